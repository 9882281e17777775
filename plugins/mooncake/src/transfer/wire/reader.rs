//! Takes bytes apart that anybody may have sent.

use host_plugin_api::{Error, ErrorCode, Result};

use super::super::regions::Card;
use super::{MAGIC, NAME_BYTES, SESSION_BYTES};

pub struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8], what: &'static str) -> Result<Self> {
        match bytes.first_chunk::<8>() {
            Some(&MAGIC) => Ok(Self { bytes: &bytes[8..], what }),
            Some(magic) if magic[..7] == MAGIC[..7] => {
                let text = format!("{what} is of version {}, this plugin speaks {}", magic[7], MAGIC[7]);
                Err(Error::new(ErrorCode::VERSION, text))
            }
            _ => {
                let text = format!("{what} is of another kind, both sides need mooncake");
                Err(Error::new(ErrorCode::VERSION, text))
            }
        }
    }

    pub fn wrong(&self, why: &str) -> Error {
        Error::new(ErrorCode::INVALID_ARGUMENT, format!("{} is damaged: {why}", self.what))
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (array, rest) = self.bytes.split_first_chunk().ok_or_else(|| self.wrong("too short"))?;
        self.bytes = rest;
        Ok(*array)
    }

    pub fn number(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn piece(&mut self, most: usize) -> Result<&'a [u8]> {
        let length = u32::from_le_bytes(self.array()?) as usize;
        if length > most || length > self.bytes.len() {
            return Err(self.wrong("a length that cannot be"));
        }
        let (piece, rest) = self.bytes.split_at(length);
        self.bytes = rest;
        Ok(piece)
    }

    pub fn text(&mut self, most: usize) -> Result<String> {
        self.piece(most).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    pub fn name(&mut self) -> Result<String> {
        let text = std::str::from_utf8(self.piece(NAME_BYTES)?).ok().filter(|text| !text.is_empty());
        text.map(str::to_owned).ok_or_else(|| self.wrong("its name is not 1 to 64 bytes of text"))
    }

    /// A host and a port, with nothing in it that Mooncake could take for something else.
    pub fn session(&mut self) -> Result<String> {
        let text = self.text(SESSION_BYTES)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
        let good = text.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && host.chars().all(plain) && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
        if good { Ok(text) } else { Err(self.wrong("its address is not a host and a port")) }
    }

    pub fn cards(&mut self, most: usize) -> Result<Vec<Card>> {
        let count = u32::from_le_bytes(self.array()?) as usize;
        if count > most {
            return Err(self.wrong("too many regions"));
        }
        let mut cards = Vec::with_capacity(count);
        for _ in 0..count {
            let (id, generation) = (u32::from_le_bytes(self.array()?), u32::from_le_bytes(self.array()?));
            let (address, length) = (self.number()?, self.number()?);
            if address.checked_add(length).is_none() {
                return Err(self.wrong("a region past the end of all addresses"));
            }
            cards.push(Card { id, generation, address, length });
        }
        Ok(cards)
    }

    pub fn end(&self) -> Result<()> {
        if self.bytes.is_empty() { Ok(()) } else { Err(self.wrong("too long")) }
    }
}
