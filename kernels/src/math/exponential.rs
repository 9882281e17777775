//! `exp` for `f32`, with the same bits on every machine.

use super::instructions::InstructionSet;
use super::{Instructions, dispatch};

/// Adding this to a number of magnitude below 2^22 leaves the nearest integer in the low mantissa bits (1.5 * 2^23).
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts (Cody and Waite): the first has 12 spare low bits, so that its product with an integer is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x, within 2 units in the last place. Gives 0 below -87 (where results would become subnormal), and e^88 above 88.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2. e^r is computed by its Taylor polynomial of degree 7 (remainder below 6e-9). The
/// polynomial has only fused multiply-adds, and the code has no branches, so that compilers vectorise it.
#[must_use]
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let high = if x > 88.0 { 88.0 } else { x };
    let clamped = if high < -87.0 { -87.0 } else { high };
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN2_HIGH, clamped);
    let r = n.mul_add(-LN2_LOW, r);
    let mut sum = 1.0 / 5040.0;
    sum = r.mul_add(sum, 1.0 / 720.0);
    sum = r.mul_add(sum, 1.0 / 120.0);
    sum = r.mul_add(sum, 1.0 / 24.0);
    sum = r.mul_add(sum, 1.0 / 6.0);
    sum = r.mul_add(sum, 0.5);
    sum = r.mul_add(sum, 1.0);
    sum = r.mul_add(sum, 1.0);
    // 2^n, from the integer in the low bits of `rounded`.
    let scale = f32::from_bits((rounded.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x < -87.0 { 0.0 } else { sum * scale }
}

/// `weights[i] = exp((logits[i] - maximum) / temperature)`. A NaN logit has weight 0.
///
/// # Panics
/// When the lengths differ.
pub fn softmax_weights(logits: &[f32], maximum: f32, temperature: f32, weights: &mut [f32]) {
    assert_eq!(logits.len(), weights.len(), "one weight per logit");
    dispatch!(Instructions::best(), weigh::<>(
        logits: &[f32], maximum: f32, temperature: f32, weights: &mut [f32],
    ));
}

#[inline(always)]
fn weigh<S: InstructionSet>(logits: &[f32], maximum: f32, temperature: f32, weights: &mut [f32]) {
    for (weight, logit) in weights.iter_mut().zip(logits) {
        let value = exp((logit - maximum) / temperature);
        *weight = if value >= 0.0 { value } else { 0.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut x = -87.0f32;
        while x <= 88.0 {
            let exact = libm::exp(f64::from(x));
            let error = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(error < 2.0 * f64::from(f32::EPSILON), "exp({x}) is off by {error:e}");
            x += 0.013;
        }
    }

    #[test]
    fn exp_at_its_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-87.1), 0.0);
        assert!(exp(88.0).is_finite());
        assert_eq!(exp(f32::INFINITY), exp(88.0));
        assert!(exp(f32::NAN).is_nan());
    }
}
