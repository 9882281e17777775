//! What the system says about this process and this thread.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::time::{Duration, Instant};

/// How long a case waits for something that has to happen.
pub const PATIENCE: Duration = Duration::from_secs(3);

/// Threads of this process.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// Open descriptors of this process.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// How often this thread gave the processor up to wait for something.
pub fn waits() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// Asks until there is an answer or patience ends.
pub fn wait_for<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return Some(answer);
        }
        if start.elapsed() > PATIENCE {
            return None;
        }
        std::thread::yield_now();
    }
}
