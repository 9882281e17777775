//! Files of the product, compiled with loom's atomics and locks.
//!
//! Nothing here is a copy: each `#[path]` names the file that the product is built from. Such a file takes atomics from
//! `crate::sync` and locks from `parking_lot`, and finds loom's under both names. What it names besides is here as small as
//! the protocol allows.
//!
//! Loom treats `SeqCst` loads and stores as acquiring and releasing ones. A protocol that needs more has a `fence(SeqCst)`.

#![allow(missing_docs, reason = "files of the product, whose items are private there")]
#![allow(clippy::new_without_default, reason = "as above")]
#![allow(dead_code, reason = "a model uses what its protocol needs")]

// Under this name the files find the locks.
extern crate self as parking_lot;

mod locks;

pub use locks::{Condvar, Mutex, MutexGuard, RwLock};

/// What the files find under `crate::sync`.
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

/// Pages as models have them: two copy threads, two places, one batch of a device.
pub mod control {
    pub use super::control_page::{Busy, Line, MAX_COPY_THREADS};

    pub type ControlPage = super::control_page::ControlPage<2, 2>;
    pub type DevicePage = super::control_page::DevicePage<1>;
}

/// Mapped memory is memory here.
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

    /// One that makes this event readable.
    pub fn waker(event: event::Event) -> waker::Waker {
        waker::Waker::of(event)
    }
}

/// The ranks' barrier.
#[path = "../../../host/executor/src/group.rs"]
pub mod group;
