//! The matrix product.

mod tile;

use std::ops::Range;

use super::disjoint::Disjoint;
use super::instructions::InstructionSet;
use super::lanes::Vector;
use super::panels::{PANEL, PanelData, Panels};
use super::{Math, dispatch};
use tile::{Block, add_block, panels_side_by_side, tallest};

/// Length of a block of the inner dimension for many rows. Two panels' blocks, widened, are 32 KiB, which a first-level cache
/// holds.
const DEPTH: usize = 256;
/// Rows that share one pass over a panel.
const ROWS: usize = 192;
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
        // Panels of a task: there are about four tasks per thread, and a task has a multiple of the panels that a tile takes for
        // so many rows.
        let group = panels.div_ceil(self.threads * 4).next_multiple_of(if rows <= 3 { 4 } else { 2 });
        let groups = panels.div_ceil(group);
        let shares = rows.div_ceil(ROWS);
        let share = rows.div_ceil(shares);
        let y = Disjoint::new(y);
        let parallel = rows * outputs * inputs > SERIAL;
        self.each(groups * shares, parallel, |task| {
            let panels = task % groups * group..panels.min((task % groups + 1) * group);
            let rows = task / groups * share..rows.min((task / groups + 1) * share);
            let (x, y) = (x, &y);
            match &weight.data {
                PanelData::F32(data) => {
                    let part = ProductPart { x, inputs, weight: data.as_slice(), y, outputs, rows, panels };
                    dispatch!(self.instructions, product::<f32>(part: ProductPart<'_, f32>));
                }
                PanelData::Bf16(data) => {
                    let part = ProductPart { x, inputs, weight: data.as_slice(), y, outputs, rows, panels };
                    dispatch!(self.instructions, product::<u16>(part: ProductPart<'_, u16>));
                }
            }
        });
    }
}

/// A range of rows and panels of one product. No two parts of a product overlap in `y`.
struct ProductPart<'a, W> {
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
    /// `V::WIDTH` elements must be readable at `source`.
    unsafe fn load<V: Vector>(source: *const Self) -> V;
}

impl Weight for f32 {
    const WIDE: bool = true;
    #[inline(always)]
    unsafe fn load<V: Vector>(source: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(source) }
    }
}

impl Weight for u16 {
    const WIDE: bool = false;
    #[inline(always)]
    unsafe fn load<V: Vector>(source: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(source) }
    }
}

/// Two panels' blocks, widened once for all rows of a part. They are aligned, because a load that spans two cache lines costs twice
/// as much.
#[repr(align(64))]
struct Widened([f32; 2 * DEPTH * PANEL]);

#[inline(always)]
fn product<S: InstructionSet, W: Weight>(part: ProductPart<'_, W>) {
    assert!(part.x.len() >= part.rows.end * part.inputs);
    assert!(part.weight.len() >= part.panels.end * PANEL * part.inputs);
    let rows = part.rows.len();
    // With up to two tiles of rows, as in decode, streaming the weights takes most of the time. So the weights are used as
    // they are stored, from end to end.
    let few = rows <= 2 * tallest::<S::Wide>();
    let depth = if few { part.inputs.max(1) } else { DEPTH };
    let widest = panels_side_by_side::<S::Wide>(rows);
    // End of the panels that lie fully inside the output. The last panel of the matrix may not, and is then computed alone.
    let full = part.panels.end.min(part.outputs / PANEL);
    let mut widened = Widened([0.0; 2 * DEPTH * PANEL]);
    let mut panel = part.panels.start;
    while panel < part.panels.end {
        let panels = if panel + widest <= full { widest } else { 1 };
        let mut k = 0;
        loop {
            let depth = depth.min(part.inputs - k);
            let place = Block { panel, panels, k, depth };
            let stored = part.weight[panel * PANEL * part.inputs + k * PANEL..].as_ptr();
            let stride = PANEL * part.inputs;
            // SAFETY: the assertions above cover x and the weights of `panels` panels. `widened` has room for the blocks of
            // two panels. More panels are taken side by side only for few rows, which do not use `widened`.
            unsafe {
                if few || W::WIDE {
                    add_block::<S::Wide, W, W>(&part, &place, stored, stride);
                } else {
                    let wide = widened.0.as_mut_ptr();
                    for index in 0..panels {
                        let (source, target) = (stored.add(index * stride), wide.add(index * DEPTH * PANEL));
                        for i in (0..depth * PANEL).step_by(S::Wide::WIDTH) {
                            W::load::<S::Wide>(source.add(i)).store(target.add(i));
                        }
                    }
                    add_block::<S::Wide, W, f32>(&part, &place, wide, DEPTH * PANEL);
                }
            }
            k += depth;
            if k >= part.inputs {
                break;
            }
        }
        panel += panels;
    }
}
