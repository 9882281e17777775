//! The innermost loops, which copy equally long rows at regular distances. There is one loop for each kind of row.

/// Rows to copy: the `count` rows of `run` bytes that lie `source_step` and `target_step` bytes apart.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub source: *const u8,
    pub target: *mut u8,
    pub source_step: usize,
    pub target_step: usize,
    pub count: usize,
    pub run: usize,
    /// Start of the rows that will be read next: as many, in the same steps. They are prefetched, because the processor does not
    /// predict short rows that lie far apart.
    pub ahead: *const u8,
}

impl Rows {
    /// Calls `copy` with the two addresses of every row.
    #[inline(always)]
    fn each(self, copy: impl Fn(*const u8, *mut u8)) {
        for row in 0..self.count {
            // Wrapping: nothing is dereferenced here, and a step past the last row is never taken.
            copy(
                self.source.wrapping_add(row * self.source_step),
                self.target.wrapping_add(row * self.target_step),
            );
        }
    }
}

/// Rows up to this length, in bytes, are fetched ahead.
const SHORT: usize = 1 << 10;

/// Bytes that are fetched ahead: enough to cover the latency of memory, and few enough to be still in the cache when read.
pub(super) const AHEAD: usize = 8 << 10;

/// Copies rows.
///
/// # Safety
/// Every row is readable at its source, writable at its target, and the two do not overlap. The CPU has the instructions
/// that [`choose`] found.
pub(super) type CopyRows = unsafe fn(Rows);

/// The loop for rows of `run` bytes. `streaming` asks for stores that go past the caches, and gets them only where
/// `alignment` (of all targets, a power of two) and the CPU allow.
pub(super) fn choose(run: usize, streaming: bool, alignment: usize) -> CopyRows {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if std::arch::is_x86_feature_detected!("avx2") {
        let aligned = run.is_multiple_of(32) && alignment.is_multiple_of(32);
        match run {
            // In a row of at least this length, the cost of reaching alignment within the row is small.
            _ if streaming && (aligned || run >= 1 << 10) => return wide::stream,
            64 => return wide::fixed::<64>,
            128 => return wide::fixed::<128>,
            256 => return wide::fixed::<256>,
            512 => return wide::fixed::<512>,
            65.. => return wide::any,
            _ => {}
        }
    }
    let _ = (streaming, alignment);
    match run {
        1 => fixed::<1>,
        2 => fixed::<2>,
        4 => fixed::<4>,
        8 => fixed::<8>,
        16 => fixed::<16>,
        32 => fixed::<32>,
        64 => fixed::<64>,
        128 => fixed::<128>,
        _ => any,
    }
}

/// Completes stores that went past the caches.
///
/// Nothing else orders these stores: without this call, a thread that learns that the copy is done may not see its bytes.
pub(super) fn settle() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every CPU of this architecture has the instruction.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

/// Rows of any length, by the C library's `memcpy`.
unsafe fn any(rows: Rows) {
    // SAFETY: the caller vouches for both sides of every row.
    rows.each(|source, target| unsafe { target.copy_from_nonoverlapping(source, rows.run) });
}

/// Rows whose length the compiler knows: no call per row.
unsafe fn fixed<const N: usize>(rows: Rows) {
    let copy = |source: *const u8, target: *mut u8| {
        // SAFETY: the caller vouches for both sides of every row, which is as long as the array. Bytes need no alignment.
        unsafe { target.cast::<[u8; N]>().write(source.cast::<[u8; N]>().read()) }
    };
    rows.each(copy);
}

/// Loops that move 32 bytes at a time.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod wide {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm256_loadu_si256, _mm256_storeu_si256, _mm256_stream_si256,
    };

    use super::{Rows, SHORT};

    /// Rows whose length, a multiple of 64, the compiler knows.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn fixed<const N: usize>(rows: Rows) {
        // SAFETY: the caller vouches for both sides of every row, which has `N` bytes.
        rows.each(|source, target| unsafe { body(source, target, N) });
    }

    /// Rows of 64 bytes or more, without a call for each. About as fast as `memcpy` for long ones.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn any(rows: Rows) {
        let copy = |source: *const u8, target: *mut u8| {
            // SAFETY: the caller vouches for both sides of every row. The last 64 bytes of a row are copied separately,
            // although some of them were copied before.
            unsafe {
                body(source, target, rows.run & !63);
                body(source.add(rows.run - 64), target.add(rows.run - 64), 64);
            }
        };
        rows.each(copy);
    }

    /// Rows of 32 bytes or more, past the caches. The ends of a row that do not reach a 32-byte boundary of the target go through
    /// the caches.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn stream(rows: Rows) {
        let copy = |source: *const u8, target: *mut u8| {
            if rows.run <= SHORT {
                foresee(&rows, source);
            }
            let head = target.addr().wrapping_neg() % 32;
            // SAFETY: the caller vouches for both sides of every row. The first and the last 32 bytes are copied
            // separately where the row does not begin or end at a boundary. The row has at least 32 bytes.
            unsafe {
                if head > 0 {
                    store(source, target);
                }
                let whole = (rows.run - head) / 32 * 32;
                let (mut from, mut to) = (source.add(head), target.add(head));
                let end = from.add(whole);
                while from < end {
                    _mm256_stream_si256(to.cast::<__m256i>(), _mm256_loadu_si256(from.cast::<__m256i>()));
                    (from, to) = (from.add(32), to.add(32));
                }
                if head + whole < rows.run {
                    store(source.add(rows.run - 32), target.add(rows.run - 32));
                }
            }
        };
        rows.each(copy);
    }

    /// Prefetches the row that has the same position among the rows ahead as this row has here.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn foresee(rows: &Rows, source: *const u8) {
        let row = source.wrapping_add(rows.ahead.addr().wrapping_sub(rows.source.addr()));
        for at in (0..rows.run).step_by(64) {
            _mm_prefetch::<_MM_HINT_T0>(row.wrapping_add(at).cast());
        }
    }

    /// Copies `length` bytes, a multiple of 64.
    ///
    /// # Safety
    /// Both sides have them, and do not overlap.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn body(source: *const u8, target: *mut u8, length: usize) {
        for at in (0..length).step_by(64) {
            // SAFETY: 64 bytes from `at` lie inside, as the caller says of `length`.
            unsafe {
                let (from, to) = (source.add(at).cast::<__m256i>(), target.add(at).cast::<__m256i>());
                let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
                _mm256_storeu_si256(to, low);
                _mm256_storeu_si256(to.add(1), high);
            }
        }
    }

    /// Copies 32 bytes.
    ///
    /// # Safety
    /// Both sides have them.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn store(source: *const u8, target: *mut u8) {
        // SAFETY: the caller says so.
        unsafe { _mm256_storeu_si256(target.cast(), _mm256_loadu_si256(source.cast())) };
    }
}
