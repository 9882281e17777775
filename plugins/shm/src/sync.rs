//! Types that the protocols between threads use. `tests/loom` and `tests/shuttle` compile the files of these protocols
//! with their own types.

pub use std::hint;
pub use std::sync::{Condvar, Mutex, atomic};
