//! Attention over K and V of a pool: rotating heads, writing K and V, and the online softmax.

use cudarc::driver::{LaunchConfig, PushKernelArg};

use super::{COLUMNS, Exact, SCRATCH, THREADS, assert_holds, at, grid, number, parts};
use crate::cuda::batch::{Attention, KvView, Rows};
use crate::cuda::launch::Divisor;
use crate::cuda::{Array, CudaError, refused};
use crate::math::Heads;

const ATTENTION_THREADS: usize = 64;
/// Positions of one step of the online softmax.
const BLOCK: usize = 16;

impl Exact {
    /// Prepares queries or keys in place, as [`crate::math::Math::rotate_heads`]: the RMS norm of each head if there is one
    /// (`norm`: weight, epsilon), then the rotation by the row's angles, `head_dim / 2` of them for each row.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When the sizes do not fit together.
    pub fn rotate_heads(
        &self,
        data: &mut Array<f32>,
        rows: usize,
        heads: Heads,
        norm: Option<(&Array<f32>, f32)>,
        cosines: &Array<f32>,
        sines: &Array<f32>,
    ) -> Result<(), CudaError> {
        let Heads { stride, offset, heads, head_dim } = heads;
        let pairs = head_dim / 2;
        assert!(
            head_dim.is_multiple_of(16) && offset + heads * head_dim <= stride,
            "heads of {head_dim} in rows of {stride}"
        );
        assert_holds(data, rows * stride, "rows of heads");
        assert_holds(cosines, rows * pairs, "cosines");
        assert_holds(sines, rows * pairs, "sines");
        if let Some((weight, _)) = norm {
            assert_holds(weight, head_dim, "norm weights of a head");
        }
        if heads * head_dim == 0 {
            return Ok(());
        }
        let scratch = self.scratch();
        for (first, rows) in parts(rows, (SCRATCH / 8 / heads).max(1)) {
            let (data, sums) = (at(data, first * stride + offset), scratch.address());
            assert!(rows * heads * 8 <= SCRATCH, "{heads} heads are too many for the kernels");
            if norm.is_some() {
                self.square_lanes(data, stride, heads, head_dim, rows, sums)?;
            }
            let (weight, epsilon) = norm.map_or((0, 0.0), |(weight, epsilon)| (weight.address(), epsilon));
            let (cosines, sines) = (at(cosines, first * pairs), at(sines, first * pairs));
            let grid = grid(rows, heads * pairs, THREADS);
            let (stride, heads, head_dim) = (number(stride), number(heads), number(head_dim));
            launch!(
                self.rotate_heads,
                grid,
                THREADS,
                data,
                stride,
                heads,
                head_dim,
                weight,
                epsilon,
                sums,
                cosines,
                sines
            )?;
        }
        Ok(())
    }

    /// Writes each row's K and V to its place in the pool, rounded to the nearest bf16 where the pool holds those. In a row of
    /// `stride` elements, K begins at element `first[0]` and V at `first[1]`, `heads` heads of `head_dim` elements each.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When the sizes do not fit together.
    #[expect(clippy::too_many_arguments, reason = "where K and V are in a row, and where they go")]
    pub fn write_kv(
        &self,
        data: &Array<f32>,
        rows: &Rows,
        stride: usize,
        first: [usize; 2],
        heads: usize,
        head_dim: usize,
        kv: &KvView,
    ) -> Result<(), CudaError> {
        let width = heads * head_dim;
        assert!(
            first.iter().all(|first| first + width <= stride),
            "K and V of {width} elements in rows of {stride}"
        );
        assert_holds(data, rows.rows * stride, "rows with K and V");
        assert_rows(rows);
        assert_kv(kv, head_dim);
        if rows.rows * width == 0 {
            return Ok(());
        }
        let grid = grid(rows.rows, 2 * width, THREADS);
        let (data, stride, keys, values) =
            (data.address(), number(stride), number(first[0]), number(first[1]));
        let (heads, head_dim, kv, tokens) =
            (number(heads), number(head_dim), *kv, Divisor::of(kv.page_tokens));
        let (positions, tables, pages) =
            (rows.position.address(), rows.table.address(), rows.pages.address());
        launch!(
            self.write_kv,
            grid,
            THREADS,
            data,
            stride,
            keys,
            values,
            heads,
            head_dim,
            positions,
            tables,
            pages,
            kv,
            tokens
        )
    }

    /// `out[row][head] = softmax(q . k * scale) v` over positions 0 to the row's own, whose K and V are in the pool.
    /// A row of `out` is `heads * head_dim` elements.
    ///
    /// # Errors
    /// As [`embed`](Self::embed), and when the device has no memory left for the scores of one row, which is one f32 for each
    /// head and each token that `rows.pages` has room for.
    ///
    /// # Panics
    /// When the sizes do not fit together, or query rows do not start at multiples of 4 elements.
    pub fn attention(
        &self,
        shape: Attention,
        queries: &Array<f32>,
        rows: &Rows,
        kv: &KvView,
        out: &mut Array<f32>,
    ) -> Result<(), CudaError> {
        let Attention { heads, kv_heads, head_dim, query_stride, scale } = shape;
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads over {kv_heads} KV heads");
        assert!(head_dim > 0 && head_dim.is_multiple_of(8), "heads of {head_dim} elements");
        assert!(
            query_stride >= heads * head_dim && query_stride.is_multiple_of(4),
            "query rows of {query_stride} elements, which are {} at least and a multiple of 4",
            heads * head_dim
        );
        assert!(heads <= COLUMNS, "{heads} heads are too many for the kernels");
        assert_holds(queries, rows.rows * query_stride, "query rows");
        assert_holds(out, rows.rows * heads * head_dim, "attention's rows");
        assert_rows(rows);
        assert_kv(kv, head_dim);
        if rows.rows * heads == 0 {
            return Ok(());
        }
        // A row sees at most as many positions as all pages hold.
        let room = (rows.pages.len() * kv.page_tokens as usize).next_multiple_of(BLOCK);
        let row_scratch = heads * (room + 4 * (room / BLOCK));
        let mut scratch = self.scratch();
        scratch.reserve(row_scratch)?;
        let between = scratch.address();
        let grid = |rows: usize, columns: usize, most: usize| {
            (number(rows), number(heads), number(columns.div_ceil(ATTENTION_THREADS).min(most)))
        };
        let group = number(heads / kv_heads);
        let tokens = Divisor::of(kv.page_tokens);
        let positions_of = &rows.position;
        for (first, part) in parts(rows.rows, scratch.len() / row_scratch) {
            let (queries, out) = (at(queries, first * query_stride), at(out, first * heads * head_dim));
            let (positions, tables) = (at(positions_of, first), at(&rows.table, first));
            let (pages, kv, bf16) = (rows.pages.address(), *kv, kv.element == 2);
            let by_position = grid(part, room, 16);
            let by_block = grid(part, room / BLOCK, 4);
            let by_dimension = grid(part, head_dim, COLUMNS);
            let (stride, heads, head_dim, room) =
                (number(query_stride), number(heads), number(head_dim), number(room));
            macro_rules! scores {
                ($name:ident) => {
                    launch!(
                        self.$name,
                        by_position,
                        ATTENTION_THREADS,
                        queries,
                        stride,
                        heads,
                        group,
                        head_dim,
                        scale,
                        positions,
                        tables,
                        pages,
                        kv,
                        tokens,
                        between,
                        room
                    )
                };
            }
            macro_rules! values {
                ($name:ident) => {
                    launch!(
                        self.$name,
                        by_dimension,
                        ATTENTION_THREADS,
                        heads,
                        group,
                        head_dim,
                        positions,
                        tables,
                        pages,
                        kv,
                        tokens,
                        between,
                        room,
                        out
                    )
                };
            }
            if bf16 { scores!(attention_scores_bf16) } else { scores!(attention_scores_f32) }?;
            launch!(self.attention_maxima, by_block, ATTENTION_THREADS, heads, positions, between, room)?;
            launch!(self.attention_weights, by_block, ATTENTION_THREADS, heads, positions, between, room)?;
            if bf16 { values!(attention_values_bf16) } else { values!(attention_values_f32) }?;
        }
        Ok(())
    }
}

fn assert_rows(rows: &Rows) {
    assert_holds(&rows.position, rows.rows, "positions");
    assert_holds(&rows.table, rows.rows, "where the rows' pages begin");
}

/// Checks a view of K and V, which kernels read 16 bytes at a time.
fn assert_kv(kv: &KvView, head_dim: usize) {
    assert!(kv.element == 4 || kv.element == 2, "K and V of {} bytes an element", kv.element);
    assert!((1..=1 << 30).contains(&kv.page_tokens), "pages of {} tokens", kv.page_tokens);
    let aligned =
        [kv.start, kv.page, kv.head, kv.token].iter().flatten().all(|bytes| bytes.is_multiple_of(16));
    assert!(aligned && head_dim.is_multiple_of(8), "rows of K and V start at multiples of 16 bytes: {kv:?}");
}
