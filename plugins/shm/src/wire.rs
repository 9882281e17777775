//! Bytes that cross between instances: the endpoint, and the two messages of a handshake.

use host_plugin_api::{Error, ErrorCode, Result};
use host_transfer_kit::Random;
use host_transfer_kit::wire::{Magic, Reader};

use crate::regions::{MAX_REGIONS, RegionDescriptor};

const MAGIC: Magic = Magic { bytes: *b"hostshm\x01", plugin: "shm" };
/// Longest message of a handshake.
pub const MESSAGE_BYTES: usize = 256 + MAX_REGIONS * 24;

/// What [`endpoint`](host_plugin_api::TransferBackend::endpoint) returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Names the abstract socket.
    pub socket: Random,
    /// A secret: an instance that knows it may connect.
    pub token: Random,
    /// Identity of the instance.
    pub instance: Random,
    pub name: String,
}

/// Sender to receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub token: Random,
    pub instance: Random,
    pub name: String,
}

/// Receiver to sender: regions, or a refusal.
pub type Welcome = Result<Vec<RegionDescriptor>>;

impl Endpoint {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.bytes.to_vec();
        bytes.extend(self.socket.iter().chain(&self.token).chain(&self.instance));
        bytes.extend(self.name.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, &MAGIC, "an endpoint")?;
        let (socket, token, instance) = (at.array()?, at.array()?, at.array()?);
        let name = at.rest();
        Ok(Self { socket, token, instance, name: at.named(name)? })
    }
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.bytes.to_vec();
        bytes.extend(self.token.iter().chain(&self.instance));
        bytes.extend(self.name.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, &MAGIC, "a hello")?;
        let (token, instance) = (at.array()?, at.array()?);
        let name = at.rest();
        Ok(Self { token, instance, name: at.named(name)? })
    }
}

/// Encodes a [`Welcome`].
pub fn encode_welcome(welcome: std::result::Result<&[RegionDescriptor], &Error>) -> Vec<u8> {
    let mut bytes = MAGIC.bytes.to_vec();
    match welcome {
        Ok(regions) => {
            bytes.extend(0i32.to_le_bytes());
            for region in regions {
                bytes.extend(region.id.to_le_bytes());
                bytes.extend(region.generation.to_le_bytes());
                bytes.extend(region.length.to_le_bytes());
                bytes.extend(region.fd_offset.to_le_bytes());
            }
        }
        Err(error) => {
            bytes.extend(error.code.0.to_le_bytes());
            bytes.extend(error.message.bytes().take(200));
        }
    }
    bytes
}

/// Decodes a [`Welcome`]. The outer error says that the bytes are none.
pub fn decode_welcome(bytes: &[u8]) -> Result<Welcome> {
    let mut at = Reader::new(bytes, &MAGIC, "a welcome")?;
    let code = i32::from_le_bytes(at.array()?);
    if code != 0 {
        let text = String::from_utf8_lossy(at.rest());
        return Ok(Err(Error::new(ErrorCode(code), format!("the peer refused: {text}"))));
    }
    let mut regions = Vec::new();
    while !at.is_empty() {
        regions.push(RegionDescriptor {
            id: at.word()?,
            generation: at.word()?,
            length: at.number()?,
            fd_offset: at.number()?,
        });
    }
    if regions.len() > MAX_REGIONS {
        return Err(at.wrong("too many regions"));
    }
    Ok(Ok(regions))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded_and_every_cut_is_an_error_or_another_value() {
        let endpoint =
            Endpoint { socket: [1; 16], token: [2; 16], instance: [3; 16], name: "prefill-0".into() };
        let bytes = endpoint.encode();
        assert_eq!(Endpoint::decode(&bytes).unwrap(), endpoint);
        for cut in 0..bytes.len() {
            assert_ne!(Endpoint::decode(&bytes[..cut]).ok(), Some(endpoint.clone()), "cut at {cut}");
        }
        let hello = Hello { token: [4; 16], instance: [5; 16], name: "n".repeat(64) };
        assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
        let regions = vec![RegionDescriptor { id: 130, generation: 7, length: 9, fd_offset: 4096 }; 3];
        let bytes = encode_welcome(Ok(&regions));
        assert_eq!(decode_welcome(&bytes).unwrap().unwrap(), regions);
        assert!(decode_welcome(&bytes[..bytes.len() - 1]).is_err());
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes =
            Endpoint { socket: [0; 16], token: [0; 16], instance: [0; 16], name: "a".into() }.encode();
        bytes[7] = 9;
        let error = Endpoint::decode(&bytes).unwrap_err();
        assert_eq!(error.code, ErrorCode::VERSION);
        assert!(error.message.contains("version 9"), "{error}");
    }
}
