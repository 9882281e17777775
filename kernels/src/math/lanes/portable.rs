use super::super::convert::f32_from_bf16;
use super::{Lanes, Vector, tree};

/// Lanes in plain Rust.
#[derive(Clone, Copy)]
pub(in super::super) struct PortableLanes([f32; 8]);

impl Vector for PortableLanes {
    const WIDTH: usize = 8;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        Self([value; 8])
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: eight readable elements by the caller's promise.
        Self(unsafe { source.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: eight readable elements by the caller's promise.
        Self(unsafe { source.cast::<[u16; 8]>().read_unaligned() }.map(f32_from_bf16))
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: eight writable elements by the caller's promise.
        unsafe { target.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    fn mul_add(mut self, factor: Self, addend: Self) -> Self {
        for i in 0..8 {
            self.0[i] = self.0[i].mul_add(factor.0[i], addend.0[i]);
        }
        self
    }

    #[inline(always)]
    fn mul(mut self, factor: Self) -> Self {
        for i in 0..8 {
            self.0[i] *= factor.0[i];
        }
        self
    }

    #[inline(always)]
    fn add(mut self, addend: Self) -> Self {
        for i in 0..8 {
            self.0[i] += addend.0[i];
        }
        self
    }
}

impl Lanes for PortableLanes {
    #[inline(always)]
    fn sum(self) -> f32 {
        tree(self.0, |a, b| a + b)
    }
}
