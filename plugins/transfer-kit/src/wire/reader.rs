//! Decodes bytes that any process may have sent.

use host_plugin_api::{Error, ErrorCode, RegionId, Result};

use super::{Format, Magic, NAME_BYTES};
use crate::regions::{MAX_REGIONS, RegionDescriptor};

/// The device in a descriptor of host memory.
pub(super) const HOST_MEMORY: u32 = u32::MAX;

/// Reads fields off the front of some bytes. All lengths are checked, and every error names what was read.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// Checks the first eight bytes, and reads on after them. `what` names the bytes in error texts: `a message`.
    ///
    /// # Errors
    /// `VERSION` when they are another plugin's, or of another version.
    pub fn new(bytes: &'a [u8], magic: &Magic, what: &'static str) -> Result<Self> {
        let Magic { bytes: magic, plugin } = magic;
        match bytes.first_chunk::<8>() {
            Some(found) if found == magic => Ok(Self { bytes: &bytes[8..], what }),
            Some(found) if found[..7] == magic[..7] => {
                let text = format!("{what} is of version {}, this plugin speaks {}", found[7], magic[7]);
                Err(Error::new(ErrorCode::VERSION, text))
            }
            _ => {
                let text = format!("{what} is of another kind, both sides need {plugin}");
                Err(Error::new(ErrorCode::VERSION, text))
            }
        }
    }

    /// The error for damaged bytes.
    pub fn wrong(&self, why: &str) -> Error {
        Error::new(ErrorCode::INVALID_ARGUMENT, format!("{} is damaged: {why}", self.what))
    }

    /// Reads `N` bytes.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when there are fewer.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (array, rest) = self.bytes.split_first_chunk().ok_or_else(|| self.wrong("too short"))?;
        self.bytes = rest;
        Ok(*array)
    }

    /// Reads a number of four bytes.
    ///
    /// # Errors
    /// As [`array`](Self::array).
    pub fn word(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    /// Reads a number of eight bytes.
    ///
    /// # Errors
    /// As [`array`](Self::array).
    pub fn number(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// Reads bytes with their length before them, no more than `most`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for another length.
    pub fn piece(&mut self, most: usize) -> Result<&'a [u8]> {
        let length = self.word()? as usize;
        if length > most || length > self.bytes.len() {
            return Err(self.wrong("a length that cannot be"));
        }
        let (piece, rest) = self.bytes.split_at(length);
        self.bytes = rest;
        Ok(piece)
    }

    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Takes all that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    /// Reads an instance's name, with its length before it.
    ///
    /// # Errors
    /// As [`named`](Self::named).
    pub fn name(&mut self) -> Result<String> {
        let bytes = self.piece(NAME_BYTES)?;
        self.named(bytes)
    }

    /// Turns bytes that were read into an instance's name.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` unless they are a name.
    pub fn named(&self, bytes: &[u8]) -> Result<String> {
        let text = std::str::from_utf8(bytes).ok();
        let name = text.filter(|text| !text.is_empty() && text.len() <= NAME_BYTES);
        name.map(str::to_owned).ok_or_else(|| self.wrong("its name is not 1 to 64 bytes of text"))
    }

    /// Reads an address, with its length before it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it is too long, or the format's check finds something wrong.
    pub fn address(&mut self, format: &Format) -> Result<Vec<u8>> {
        let address = self.piece(format.address_bytes)?;
        match (format.check_address)(address) {
            Some(why) => Err(self.wrong(why)),
            None => Ok(address.to_vec()),
        }
    }

    /// Reads region descriptors, with their number before them.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for too many, and for an invalid one.
    pub fn regions(&mut self, format: &Format) -> Result<Vec<RegionDescriptor>> {
        let count = self.word()? as usize;
        if count > MAX_REGIONS {
            return Err(self.wrong("too many regions"));
        }
        let mut regions = Vec::with_capacity(count);
        for _ in 0..count {
            let (id, generation) = (self.word()?, self.word()?);
            let (address, length) = (self.number()?, self.number()?);
            let device = if format.devices { self.word()? } else { HOST_MEMORY };
            let device = Some(device).filter(|device| *device != HOST_MEMORY);
            if address.checked_add(length).is_none() {
                return Err(self.wrong("a region past the end of all addresses"));
            }
            regions.push(RegionDescriptor { id: RegionId(id), generation, address, length, device });
        }
        Ok(regions)
    }

    /// Makes sure that nothing is left.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when something is left.
    pub fn end(&self) -> Result<()> {
        if self.bytes.is_empty() { Ok(()) } else { Err(self.wrong("too long")) }
    }
}
