//! Memory of GPUs: the part of NVIDIA's driver that moves pages of one process into the memory of another.
//!
//! The driver's library is loaded when the first memory of a device is registered or a peer offers some. An instance
//! without devices loads nothing.

mod device;
mod driver;
mod list;
mod stream;

pub use device::{Device, Devices, Export, Opened, Pinned};
pub use driver::{IpcHandle, Refused, Uuid};
pub use list::{Batch, Run};
pub use stream::Stream;
