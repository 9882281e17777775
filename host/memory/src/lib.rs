//! Memory that plugins and other processes are given, and what the allocator keeps.

pub mod heap;
mod mapping;
mod shared;

pub use mapping::Mapping;
pub use shared::SharedMemory;
