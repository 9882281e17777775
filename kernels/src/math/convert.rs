//! Element types of weights and KV, and their conversion to and from `f32`.

/// How numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// 32-bit float.
    F32,
    /// The upper half of a 32-bit float.
    Bf16,
    /// IEEE 754 half precision.
    F16,
}

impl Element {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Element::F32 => 4,
            Element::Bf16 | Element::F16 => 2,
        }
    }

    /// Widens little-endian elements. Exact for every type.
    ///
    /// # Panics
    /// When `bytes` and `target` hold different numbers of elements.
    #[inline(always)]
    pub fn widen(self, bytes: &[u8], target: &mut [f32]) {
        assert_eq!(bytes.len(), target.len() * self.bytes(), "as many elements in as out");
        match self {
            Element::F32 => {
                for (target, source) in target.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *target = f32::from_le_bytes(*source);
                }
            }
            Element::Bf16 => {
                for (target, source) in target.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *target = f32_from_bf16(u16::from_le_bytes(*source));
                }
            }
            Element::F16 => {
                for (target, source) in target.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *target = f32_from_f16(u16::from_le_bytes(*source));
                }
            }
        }
    }
}

/// The `f32` with these upper 16 bits.
#[must_use]
#[inline(always)]
pub fn f32_from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bf16, ties to even. NaN stays NaN.
#[must_use]
#[inline(always)]
pub fn bf16_from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

fn f32_from_f16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let fraction = u32::from(bits & 0x3ff);
    match exponent {
        // A subnormal is fraction * 2^-24, which f32 holds exactly.
        0 => f32::from_bits((fraction as f32 / 16_777_216.0).to_bits() | sign),
        31 => f32::from_bits(sign | 0x7f80_0000 | (fraction << 13)),
        _ => f32::from_bits(sign | ((exponent + 112) << 23) | (fraction << 13)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even_and_keeps_what_it_can_hold() {
        for bits in 0..=u16::MAX {
            let value = f32_from_bf16(bits);
            let back = bf16_from_f32(value);
            assert!(back == bits || (value.is_nan() && f32_from_bf16(back).is_nan()), "{bits:04x}");
        }
        let cases =
            [(0x3f80_8000, 0x3f80), (0x3f81_8000, 0x3f82), (0x3f80_8001, 0x3f81), (0x7f7f_ffff, 0x7f80)];
        for (bits, expected) in cases {
            assert_eq!(bf16_from_f32(f32::from_bits(bits)), expected, "{bits:08x}");
        }
    }

    #[test]
    fn half_precision_widens_exactly() {
        let cases = [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x3555, 0.333_251_95),
            (0x0001, 5.960_464_5e-8),
            (0x83ff, -6.097_555e-5),
            (0x7bff, 65504.0),
            (0x7c00, f32::INFINITY),
        ];
        for (bits, expected) in cases {
            assert_eq!(f32_from_f16(bits), expected, "{bits:04x}");
        }
        assert!(f32_from_f16(0x7e00).is_nan());
        assert_eq!(f32_from_f16(0x8000).to_bits(), (-0.0f32).to_bits());
    }
}
