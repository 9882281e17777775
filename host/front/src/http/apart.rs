//! Long work of a task that must not keep others waiting.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Bytes of deltas from which on writing them as JSON counts as long work.
const LONG: usize = 64 << 10;

/// Runs work that takes a thread as long as so many bytes take to be written. Long work keeps no task of the control plane waiting,
/// where the runtime has threads to spare for that.
pub(super) fn write_apart<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let has_threads =
        Handle::try_current().is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::MultiThread);
    if bytes > LONG && has_threads { tokio::task::block_in_place(work) } else { work() }
}
