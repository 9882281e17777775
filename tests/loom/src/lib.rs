//! Files of the product, compiled with loom's atomics and locks.
//!
//! Nothing here is a copy: each `#[path]` names a source file of the product. Such a file imports atomics from `crate::sync` and
//! locks from `parking_lot`, and gets loom's under both names. Its other imports are reduced here to what the protocol needs.
//!
//! Loom treats `SeqCst` loads and stores as acquiring and releasing ones. A protocol that needs more has a `fence(SeqCst)`.

#![allow(missing_docs, reason = "files of the product, whose items are private there")]
#![allow(clippy::new_without_default, reason = "as above")]
#![allow(dead_code, reason = "a model uses what its protocol needs")]

// The files import locks under this name.
extern crate self as parking_lot;

mod locks;

pub use locks::{Condvar, Mutex, MutexGuard, RwLock};

/// Atomics and locks that the files import from `crate::sync`.
pub mod sync {
    pub use loom::hint;
    pub use loom::sync as locks;
    pub use loom::sync::atomic;
}

/// `shm`: the gate before a peer's memory, the ring of notifications, the table of live regions.
#[path = "../../../plugins/shm/src/control.rs"]
pub mod control_page;
#[path = "../../../plugins/shm/src/inbound.rs"]
pub mod inbound;
#[path = "../../../plugins/shm/src/live.rs"]
pub mod live;
#[path = "../../../plugins/shm/src/pages.rs"]
pub mod pages;

/// Control pages in the size of the models: two copy threads, two places in the ring, one batch of a device.
pub mod control {
    pub use super::control_page::{Busy, Line, MAX_COPY_THREADS};

    pub type ControlPage = super::control_page::ControlPage<2, 2>;
    pub type DevicePage = super::control_page::DevicePage<1>;
}

/// Stand-in for mapped memory: memory of this process.
pub mod mapping {
    /// # Safety
    /// As in the product.
    pub unsafe trait Shared {}

    #[derive(Default)]
    pub struct SharedPage<T>(pub loom::sync::Arc<T>);

    impl<T> std::ops::Deref for SharedPage<T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.0
        }
    }
}

/// Wake-ups that the host gives plugins.
pub mod services {
    pub mod event;
    #[path = "../../../../host/plugins/src/services/waker.rs"]
    pub mod waker;

    /// A waker that makes this event readable.
    pub fn waker(event: event::Event) -> waker::Waker {
        waker::Waker::of(event)
    }
}

/// The ranks' barrier.
#[path = "../../../host/executor/src/group.rs"]
pub mod group;
