//! Expands stored rows to `f32`.
//!
//! Each formula is that of the `gguf` package of PyPI (`gguf/quants.py`, 0.17.1), operation by operation. Each operation rounds
//! to `f32`: Rust never fuses a product and a sum. The order of elements within a block is that of the package, too.

use crate::Kind;

/// Expands whole blocks.
///
/// Both slices hold the same blocks. An incomplete block, or a block that only one slice has, stays untouched.
pub(crate) fn expand(kind: Kind, stored: &[u8], target: &mut [f32]) {
    match kind {
        Kind::F32 => each(stored, target, |bytes: &[u8; 4], [value]| *value = f32::from_le_bytes(*bytes)),
        Kind::F16 => each(stored, target, |bytes: &[u8; 2], [value]| *value = half(*bytes)),
        Kind::Bf16 => each(stored, target, |bytes: &[u8; 2], [value]| {
            *value = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
        }),
        Kind::Q8_0 => each(stored, target, q8_0),
        Kind::Q4_0 => each(stored, target, q4_0),
        Kind::Q4_1 => each(stored, target, q4_1),
        Kind::Q5_0 => each(stored, target, q5_0),
        Kind::Q5_1 => each(stored, target, q5_1),
        Kind::Q4K => each(stored, target, q4_k),
        Kind::Q5K => each(stored, target, q5_k),
        Kind::Q6K => each(stored, target, q6_k),
    }
}

fn each<const BYTES: usize, const ELEMENTS: usize>(
    stored: &[u8],
    target: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (bytes, target) in stored.as_chunks::<BYTES>().0.iter().zip(target.as_chunks_mut::<ELEMENTS>().0) {
        block(bytes, target);
    }
}

/// IEEE 754 half precision, widened exactly.
fn half(bytes: [u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(bytes));
    let sign = (bits & 0x8000) << 16;
    let (exponent, fraction) = (bits >> 10 & 0x1f, bits & 0x3ff);
    match exponent {
        // A subnormal is fraction * 2^-24, which f32 holds exactly.
        0 => f32::from_bits((fraction as f32 / 16_777_216.0).to_bits() | sign),
        31 => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
        _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
    }
}

/// The scale at the start of a block.
fn scale(block: &[u8]) -> f32 {
    block.first_chunk().map_or(0.0, |bytes| half(*bytes))
}

/// The values of 4 bits in some bytes: first the lower halves of all bytes, then the upper halves.
fn nibbles(bytes: &[u8]) -> impl Iterator<Item = u8> {
    bytes.iter().map(|byte| byte & 15).chain(bytes.iter().map(|byte| byte >> 4))
}

/// The 32 values of 5 bits in 4 bytes and 16 bytes: the fifth bit of each from `high`, the other bits from `low`.
fn fives(high: &[u8], low: &[u8]) -> impl Iterator<Item = u8> {
    let high = high.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    nibbles(low).enumerate().map(move |(index, low)| low | ((high >> index & 1) as u8) << 4)
}

fn q8_0(block: &[u8; 34], target: &mut [f32; 32]) {
    let (d, quants) = (scale(block), &block[2..]);
    for (target, quant) in target.iter_mut().zip(quants) {
        *target = f32::from(quant.cast_signed()) * d;
    }
}

fn q4_0(block: &[u8; 18], target: &mut [f32; 32]) {
    let d = scale(block);
    for (target, quant) in target.iter_mut().zip(nibbles(&block[2..])) {
        *target = d * (f32::from(quant) - 8.0);
    }
}

fn q4_1(block: &[u8; 20], target: &mut [f32; 32]) {
    let (d, least) = (scale(block), scale(&block[2..]));
    for (target, quant) in target.iter_mut().zip(nibbles(&block[4..])) {
        *target = d * f32::from(quant) + least;
    }
}

fn q5_0(block: &[u8; 22], target: &mut [f32; 32]) {
    let d = scale(block);
    for (target, quant) in target.iter_mut().zip(fives(&block[2..6], &block[6..])) {
        *target = d * (f32::from(quant) - 16.0);
    }
}

fn q5_1(block: &[u8; 24], target: &mut [f32; 32]) {
    let (d, least) = (scale(block), scale(&block[2..]));
    for (target, quant) in target.iter_mut().zip(fives(&block[4..8], &block[8..])) {
        *target = d * f32::from(quant) + least;
    }
}

/// Scale and least value of each 32 elements of a block of Q4_K or Q5_K. The 16 numbers of 6 bits are packed in 12 bytes: the
/// bytes of the first four scales and least values also hold the upper two bits of the last four.
fn scales(block: &[u8]) -> [(f32, f32); 8] {
    let (d, least) = (scale(block), scale(&block[2..]));
    let packed = &block[4..16];
    std::array::from_fn(|index| {
        let (quant, quant_least) = match index.checked_sub(4) {
            None => (packed[index] & 63, packed[index + 4] & 63),
            Some(low) => {
                let both = packed[low + 8];
                (both & 15 | packed[low] >> 2 & 48, both >> 4 | packed[low + 4] >> 2 & 48)
            }
        };
        (d * f32::from(quant), least * f32::from(quant_least))
    })
}

fn q4_k(block: &[u8; 144], target: &mut [f32; 256]) {
    let scales = scales(block);
    let quants = block[16..].chunks_exact(32).flat_map(nibbles);
    for (index, (target, quant)) in target.iter_mut().zip(quants).enumerate() {
        let (d, least) = scales[index / 32];
        *target = d * f32::from(quant) - least;
    }
}

fn q5_k(block: &[u8; 176], target: &mut [f32; 256]) {
    let scales = scales(block);
    let high = &block[16..48];
    let quants = block[48..].chunks_exact(32).flat_map(nibbles);
    for (index, (target, quant)) in target.iter_mut().zip(quants).enumerate() {
        let (d, least) = scales[index / 32];
        let quant = quant | (high[index % 32] >> (index / 32) & 1) << 4;
        *target = d * f32::from(quant) - least;
    }
}

fn q6_k(block: &[u8; 210], target: &mut [f32; 256]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = scale(&block[208..]);
    let low = low.chunks_exact(64).flat_map(nibbles);
    for (index, (target, low)) in target.iter_mut().zip(low).enumerate() {
        let high = high[index / 128 * 32 + index % 32] >> (index / 32 % 4 * 2) & 3;
        let d = d * f32::from(scales[index / 16].cast_signed());
        *target = d * (f32::from(low | high << 4) - 32.0);
    }
}
