//! What NIXL made of the lists that a link has prepared, and the requests of them that are kept to be posted again.

use std::collections::HashMap;
use std::sync::Arc;

use host_plugin_api::{PreparedId, Write};
use host_transfer_kit::RegionDescriptor;

use super::Posted;
use crate::capi::{Agent, Prepared, Progress, Refusal, Request};
use crate::shared::List;

/// Most requests that a link keeps to post again.
const KEPT: usize = 256;
/// The fewest ranges of a request that is kept: making one takes NIXL about 20 ns a range.
const LEAST_RANGES_KEPT: usize = 16;

struct Handles {
    list: Arc<List>,
    local: Prepared,
    remote: Prepared,
    /// Requests that have ended, by the places in the list that they were made of.
    kept: HashMap<Box<[u32]>, Request>,
}

/// All of a link.
#[derive(Default)]
pub struct PreparedLists {
    lists: HashMap<PreparedId, Handles>,
    /// Requests that are kept, of all lists.
    kept: usize,
}

/// One of them.
pub struct OfList<'a> {
    handles: &'a mut Handles,
    kept: &'a mut usize,
}

impl PreparedLists {
    pub fn insert(&mut self, list: Arc<List>, local: Prepared, remote: Prepared) {
        self.lists.insert(list.id, Handles { list, local, remote, kept: HashMap::new() });
    }

    pub fn of(&mut self, list: PreparedId) -> Option<OfList<'_>> {
        let Self { lists, kept } = self;
        Some(OfList { handles: lists.get_mut(&list)?, kept })
    }

    /// Gives a request that has ended back to NIXL, or to its list, which may post it again.
    pub fn keep(&mut self, agent: &mut Agent, Posted { request, made_of }: Posted) {
        let made_of = made_of.filter(|(_, places)| self.kept < KEPT && places.len() >= LEAST_RANGES_KEPT);
        let handles = made_of.and_then(|(list, places)| Some((self.lists.get_mut(&list)?, places)));
        match handles {
            Some((handles, places)) => match handles.kept.insert(places, request) {
                // Two of the same places may have been in flight at once.
                Some(twin) => agent.release(twin),
                None => self.kept += 1,
            },
            None => agent.release(request),
        }
    }

    /// Forgets a list. What runs of it goes on.
    pub fn remove(&mut self, agent: &mut Agent, list: PreparedId) {
        if let Some(handles) = self.lists.remove(&list) {
            self.kept -= handles.kept.len();
            handles.release(agent);
        }
    }

    /// Forgets the lists that read from a region.
    pub fn remove_reading(&mut self, agent: &mut Agent, region: u32) {
        for (_, handles) in self.lists.extract_if(|_, handles| handles.list.reads(region)) {
            self.kept -= handles.kept.len();
            handles.release(agent);
        }
    }

    /// Forgets all.
    pub fn clear(&mut self, agent: &mut Agent) {
        self.lists.drain().for_each(|(_, handles)| handles.release(agent));
        self.kept = 0;
    }
}

impl OfList<'_> {
    /// Bytes of the writes at these places; nothing when one of them reads from a region that has gone.
    pub fn bytes(&self, places: &[u32], ours: &[RegionDescriptor]) -> Option<u64> {
        let mut alive = 0;
        places.iter().try_fold(0, |bytes, place| {
            let Write { source_region, length, .. } = self.handles.list.writes[*place as usize];
            if source_region != alive {
                alive = ours.iter().find(|region| region.id == source_region)?.id;
            }
            Some(bytes + u64::from(length))
        })
    }

    /// Posts a request of these places, one that is kept if there is one.
    ///
    /// # Errors
    /// When NIXL refuses; then nothing was started.
    pub fn post(
        self,
        agent: &mut Agent,
        places: &[u32],
        message: &[u8],
    ) -> Result<(Posted, Progress), Refusal> {
        let Self { handles, kept } = self;
        let id = handles.list.id;
        let Some((places, request)) = handles.kept.remove_entry(places) else {
            let (request, progress) =
                agent.write_prepared(&handles.local, &handles.remote, places, message)?;
            return Ok((Posted { request, made_of: Some((id, places.into())) }, progress));
        };
        *kept -= 1;
        match agent.write_again(&request, message) {
            Ok(progress) => Ok((Posted { request, made_of: Some((id, places)) }, progress)),
            Err(refusal) => {
                agent.release(request);
                Err(refusal)
            }
        }
    }
}

impl Handles {
    fn release(self, agent: &mut Agent) {
        self.kept.into_values().for_each(|request| agent.release(request));
        agent.release_prepared(self.local);
        agent.release_prepared(self.remote);
    }
}
