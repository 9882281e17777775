//! Reads of a file of unknown origin that cannot ask for more memory than a plugin needs.
//!
//! What the headers of such a file say decides which ranges are read, and everything read stays in memory. A few kilobytes of
//! headers can name terabytes of a sparse file, so the bytes are counted before they are read.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;

use object::read::ReadCacheOps;
use object::{ReadCache, ReadRef};

/// Most bytes of headers, notes and names that are read of one file. A plugin has some kilobytes of them, and a manifest at
/// most a mebibyte.
pub const MOST_BYTES: u64 = 16 << 20;

/// Most segments of a file. Linkers make about a dozen.
pub const MAX_SEGMENTS: usize = 1024;

/// A file whose bytes are counted as they are asked for, again if they are asked for again.
pub struct Bounded<R: ReadCacheOps = File> {
    cache: ReadCache<R>,
    left: Cell<u64>,
    exceeded: Cell<bool>,
}

impl<R: ReadCacheOps> Bounded<R> {
    /// A file of which nothing was read yet.
    pub fn new(file: R) -> Self {
        Self { cache: ReadCache::new(file), left: Cell::new(MOST_BYTES), exceeded: Cell::new(false) }
    }

    /// Whether more was asked for than is read. The reads from then on have failed.
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
        // What lies outside of the file is not read, and its error is another.
        if offset.checked_add(size).is_none_or(|end| self.cache.len().is_ok_and(|length| end > length)) {
            return Err(());
        }
        self.take(size)?;
        self.cache.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        // How far the delimiter is shows only when it was read.
        self.take(range.end.saturating_sub(range.start))?;
        self.cache.read_bytes_at_until(range, delimiter)
    }
}
