//! Kernels that take one row at a time: norms, rotations, gates.

use super::disjoint::Disjoint;
use super::exponential::exp;
use super::instructions::InstructionSet;
use super::lanes::{Lanes, dot};
use super::{Math, dispatch};

/// Elements below which one thread does all rows.
const SERIAL: usize = 1 << 14;

/// A buffer that holds attention heads side by side in each row, and which of them to work on.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Elements from one row to the next.
    pub stride: usize,
    /// First element of the first head in each row.
    pub offset: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head, a multiple of 16.
    pub head_dim: usize,
}

/// The function of an MLP's gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, the usual approximation of GELU.
    GeluTanh,
}

/// `2 sqrt(2 / pi)`.
const GELU_SLOPE: f32 = 1.595_769_2;
/// Cubic term of the argument.
const GELU_CUBIC: f32 = 0.044_715;

impl Math {
    /// `y = x / sqrt(mean(x^2) + epsilon) * weight` for each row of `weight.len()` elements.
    ///
    /// # Panics
    /// When the row length is no multiple of 8, or `x` and `y` do not have the same number of whole rows.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
        let width = weight.len();
        assert!(x.len() == y.len() && x.len().is_multiple_of(width), "rows of {width} elements");
        let parallel = x.len() > SERIAL;
        let y = Disjoint::new(y);
        self.each(x.len() / width, parallel, |row| {
            let x = &x[row * width..][..width];
            // SAFETY: each task takes its own row.
            let y = unsafe { y.part(row * width, width) };
            dispatch!(self.instructions, norm_row::<>(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]));
        });
    }

    /// Prepares queries or keys in place: the RMS norm of each head if the model has one (`norm`: weight, epsilon),
    /// then the rotation by the row's angles. Rows are `heads.stride` elements apart. `cosines` and `sines` hold
    /// `head_dim / 2` values per row. Dimension i is rotated with dimension i + head_dim / 2.
    ///
    /// # Panics
    /// When the sizes do not fit together.
    pub fn rotate_heads(
        &self,
        data: &mut [f32],
        heads: Heads,
        norm: Option<(&[f32], f32)>,
        cosines: &[f32],
        sines: &[f32],
    ) {
        let Heads { stride, offset, heads, head_dim } = heads;
        let pairs = head_dim / 2;
        let width = heads * head_dim;
        assert!(
            head_dim.is_multiple_of(16) && offset + width <= stride,
            "heads of {head_dim} in rows of {stride}"
        );
        assert!(data.len().is_multiple_of(stride), "rows of {stride} elements");
        let rows = data.len() / stride;
        assert!(
            cosines.len() == rows * pairs && sines.len() == rows * pairs,
            "{pairs} angles for {rows} rows"
        );
        assert!(norm.is_none_or(|(weight, _)| weight.len() == head_dim), "one norm weight per dimension");
        let parallel = rows * width > SERIAL;
        let data = Disjoint::new(data);
        self.each(rows, parallel, |row| {
            // SAFETY: each task takes its own row.
            let data = unsafe { data.part(row * stride + offset, width) };
            let cosines = &cosines[row * pairs..][..pairs];
            let sines = &sines[row * pairs..][..pairs];
            dispatch!(self.instructions, rotate_row::<>(
                data: &mut [f32], head_dim: usize, norm: Option<(&[f32], f32)>, cosines: &[f32], sines: &[f32],
            ));
        });
    }

    /// `y = gate(g) * up` for each row of `gate_up`, which holds `width` elements g and then `width` ups.
    ///
    /// # Panics
    /// When the sizes do not fit together.
    pub fn gated(&self, gate: Gate, gate_up: &[f32], width: usize, y: &mut [f32]) {
        assert!(
            gate_up.len() == 2 * y.len() && y.len().is_multiple_of(width),
            "rows of {width} gates and ups"
        );
        let parallel = y.len() > SERIAL;
        let rows = y.len() / width;
        let y = Disjoint::new(y);
        self.each(rows, parallel, |row| {
            let (x, up) = gate_up[row * 2 * width..][..2 * width].split_at(width);
            // SAFETY: each task takes its own row.
            let y = unsafe { y.part(row * width, width) };
            match gate {
                Gate::Silu => {
                    dispatch!(self.instructions, silu_row::<>(x: &[f32], up: &[f32], y: &mut [f32]))
                }
                Gate::GeluTanh => {
                    dispatch!(self.instructions, gelu_row::<>(x: &[f32], up: &[f32], y: &mut [f32]))
                }
            }
        });
    }

    /// `x *= factor`.
    pub fn scale(&self, x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }

    /// `x += y`.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn add(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "as many addends as sums");
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

#[inline(always)]
fn inverse_rms<L: Lanes>(x: &[f32], epsilon: f32) -> f32 {
    1.0 / (dot::<L>(x, x) / x.len() as f32 + epsilon).sqrt()
}

#[inline(always)]
fn norm_row<S: InstructionSet>(x: &[f32], weight: &[f32], epsilon: f32, y: &mut [f32]) {
    let scale = inverse_rms::<S::Lanes>(x, epsilon);
    for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
        *y = x * scale * weight;
    }
}

#[inline(always)]
fn rotate_row<S: InstructionSet>(
    data: &mut [f32],
    head_dim: usize,
    norm: Option<(&[f32], f32)>,
    cosines: &[f32],
    sines: &[f32],
) {
    for head in data.chunks_exact_mut(head_dim) {
        if let Some((weight, epsilon)) = norm {
            let scale = inverse_rms::<S::Lanes>(head, epsilon);
            for (x, weight) in head.iter_mut().zip(weight) {
                *x = *x * scale * weight;
            }
        }
        let (first, second) = head.split_at_mut(head_dim / 2);
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
            (*a, *b) = (a.mul_add(*cos, -(*b * sin)), b.mul_add(*cos, *a * sin));
        }
    }
}

#[inline(always)]
fn silu_row<S: InstructionSet>(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = gate / (1.0 + exp(-gate)) * up;
    }
}

/// With `tanh(u) = 2 / (1 + e^-2u) - 1`, the function is `x / (1 + e^-2u)`.
#[inline(always)]
fn gelu_row<S: InstructionSet>(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        let bent = (gate * gate * gate).mul_add(GELU_CUBIC, *gate);
        *y = gate / (1.0 + exp(-GELU_SLOPE * bent)) * up;
    }
}
