//! One block of the online softmax: scores, weights, weighted values.

use std::ops::Range;

use super::super::exponential::exp;
use super::super::lanes::{Lanes, Vector, dot, tree};
use super::ATTENTION_BLOCK;

/// One value per position of a block.
pub(super) type Scores = [f32; ATTENTION_BLOCK];

/// Turns a block's keys `[position][dim]` into `[dim][position]`, which [`score_side_by_side`] reads.
#[inline(always)]
pub(super) fn transpose(keys: &[f32], head_dim: usize, columns: &mut [f32]) {
    for (slot, key) in keys.chunks_exact(head_dim).enumerate() {
        for (target, value) in columns[slot..].iter_mut().step_by(ATTENTION_BLOCK).zip(key) {
            *target = *value;
        }
    }
}

/// The products of one query with the keys of the slots that it sees.
#[inline(always)]
pub(super) fn score_one_by_one<L: Lanes>(
    query: &[f32],
    keys: &[f32],
    seen: Range<usize>,
    scores: &mut Scores,
) {
    for slot in seen {
        scores[slot] = dot::<L>(query, &keys[slot * query.len()..][..query.len()]);
    }
}

/// The products of `N` queries with all keys of a block, whose `columns` are `[dim][position]`. The bits are those of
/// [`dot`]: a vector holds the same lane of several keys' sums, so that the tree adds vectors.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "register tiles are indexed by row and column")]
pub(super) fn score_side_by_side<V: Vector, const N: usize>(
    queries: [&[f32]; N],
    columns: &[f32],
    scores: &mut [Scores; N],
) {
    let head_dim = queries[0].len();
    assert!(queries.iter().all(|query| query.len() == head_dim) && head_dim.is_multiple_of(8));
    assert!(columns.len() >= head_dim * ATTENTION_BLOCK);
    for slot in (0..ATTENTION_BLOCK).step_by(V::WIDTH) {
        let mut sum = [[V::splat(0.0); 8]; N];
        for first in (0..head_dim).step_by(8) {
            for lane in 0..8 {
                let dimension = first + lane;
                // SAFETY: `columns` has 16 elements for each dimension, and `slot` one of its vectors. Queries have
                // `head_dim` elements.
                unsafe {
                    let keys = V::load(columns.as_ptr().add(dimension * ATTENTION_BLOCK + slot));
                    for n in 0..N {
                        let query = V::splat(*queries[n].get_unchecked(dimension));
                        sum[n][lane] = query.mul_add(keys, sum[n][lane]);
                    }
                }
            }
        }
        for n in 0..N {
            // SAFETY: `slot` starts a vector of the 16 scores.
            unsafe { tree(sum[n], V::add).store(scores[n].as_mut_ptr().add(slot)) };
        }
    }
}

/// Turns products into weights and returns the weights' sum. Raises `maximum` to the largest score of this block and those
/// before it.
#[inline(always)]
pub(super) fn weigh<L: Lanes>(scores: &mut Scores, seen: Range<usize>, scale: f32, maximum: &mut f32) -> f32 {
    // Slots that the query does not see get a score of -inf, whose exponential is 0. NaN is never a maximum.
    let mut maxima = [*maximum; ATTENTION_BLOCK];
    for (slot, (score, largest)) in scores.iter_mut().zip(&mut maxima).enumerate() {
        *score = if seen.contains(&slot) { *score * scale } else { f32::NEG_INFINITY };
        *largest = if *score > *largest { *score } else { *largest };
    }
    let mut width = ATTENTION_BLOCK / 2;
    while width > 0 {
        for slot in 0..width {
            let other = maxima[slot + width];
            maxima[slot] = if other > maxima[slot] { other } else { maxima[slot] };
        }
        width /= 2;
    }
    *maximum = maxima[0];
    for score in scores.iter_mut() {
        *score = exp(*score - maxima[0]);
    }
    // SAFETY: `scores` has 16 elements.
    unsafe { L::load(scores.as_ptr()).add(L::load(scores.as_ptr().add(8))).sum() }
}

/// `weighted = weighted * correction + sum of weight * value` for queries of one row, over the slots that it sees, in
/// ascending order. Each query has `head_dim` elements of `weighted`.
#[inline(always)]
pub(super) fn add_values<V: Vector, L: Lanes>(
    weights: &[Scores],
    corrections: &[f32],
    seen: Range<usize>,
    values: &[f32],
    head_dim: usize,
    weighted: &mut [f32],
) {
    // Two queries share the loads of values.
    let (pairs, last) = weights.as_chunks::<2>();
    let (pair_corrections, last_correction) = corrections.as_chunks::<2>();
    let (pair_weighted, last_weighted) = weighted.split_at_mut(pairs.len() * 2 * head_dim);
    let targets = pair_weighted.chunks_exact_mut(2 * head_dim);
    for ((weights, corrections), weighted) in pairs.iter().zip(pair_corrections).zip(targets) {
        add_rows::<V, L, 2>(weights, corrections, seen.clone(), values, head_dim, weighted);
    }
    if let ([weights], [correction]) = (last, last_correction) {
        add_rows::<V, L, 1>(&[*weights], &[*correction], seen, values, head_dim, last_weighted);
    }
}

/// As [`add_values`], for `Q` queries.
#[inline(always)]
fn add_rows<V: Vector, L: Lanes, const Q: usize>(
    weights: &[Scores; Q],
    corrections: &[f32; Q],
    seen: Range<usize>,
    values: &[f32],
    head_dim: usize,
    weighted: &mut [f32],
) {
    let mut dimension = 0;
    while dimension + 4 * V::WIDTH <= head_dim {
        add_columns::<V, Q, 4>(weights, corrections, seen.clone(), values, head_dim, dimension, weighted);
        dimension += 4 * V::WIDTH;
    }
    while dimension + V::WIDTH <= head_dim {
        add_columns::<V, Q, 1>(weights, corrections, seen.clone(), values, head_dim, dimension, weighted);
        dimension += V::WIDTH;
    }
    // Half a vector of 16 may be left.
    if dimension < head_dim {
        add_columns::<L, Q, 1>(weights, corrections, seen, values, head_dim, dimension, weighted);
    }
}

/// As [`add_rows`], for `N` vectors of dimensions, which stay in registers.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "register tiles are indexed by row and column")]
fn add_columns<V: Vector, const Q: usize, const N: usize>(
    weights: &[Scores; Q],
    corrections: &[f32; Q],
    seen: Range<usize>,
    values: &[f32],
    head_dim: usize,
    dimension: usize,
    weighted: &mut [f32],
) {
    assert!(dimension + V::WIDTH * N <= head_dim && weighted.len() >= Q * head_dim);
    assert!(seen.end <= ATTENTION_BLOCK && seen.end * head_dim <= values.len());
    // SAFETY: by the assertions the dimensions lie inside a row, the queries' rows inside `weighted`, and the slots' rows
    // inside `values`.
    unsafe {
        let target = weighted.as_mut_ptr().add(dimension);
        let mut sum = [[V::splat(0.0); N]; Q];
        for q in 0..Q {
            for n in 0..N {
                sum[q][n] = V::load(target.add(q * head_dim + V::WIDTH * n)).mul(V::splat(corrections[q]));
            }
        }
        for slot in seen {
            let value = values.as_ptr().add(slot * head_dim + dimension);
            for n in 0..N {
                let value = V::load(value.add(V::WIDTH * n));
                for q in 0..Q {
                    sum[q][n] = V::splat(weights[q][slot]).mul_add(value, sum[q][n]);
                }
            }
        }
        for q in 0..Q {
            for n in 0..N {
                sum[q][n].store(target.add(q * head_dim + V::WIDTH * n));
            }
        }
    }
}
