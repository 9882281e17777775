use std::arch::x86_64::*;

use super::{Lanes, Vector};

/// Eight lanes in one AVX register. Used only in functions that are entered through `dispatch!` after the CPU was found to
/// have AVX2 and FMA. Every unsafe block below relies on that.
#[derive(Clone, Copy)]
pub(in super::super) struct Ymm(__m256);

impl Vector for Ymm {
    const WIDTH: usize = 8;

    #[inline(always)]
    fn splat(value: f32) -> Self {
        // SAFETY: the CPU has AVX2, see `Ymm`.
        Self(unsafe { _mm256_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(source: *const f32) -> Self {
        // SAFETY: eight readable elements by the caller's promise. The CPU has AVX2, see `Ymm`.
        Self(unsafe { _mm256_loadu_ps(source) })
    }

    #[inline(always)]
    unsafe fn load_bf16(source: *const u16) -> Self {
        // SAFETY: eight readable elements by the caller's promise. The CPU has AVX2, see `Ymm`.
        Self(unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        })
    }

    #[inline(always)]
    unsafe fn store(self, target: *mut f32) {
        // SAFETY: eight writable elements by the caller's promise. The CPU has AVX2, see `Ymm`.
        unsafe { _mm256_storeu_ps(target, self.0) }
    }

    #[inline(always)]
    fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: the CPU has FMA, see `Ymm`.
        Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
    }

    #[inline(always)]
    fn mul(self, factor: Self) -> Self {
        // SAFETY: the CPU has AVX2, see `Ymm`.
        Self(unsafe { _mm256_mul_ps(self.0, factor.0) })
    }

    #[inline(always)]
    fn add(self, addend: Self) -> Self {
        // SAFETY: the CPU has AVX2, see `Ymm`.
        Self(unsafe { _mm256_add_ps(self.0, addend.0) })
    }
}

impl Lanes for Ymm {
    #[inline(always)]
    fn sum(self) -> f32 {
        // SAFETY: the CPU has AVX2, see `Ymm`.
        unsafe {
            let quad = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
            let pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        }
    }
}
