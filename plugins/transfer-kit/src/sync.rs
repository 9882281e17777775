//! Types that the protocols between threads use. `tests/shuttle` compiles the files of these protocols with its own types.

pub use std::sync::atomic;
pub use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
