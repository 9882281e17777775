//! The matrix product.

use std::ops::Range;

use super::disjoint::Disjoint;
use super::lanes::Lanes;
use super::panels::{PANEL, PanelData, Panels};
use super::{Math, dispatch};

/// Rows of one register tile: 6 rows x 16 columns are 12 of the 16 AVX registers.
const TILE: usize = 6;
/// Inner-dimension block for many rows: a panel's block of it is 16 KiB wide, half of a first-level cache.
const DEPTH: usize = 256;
/// Up to this many rows, widening a panel beforehand costs more than widening it once per tile.
const FEW: usize = 2 * TILE;
/// Rows that share one pass over a panel.
const ROWS: usize = 32 * TILE;
/// Multiply-adds below which starting other threads costs more than it saves.
const SERIAL: usize = 1 << 16;

impl Math {
    /// `y[m][n] = sum over k of x[m][k] * weight[n][k]`, for `rows` rows.
    ///
    /// Each `y[m][n]` is one chain of fused multiply-adds over k = 0, 1, 2, ... that starts at 0, whatever the number
    /// of rows and threads.
    ///
    /// # Panics
    /// When `x` is not `rows * inputs` or `y` not `rows * outputs` long.
    pub fn linear(&self, x: &[f32], rows: usize, weight: &Panels, y: &mut [f32]) {
        let (outputs, inputs) = (weight.outputs(), weight.inputs());
        assert_eq!(x.len(), rows * inputs, "{rows} rows of {inputs} inputs");
        assert_eq!(y.len(), rows * outputs, "{rows} rows of {outputs} outputs");
        if y.is_empty() {
            return;
        }
        let panels = outputs.div_ceil(PANEL);
        // About four tasks per thread, in multiples of the widest tile's four panels.
        let group = panels.div_ceil(self.threads * 4).next_multiple_of(if rows < TILE { 4 } else { 1 });
        let groups = panels.div_ceil(group);
        let y = Disjoint::new(y);
        let parallel = rows * outputs * inputs > SERIAL;
        self.each(groups * rows.div_ceil(ROWS), parallel, |task| {
            let panels = task % groups * group..panels.min((task % groups + 1) * group);
            let rows = task / groups * ROWS..rows.min((task / groups + 1) * ROWS);
            let (x, y) = (x, &y);
            match &weight.data {
                PanelData::F32(data) => {
                    let part = Part { x, inputs, weight: data.as_slice(), y, outputs, rows, panels };
                    dispatch!(self.level, product::<f32>(part: Part<'_, f32>));
                }
                PanelData::Bf16(data) => {
                    let part = Part { x, inputs, weight: data.as_slice(), y, outputs, rows, panels };
                    dispatch!(self.level, product::<u16>(part: Part<'_, u16>));
                }
            }
        });
    }
}

/// A range of rows and panels of one product. No two parts of a product overlap in `y`.
struct Part<'a, W> {
    x: &'a [f32],
    inputs: usize,
    weight: &'a [W],
    y: &'a Disjoint<'a>,
    outputs: usize,
    rows: Range<usize>,
    panels: Range<usize>,
}

/// An element of a packed weight: `f32`, or the bits of a bf16.
trait Weight: Copy {
    const WIDE: bool;
    /// # Safety
    /// Eight elements must be readable at `source`.
    unsafe fn load<L: Lanes>(source: *const Self) -> L;
}

impl Weight for f32 {
    const WIDE: bool = true;
    #[inline(always)]
    unsafe fn load<L: Lanes>(source: *const Self) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load(source) }
    }
}

impl Weight for u16 {
    const WIDE: bool = false;
    #[inline(always)]
    unsafe fn load<L: Lanes>(source: *const Self) -> L {
        // SAFETY: the caller's promise.
        unsafe { L::load_bf16(source) }
    }
}

#[inline(always)]
fn product<L: Lanes, W: Weight>(part: Part<'_, W>) {
    assert!(part.x.len() >= part.rows.end * part.inputs);
    assert!(part.weight.len() >= part.panels.end * PANEL * part.inputs);
    if part.rows.len() <= FEW {
        few_rows::<L, W>(&part);
        return;
    }
    let mut wide = [0f32; DEPTH * PANEL];
    for panel in part.panels.clone() {
        let mut k = 0;
        while k < part.inputs {
            let depth = DEPTH.min(part.inputs - k);
            let block = part.weight[(panel * part.inputs + k) * PANEL..][..depth * PANEL].as_ptr();
            if !W::WIDE {
                let mut i = 0;
                while i < depth * PANEL {
                    // SAFETY: i + 8 <= depth * 16, the length of the block and at most that of `wide`.
                    unsafe { W::load::<L>(block.add(i)).store(wide.as_mut_ptr().add(i)) };
                    i += 8;
                }
            }
            let mut row = part.rows.start;
            while row < part.rows.end {
                let count = even(part.rows.end - row);
                let place = Place { row, panel, k, depth };
                // SAFETY: `place` lies inside the part: the assertions above cover x and the weights.
                unsafe {
                    if W::WIDE {
                        some_rows::<L, W, W>(&part, &place, count, block);
                    } else {
                        some_rows::<L, W, f32>(&part, &place, count, wide.as_ptr());
                    }
                }
                row += count;
            }
            k += depth;
        }
    }
}

/// Rows of the next tile when `left` are left: full tiles, but no small rest (8 rows are 4 and 4, not 6 and 2).
#[inline(always)]
fn even(left: usize) -> usize {
    left.div_ceil(left.div_ceil(TILE))
}

/// Up to two tiles of rows, as in decoding: the time goes into streaming the weights, which are used as they are stored.
/// One or two rows alone would wait for the latency of their chains, so they take several panels side by side.
#[inline(always)]
fn few_rows<L: Lanes, W: Weight>(part: &Part<'_, W>) {
    let mut panel = part.panels.start;
    // Panels that end inside the output; the last of the matrix may not.
    let full = part.panels.end.min(part.outputs / PANEL);
    let (row, depth) = (part.rows.start, part.inputs);
    let at = |panel: usize| part.weight[panel * PANEL * depth..][..PANEL * depth].as_ptr();
    while panel < part.panels.end {
        let place = Place { row, panel, k: 0, depth };
        // SAFETY: `place` lies inside the part, and wide tiles are taken only over full panels.
        unsafe {
            match part.rows.len() {
                1 if panel + 4 <= full => {
                    let block = [at(panel), at(panel + 1), at(panel + 2), at(panel + 3)];
                    tile::<L, W, W, 1, 4>(part, &place, block);
                    panel += 4;
                }
                2 if panel + 2 <= full => {
                    tile::<L, W, W, 2, 2>(part, &place, [at(panel), at(panel + 1)]);
                    panel += 2;
                }
                _ => {
                    let mut row = part.rows.start;
                    while row < part.rows.end {
                        let count = even(part.rows.end - row);
                        some_rows::<L, W, W>(part, &Place { row, ..place }, count, at(panel));
                        row += count;
                    }
                    panel += 1;
                }
            }
        }
    }
}

/// Where a tile lies: its first row, first panel, and block of the inner dimension.
struct Place {
    row: usize,
    panel: usize,
    k: usize,
    depth: usize,
}

/// One panel, `count` rows.
///
/// # Safety
/// As for [`tile`].
#[inline(always)]
unsafe fn some_rows<L: Lanes, W, V: Weight>(
    part: &Part<'_, W>,
    place: &Place,
    count: usize,
    block: *const V,
) {
    // SAFETY: the caller's promise, and `count` rows are asked of a tile of `count`.
    unsafe {
        match count {
            1 => tile::<L, W, V, 1, 1>(part, place, [block]),
            2 => tile::<L, W, V, 2, 1>(part, place, [block]),
            3 => tile::<L, W, V, 3, 1>(part, place, [block]),
            4 => tile::<L, W, V, 4, 1>(part, place, [block]),
            5 => tile::<L, W, V, 5, 1>(part, place, [block]),
            _ => tile::<L, W, V, 6, 1>(part, place, [block]),
        }
    }
}

/// Adds one block of the inner dimension to `M` rows x `P` panels of y, which stay in registers meanwhile. A block that
/// is not the first goes on from what y holds: storing an `f32` and loading it again changes nothing.
///
/// # Safety
/// `M` rows from `place.row` must be in the part, and each of `blocks` must hold `place.depth` x 16 weights. With
/// `P` > 1, all panels must lie fully inside y.
#[inline(always)]
#[expect(clippy::needless_range_loop, reason = "register tiles are indexed by row and column")]
unsafe fn tile<L: Lanes, W, V: Weight, const M: usize, const P: usize>(
    part: &Part<'_, W>,
    place: &Place,
    blocks: [*const V; P],
) {
    let column = place.panel * PANEL;
    let columns = (part.outputs - column).min(PANEL * P);
    let whole = columns == PANEL * P;
    let last = (place.row + M - 1) * part.outputs + column + columns - 1;
    let y = part.y.address(last).wrapping_sub((M - 1) * part.outputs + columns - 1);
    debug_assert!(whole || P == 1, "a wide tile over a panel that is not full");
    let mut edge = [0f32; TILE * PANEL];
    let (target, stride) = if whole { (y, part.outputs) } else { (edge.as_mut_ptr(), PANEL) };
    // SAFETY: x has `M` rows from `place.row` with `place.k + place.depth` elements, the weights are the caller's
    // promise, y has its last element checked above, and `edge` has room for a tile of one panel.
    unsafe {
        let x = part.x.as_ptr().add(place.row * part.inputs + place.k);
        let mut sum = [[[L::splat(0.0); 2]; P]; M];
        if place.k > 0 {
            if !whole {
                for m in 0..M {
                    std::ptr::copy_nonoverlapping(y.add(m * part.outputs), target.add(m * stride), columns);
                }
            }
            for m in 0..M {
                for p in 0..P {
                    sum[m][p][0] = L::load(target.add(m * stride + p * PANEL));
                    sum[m][p][1] = L::load(target.add(m * stride + p * PANEL + 8));
                }
            }
        }
        for k in 0..place.depth {
            let mut weights = [[L::splat(0.0); 2]; P];
            for p in 0..P {
                weights[p][0] = V::load(blocks[p].add(k * PANEL));
                weights[p][1] = V::load(blocks[p].add(k * PANEL + 8));
            }
            for m in 0..M {
                let input = L::splat(*x.add(m * part.inputs + k));
                for p in 0..P {
                    sum[m][p][0] = input.mul_add(weights[p][0], sum[m][p][0]);
                    sum[m][p][1] = input.mul_add(weights[p][1], sum[m][p][1]);
                }
            }
        }
        for m in 0..M {
            for p in 0..P {
                sum[m][p][0].store(target.add(m * stride + p * PANEL));
                sum[m][p][1].store(target.add(m * stride + p * PANEL + 8));
            }
        }
        if !whole {
            for m in 0..M {
                std::ptr::copy_nonoverlapping(target.add(m * stride), y.add(m * part.outputs), columns);
            }
        }
    }
}
