//! Memory of GPUs: NVIDIA's driver, as far as pages of one process have to come into the memory of another.
//!
//! The driver's library is loaded when the first memory of a device is registered or a peer offers some. An instance that never
//! has to do with a device loads nothing.

mod device;
mod driver;
mod list;
mod stream;

pub use device::{Device, Devices, Export, Opened, Pinned};
pub use driver::{IpcHandle, Refused, Uuid};
pub use list::{Batch, Run};
pub use stream::Stream;
