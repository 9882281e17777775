//! The memory of the C library's allocator, which Rust's allocations are made of.
//!
//! The library keeps freed memory for the next allocation, in an area for each thread that allocates (up to eight for each core). A
//! request with a large body leaves its peak behind in the area of its thread, so that a server which has seen many of them holds many
//! times that peak. The library gives it back when it is told to.

use std::time::Duration;

/// Growth after which memory is given back, in bytes.
const GROWTH: u64 = 16 << 20;

/// Whether a process has grown so much that it is worth giving back what was freed.
///
/// It is told how large the process is, so that tests can say so.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap {
    /// What the process held the last time that it gave back, or the least since then. In bytes.
    least: Option<u64>,
}

impl Heap {
    /// Time between two looks: long against a request, short against the time in which an operator looks at the memory.
    pub const PAUSE: Duration = Duration::from_secs(10);

    /// Whether to give back, for a process of this many bytes.
    pub fn has_grown(&mut self, resident: u64) -> bool {
        let least = *self.least.get_or_insert(resident);
        self.least = Some(least.min(resident));
        resident > least + GROWTH
    }

    /// Notes what the process holds after memory was given back, in bytes.
    pub fn gave_back(&mut self, resident: u64) {
        self.least = Some(resident);
    }
}

/// Gives the pages of freed allocations back to the system. Other threads may wait for some milliseconds if they allocate meanwhile. Does
/// nothing with a C library that has no such call.
pub fn give_back() {
    trim();
}

#[cfg(target_env = "gnu")]
fn trim() {
    unsafe extern "C" {
        safe fn malloc_trim(pad: usize) -> std::ffi::c_int;
    }
    let _gave_some = malloc_trim(0);
}

#[cfg(not(target_env = "gnu"))]
fn trim() {}

/// Memory of this process that no file stands behind and that is not shared, in bytes. `None` where the system does not say.
#[must_use]
pub fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_gives_back_when_it_has_grown_since_it_last_did() {
        let mib = |count: u64| count << 20;
        let mut heap = Heap::default();
        assert!(!heap.has_grown(mib(100)));
        assert!(!heap.has_grown(mib(90)));
        assert!(!heap.has_grown(mib(106)));
        assert!(heap.has_grown(mib(107)));
        // All of it is in use.
        heap.gave_back(mib(107));
        assert!(!heap.has_grown(mib(123)));
        assert!(heap.has_grown(mib(124)));
        heap.gave_back(mib(20));
        assert!(heap.has_grown(mib(37)));
    }

    #[cfg(target_env = "gnu")]
    #[test]
    fn what_threads_have_freed_goes_back_to_the_system() {
        // Small ones between which one stays, so that no area shrinks by itself.
        let peaks: Vec<_> = (0..4)
            .map(|_| {
                std::thread::spawn(|| {
                    let mut boxes: Vec<Box<[u8; 1000]>> = (0..16_000).map(|_| Box::new([1; 1000])).collect();
                    boxes.pop()
                })
            })
            .collect();
        let kept: Vec<_> =
            peaks.into_iter().map(|thread| thread.join().expect("a thread that ends")).collect();
        let before = resident().expect("a system with /proc");
        give_back();
        let after = resident().expect("a system with /proc");
        assert!(after + (32 << 20) < before, "{before} bytes before, {after} after");
        drop(kept);
    }
}
