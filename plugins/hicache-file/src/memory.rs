//! The host's registered memory, and buffers of the tier for pages that are not aligned. Only this module reads and writes either.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;

use host_plugin_api::{Address, Error, ErrorCode, Key, Memory, MemoryKind, RegionId, Result, TierPage};

use crate::format::{BLOCK, checksum, padded};

const MOST_REGIONS: usize = 1024;

/// A piece of memory, laid out as the system's `iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Vector {
    pub base: *mut u8,
    pub length: usize,
}

/// Where a page lies in the host's memory, from its claim to its completion.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    page: Vector,
    /// The whole region of the page.
    region: Vector,
}

// SAFETY: the memory belongs to the page's batch, and one thread at a time works on a page.
unsafe impl Send for Span {}

impl Span {
    /// Whether the page can be read and written without a copy.
    pub fn is_aligned(self) -> bool {
        (self.page.base as u64).is_multiple_of(BLOCK) && (self.page.length as u64).is_multiple_of(BLOCK)
    }

    pub fn vector(self) -> Vector {
        self.page
    }

    /// The piece of `size` bytes of the region that contains the whole page: its number and its place. None when there
    /// is no such piece.
    pub fn piece(self, size: u64) -> Option<(u64, Vector)> {
        let offset = self.page.base as u64 - self.region.base as u64;
        let (number, last) = (offset / size, (offset + self.page.length as u64 - 1) / size);
        let start = number * size;
        let length = size.min(self.region.length as u64 - start) as usize;
        (number == last)
            .then(|| (number, Vector { base: self.region.base.wrapping_add(start as usize), length }))
    }

    pub fn checksum(self, key: &Key) -> u64 {
        // SAFETY: registered memory stays mapped until its region is deregistered, which waits for claimed pages. Until
        // the page's completion nothing else writes there.
        checksum(key, unsafe { std::slice::from_raw_parts(self.page.base, self.page.length) })
    }

    /// Copies into a buffer of at least this length.
    pub fn copy_to(self, buffer: &mut Buffer) {
        buffer.bytes_mut()[..self.page.length].copy_from_slice(
            // SAFETY: as in `checksum`.
            unsafe { std::slice::from_raw_parts(self.page.base, self.page.length) },
        );
    }

    pub fn copy_from(self, buffer: &Buffer) {
        // SAFETY: as in `checksum`, and the page may be written: it belongs to a get.
        unsafe { std::slice::from_raw_parts_mut(self.page.base, self.page.length) }
            .copy_from_slice(&buffer.bytes()[..self.page.length]);
    }
}

/// Aligned memory of the tier, of whole blocks.
#[derive(Debug)]
pub struct Buffer {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its memory.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Zeros, for a value of this length. None when memory is short.
    pub fn new(length: usize) -> Option<Self> {
        let layout = Layout::from_size_align(padded(length as u64) as usize, BLOCK as usize).ok()?;
        if layout.size() == 0 {
            return None;
        }
        // SAFETY: the layout is not empty.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }

    pub fn vector(&mut self) -> Vector {
        Vector { base: self.base.as_ptr(), length: self.layout.size() }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: owned by this buffer, and initialised from the start.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.layout.size()) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout. Runs that the system works on are not dropped.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

struct Region {
    memory: Memory,
    /// Pages claimed and not completed.
    in_use: u32,
    leaving: bool,
}

/// The memory that the host registered.
#[derive(Default)]
pub struct Regions {
    regions: BTreeMap<u32, Region>,
    last: u32,
}

impl Regions {
    pub fn register(&mut self, memory: &Memory) -> Result<RegionId> {
        if memory.kind != MemoryKind::DRAM {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "only host memory can be registered"));
        }
        let Address(address) = memory.address;
        if address == 0 || memory.length == 0 || address.checked_add(memory.length).is_none() {
            let text = "the memory is empty or leaves the address space";
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        if self.regions.len() >= MOST_REGIONS || self.last == u32::MAX {
            let text = format!("{MOST_REGIONS} regions are registered, deregister some");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        self.last += 1;
        self.regions.insert(self.last, Region { memory: *memory, in_use: 0, leaving: false });
        Ok(RegionId(self.last))
    }

    /// Closes a region: no page of it can be claimed any more.
    pub fn close(&mut self, id: RegionId) -> Result<()> {
        let unknown = || Error::new(ErrorCode::INVALID_ARGUMENT, "no such region");
        self.regions.get_mut(&id.0).map(|region| region.leaving = true).ok_or_else(unknown)
    }

    /// Forgets a closed region if nothing of it is in use. Says whether it is gone.
    pub fn remove(&mut self, id: RegionId) -> bool {
        let idle = self.regions.get(&id.0).is_none_or(|region| region.in_use == 0);
        if idle {
            self.regions.remove(&id.0);
        }
        idle
    }

    /// Claims the page's memory, which is in use from now on. None when it is not inside a region.
    pub fn claim(&mut self, page: &TierPage, most: u64) -> Option<Span> {
        let region = self.regions.get_mut(&page.region.0).filter(|region| !region.leaving)?;
        let end = page.offset.checked_add(u64::from(page.length))?;
        if page.length == 0 || u64::from(page.length) > most || end > region.memory.length {
            return None;
        }
        region.in_use += 1;
        let base = Address(region.memory.address.0 + page.offset).pointer();
        let whole = Vector { base: region.memory.address.pointer(), length: region.memory.length as usize };
        Some(Span { page: Vector { base, length: page.length as usize }, region: whole })
    }

    pub fn has(&self, region: u32) -> bool {
        self.regions.contains_key(&region)
    }

    /// Releases a claimed page of this region. The page has ended.
    pub fn release(&mut self, region: u32) {
        if let Some(region) = self.regions.get_mut(&region) {
            region.in_use = region.in_use.saturating_sub(1);
        }
    }
}
