//! Memory for plugins and other processes, and settings of the allocator.

pub mod heap;
mod mapping;
mod shared;

pub use mapping::Mapping;
pub use shared::SharedMemory;
