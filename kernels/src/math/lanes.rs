//! Vectors of `f32`. Every kernel that has a sum is written over them.

mod portable;
#[cfg(target_arch = "x86_64")]
mod ymm;
#[cfg(target_arch = "x86_64")]
mod zmm;

pub(super) use portable::PortableLanes;
#[cfg(target_arch = "x86_64")]
pub(super) use ymm::Ymm;
#[cfg(target_arch = "x86_64")]
pub(super) use zmm::Zmm;

/// Lanes of `f32`. Every operation is exactly the operation of IEEE 754 on each lane, so implementations cannot differ.
pub(super) trait Vector: Copy {
    /// Lanes: 8 or 16.
    const WIDTH: usize;

    fn splat(value: f32) -> Self;

    /// # Safety
    /// `WIDTH` elements must be readable at `source`. No alignment is needed.
    unsafe fn load(source: *const f32) -> Self;

    /// Widens `WIDTH` bf16.
    ///
    /// # Safety
    /// As for `load`.
    unsafe fn load_bf16(source: *const u16) -> Self;

    /// # Safety
    /// `WIDTH` elements must be writable at `target`. No alignment is needed.
    unsafe fn store(self, target: *mut f32);

    /// `self * factor + addend`, rounded once.
    fn mul_add(self, factor: Self, addend: Self) -> Self;

    fn mul(self, factor: Self) -> Self;

    fn add(self, addend: Self) -> Self;
}

/// Eight lanes.
pub(super) trait Lanes: Vector {
    /// The sum of all lanes by the fixed tree of [`tree`].
    fn sum(self) -> f32;
}

/// The order in which eight lanes, or eight vectors that hold a lane each, are added up:
/// ((0+4)+(2+6)) + ((1+5)+(3+7)).
#[inline(always)]
pub(super) fn tree<T>(lanes: [T; 8], add: impl Fn(T, T) -> T) -> T {
    let [a, b, c, d, e, f, g, h] = lanes;
    add(add(add(a, e), add(c, g)), add(add(b, f), add(d, h)))
}

/// `sum(a[i] * b[i])`: lane j takes elements j, j + 8, j + 16, ... in turn, then [`tree`].
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
