//! One output buffer that several threads write, each thread its own part.

use std::marker::PhantomData;

/// A borrowed slice whose disjoint parts may be written from different threads.
pub(super) struct Disjoint<'a> {
    base: *mut f32,
    length: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only way to the elements is `part`, whose caller promises that no two parts alive overlap.
unsafe impl Sync for Disjoint<'_> {}
// SAFETY: as above, and the buffer itself is borrowed for the life of the value.
unsafe impl Send for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    pub(super) fn new(buffer: &'a mut [f32]) -> Self {
        Self { base: buffer.as_mut_ptr(), length: buffer.len(), borrow: PhantomData }
    }

    /// Elements `start .. start + length`.
    ///
    /// # Safety
    /// No other part that is alive may overlap this one.
    ///
    /// # Panics
    /// When the part leaves the buffer.
    #[expect(clippy::mut_from_ref, reason = "handing out disjoint parts is what this type is for")]
    pub(super) unsafe fn part(&self, start: usize, length: usize) -> &mut [f32] {
        assert!(
            start.checked_add(length).is_some_and(|end| end <= self.length),
            "part {start}+{length} of a buffer of {}",
            self.length
        );
        // SAFETY: inside the buffer by the assertion above, and exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(start), length) }
    }

    /// Address of element `index`, for strided access.
    ///
    /// # Panics
    /// When the buffer has no such element.
    pub(super) fn address(&self, index: usize) -> *mut f32 {
        assert!(index < self.length, "element {index} of a buffer of {}", self.length);
        // SAFETY: inside the buffer by the assertion above.
        unsafe { self.base.add(index) }
    }
}
