//! What the protocols between threads are made of. `tests/shuttle` compiles their files with its own.

pub use std::sync::atomic;
pub use std::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
