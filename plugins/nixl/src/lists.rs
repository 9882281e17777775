//! Lists of writes that were prepared, as the hot calls see them.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use host_plugin_api::{Error, ErrorCode, PeerId, PreparedId, Result, Write};

use crate::shared::Peer;

/// Most lists at a time, and most writes in one.
const MOST: usize = 4096;
const MOST_WRITES: usize = 1 << 20;

/// Writes that were checked once. What NIXL made of them is with the link.
pub struct List {
    pub id: u64,
    pub peer: Arc<Peer>,
    pub writes: Box<[Write]>,
}

impl List {
    /// Whether the list reads from a region.
    pub fn reads(&self, region: u32) -> bool {
        self.writes.iter().any(|write| write.source_region == region)
    }
}

/// All lists of an instance.
#[derive(Default)]
pub struct Lists(RwLock<State>);

#[derive(Default)]
struct State {
    alive: HashMap<u64, Arc<List>>,
    last: u64,
}

fn unknown(id: PreparedId) -> Error {
    Error::new(ErrorCode::INVALID_ARGUMENT, format!("no prepared list {}", id.0))
}

impl Lists {
    /// # Errors
    /// When there are too many.
    pub fn add(&self, peer: Arc<Peer>, writes: &[Write]) -> Result<Arc<List>> {
        if writes.len() > MOST_WRITES {
            let text = format!("{} writes in one list, {MOST_WRITES} are allowed", writes.len());
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let mut state = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if state.alive.len() >= MOST {
            let text = format!("{MOST} lists are prepared, release one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        state.last += 1;
        let list = Arc::new(List { id: state.last, peer, writes: writes.into() });
        state.alive.insert(list.id, list.clone());
        Ok(list)
    }

    pub fn get(&self, id: PreparedId) -> Option<Arc<List>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).alive.get(&id.0).cloned()
    }

    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown list.
    pub fn remove(&self, id: PreparedId) -> Result<Arc<List>> {
        let mut state = self.0.write().unwrap_or_else(PoisonError::into_inner);
        state.alive.remove(&id.0).ok_or_else(|| unknown(id))
    }

    /// Forgets all lists of a peer.
    pub fn forget(&self, peer: PeerId) {
        let mut state = self.0.write().unwrap_or_else(PoisonError::into_inner);
        state.alive.retain(|_, list| list.peer.id != peer);
    }
}
