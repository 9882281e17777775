//! Bounded reads of a file of unknown origin: the reader never asks for more memory than a plugin needs.
//!
//! The headers of such a file decide which ranges are read, and all bytes that are read stay in memory. A few kilobytes of headers
//! can name terabytes of a sparse file, so the reader counts bytes before it reads them.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;

use object::read::ReadCacheOps;
use object::{ReadCache, ReadRef};

/// Limit of the bytes of headers, notes and names that are read of one file. A plugin has some kilobytes of them, and a manifest at
/// most a mebibyte.
pub const MOST_BYTES: u64 = 16 << 20;

/// Most segments of a file. Linkers make about a dozen.
pub const MAX_SEGMENTS: usize = 1024;

/// A file that counts the bytes of each read, also when the same range is read again.
pub struct Bounded<R: ReadCacheOps = File> {
    cache: ReadCache<R>,
    left: Cell<u64>,
    exceeded: Cell<bool>,
}

impl<R: ReadCacheOps> Bounded<R> {
    /// Wraps a file of which no bytes were read yet.
    pub fn new(file: R) -> Self {
        Self { cache: ReadCache::new(file), left: Cell::new(MOST_BYTES), exceeded: Cell::new(false) }
    }

    /// Whether a read would have exceeded [`MOST_BYTES`]. That read and all later ones fail.
    pub fn is_exceeded(&self) -> bool {
        self.exceeded.get()
    }

    fn take(&self, bytes: u64) -> Result<(), ()> {
        match self.left.get().checked_sub(bytes) {
            Some(left) => self.left.set(left),
            None => {
                self.left.set(0);
                self.exceeded.set(true);
            }
        }
        if self.is_exceeded() { Err(()) } else { Ok(()) }
    }
}

impl<'a, R: ReadCacheOps> ReadRef<'a> for &'a Bounded<R> {
    fn len(self) -> Result<u64, ()> {
        self.cache.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        // A range outside of the file is an error of its own. It does not count as exceeding the limit.
        if offset.checked_add(size).is_none_or(|end| self.cache.len().is_ok_and(|length| end > length)) {
            return Err(());
        }
        self.take(size)?;
        self.cache.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        // Counts the whole range: the position of the delimiter is known only after the read.
        self.take(range.end.saturating_sub(range.start))?;
        self.cache.read_bytes_at_until(range, delimiter)
    }
}
