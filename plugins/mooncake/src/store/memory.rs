//! The host's memory, and the calls that use it. A region is removed when no call and no held page uses it.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use host_plugin_api::{Error, ErrorCode, Memory, MemoryKind, RegionId, Result, TierPage};
use host_transfer_kit::locked;

use super::client::Span;

/// Most regions at a time.
const MAX_REGIONS: usize = 128;

struct Region {
    span: Span,
    users: usize,
    leaving: bool,
}

#[derive(Default)]
pub struct State {
    regions: BTreeMap<u32, Region>,
    last: u32,
}

/// The regions of host memory that calls may use.
#[derive(Default)]
pub struct Regions {
    state: Mutex<State>,
    unused: Condvar,
}

impl Regions {
    /// Locks the regions: no use of a region begins or ends while this is held.
    pub fn still(&self) -> MutexGuard<'_, State> {
        locked(&self.state)
    }

    /// Pins the place of a page until it is [released](Regions::release). `None` if the page is in no region.
    pub fn pin(&self, page: &TierPage) -> Option<Span> {
        let mut state = locked(&self.state);
        let region = state.regions.get_mut(&page.region.0).filter(|region| !region.leaving)?;
        let length = u64::from(page.length);
        let end = page.offset.checked_add(length)?;
        if length == 0 || end > region.span.length {
            return None;
        }
        let address = region.span.address.checked_add(page.offset)?;
        region.users += 1;
        Some(Span { address, length })
    }

    /// Releases a page that was pinned.
    pub fn release(&self, page: &TierPage) {
        let mut state = locked(&self.state);
        if let Some(region) = state.regions.get_mut(&page.region.0) {
            region.users -= 1;
            if region.leaving && region.users == 0 {
                self.unused.notify_all();
            }
        }
    }

    /// Waits until nothing uses the region, and forgets it. Calls `last` before another region may be added.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a region that is not there.
    pub fn remove(&self, id: RegionId, last: impl FnOnce(Span)) -> Result<()> {
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", id.0));
        let mut state = locked(&self.state);
        let region = state.regions.get_mut(&id.0).filter(|region| !region.leaving).ok_or_else(unknown)?;
        region.leaving = true;
        while state.regions.get(&id.0).is_some_and(|region| region.users > 0) {
            state = self.unused.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(region) = state.regions.remove(&id.0) {
            last(region.span);
        }
        Ok(())
    }
}

impl State {
    /// Checks whether memory can be a region.
    ///
    /// # Errors
    /// `UNSUPPORTED` for memory of devices, `INVALID_ARGUMENT` for memory without bytes and for memory that overlaps a
    /// region, `NO_RESOURCE` when there are too many.
    pub fn check(&self, memory: &Memory) -> Result<Span> {
        let refuse = |code, text| Err(Error::new(code, text));
        if memory.kind != MemoryKind::DRAM {
            let text = format!("memory of kind {} cannot be registered, only host memory", memory.kind.0);
            return refuse(ErrorCode::UNSUPPORTED, text);
        }
        let span = Span { address: memory.address.0, length: memory.length };
        let Some(end) = span.address.checked_add(span.length).filter(|_| span.address > 0 && span.length > 0)
        else {
            let text = format!("{} bytes at {:#x} are no memory", memory.length, memory.address);
            return refuse(ErrorCode::INVALID_ARGUMENT, text);
        };
        // Mooncake would refuse that, too, but with a number only.
        let overlaps = |other: &Region| {
            span.address < other.span.address + other.span.length && other.span.address < end
        };
        if let Some((id, _)) = self.regions.iter().find(|(_, other)| overlaps(other)) {
            let text = format!("{} bytes at {:#x} overlap region {id}", memory.length, memory.address);
            return refuse(ErrorCode::INVALID_ARGUMENT, text);
        }
        if self.regions.len() >= MAX_REGIONS {
            let text = format!("{MAX_REGIONS} regions are registered, deregister one first");
            return refuse(ErrorCode::NO_RESOURCE, text);
        }
        Ok(span)
    }

    /// Adds a region that was checked.
    pub fn add(&mut self, span: Span) -> RegionId {
        self.last += 1;
        self.regions.insert(self.last, Region { span, users: 0, leaving: false });
        RegionId(self.last)
    }

    /// The memory of all regions.
    pub fn spans(&self) -> impl Iterator<Item = Span> {
        self.regions.values().map(|region| region.span)
    }
}

#[cfg(test)]
mod tests {
    use host_plugin_api::Address;
    use host_tests::wait::try_until;

    use super::*;

    fn memory(address: u64, length: u64) -> Memory {
        let kind = MemoryKind::DRAM;
        Memory { address: Address(address), length, kind, device: 0, fd: -1, generation: 1, fd_offset: 0 }
    }

    #[test]
    fn pages_lie_inside_of_their_region_or_nowhere() {
        let regions = Regions::default();
        let span = regions.still().check(&memory(4096, 100)).unwrap();
        let id = regions.still().add(span);
        let at = |offset, length| {
            let page = TierPage { region: id, offset, length, ..TierPage::default() };
            regions.pin(&page).map(|span| span.address)
        };
        assert_eq!(at(0, 100), Some(4096));
        assert_eq!(at(90, 10), Some(4186));
        for (offset, length) in [(90, 11), (0, 0), (u64::MAX, 1), (u64::MAX - 4095, 1)] {
            assert_eq!(at(offset, length), None, "{offset} {length}");
        }
        for (address, length) in
            [(4096, 1), (4195, 1), (4000, 97), (4000, 1000), (0, 5), (8, 0), (u64::MAX, 2)]
        {
            let refused = regions.still().check(&memory(address, length)).unwrap_err();
            assert_eq!(refused.code, ErrorCode::INVALID_ARGUMENT, "{address} {length}");
        }
        regions.still().check(&memory(4196, 10)).unwrap();
    }

    #[test]
    fn a_region_leaves_when_the_last_page_in_it_is_let_go() {
        let regions = Regions::default();
        let span = regions.still().check(&memory(4096, 100)).unwrap();
        let id = regions.still().add(span);
        let page = TierPage { region: id, length: 10, ..TierPage::default() };
        regions.pin(&page).unwrap();
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| regions.remove(id, |_| ()));
            // No page is pinned in a region that is leaving.
            let leaves = try_until(|| match regions.pin(&page) {
                None => Ok(()),
                Some(_) => {
                    regions.release(&page);
                    Err("a page can still be pinned")
                }
            });
            let stays = !removed.is_finished() && regions.still().spans().count() == 1;
            // Let go also in a test that fails, because the thread waits for it.
            regions.release(&page);
            assert_eq!(leaves, Ok(()));
            assert!(stays, "it has left with a page in it");
            removed.join().unwrap().unwrap();
        });
        assert_eq!(regions.remove(id, |_| ()).unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
    }
}
