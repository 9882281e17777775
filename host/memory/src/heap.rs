//! Settings of the C library's allocator, which Rust's allocations come from.
//!
//! glibc keeps freed memory for later allocations, in an area for each thread that allocates (up to eight for each core). The
//! amount that an area keeps grows with the largest freed allocation, up to 64 MiB. So a request with a large body leaves its peak
//! in the area of its thread. A server that has had many such requests holds many times that peak.

/// Bytes that an area keeps at its end at most. Allocations of this size or more are mappings of their own. Both are glibc's
/// initial values. Setting them stops glibc from raising them.
#[cfg(target_env = "gnu")]
const KEPT: std::ffi::c_int = 128 << 10;

/// Makes the allocator return freed memory to the system at once, except for a small rest. For processes that read data from
/// clients. Does nothing with a C library other than glibc.
pub fn keep_little() {
    set();
}

#[cfg(target_env = "gnu")]
fn set() {
    use std::ffi::c_int;
    unsafe extern "C" {
        safe fn mallopt(parameter: c_int, value: c_int) -> c_int;
    }
    /// Numbers of parameters, from malloc.h.
    const TRIM_THRESHOLD: c_int = -1;
    const MMAP_THRESHOLD: c_int = -3;
    // Ignored: glibc accepts these values.
    let _taken = [TRIM_THRESHOLD, MMAP_THRESHOLD].map(|parameter| mallopt(parameter, KEPT));
}

#[cfg(not(target_env = "gnu"))]
fn set() {}
