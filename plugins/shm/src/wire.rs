//! Bytes that cross between instances: the endpoint, and the two messages of a handshake.

use host_plugin_api::{Error, ErrorCode, Result};
use host_transfer_kit::Random;
use host_transfer_kit::wire::{Magic, Reader};

use crate::cuda::{Export, IpcHandle, Uuid};
use crate::regions::{MAX_REGIONS, Place, RegionDescriptor};

const MAGIC: Magic = Magic { bytes: *b"hostshm\x02", plugin: "shm" };
/// Kinds of region.
const FILE: u32 = 0;
const DEVICE: u32 = 1;
/// Longest message of a handshake.
pub const MESSAGE_BYTES: usize = 256 + MAX_REGIONS * (24 + 4 + 16 + 64);

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

/// Receiver to sender, at any time: close this region, which is on a device and was taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LetGo {
    pub region: u32,
}

impl LetGo {
    pub fn encode(self) -> Vec<u8> {
        [MAGIC.bytes.as_slice(), &self.region.to_le_bytes()].concat()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, &MAGIC, "a message")?;
        let region = at.word()?;
        if at.is_empty() { Ok(Self { region }) } else { Err(at.wrong("too long")) }
    }
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
                match &region.place {
                    Place::File { offset } => {
                        bytes.extend(FILE.to_le_bytes());
                        bytes.extend(offset.to_le_bytes());
                    }
                    Place::Device(export) => {
                        bytes.extend(DEVICE.to_le_bytes());
                        bytes.extend(export.offset.to_le_bytes());
                        bytes.extend(export.uuid.0);
                        bytes.extend(export.handle.0);
                    }
                }
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
        let (id, generation, length) = (at.word()?, at.word()?, at.number()?);
        let (kind, offset) = (at.word()?, at.number()?);
        let place = match kind {
            FILE => Place::File { offset },
            DEVICE => {
                let (uuid, handle) = (Uuid(at.array()?), IpcHandle(at.array()?));
                Place::Device(Export { uuid, handle, offset })
            }
            _ => return Err(at.wrong("a region is of an unknown kind")),
        };
        regions.push(RegionDescriptor { id, generation, length, place });
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
        assert_eq!(LetGo::decode(&LetGo { region: 7 }.encode()).unwrap(), LetGo { region: 7 });
        assert!(LetGo::decode(&hello.encode()).is_err());
        let place = Place::File { offset: 4096 };
        let mut regions = vec![RegionDescriptor { id: 130, generation: 7, length: 9, place }; 3];
        let (uuid, handle) = (Uuid([6; 16]), IpcHandle([7; 64]));
        regions[1].place = Place::Device(Export { uuid, handle, offset: 512 });
        let bytes = encode_welcome(Ok(&regions));
        assert_eq!(decode_welcome(&bytes).unwrap().unwrap(), regions);
        assert!(decode_welcome(&bytes[..bytes.len() - 1]).is_err());
        let mut unknown = bytes;
        unknown[28] = 2;
        assert!(decode_welcome(&unknown).unwrap_err().message.contains("unknown kind"));
        let most = vec![regions[1]; MAX_REGIONS];
        assert!(encode_welcome(Ok(&most)).len() <= MESSAGE_BYTES);
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
