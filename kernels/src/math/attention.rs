//! Attention over paged K and V.

use super::convert::Element;
use super::disjoint::Disjoint;
use super::exponential::exp;
use super::instructions::InstructionSet;
use super::lanes::{Lanes, dot};
use super::{Math, dispatch};

/// Positions of one step of the online softmax. Blocks are aligned to position 0 of the sequence and have nothing to
/// do with the page size.
pub const ATTENTION_BLOCK: usize = 16;

/// Query rows that share one pass over K and V.
const TILE: usize = 16;
/// Multiply-adds below which one thread does everything.
const SERIAL: usize = 1 << 15;

/// Where K and V of one sequence are.
pub trait KvRows: Sync {
    /// Fills in the K rows and V rows of positions `first .. first + keys.len()` for a KV head, `head_dim` elements
    /// each.
    fn rows<'a>(&'a self, head: usize, first: usize, keys: &mut [&'a [u8]], values: &mut [&'a [u8]]);
}

/// Sizes of one attention layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// KV heads; each serves `heads / kv_heads` query heads that lie side by side.
    pub kv_heads: usize,
    /// Elements of a head, a multiple of 8.
    pub head_dim: usize,
    /// How K and V are stored.
    pub element: Element,
    /// Elements from one query row to the next; the heads start at the row's first element.
    pub query_stride: usize,
    /// What scores are multiplied by; most models have `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// A row sees this many positions at most, the newest, its own included; all where absent.
    pub window: Option<usize>,
}

/// One sequence's share of the query rows.
pub struct QueryRows<'a> {
    /// First row in the query buffer.
    pub row: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the first row; row i sees positions `first ..= position + i`, or the last of them.
    pub position: usize,
    /// The first position that there is to be seen, none behind that of the first row; mostly 0.
    pub first: usize,
    /// The sequence's K and V, including those of the rows' own positions. Positions that no row sees are not asked for.
    pub kv: &'a dyn KvRows,
}

impl Math {
    /// `out[row][head] = softmax(q . k * scale) v` over each row's own and earlier positions, as far as its window reaches.
    ///
    /// Per (row, head): blocks of [`ATTENTION_BLOCK`] positions in ascending order, one online-softmax step (running
    /// maximum, sum and weighted values) per block; within a block scores are 8-lane dot products, their exponentials
    /// are summed by the fixed tree, and values are added in ascending order. A window trims slots of the first block, like
    /// [`QueryRows::first`], and moves no blocks. K and V come through [`KvRows`] alone, so a fresh position and one that was moved here
    /// from another machine are the same.
    ///
    /// # Panics
    /// When the sizes do not fit together.
    pub fn attention(
        &self,
        shape: AttentionShape,
        queries: &[f32],
        sequences: &[QueryRows<'_>],
        out: &mut [f32],
    ) {
        let AttentionShape { heads, kv_heads, head_dim, query_stride, window, .. } = shape;
        assert!(kv_heads > 0 && heads.is_multiple_of(kv_heads), "{heads} heads over {kv_heads} KV heads");
        assert!(head_dim > 0 && head_dim.is_multiple_of(8), "heads of {head_dim} elements");
        assert!(query_stride >= heads * head_dim, "rows of {query_stride} elements");
        assert!(window != Some(0), "a row sees itself");
        let mut tasks = Vec::new();
        let (mut work, mut taken) = (0, 0);
        for sequence in sequences {
            assert!(sequence.row >= taken, "sequences in ascending order of rows, none twice");
            let end = sequence.row + sequence.rows;
            taken = end;
            assert!(sequence.first <= sequence.position, "a row sees itself");
            assert!(queries.len() >= end * query_stride && out.len() >= end * heads * head_dim, "{end} rows");
            let seen = (sequence.position + sequence.rows - sequence.first).min(window.unwrap_or(usize::MAX));
            work += sequence.rows * seen * heads * head_dim;
            for first in (0..sequence.rows).step_by(TILE) {
                tasks.extend((0..kv_heads).map(|head| (sequence, first, head)));
            }
        }
        let out = Disjoint::new(out);
        self.each(tasks.len(), work > SERIAL, |task| {
            let (sequence, first, head) = tasks[task];
            let tile = Tile {
                shape,
                queries,
                row: sequence.row + first,
                rows: TILE.min(sequence.rows - first),
                position: sequence.position + first,
                oldest: sequence.first,
                head,
                kv: sequence.kv,
                out: &out,
            };
            dispatch!(self.instructions, attend::<>(tile: Tile<'_>));
        });
    }
}

/// Rows of one sequence and one KV head with all its query heads. No two tiles of a call overlap in `out`.
struct Tile<'a> {
    shape: AttentionShape,
    queries: &'a [f32],
    row: usize,
    rows: usize,
    position: usize,
    /// The first position that there is to be seen.
    oldest: usize,
    head: usize,
    kv: &'a dyn KvRows,
    out: &'a Disjoint<'a>,
}

/// Running state of one (row, head).
#[derive(Clone, Copy)]
struct Softmax {
    maximum: f32,
    sum: f32,
}

#[inline(always)]
fn attend<S: InstructionSet>(tile: Tile<'_>) {
    let AttentionShape { heads, kv_heads, head_dim, element, query_stride, scale, window } = tile.shape;
    let group = heads / kv_heads;
    // The first position that the row at `position` sees.
    let oldest =
        |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window)).max(tile.oldest);
    let mut states = vec![Softmax { maximum: f32::NEG_INFINITY, sum: 0.0 }; tile.rows * group];
    let mut weighted = vec![0f32; tile.rows * group * head_dim];
    let mut wide = vec![0f32; 2 * ATTENTION_BLOCK * head_dim];
    let (wide_keys, wide_values) = wide.split_at_mut(ATTENTION_BLOCK * head_dim);
    let (start, end) = (oldest(tile.position), tile.position + tile.rows);
    for first in (start - start % ATTENTION_BLOCK..end).step_by(ATTENTION_BLOCK) {
        let count = ATTENTION_BLOCK.min(end - first);
        let trimmed = start.saturating_sub(first);
        let mut keys: [&[u8]; ATTENTION_BLOCK] = [&[]; ATTENTION_BLOCK];
        let mut values = keys;
        let asked = trimmed..count;
        tile.kv.rows(tile.head, first + trimmed, &mut keys[asked.clone()], &mut values[asked.clone()]);
        for slot in asked {
            element.widen(keys[slot], &mut wide_keys[slot * head_dim..][..head_dim]);
            element.widen(values[slot], &mut wide_values[slot * head_dim..][..head_dim]);
        }
        for row in 0..tile.rows {
            let position = tile.position + row;
            let (from, to) =
                (oldest(position).saturating_sub(first), count.min((position + 1).saturating_sub(first)));
            if from >= to {
                continue;
            }
            let keys = &wide_keys[from * head_dim..to * head_dim];
            let values = &wide_values[from * head_dim..to * head_dim];
            for member in 0..group {
                let head = tile.head * group + member;
                let query = &tile.queries[(tile.row + row) * query_stride + head * head_dim..][..head_dim];
                let weighted = &mut weighted[(row * group + member) * head_dim..][..head_dim];
                block::<S::Lanes>(
                    query,
                    from,
                    keys,
                    values,
                    scale,
                    &mut states[row * group + member],
                    weighted,
                );
            }
        }
    }
    for row in 0..tile.rows {
        let start = (tile.row + row) * heads * head_dim + tile.head * group * head_dim;
        // SAFETY: only this tile has these rows and this KV head's query heads.
        let out = unsafe { tile.out.part(start, group * head_dim) };
        for member in 0..group {
            let inverse = 1.0 / states[row * group + member].sum;
            let weighted = &weighted[(row * group + member) * head_dim..][..head_dim];
            for (out, weighted) in out[member * head_dim..].iter_mut().zip(weighted) {
                *out = weighted * inverse;
            }
        }
    }
}

/// One online-softmax step: `keys` and `values` are the rows of a block that the query sees, at least one, from its slot
/// `from` on.
#[inline(always)]
fn block<L: Lanes>(
    query: &[f32],
    from: usize,
    keys: &[f32],
    values: &[f32],
    scale: f32,
    state: &mut Softmax,
    weighted: &mut [f32],
) {
    // Slots that the query does not see keep a score of -inf, whose exponential is 0.
    let mut scores = [f32::NEG_INFINITY; ATTENTION_BLOCK];
    let mut maximum = state.maximum;
    for (score, key) in scores[from..].iter_mut().zip(keys.chunks_exact(query.len())) {
        *score = dot::<L>(query, key) * scale;
        maximum = if *score > maximum { *score } else { maximum };
    }
    for score in &mut scores {
        *score = exp(*score - maximum);
    }
    let correction = exp(state.maximum - maximum);
    // SAFETY: `scores` has 16 elements.
    let sum = unsafe {
        let one = L::splat(1.0);
        one.mul_add(L::load(scores.as_ptr()), L::load(scores.as_ptr().add(8))).sum()
    };
    *state = Softmax { maximum, sum: state.sum.mul_add(correction, sum) };
    let mut dimension = 0;
    while dimension + 32 <= weighted.len() {
        add_values::<L, 4>(&scores[from..], values, correction, dimension, weighted);
        dimension += 32;
    }
    while dimension < weighted.len() {
        add_values::<L, 1>(&scores[from..], values, correction, dimension, weighted);
        dimension += 8;
    }
}

/// `weighted = weighted * correction + sum of weight * value` for `N` x 8 dimensions, which stay in registers.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "register tiles are indexed by row and column")]
fn add_values<L: Lanes, const N: usize>(
    weights: &[f32],
    values: &[f32],
    correction: f32,
    dimension: usize,
    weighted: &mut [f32],
) {
    let head_dim = weighted.len();
    let rows = values.len() / head_dim;
    assert!(dimension + 8 * N <= head_dim && rows <= weights.len());
    // SAFETY: `dimension + 8 * N` lies inside a row by the assertion, and `rows` rows inside `values`.
    unsafe {
        let target = weighted.as_mut_ptr().add(dimension);
        let mut sum = [L::splat(0.0); N];
        for n in 0..N {
            sum[n] = L::load(target.add(8 * n)).mul(L::splat(correction));
        }
        for row in 0..rows {
            let weight = L::splat(weights[row]);
            let value = values.as_ptr().add(row * head_dim + dimension);
            for n in 0..N {
                sum[n] = weight.mul_add(L::load(value.add(8 * n)), sum[n]);
            }
        }
        for n in 0..N {
            sum[n].store(target.add(8 * n));
        }
    }
}
