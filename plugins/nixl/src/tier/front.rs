//! What the host's threads share with the tier's, whatever keeps the pages.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::RwLock;

use host_plugin_api::{Error, ErrorCode, Memory, Result};
use rustix::event::{EventfdFlags, eventfd};

use super::queue::Queue;
use super::touching::Touching;

pub struct Front {
    pub queue: Queue,
    pub regions: RwLock<BTreeMap<u32, Memory>>,
    pub touching: Touching,
    /// Readable while completions wait.
    pub event: OwnedFd,
}

impl Front {
    /// # Errors
    /// `IO` when the system has no descriptor left.
    pub fn new(batches: u32, pages: u32) -> Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Self {
            queue: Queue::new(batches, pages),
            regions: RwLock::default(),
            touching: Touching::default(),
            event: event.map_err(|e| Error::new(ErrorCode::IO, format!("cannot create an eventfd: {e}")))?,
        })
    }
}
