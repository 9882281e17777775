//! Registered memory, and the only `unsafe` of this crate.

use std::slice;

use host_plugin_api::{Error, ErrorCode, Memory, MemoryKind, RegionId, Result, TierPage};

use crate::store::Limits;

/// Most regions of an instance at a time.
pub const MAX_REGIONS: usize = 1024;

#[derive(Debug)]
struct Region {
    id: u32,
    /// Calls of the store that use it.
    users: u32,
    /// Whether it is being deregistered. Nothing new begins in it.
    is_going: bool,
    address: u64,
    length: u64,
}

/// The regions of an instance. Ids only grow, and the list is in their order.
#[derive(Debug, Default)]
pub(crate) struct Regions {
    list: Vec<Region>,
    last: u32,
}

/// A page's bytes, in use by one call of the store until it is [given back](Regions::give_back).
#[derive(Debug)]
pub(crate) struct PageBytes {
    region: u32,
    address: usize,
    length: usize,
}

impl PageBytes {
    /// # Safety
    /// The host neither changes nor unmaps the page until its completion: this is a page of a put that has none yet.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies in a region that is mapped until `deregister` returns, which waits for this place. The
        // caller says that no bytes change.
        unsafe { slice::from_raw_parts(self.address as *const u8, self.length) }
    }

    /// # Safety
    /// The page's memory belongs to this page alone until its completion: this is a page of a get that has none yet.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the caller says that it is the only user.
        unsafe { slice::from_raw_parts_mut(self.address as *mut u8, self.length) }
    }
}

impl Regions {
    /// Adds memory.
    ///
    /// # Errors
    /// `UNSUPPORTED` for memory of a device, `INVALID_ARGUMENT` for an invalid range, `NO_RESOURCE` beyond [`MAX_REGIONS`].
    pub(crate) fn add(&mut self, memory: &Memory) -> Result<RegionId> {
        if memory.kind != MemoryKind::DRAM {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "only host memory can be registered"));
        }
        let (address, length) = (memory.address, memory.length);
        if address.0 == 0 || length == 0 || address.checked_add(length).is_none() {
            let text = "the memory is empty or leaves the address space";
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let full =
            || Error::new(ErrorCode::NO_RESOURCE, format!("{} regions are registered", self.list.len()));
        let id = self.last.checked_add(1).filter(|_id| self.list.len() < MAX_REGIONS).ok_or_else(full)?;
        self.last = id;
        self.list.push(Region { id, users: 0, is_going: false, address: address.0, length });
        Ok(RegionId(id))
    }

    fn find(&self, id: u32) -> Option<usize> {
        self.list.binary_search_by_key(&id, |region| region.id).ok()
    }

    /// Lets nothing new begin in a region. False when there is no region with this id.
    pub(crate) fn end(&mut self, id: RegionId) -> bool {
        let found = self.find(id.0);
        if let Some(at) = found {
            self.list[at].is_going = true;
        }
        found.is_some()
    }

    /// Removes a region if no call uses it. True when it is gone.
    pub(crate) fn remove_unused(&mut self, id: RegionId) -> bool {
        match self.find(id.0) {
            Some(at) if self.list[at].users > 0 => false,
            Some(at) => {
                self.list.remove(at);
                true
            }
            None => true,
        }
    }

    /// Takes a page's bytes into use, when they lie inside a region and keep the limits.
    pub(crate) fn take(&mut self, page: &TierPage, limits: &Limits) -> Option<PageBytes> {
        let at = self.find(page.region.0)?;
        let region = &mut self.list[at];
        let length = u64::from(page.length);
        let end = page.offset.checked_add(length)?;
        let is_aligned = page.offset % limits.alignment == 0 && length % limits.alignment == 0;
        let fits = length > 0 && length <= limits.max_value && end <= region.length;
        if region.is_going || !is_aligned || !fits {
            return None;
        }
        // `add` has checked that address plus length does not overflow.
        let address = usize::try_from(region.address + page.offset).ok()?;
        let length = usize::try_from(length).ok()?;
        region.users += 1;
        Some(PageBytes { region: region.id, address, length })
    }

    /// Ends the use of these bytes by a call of the store.
    pub(crate) fn give_back(&mut self, place: &PageBytes) {
        if let Some(at) = self.find(place.region) {
            self.list[at].users -= 1;
        }
    }
}
