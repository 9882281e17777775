//! The atomics that protocols between threads use. `tests/loom` compiles the files of these protocols with its own.

pub(crate) use std::sync::atomic;
