//! Eight `f32` lanes: what every kernel with a sum in it is written over.

/// Eight lanes of `f32`. Every operation is exactly the IEEE 754 one per lane, so implementations cannot differ.
pub(super) trait Lanes: Copy {
    fn splat(value: f32) -> Self;

    /// # Safety
    /// Eight elements must be readable at `source`; no alignment is asked for.
    unsafe fn load(source: *const f32) -> Self;

    /// Widens eight bf16.
    ///
    /// # Safety
    /// As for `load`.
    unsafe fn load_bf16(source: *const u16) -> Self;

    /// # Safety
    /// Eight elements must be writable at `target`; no alignment is asked for.
    unsafe fn store(self, target: *mut f32);

    /// `self * factor + addend`, rounded once.
    fn mul_add(self, factor: Self, addend: Self) -> Self;

    fn mul(self, factor: Self) -> Self;

    /// The sum of all lanes by the fixed tree ((0+4)+(2+6)) + ((1+5)+(3+7)).
    fn sum(self) -> f32;
}

/// Lanes in plain Rust.
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

impl Lanes for Portable {
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
        let bits = unsafe { source.cast::<[u16; 8]>().read_unaligned() };
        let mut lanes = [0.0; 8];
        for (lane, bits) in lanes.iter_mut().zip(bits) {
            *lane = super::convert::f32_from_bf16(bits);
        }
        Self(lanes)
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
    fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// Lanes in one AVX register. Used only in functions that are entered through `dispatch!` at `Level::Avx2`, which
    /// exists only where the CPU was found to have AVX2 and FMA: the promise behind every block below.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(__m256);

    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(value: f32) -> Self {
            // SAFETY: the CPU has AVX2, see `Avx2`.
            Self(unsafe { _mm256_set1_ps(value) })
        }

        #[inline(always)]
        unsafe fn load(source: *const f32) -> Self {
            // SAFETY: eight readable elements by the caller's promise; the CPU has AVX2, see `Avx2`.
            Self(unsafe { _mm256_loadu_ps(source) })
        }

        #[inline(always)]
        unsafe fn load_bf16(source: *const u16) -> Self {
            // SAFETY: eight readable elements by the caller's promise; the CPU has AVX2, see `Avx2`.
            Self(unsafe {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(source.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            })
        }

        #[inline(always)]
        unsafe fn store(self, target: *mut f32) {
            // SAFETY: eight writable elements by the caller's promise; the CPU has AVX2, see `Avx2`.
            unsafe { _mm256_storeu_ps(target, self.0) }
        }

        #[inline(always)]
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            // SAFETY: the CPU has FMA, see `Avx2`.
            Self(unsafe { _mm256_fmadd_ps(self.0, factor.0, addend.0) })
        }

        #[inline(always)]
        fn mul(self, factor: Self) -> Self {
            // SAFETY: the CPU has AVX2, see `Avx2`.
            Self(unsafe { _mm256_mul_ps(self.0, factor.0) })
        }

        #[inline(always)]
        fn sum(self) -> f32 {
            // SAFETY: the CPU has AVX2, see `Avx2`.
            unsafe {
                let quad = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let pair = _mm_add_ps(quad, _mm_movehl_ps(quad, quad));
                _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
            }
        }
    }
}

/// `sum(a[i] * b[i])`: lane j takes elements j, j + 8, j + 16, ... in turn, then the tree of [`Lanes::sum`].
///
/// # Panics
/// When the lengths differ or are no multiple of 8.
#[inline(always)]
pub(super) fn dot<L: Lanes>(a: &[f32], b: &[f32]) -> f32 {
    assert!(a.len() == b.len() && a.len().is_multiple_of(8), "dot of {} and {} elements", a.len(), b.len());
    let mut sum = L::splat(0.0);
    let mut i = 0;
    while i < a.len() {
        // SAFETY: i + 8 <= len for both, since len is a multiple of 8.
        unsafe { sum = L::load(a.as_ptr().add(i)).mul_add(L::load(b.as_ptr().add(i)), sum) };
        i += 8;
    }
    sum.sum()
}
