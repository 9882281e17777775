//! Lists of writes that were prepared: checked once, posted by index.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use host_plugin_api::{Error, ErrorCode, PeerId, PreparedId, Result, Write};

use crate::outbound::Outbound;

/// Most lists at a time, and most writes in one.
const MOST: usize = 4096;
const MOST_WRITES: usize = 1 << 20;

/// Writes to one peer, each within its regions.
pub struct List {
    pub peer: Arc<Outbound>,
    pub writes: Box<[Write]>,
}

/// All lists of an instance.
#[derive(Default)]
pub struct Lists(RwLock<State>);

#[derive(Default)]
struct State {
    alive: HashMap<u64, Arc<List>>,
    last: u64,
}

impl Lists {
    /// # Errors
    /// When there are too many.
    pub fn add(&self, peer: Arc<Outbound>, writes: &[Write]) -> Result<PreparedId> {
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
        let id = state.last;
        state.alive.insert(id, Arc::new(List { peer, writes: writes.into() }));
        Ok(PreparedId(id))
    }

    pub fn get(&self, id: PreparedId) -> Option<Arc<List>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).alive.get(&id.0).cloned()
    }

    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown list.
    pub fn remove(&self, id: PreparedId) -> Result<()> {
        let removed = self.0.write().unwrap_or_else(PoisonError::into_inner).alive.remove(&id.0);
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, format!("no prepared list {}", id.0));
        removed.map(drop).ok_or_else(unknown)
    }

    /// Forgets all lists of a peer.
    pub fn forget(&self, peer: PeerId) {
        let mut state = self.0.write().unwrap_or_else(PoisonError::into_inner);
        state.alive.retain(|_, list| list.peer.id != peer);
    }
}
