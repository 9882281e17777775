//! Copies KV pages between two layouts: gathers pages into a staging buffer, scatters them from one, and moves them
//! inside a pool.
//!
//! There is one operation. A [`PagesCopy`] names pairs of pages and says, for each [`PageBlock`] of a page (its K, its
//! V, or both at once), where rows lie on either side as byte strides. Gathering is a copy with a dense target. Scattering is
//! a copy with a dense source. Both use the same code.
//!
//! ```text
//! for each [s, t] of pages, each block, each i, j, k below the extents of its dims:
//!     copy `run` bytes
//!     from  block.source + s * block.source_page + i * dims[0].source + j * dims[1].source + k * dims[2].source
//!     to    block.target + t * block.target_page + i * dims[0].target + j * dims[1].target + k * dims[2].target
//! ```
//!
//! The whole copy is checked before its first byte is written, so a refused copy has changed nothing. The check uses the
//! largest offset on each side and the nesting of the strides, and does not visit rows. Then rows that are contiguous on
//! both sides are folded into longer runs, also over neighbouring pages. Callers need not look for such rows.
//!
//! Two engines do the same copies: [`Copier`] on the CPU, and `cuda::CudaCopier` on a GPU's memory.

mod check;
mod cpu;
mod plan;
mod rows;

pub use cpu::{Copier, Stores};
pub(crate) use plan::{Strip, plan};

/// One dimension of a block: the number of rows, and the bytes from one row to the next on either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimension {
    /// Rows along it.
    pub extent: usize,
    /// Bytes from one row to the next in the source.
    pub source: usize,
    /// Bytes from one row to the next in the target.
    pub target: usize,
}

impl Dimension {
    /// An unused dimension.
    pub const NONE: Dimension = Dimension { extent: 1, source: 0, target: 0 };
}

/// The rows of one page that lie at regular distances on both sides. All numbers are in bytes.
///
/// The K of a page is such a block over heads, layers and tokens. The V of the page is another block, which may have other
/// strides and another row. The order of the dimensions is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageBlock {
    /// Bytes of one row, contiguous on both sides.
    pub run: usize,
    /// Where the first row of page 0 lies in the source.
    pub source: usize,
    /// Where the first row of page 0 lies in the target.
    pub target: usize,
    /// Bytes from one page to the next in the source.
    pub source_page: usize,
    /// Bytes from one page to the next in the target.
    pub target_page: usize,
    /// The rows of the page, with [`Dimension::NONE`] where fewer dimensions are needed.
    pub dims: [Dimension; 3],
}

impl PageBlock {
    /// The same rows copied in the other direction: gathering becomes scattering. The caller must swap the pairs of pages, too.
    #[must_use]
    pub fn reversed(self) -> Self {
        Self {
            run: self.run,
            source: self.target,
            target: self.source,
            source_page: self.target_page,
            target_page: self.source_page,
            dims: self.dims.map(|dim| Dimension { source: dim.target, target: dim.source, ..dim }),
        }
    }
}

/// Pages to copy.
#[derive(Clone, Copy, Debug)]
pub struct PagesCopy<'a> {
    /// Pairs of a source page and a target page. A source page may occur more than once, a target page may not.
    pub pages: &'a [[u32; 2]],
    /// The rows of each page that are copied. Rows of the blocks may not overlap in the target.
    pub blocks: &'a [PageBlock],
}

impl PagesCopy<'_> {
    /// Bytes that the copy moves. Saturates where no memory could hold them.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let block = |block: &PageBlock| {
            block.dims.iter().fold(block.run, |bytes, dimension| bytes.saturating_mul(dimension.extent))
        };
        let page = self.blocks.iter().map(block).fold(0, usize::saturating_add);
        page.saturating_mul(self.pages.len())
    }
}

/// A piece of memory: the CPU's for [`Copier`], a GPU's for a copier of that GPU.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    base: *mut u8,
    length: usize,
}

// SAFETY: the value is an address and a length. Only the unsafe functions of `CopyPages` read or write through it, and
// their callers vouch for the memory.
unsafe impl Send for Memory {}
// SAFETY: as above, and there is no interior state.
unsafe impl Sync for Memory {}

impl Memory {
    /// `length` bytes from `base`. The caller of a copy vouches for the memory, the caller of this function does not.
    #[must_use]
    pub const fn new(base: *mut u8, length: usize) -> Self {
        Self { base, length }
    }

    /// `length` bytes from a GPU's address.
    #[must_use]
    pub const fn device(address: u64, length: usize) -> Self {
        Self { base: std::ptr::without_provenance_mut(address as usize), length }
    }

    /// `length` bytes of it from `start` on, if it has them.
    #[must_use]
    pub fn part(&self, start: usize, length: usize) -> Option<Self> {
        start.checked_add(length).filter(|end| *end <= self.length)?;
        Some(Self { base: self.base.wrapping_add(start), length })
    }

    /// Address of its first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.base.addr()
    }
}

/// An engine that copies pages.
pub trait CopyPages {
    /// Copies pages from `source` to `target`, which may be the same memory when no source page is a target page.
    ///
    /// The engine of the CPU returns when the copy is done. An engine of a GPU returns when the copy is in its stream, behind the
    /// earlier work.
    ///
    /// # Errors
    /// When a row lies outside its memory, rows overlap in the target, or source and target overlap. Nothing was copied
    /// then. An engine of a GPU also fails when its driver refuses the launch.
    ///
    /// # Safety
    /// The caller guarantees, until the copy is done, that `source` is readable and `target` writable over their length, that
    /// the rows that are read are not written meanwhile, and that nothing else reads or writes the rows that are written.
    unsafe fn copy_memory(
        &self,
        copy: &PagesCopy<'_>,
        source: Memory,
        target: Memory,
    ) -> Result<(), CopyError>;
}

/// Source or target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The memory that is read.
    Source,
    /// The memory that is written.
    Target,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Source => "source",
            Side::Target => "target",
        })
    }
}

/// Why pages were not copied. Nothing was written, except in the case of [`CopyError::Device`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// A row lies outside its memory.
    #[error(
        "block {block} of the copy needs {needed} bytes of a {side} of {length}: its strides or pages belong to another pool"
    )]
    OutOfBounds {
        /// Which memory.
        side: Side,
        /// Position of the block in the list.
        block: usize,
        /// End of its last row.
        needed: u128,
        /// Length of the memory.
        length: usize,
    },
    /// A page would be written twice.
    #[error("page {0} is the target of more than one page")]
    RepeatedTarget(u32),
    /// Rows of a block do not nest in the target, so that some could overlap.
    #[error("rows of block {0} of the copy could overlap in the target: its strides must nest")]
    RowsOverlap(usize),
    /// Rows of two blocks could overlap in the target.
    #[error("blocks {0} and {1} of the copy could overlap in the target")]
    BlocksOverlap(usize, usize),
    /// The same bytes would be read and written.
    #[error(
        "source and target overlap, and not as disjoint pages of one pool: copy through a buffer that is apart from both"
    )]
    SharedBytes,
    /// A GPU cannot do the copy. The text says why.
    #[error("{0}")]
    Device(String),
}
