//! The state that the host's threads share with the tier's, for files and for objects.

use std::collections::BTreeMap;
use std::sync::RwLock;

use host_plugin_api::{Memory, Result};
use host_transfer_kit::Event;

use super::queue::Queue;
use super::touching::Touching;

pub struct Front {
    pub queue: Queue,
    pub regions: RwLock<BTreeMap<u32, Memory>>,
    pub touching: Touching,
    /// Readable while completions wait.
    pub event: Event,
}

impl Front {
    /// # Errors
    /// `IO` when the system has no descriptor left.
    pub fn new(batches: u32, pages: u32) -> Result<Self> {
        Ok(Self {
            queue: Queue::new(batches, pages),
            regions: RwLock::default(),
            touching: Touching::default(),
            event: Event::new()?,
        })
    }
}
