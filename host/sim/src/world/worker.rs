//! One worker process.

use std::collections::{BTreeMap, BTreeSet};

use host_core::aux_row::AUX_ROW_BYTES;
use host_core::pool::PoolLimits;
use host_core::routing::EventLog;
use host_core::{Batch, Config, Instance, Room, Scheduler, Time};

use super::rooms::OpenRoom;
use crate::kv::{Kv, Memory};

/// A part of an attempt, as it arrived.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The sender's digest.
    pub sum: u64,
    /// Whether no part has a higher sequence.
    pub last: bool,
}

/// One worker process: its scheduler and its memory.
pub(super) struct Worker {
    pub instance: Instance,
    pub config: Config,
    pub limits: PoolLimits,
    /// The number of processes that died at this place.
    pub deaths: u32,
    pub scheduler: Scheduler,
    /// When the worker must decide without an event.
    pub deadline: Option<Time>,
    pub memory: Memory,
    /// Slots of host memory.
    pub host: Memory,
    pub aux: Vec<[u8; AUX_ROW_BYTES]>,
    pub batch: Option<Batch>,
    /// Layers of the batch that are computed.
    pub layers: u32,
    /// Rooms that the worker's transfer threads know.
    pub rooms: BTreeMap<Room, OpenRoom>,
    /// Attempts that a later attempt has replaced.
    pub superseded: BTreeSet<(Room, u32)>,
    /// Parts that arrived, by room, attempt and sequence.
    pub parts: BTreeMap<Room, BTreeMap<u32, BTreeMap<u32, Part>>>,
    /// The cache as its events tell it, in a world whose pages have contents.
    pub log: EventLog,
}

impl Worker {
    pub(super) fn new(instance: Instance, config: Config, limits: PoolLimits, kv: Kv) -> Self {
        let slots = config.hierarchy.as_ref().map_or(0, |hierarchy| hierarchy.host_slots);
        Self {
            instance,
            limits,
            deaths: 0,
            scheduler: Scheduler::with_pages(config.clone(), limits, None),
            deadline: None,
            memory: Memory::new(kv, config.pages),
            host: Memory::new(kv, slots),
            aux: vec![[0; AUX_ROW_BYTES]; config.max_running as usize],
            batch: None,
            layers: 0,
            rooms: BTreeMap::new(),
            superseded: BTreeSet::new(),
            parts: BTreeMap::new(),
            log: EventLog::new(config.pages, config.page_tokens, 100),
            config,
        }
    }

    /// Compares the contents that the cache's events tell with the actual contents.
    pub(super) fn check_told(&self) {
        if !self.config.cache_events || !self.memory.has_words() {
            return;
        }
        let mut told = EventLog::new(self.config.pages, self.config.page_tokens, 0);
        self.scheduler.cache_contents().iter().for_each(|event| told.record(event));
        let (log, there) = (self.log.snapshot().keys, told.snapshot().keys);
        assert_eq!(log, there, "{:?}: what was told of its cache", self.instance);
    }
}
