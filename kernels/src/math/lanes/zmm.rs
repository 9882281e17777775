use std::arch::x86_64::*;

use super::Vector;

/// Sixteen lanes in one AVX-512 register. Used only in functions that are entered through `dispatch!` after the CPU was
/// found to have AVX-512F. Every unsafe block below relies on that.
///
/// bf16 is widened by a shift. The products of AVX512-BF16 are not used: they flush subnormals and do not round as a chain of
/// `f32` does.
#[derive(Clone, Copy)]
pub(in super::super) struct Zmm(__m512);

impl Vector for Zmm {
    const WIDTH: usize = 16;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: the CPU has AVX-512F, see `Zmm`.
        Self(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: sixteen readable elements by the caller's promise. The CPU has AVX-512F, see `Zmm`.
        Self(unsafe { _mm512_loadu_ps(source) })
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: sixteen readable elements by the caller's promise. The CPU has AVX-512F, see `Zmm`.
        Self(unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(source.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: sixteen writable elements by the caller's promise. The CPU has AVX-512F, see `Zmm`.
        unsafe { _mm512_storeu_ps(target, self.0) }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the CPU has AVX-512F, see `Zmm`.
        Self(unsafe { _mm512_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn mul(self, factor: Self) -> Self {
        // SAFETY: the CPU has AVX-512F, see `Zmm`.
        Self(unsafe { _mm512_mul_ps(self.0, factor.0) })
    }

    #[inline(always)]
    fn add(self, addend: Self) -> Self {
        // SAFETY: the CPU has AVX-512F, see `Zmm`.
        Self(unsafe { _mm512_add_ps(self.0, addend.0) })
    }
}
