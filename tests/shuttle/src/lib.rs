//! Files of the product, compiled with shuttle's atomics and locks.
//!
//! As in `tests/loom`, nothing here is a copy. Shuttle draws schedules from a seed, for models with too many schedules to run
//! them all. It treats every atomic as sequentially consistent.

#![allow(missing_docs, reason = "files of the product, whose items are private there")]
#![allow(clippy::new_without_default, reason = "as above")]
#![allow(dead_code, reason = "a model uses what its protocol needs")]

// The files import the locks and the transfer kit under these names.
extern crate self as host_transfer_kit;
extern crate self as parking_lot;

#[path = "../../loom/src/locks.rs"]
mod locks;

pub use locked::locked;
pub use locks::{Condvar, Mutex, MutexGuard, RwLock};

/// Atomics and locks that the files import from `crate::sync`.
pub mod sync {
    pub use shuttle::sync as locks;
    pub use shuttle::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic};
}

/// `transfer-kit`: submissions from the host's threads to the backend's and back.
#[path = "../../../plugins/transfer-kit/src/locked.rs"]
pub mod locked;
#[path = "../../../plugins/transfer-kit/src/peer.rs"]
pub mod peer;
#[path = "../../../plugins/transfer-kit/src/queue.rs"]
pub mod submissions;

/// A stand-in for the type that describes regions of a peer of `transfer-kit`. No model looks at it.
pub mod regions {
    #[derive(Clone, Copy, Debug)]
    pub struct RegionDescriptor;
}

pub mod system {
    pub type Random = [u8; 16];
}

/// `shm`: submissions that wait for a copy thread.
#[path = "../../../plugins/shm/src/ready.rs"]
pub mod ready;

/// A worker's links to its peers.
#[path = "../../../host/worker/src/link/table.rs"]
pub mod links;

/// Bounds of what one client of the API may hold.
#[path = "../../../host/wire/src/shares.rs"]
pub mod shares;

/// `hicache-file`: batches, and segments that are being written.
#[path = "../../../plugins/hicache-file/src/queue.rs"]
pub mod queue;
#[path = "../../../plugins/hicache-file/src/writer.rs"]
pub mod writer;

#[path = "../../../plugins/hicache-file/src/format.rs"]
pub mod format;
#[path = "../../../plugins/hicache-file/src/memory.rs"]
pub mod memory;
#[path = "../../../plugins/hicache-file/src/metrics.rs"]
pub mod metrics;
#[path = "../../../plugins/hicache-file/src/waker.rs"]
pub mod waker;

pub mod backing {
    use std::io;
    use std::os::fd::OwnedFd;

    /// Writes all bytes, after giving other threads a chance to run.
    pub fn write_at(file: &OwnedFd, bytes: &[u8], at: u64) -> io::Result<()> {
        shuttle::thread::yield_now();
        let written = rustix::io::pwrite(file, bytes, at)?;
        if written == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

pub mod config {
    #[derive(Clone, Copy, PartialEq, Eq)]
    pub enum Fsync {
        Never,
        Segment,
        Always,
    }
}

pub mod segment {
    use crate::format::Name;

    pub struct Segment {
        pub id: u32,
        pub name: Name,
    }
}
