//! Memory that plugins and other processes are given.

mod mapping;
mod shared;

pub use mapping::Mapping;
pub use shared::SharedMemory;
