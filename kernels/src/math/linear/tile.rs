//! Register tiles of the matrix product.

use super::super::lanes::Vector;
use super::super::panels::PANEL;
use super::{ProductPart, Weight};

/// Rows of the tallest tile. AVX has 16 registers, of which 6 rows x 16 columns take 12. AVX-512 has 32, of which 14 rows x
/// 32 columns take 28. The remaining registers hold the weights of one k and an input.
#[inline(always)]
pub(super) const fn tallest<V: Vector>() -> usize {
    if V::WIDTH == 16 { 14 } else { 6 }
}

/// Panels of a tile for that many rows. A chain waits four cycles for its last multiply-add while two could start in each
/// cycle, so one to three rows take several panels side by side.
#[inline(always)]
pub(super) fn panels_side_by_side<V: Vector>(rows: usize) -> usize {
    match (V::WIDTH, rows) {
        (16, 1..=3) => 4,
        (16, _) => 2,
        (_, 1) => 4,
        (_, 2) => 2,
        _ => 1,
    }
}

/// Rows of the next tile when `left` are left: full tiles, but no small rest (8 rows are 4 and 4, not 6 and 2).
#[inline(always)]
fn even(left: usize, tallest: usize) -> usize {
    left.div_ceil(left.div_ceil(tallest))
}

/// Panels side by side, and a block of the inner dimension.
pub(super) struct Block {
    pub panel: usize,
    pub panels: usize,
    pub k: usize,
    pub depth: usize,
}

/// Adds one block of the inner dimension to all rows of a part. The weights of panel p start at `weights + p * stride`.
///
/// # Safety
/// x must have all rows of the part and weights of each panel must be readable for the block's depth. Several panels must
/// lie fully inside y.
#[inline(always)]
pub(super) unsafe fn add_block<V: Vector, W, K: Weight>(
    part: &ProductPart<'_, W>,
    block: &Block,
    weights: *const K,
    stride: usize,
) {
    // A single panel is the rest of a group if other tiles are wider, so shorter tiles are enough.
    let tallest = if block.panels == 1 { 6 } else { tallest::<V>() };
    let mut row = part.rows.start;
    while row < part.rows.end {
        let rows = even(part.rows.end - row, tallest);
        macro_rules! tiles {
            ($(($panels:literal: $($rows:literal)*))*) => {
                match (block.panels, rows) {
                    $($(
                        // SAFETY: the caller's promise. The part has the tile's rows, and the block its panels.
                        ($panels, $rows) => unsafe {
                            tile::<V, W, K, $rows, $panels>(part, block, row, weights, stride);
                        },
                    )*)*
                    _ => unreachable!("a tile of {rows} rows and {} panels", block.panels),
                }
            };
        }
        if const { V::WIDTH == 16 } {
            tiles!((1: 1 2 3 4 5 6)(2: 4 5 6 7 8 9 10 11 12 13 14)(4: 1 2 3));
        } else {
            tiles!((1: 1 2 3 4 5 6)(2: 2)(4: 1));
        }
        row += rows;
    }
}

/// Adds one block of the inner dimension to `M` rows x `P` panels of y, which stay in registers meanwhile. A block that
/// is not the first continues from the sums in y: storing an `f32` and loading it again does not change it.
///
/// # Safety
/// As for [`add_block`], for `M` rows from `row` on and `P` panels.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "register tiles are indexed by row and column")]
unsafe fn tile<V: Vector, W, K: Weight, const M: usize, const P: usize>(
    part: &ProductPart<'_, W>,
    block: &Block,
    row: usize,
    weights: *const K,
    stride: usize,
) {
    let column = block.panel * PANEL;
    let columns = (part.outputs - column).min(PANEL * P);
    let whole = columns == PANEL * P;
    let last = (row + M - 1) * part.outputs + column + columns - 1;
    let y = part.y.address(last).wrapping_sub((M - 1) * part.outputs + columns - 1);
    debug_assert!(whole || P == 1, "a wide tile over a panel that is not full");
    let mut edge = [[0f32; PANEL]; M];
    let (target, step) = if whole { (y, part.outputs) } else { (edge.as_mut_ptr().cast(), PANEL) };
    // Vectors of a panel. With one of them, the second of each pair below is never used.
    let vectors = PANEL / V::WIDTH;
    // SAFETY: the caller vouches for x and the weights. The last element of y was checked above. `edge` has room for a tile of
    // one panel.
    unsafe {
        let x = part.x.as_ptr().add(row * part.inputs + block.k);
        let mut sum = [[[V::splat(0.0); 2]; P]; M];
        if block.k > 0 {
            if !whole {
                for m in 0..M {
                    std::ptr::copy_nonoverlapping(y.add(m * part.outputs), target.add(m * step), columns);
                }
            }
            for m in 0..M {
                for p in 0..P {
                    for v in 0..vectors {
                        sum[m][p][v] = V::load(target.add(m * step + p * PANEL + v * V::WIDTH));
                    }
                }
            }
        }
        for k in 0..block.depth {
            let mut weight = [[V::splat(0.0); 2]; P];
            for p in 0..P {
                for v in 0..vectors {
                    weight[p][v] = K::load(weights.add(p * stride + k * PANEL + v * V::WIDTH));
                }
            }
            for m in 0..M {
                let input = V::splat(*x.add(m * part.inputs + k));
                for p in 0..P {
                    for v in 0..vectors {
                        sum[m][p][v] = input.mul_add(weight[p][v], sum[m][p][v]);
                    }
                }
            }
        }
        for m in 0..M {
            for p in 0..P {
                for v in 0..vectors {
                    sum[m][p][v].store(target.add(m * step + p * PANEL + v * V::WIDTH));
                }
            }
        }
        if !whole {
            for m in 0..M {
                std::ptr::copy_nonoverlapping(target.add(m * step), y.add(m * part.outputs), columns);
            }
        }
    }
}
