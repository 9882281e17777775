//! Attention over paged K and V.

mod block;

use std::ops::Range;

use super::convert::Element;
use super::disjoint::Disjoint;
use super::exponential::exp;
use super::instructions::InstructionSet;
use super::lanes::Vector;
use super::{Math, dispatch};
use block::{Scores, add_values, score_one_by_one, score_side_by_side, transpose, weigh};

/// Positions of one step of the online softmax. Blocks are aligned to position 0 of the sequence and do not depend on the
/// page size.
pub const ATTENTION_BLOCK: usize = 16;

/// Query rows that share one pass over K and V.
const TILE: usize = 16;
/// From this many queries on, transposing a block's keys saves time.
const MANY: usize = 8;
/// Elements of a cache line.
const LINE: usize = 16;
/// Multiply-adds below which one thread does everything.
const SERIAL: usize = 1 << 15;

/// Access to the K and V of one sequence.
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
    /// KV heads. Each serves `heads / kv_heads` query heads that lie side by side.
    pub kv_heads: usize,
    /// Elements of a head, a multiple of 8.
    pub head_dim: usize,
    /// How K and V are stored.
    pub element: Element,
    /// Elements from one query row to the next. The heads start at the row's first element.
    pub query_stride: usize,
    /// The factor by which scores are multiplied. Most models have `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// The most positions that a row sees: the newest, including its own. If absent, a row sees all.
    pub window: Option<usize>,
}

/// The query rows of one sequence.
pub struct QueryRows<'a> {
    /// First row in the query buffer.
    pub row: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the first row. Row i sees positions `first ..= position + i`, or with a window the last of them.
    pub position: usize,
    /// The first position that rows may see. It is not behind that of the first row, and mostly 0.
    pub first: usize,
    /// The sequence's K and V, including those of the rows' own positions. Positions that no row sees are not read.
    pub kv: &'a dyn KvRows,
}

impl Math {
    /// `out[row][head] = softmax(q . k * scale) v` over each row's own and earlier positions, as far as its window reaches.
    ///
    /// Per (row, head): blocks of [`ATTENTION_BLOCK`] positions in ascending order, one online-softmax step (running
    /// maximum, sum and weighted values) per block. Within a block scores are 8-lane dot products, their exponentials are summed
    /// by the fixed tree, and values are added in ascending order. A window trims slots of the first block, like
    /// [`QueryRows::first`], and moves no blocks. K and V come through [`KvRows`] alone, so a position that was computed here and a
    /// position that was transferred from another machine give the same result.
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
    /// The first position that rows may see.
    oldest: usize,
    head: usize,
    kv: &'a dyn KvRows,
    out: &'a Disjoint<'a>,
}

/// Running states of a tile's queries, one for each row and head.
struct States {
    /// Largest score so far.
    maxima: Vec<f32>,
    /// Sum of the weights so far.
    sums: Vec<f32>,
    /// `head_dim` weighted sums of values each.
    weighted: Vec<f32>,
    /// Products with the keys of a block, then weights of its values.
    scores: Vec<Scores>,
    /// Sum of a block's weights.
    added: Vec<f32>,
    /// Factors that correct earlier weights for a new maximum.
    corrections: Vec<f32>,
}

#[inline(always)]
fn attend<S: InstructionSet>(tile: Tile<'_>) {
    let AttentionShape { heads, kv_heads, head_dim, element, query_stride, scale, window } = tile.shape;
    let group = heads / kv_heads;
    let count = tile.rows * group;
    // The first position that the row at `position` sees.
    let oldest =
        |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window)).max(tile.oldest);
    let query = |index: usize| {
        let (row, head) = (tile.row + index / group, tile.head * group + index % group);
        &tile.queries[row * query_stride + head * head_dim..][..head_dim]
    };
    let mut states = States {
        maxima: vec![f32::NEG_INFINITY; count],
        sums: vec![0.0; count],
        weighted: vec![0.0; count * head_dim],
        scores: vec![[0.0; ATTENTION_BLOCK]; count],
        added: vec![0.0; count],
        corrections: vec![0.0; count],
    };
    // A load that spans two cache lines costs twice as much, so all three buffers start at a line.
    let block = ATTENTION_BLOCK * head_dim;
    let mut wide = vec![0f32; 3 * block + LINE];
    let line = wide.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
    let (keys, wide) = wide[line..].split_at_mut(block);
    let (values, columns) = wide.split_at_mut(block);
    let columns = &mut columns[..block];
    let (start, end) = (oldest(tile.position), tile.position + tile.rows);
    for first in (start - start % ATTENTION_BLOCK..end).step_by(ATTENTION_BLOCK) {
        let held = start.saturating_sub(first)..ATTENTION_BLOCK.min(end - first);
        load(&tile, element, first, held.clone(), keys, values);
        // Slots of the block that a row sees. The rows that see any slot lie side by side.
        let seen = |row: usize| {
            let position = tile.position + row;
            oldest(position).saturating_sub(first)..held.end.min((position + 1).saturating_sub(first))
        };
        let newest = (0..tile.rows).rev().find(|row| !seen(*row).is_empty()).map_or(0, |row| row + 1);
        let eldest = (0..newest).find(|row| !seen(*row).is_empty()).unwrap_or(newest);
        let States { maxima, sums, weighted, scores, added, corrections } = &mut states;
        let queries = eldest * group..newest * group;
        if queries.len() < MANY {
            for index in queries.clone() {
                let score = &mut scores[index];
                score_one_by_one::<S::Lanes>(query(index), keys, seen(index / group), score);
            }
        } else {
            transpose(keys, head_dim, columns);
            // Each query has eight sums: 8 of 16 registers for one query, 16 of 32 for two.
            let mut index = queries.start;
            if S::Wide::WIDTH == 16 {
                let (pairs, _) = scores[queries.clone()].as_chunks_mut::<2>();
                for pair in pairs {
                    score_side_by_side::<S::Wide, 2>([query(index), query(index + 1)], columns, pair);
                    index += 2;
                }
            }
            for score in scores[index..queries.end].as_chunks_mut::<1>().0 {
                score_side_by_side::<S::Wide, 1>([query(index)], columns, score);
                index += 1;
            }
        }
        // Each step runs for all queries before the next step, because the steps of one query wait for each other.
        for row in eldest..newest {
            let seen = seen(row);
            for index in row * group..(row + 1) * group {
                let before = maxima[index];
                added[index] = weigh::<S::Lanes>(&mut scores[index], seen.clone(), scale, &mut maxima[index]);
                corrections[index] = before - maxima[index];
            }
        }
        let sums = sums[queries.clone()].iter_mut().zip(&added[queries.clone()]);
        for (correction, (sum, added)) in corrections[queries].iter_mut().zip(sums) {
            *correction = exp(*correction);
            *sum = sum.mul_add(*correction, *added);
        }
        for row in eldest..newest {
            let queries = row * group..(row + 1) * group;
            let weighted = &mut weighted[queries.start * head_dim..queries.end * head_dim];
            let (scores, corrections) = (&scores[queries.clone()], &corrections[queries]);
            add_values::<S::Wide, S::Lanes>(scores, corrections, seen(row), values, head_dim, weighted);
        }
    }
    for row in 0..tile.rows {
        let start = (tile.row + row) * heads * head_dim + tile.head * group * head_dim;
        // SAFETY: only this tile has these rows and this KV head's query heads.
        let out = unsafe { tile.out.part(start, group * head_dim) };
        for (member, out) in out.chunks_exact_mut(head_dim).enumerate() {
            let index = row * group + member;
            let inverse = 1.0 / states.sums[index];
            for (out, weighted) in out.iter_mut().zip(&states.weighted[index * head_dim..]) {
                *out = weighted * inverse;
            }
        }
    }
}

/// Widens K and V of the slots `held` of the block at `first`.
#[inline(always)]
fn load(
    tile: &Tile<'_>,
    element: Element,
    first: usize,
    held: Range<usize>,
    wide_keys: &mut [f32],
    wide_values: &mut [f32],
) {
    let head_dim = tile.shape.head_dim;
    let mut keys: [&[u8]; ATTENTION_BLOCK] = [&[]; ATTENTION_BLOCK];
    let mut values = keys;
    tile.kv.rows(tile.head, first + held.start, &mut keys[held.clone()], &mut values[held.clone()]);
    for slot in held {
        element.widen(keys[slot], &mut wide_keys[slot * head_dim..][..head_dim]);
        element.widen(values[slot], &mut wide_values[slot * head_dim..][..head_dim]);
    }
}
