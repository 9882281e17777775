//! Bytes that cross between instances. Little endian, versioned.
//!
//! All begin with a [`Magic`] of eight bytes, of which the last is the version. The host carries an [`Endpoint`] from
//! one instance to another. Two instances send each other a [`Message`] about their connections. The backend decides
//! how it travels, and what else they send.

mod message;
mod reader;

use host_plugin_api::{Error, ErrorCode, Result};

pub use message::Message;
pub use reader::Reader;

use crate::system::Random;

/// Longest name of an instance, in bytes.
pub const NAME_BYTES: usize = 64;
/// Longest reason of a refusal that is sent, in bytes.
pub const REASON_BYTES: usize = 512;

/// The first bytes of everything that one plugin sends.
#[derive(Debug)]
pub struct Magic {
    /// The last of them is the version.
    pub bytes: [u8; 8],
    /// The plugin's name, for messages.
    pub plugin: &'static str,
}

/// How one plugin writes [`Endpoint`]s and [`Message`]s.
#[derive(Debug)]
pub struct Format {
    /// What they begin with.
    pub magic: Magic,
    /// Longest address of an instance or of an inbound endpoint, in bytes.
    pub address_bytes: usize,
    /// Returns what is wrong with an address, if something is.
    pub check_address: fn(&[u8]) -> Option<&'static str>,
    /// Whether region descriptors have a device.
    pub devices: bool,
    /// The numbers of [`Message`]'s variants, in their order.
    pub kinds: [u8; 7],
}

/// What a peer needs to connect: opaque bytes to the host, which carries them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// A secret: an instance that knows it may connect.
    pub token: Random,
    /// Identity of the instance. It differs after a restart.
    pub instance: Random,
    /// The name under which it was opened.
    pub name: String,
    /// Where messages to the instance go, in the backend's own terms.
    pub address: Vec<u8>,
}

impl Endpoint {
    /// Encodes the endpoint as bytes.
    pub fn encode(&self, format: &Format) -> Vec<u8> {
        let mut to = format.magic.bytes.to_vec();
        to.extend(self.token.iter().chain(&self.instance));
        put(&mut to, self.name.as_bytes());
        put(&mut to, &self.address);
        to
    }

    /// Decodes bytes.
    ///
    /// # Errors
    /// `VERSION` for bytes of another plugin or another version. `INVALID_ARGUMENT` for damaged bytes.
    pub fn decode(bytes: &[u8], format: &Format) -> Result<Self> {
        let mut at = Reader::new(bytes, &format.magic, "the endpoint")?;
        let (token, instance) = (at.array()?, at.array()?);
        let endpoint = Self { token, instance, name: at.name()?, address: at.address(format)? };
        at.end()?;
        Ok(endpoint)
    }
}

/// Appends bytes with their length before them. [`Reader::piece`] reads them again.
pub fn put(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u32).to_le_bytes());
    to.extend(bytes);
}

/// Refuses a name that no instance may have.
///
/// # Errors
/// `INVALID_ARGUMENT` unless it is 1 to [`NAME_BYTES`] bytes, none of them zero.
pub fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.len() > NAME_BYTES || name.contains('\0') {
        let text = format!("the name {name:?} is not 1 to {NAME_BYTES} bytes of text");
        return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
