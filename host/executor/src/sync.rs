//! Primitives of the protocols between threads. `tests/loom` compiles the files that use them with primitives of its own.

pub(crate) use std::hint;
pub(crate) use std::sync::atomic;
