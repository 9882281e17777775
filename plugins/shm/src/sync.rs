//! What the protocols between threads are made of. `tests/loom` and `tests/shuttle` compile their files with their own.

pub use std::hint;
pub use std::sync::{Condvar, Mutex, atomic};
