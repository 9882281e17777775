//! Figures of the system about this process and this thread, and waiting with patience.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a case waits for something that has to happen, in milliseconds.
static PATIENCE: AtomicU64 = AtomicU64::new(3000);
/// Limit of the time that counts between two looks. Beyond it the process did not run.
const LOOK: Duration = Duration::from_millis(50);
/// Time after which a case that repeats something ends, however slow the plugin is.
pub const ENOUGH: Duration = Duration::from_secs(3);

/// Sets how long this process waits for something that has to happen.
pub fn be_patient(patience: Duration) {
    PATIENCE.store(u64::try_from(patience.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// How long a case waits for something that has to happen.
pub fn patience() -> Duration {
    Duration::from_millis(PATIENCE.load(Ordering::Relaxed))
}

/// Deadline of a shutdown in milliseconds: the server's, or the case's patience if that is longer.
pub fn shutdown_ms() -> u64 {
    PATIENCE.load(Ordering::Relaxed).max(3000)
}

/// Threads of this process.
pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").map_or(0, Iterator::count)
}

/// Open descriptors of this process.
pub fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// How often this thread gave up the processor to wait.
pub fn waits() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// Calls `ask` until it returns an answer or patience ends.
pub fn wait_for<T>(mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    wait_while_moving(|| (ask(), ()))
}

/// Calls `ask` until it returns an answer. Patience starts again each time the second value changes, so a slow plugin may take its
/// time. Time in which this process did not run does not count, because the plugin's threads did not run either.
pub fn wait_while_moving<T, S: PartialEq>(mut ask: impl FnMut() -> (Option<T>, S)) -> Option<T> {
    let (mut waited, mut looked, mut last) = (Duration::ZERO, Instant::now(), None);
    loop {
        let (answer, seen) = ask();
        if answer.is_some() {
            return answer;
        }
        waited += looked.elapsed().min(LOOK);
        looked = Instant::now();
        if last.as_ref() != Some(&seen) {
            (waited, last) = (Duration::ZERO, Some(seen));
        } else if waited > patience() {
            return None;
        }
        std::thread::yield_now();
    }
}
