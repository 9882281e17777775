//! Makes the parameters of kernel launches from a folded copy.

use crate::copy::{CopyError, Memory, Strip};

/// Page pairs of one launch, as in `page_copy.cu`.
const PAGES: usize = 464;
/// Threads of a block, as in `page_copy.cu`.
pub(super) const THREADS: u32 = 256;
/// Vectors of a thread, as in `page_copy.cu`.
const EACH: u32 = 4;
/// Most vectors of a launch. Up to this number, divisions and the threads' numbers are exact.
const VECTORS: usize = 1 << 30;

/// Division by a fixed number as a multiplication, exact for dividends below 2^31.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Divisor {
    value: u32,
    multiplier: u32,
    shift: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl cudarc::driver::DeviceRepr for Divisor {}

impl Divisor {
    /// Division by `value`, from 1 to 2^31.
    ///
    /// With `l` the logarithm of the value rounded up and `m = ceil(2^(31 + l) / value)`, `n * m / 2^(31 + l)` exceeds
    /// `n / value` by less than `1 / value`, because `m * value - 2^(31 + l) < value <= 2^l` and `n < 2^31` (Granlund and
    /// Montgomery, Division by Invariant Integers using Multiplication, 1994). The multiplier `m` is at most 2^32 - 1.
    pub(super) const fn of(value: u32) -> Self {
        let shift = 31 + value.next_power_of_two().trailing_zeros();
        let multiplier = (1_u64 << shift).div_ceil(value as u64);
        Self { value, multiplier: multiplier as u32, shift }
    }
}

/// The kernels' parameter, byte for byte the structure of that name in `page_copy.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PageCopy {
    source: u64,
    target: u64,
    source_page: u64,
    target_page: u64,
    source_steps: [u64; 4],
    target_steps: [u64; 4],
    dims: [Divisor; 4],
    row: Divisor,
    page: Divisor,
    pages: u32,
    unused: u32,
    source_pages: [u32; PAGES],
    target_pages: [u32; PAGES],
}

// CUDA limits a kernel's parameters to this size.
const _: () = assert!(size_of::<PageCopy>() <= 4096);

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl cudarc::driver::DeviceRepr for PageCopy {}

/// Bytes that a thread moves at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// 1 byte.
    One,
    /// 2 bytes.
    Two,
    /// 4 bytes.
    Four,
    /// 8 bytes.
    Eight,
    /// 16 bytes.
    Sixteen,
}

impl Width {
    /// All widths, the narrowest first.
    pub(super) const ALL: [Width; 5] = [Width::One, Width::Two, Width::Four, Width::Eight, Width::Sixteen];

    /// The bytes.
    pub(super) const fn bytes(self) -> usize {
        1 << self as u32
    }

    /// Name of the kernel.
    pub(super) const fn kernel(self) -> &'static str {
        match self {
            Width::One => "page_copy_1",
            Width::Two => "page_copy_2",
            Width::Four => "page_copy_4",
            Width::Eight => "page_copy_8",
            Width::Sixteen => "page_copy_16",
        }
    }

    /// The widest width that divides all these numbers, given as their bitwise OR.
    fn dividing(bits: usize) -> Self {
        Self::ALL[(bits.trailing_zeros() as usize).min(4)]
    }
}

/// One launch of a kernel.
#[derive(Clone, Debug)]
pub(super) struct Launch {
    /// Which kernel.
    pub(super) width: Width,
    /// Blocks in its grid.
    pub(super) blocks: u32,
    /// Its parameter.
    pub(super) copy: Box<PageCopy>,
}

/// The launches that copy one strip of pages.
///
/// # Errors
/// When a page has more vectors than a launch can number.
pub(super) fn launches<'a>(
    strip: &Strip,
    pages: &'a [[u32; 2]],
    source: Memory,
    target: Memory,
) -> Result<impl Iterator<Item = Launch> + use<'a>, CopyError> {
    let (source, target) =
        (source.address().wrapping_add(strip.source), target.address().wrapping_add(strip.target));
    let bits = strip
        .dims
        .iter()
        .fold(strip.run | strip.source_page | strip.target_page | source | target, |bits, dim| {
            bits | dim.source | dim.target
        });
    let width = Width::dividing(bits);
    let vectors = strip.page_bytes() / width.bytes();
    if vectors > VECTORS {
        let bytes = strip.page_bytes();
        return Err(CopyError::Device(format!(
            "a page of {bytes} bytes is too large for one launch, {} bytes at a time: copy fewer layers at once",
            width.bytes()
        )));
    }
    let mut copy = PageCopy {
        source: source as u64,
        target: target as u64,
        source_page: strip.source_page as u64,
        target_page: strip.target_page as u64,
        source_steps: [0; 4],
        target_steps: [0; 4],
        dims: [Divisor::of(1); 4],
        // All these numbers are factors of the number of vectors, so they fit in 32 bits.
        row: Divisor::of((strip.run / width.bytes()) as u32),
        page: Divisor::of(vectors as u32),
        pages: 0,
        unused: 0,
        source_pages: [0; PAGES],
        target_pages: [0; PAGES],
    };
    for (at, dim) in strip.dims.iter().enumerate() {
        copy.dims[at] = Divisor::of(dim.extent as u32);
        (copy.source_steps[at], copy.target_steps[at]) = (dim.source as u64, dim.target as u64);
    }
    let at_once = PAGES.min(VECTORS / vectors);
    Ok(pages.chunks(at_once).map(move |pages| {
        let mut copy = Box::new(copy);
        copy.pages = pages.len() as u32;
        for (at, &[from, to]) in pages.iter().enumerate() {
            (copy.source_pages[at], copy.target_pages[at]) = (from, to);
        }
        let blocks = (pages.len() * vectors).div_ceil((THREADS * EACH) as usize) as u32;
        Launch { width, blocks, copy }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn divide(number: u32, by: Divisor) -> u32 {
        ((u64::from(number) * u64::from(by.multiplier)) >> by.shift) as u32
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn divisors_divide(number in 0..1_u32 << 31, value in prop_oneof![1..1_u32 << 31, 1..300_u32]) {
            for value in [value, value.next_power_of_two().min(1 << 30), 1] {
                let by = Divisor::of(value);
                let multiple = number / value * value;
                for number in [number, multiple, multiple.saturating_sub(1), (1 << 31) - 1] {
                    prop_assert_eq!(divide(number, by), number / value, "{} / {}", number, value);
                }
            }
        }
    }
}
