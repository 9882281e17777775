//! Sources of the bytes of a file.

use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;

/// A source of bytes that are read by position. Several threads may read at once.
pub trait ReadAt {
    /// The number of bytes.
    ///
    /// # Errors
    /// When the system cannot tell the number.
    fn size(&self) -> Result<u64>;

    /// Fills `bytes` from `offset` on.
    ///
    /// # Errors
    /// When there are fewer bytes, or the system cannot read them.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()>;
}

impl ReadAt for File {
    fn size(&self) -> Result<u64> {
        let metadata = self.metadata()?;
        if !metadata.is_file() {
            return Err(Error::new(ErrorKind::InvalidInput, "not a regular file"));
        }
        Ok(metadata.len())
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        self.read_exact_at(bytes, offset)
    }
}

impl ReadAt for &[u8] {
    fn size(&self) -> Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let found = self.get(start..).and_then(|rest| rest.get(..bytes.len()));
        bytes.copy_from_slice(found.ok_or_else(|| Error::from(ErrorKind::UnexpectedEof))?);
        Ok(())
    }
}
