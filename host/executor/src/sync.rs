//! What the protocols between threads are made of. `tests/loom` compiles their files with its own.

pub(crate) use std::hint;
pub(crate) use std::sync::atomic;
