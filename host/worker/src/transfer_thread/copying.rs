//! Copies between a pool and staging memory.

use host_core::transfer::PagesCopy;
use host_kernels::copy::{self as kernels, Copier, CopyPages, Memory};

use host_memory::SharedMemory;

/// A part of a memory. Offsets of a copy count from the start of the part.
pub(super) struct Place<'a> {
    pub memory: &'a SharedMemory,
    pub offset: u64,
    pub bytes: usize,
}

impl Place<'_> {
    fn kernels_memory(&self) -> Option<Memory> {
        let offset = usize::try_from(self.offset).ok()?;
        offset.checked_add(self.bytes).filter(|end| *end <= self.memory.bytes())?;
        // SAFETY: the offset lies inside the mapping, as was just checked.
        let base = unsafe { self.memory.address().add(offset) };
        Some(Memory::new(base.as_ptr(), self.bytes))
    }
}

/// Copies pages from one place to another.
///
/// # Errors
/// When anything lies outside of its place. Nothing was copied then.
pub(super) fn copy(copier: &Copier, copy: &PagesCopy, from: &Place, to: &Place) -> Result<(), String> {
    let memories = from.kernels_memory().zip(to.kernels_memory());
    let (source, target) = memories.ok_or("a slot lies outside of the staging memory")?;
    let dimension = |dimension: &host_core::transfer::Dimension| kernels::Dimension {
        extent: dimension.extent,
        source: dimension.source,
        target: dimension.target,
    };
    let block = |block: &host_core::transfer::PageBlock| kernels::PageBlock {
        run: block.run,
        source: block.source,
        target: block.target,
        source_page: block.source_page,
        target_page: block.target_page,
        dims: std::array::from_fn(|index| dimension(&block.dims[index])),
    };
    let blocks: Vec<kernels::PageBlock> = copy.blocks().iter().map(block).collect();
    let copy = kernels::PagesCopy { pages: copy.pages(), blocks: &blocks };
    // SAFETY: both lie inside mappings that the caller keeps. A slot is its piece's alone, and pages that are sent from are
    // written no more, pages that are received into are not read before they are verified: the scheduler's page
    // accounting sees to that.
    unsafe { copier.copy_memory(&copy, source, target) }.map_err(|error| error.to_string())
}
