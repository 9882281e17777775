//! The C library's allocator, which Rust's allocations come from.
//!
//! glibc keeps freed memory for the next allocation, in an area for each thread that allocates (up to eight for each core). How much
//! each area keeps grows with the largest allocation that was freed, up to 64 MiB. A request with a large body so leaves its peak behind
//! in the area of its thread, and a server which has seen many of them holds many times that peak.

/// Bytes that an area keeps at its end, and from which an allocation is a mapping of its own. Both are glibc's values at the start, which
/// stay as they are once they are set.
#[cfg(target_env = "gnu")]
const KEPT: std::ffi::c_int = 128 << 10;

/// From now on freed memory goes back to the system at once, but for little. For processes that read what clients send. Does nothing
/// with a C library other than glibc.
pub fn keep_little() {
    set();
}

#[cfg(target_env = "gnu")]
fn set() {
    use std::ffi::c_int;
    unsafe extern "C" {
        safe fn mallopt(parameter: c_int, value: c_int) -> c_int;
    }
    /// Numbers of malloc.h.
    const TRIM_THRESHOLD: c_int = -1;
    const MMAP_THRESHOLD: c_int = -3;
    // glibc takes these values.
    let _taken = [TRIM_THRESHOLD, MMAP_THRESHOLD].map(|parameter| mallopt(parameter, KEPT));
}

#[cfg(not(target_env = "gnu"))]
fn set() {}
