//! Lists of writes that were prepared: checked once, posted by index.

use std::collections::HashMap;
use std::sync::Arc;

use host_plugin_api::{Error, ErrorCode, PeerId, PreparedId, Result, Write};

use crate::locked::{reading, writing};
use crate::peer::Peer;
use crate::sync::RwLock;

/// Most lists of an instance at a time.
pub const MAX_LISTS: usize = 4096;
/// Most writes in one list.
pub const MAX_LIST_WRITES: usize = 1 << 20;

/// Writes to one peer, each found to lie within its regions.
#[derive(Debug)]
pub struct List<P> {
    /// The host's number for it.
    pub id: PreparedId,
    /// The receiver.
    pub peer: Arc<P>,
    /// In the order in which they are numbered.
    pub writes: Box<[Write]>,
}

impl<P> List<P> {
    /// Whether the list reads from a region.
    pub fn reads(&self, region: u32) -> bool {
        self.writes.iter().any(|write| write.source_region == region)
    }
}

/// All prepared lists of an instance.
#[derive(Debug)]
pub struct Lists<P>(RwLock<State<P>>);

#[derive(Debug)]
struct State<P> {
    alive: HashMap<u64, Arc<List<P>>>,
    last: u64,
}

impl<P> Default for Lists<P> {
    fn default() -> Self {
        Self(RwLock::new(State { alive: HashMap::new(), last: 0 }))
    }
}

impl<P: Peer> Lists<P> {
    /// Adds a list of writes that were checked.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for more than [`MAX_LIST_WRITES`] writes, `NO_RESOURCE` for more than [`MAX_LISTS`] lists.
    pub fn add(&self, peer: Arc<P>, writes: &[Write]) -> Result<Arc<List<P>>> {
        if writes.len() > MAX_LIST_WRITES {
            let text = format!("{} writes in one list, {MAX_LIST_WRITES} are allowed", writes.len());
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let mut state = writing(&self.0);
        if state.alive.len() >= MAX_LISTS {
            let text = format!("{MAX_LISTS} lists are prepared, release one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        state.last += 1;
        let list = Arc::new(List { id: PreparedId(state.last), peer, writes: writes.into() });
        state.alive.insert(list.id.0, list.clone());
        Ok(list)
    }

    /// **Hot.** A list by its number.
    pub fn get(&self, id: PreparedId) -> Option<Arc<List<P>>> {
        reading(&self.0).alive.get(&id.0).cloned()
    }

    /// Forgets a list. What was posted of it goes on.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown list.
    pub fn remove(&self, id: PreparedId) -> Result<Arc<List<P>>> {
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, format!("no prepared list {}", id.0));
        writing(&self.0).alive.remove(&id.0).ok_or_else(unknown)
    }

    /// Forgets all lists of a peer.
    pub fn forget(&self, peer: PeerId) {
        writing(&self.0).alive.retain(|_, list| list.peer.id() != peer);
    }
}
