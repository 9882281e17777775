//! Bytes that cross between instances: the endpoint, and the two messages of a handshake.

use host_plugin_api::{Error, ErrorCode, Result};
use host_transfer_kit::Random;
use host_transfer_kit::wire::{Magic, Reader};

use crate::cuda::{Export, IpcHandle, Uuid};
use crate::regions::{MAX_REGIONS, RegionDescriptor, RegionPlace};

/// A version of the handshake. It is the last byte of the [`Magic`] that a message begins with.
///
/// | | [`One`](Self::One) | [`Two`](Self::Two) |
/// | --- | --- | --- |
/// | regions in a welcome | in files | in files and on devices, each with its kind |
/// | descriptors of a hello | none | the sender's process |
/// | descriptors of a welcome | control page, live regions, event, files of regions | as in version 1, with the device page behind the event |
/// | behind the handshake | nothing | [`LetGo`] |
///
/// Everything else is the same in both: endpoints, which say that they are of version 1, the fields of a hello,
/// refusals, the control page and the table of live regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Version {
    One,
    Two,
}

const ONE: Magic = Magic { bytes: *b"hostshm\x01", plugin: "shm" };
const TWO: Magic = Magic { bytes: *b"hostshm\x02", plugin: "shm" };

impl Version {
    pub const NEWEST: Self = Self::Two;

    fn magic(self) -> &'static Magic {
        match self {
            Self::One => &ONE,
            Self::Two => &TWO,
        }
    }

    /// The version of a message. `None` when it is not one of these.
    pub fn of(message: &[u8]) -> Option<Self> {
        [Self::One, Self::Two].into_iter().find(|version| message.starts_with(&version.magic().bytes))
    }

    /// Begins to read a message that may be of either version.
    fn read<'a>(message: &'a [u8], what: &'static str) -> Result<(Self, Reader<'a>)> {
        let version = Self::of(message).unwrap_or(Self::NEWEST);
        Ok((version, Reader::new(message, version.magic(), what)?))
    }
}

/// Kinds of region.
const FILE: u32 = 0;
const DEVICE: u32 = 1;
/// Longest message of a handshake.
pub const MESSAGE_BYTES: usize = 256 + MAX_REGIONS * (24 + 4 + 16 + 64);

/// Longest reason of a refusal.
pub const REFUSAL_BYTES: usize = 200;

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

/// Sender to receiver, in the version in which it wants to be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    pub version: Version,
    pub token: Random,
    pub instance: Random,
    pub name: String,
}

/// Receiver to sender, at any time: close this region, which is on a device and was deregistered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LetGo {
    pub region: u32,
}

impl LetGo {
    pub fn encode(self) -> Vec<u8> {
        [TWO.bytes.as_slice(), &self.region.to_le_bytes()].concat()
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, &TWO, "a message")?;
        let region = at.word()?;
        if at.is_empty() { Ok(Self { region }) } else { Err(at.wrong("too long")) }
    }
}

/// Receiver to sender, in the version of the hello. A receiver that does not know that version refuses in its own.
#[derive(Clone, Debug, PartialEq)]
pub enum Welcome {
    Regions(Vec<RegionDescriptor>),
    Refused { version: Version, error: Error },
}

impl Endpoint {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = ONE.bytes.to_vec();
        bytes.extend(self.socket.iter().chain(&self.token).chain(&self.instance));
        bytes.extend(self.name.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, &ONE, "an endpoint")?;
        let (socket, token, instance) = (at.array()?, at.array()?, at.array()?);
        let name = at.rest();
        Ok(Self { socket, token, instance, name: at.named(name)? })
    }
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.version.magic().bytes.to_vec();
        bytes.extend(self.token.iter().chain(&self.instance));
        bytes.extend(self.name.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (version, mut at) = Version::read(bytes, "a hello")?;
        let (token, instance) = (at.array()?, at.array()?);
        let name = at.rest();
        Ok(Self { version, token, instance, name: at.named(name)? })
    }
}

/// Encodes the regions of a [`Welcome`]. `None` when one is on a device, which version 1 cannot express.
pub fn encode_welcome(version: Version, regions: &[RegionDescriptor]) -> Option<Vec<u8>> {
    let mut bytes = version.magic().bytes.to_vec();
    bytes.extend(0i32.to_le_bytes());
    for region in regions {
        bytes.extend(region.id.to_le_bytes());
        bytes.extend(region.generation.to_le_bytes());
        bytes.extend(region.length.to_le_bytes());
        match (version, &region.place) {
            (Version::One, RegionPlace::File { offset }) => bytes.extend(offset.to_le_bytes()),
            (Version::One, RegionPlace::Device(_)) => return None,
            (Version::Two, RegionPlace::File { offset }) => {
                bytes.extend(FILE.to_le_bytes());
                bytes.extend(offset.to_le_bytes());
            }
            (Version::Two, RegionPlace::Device(export)) => {
                bytes.extend(DEVICE.to_le_bytes());
                bytes.extend(export.offset.to_le_bytes());
                bytes.extend(export.uuid.0);
                bytes.extend(export.handle.0);
            }
        }
    }
    Some(bytes)
}

/// Encodes the refusal of a [`Welcome`].
pub fn encode_refusal(version: Version, error: &Error) -> Vec<u8> {
    let mut bytes = version.magic().bytes.to_vec();
    bytes.extend(error.code.0.to_le_bytes());
    bytes.extend(error.message.bytes().take(REFUSAL_BYTES));
    bytes
}

/// Decodes a [`Welcome`] to a hello of version `asked`.
pub fn decode_welcome(bytes: &[u8], asked: Version) -> Result<Welcome> {
    let (version, mut at) = Version::read(bytes, "a welcome")?;
    let code = i32::from_le_bytes(at.array()?);
    if code != 0 {
        let text = String::from_utf8_lossy(at.rest());
        let error = Error::new(ErrorCode(code), format!("the peer refused: {text}"));
        return Ok(Welcome::Refused { version, error });
    }
    if version != asked {
        return Err(at.wrong("it is of another version than the hello"));
    }
    let mut regions = Vec::new();
    while !at.is_empty() {
        let (id, generation, length) = (at.word()?, at.word()?, at.number()?);
        let kind = if version == Version::One { FILE } else { at.word()? };
        let offset = at.number()?;
        let place = match kind {
            FILE => RegionPlace::File { offset },
            DEVICE => {
                let (uuid, handle) = (Uuid(at.array()?), IpcHandle(at.array()?));
                RegionPlace::Device(Export { uuid, handle, offset })
            }
            _ => return Err(at.wrong("a region is of an unknown kind")),
        };
        regions.push(RegionDescriptor { id, generation, length, place });
    }
    if regions.len() > MAX_REGIONS {
        return Err(at.wrong("too many regions"));
    }
    Ok(Welcome::Regions(regions))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERSIONS: [Version; 2] = [Version::One, Version::Two];

    fn in_a_file() -> RegionDescriptor {
        RegionDescriptor { id: 130, generation: 7, length: 9, place: RegionPlace::File { offset: 4096 } }
    }

    fn on_a_device() -> RegionDescriptor {
        let (uuid, handle) = (Uuid([6; 16]), IpcHandle([7; 64]));
        RegionDescriptor { place: RegionPlace::Device(Export { uuid, handle, offset: 512 }), ..in_a_file() }
    }

    fn endpoint() -> Endpoint {
        Endpoint { socket: [1; 16], token: [2; 16], instance: [3; 16], name: "prefill-0".into() }
    }

    fn hello(version: Version) -> Hello {
        Hello { version, token: [4; 16], instance: [5; 16], name: "n".repeat(64) }
    }

    #[test]
    fn what_is_encoded_is_decoded_and_every_cut_is_an_error_or_another_value() {
        let bytes = endpoint().encode();
        assert_eq!(Endpoint::decode(&bytes).unwrap(), endpoint());
        for cut in 0..bytes.len() {
            assert_ne!(Endpoint::decode(&bytes[..cut]).ok(), Some(endpoint()), "cut at {cut}");
        }
        assert_eq!(LetGo::decode(&LetGo { region: 7 }.encode()).unwrap(), LetGo { region: 7 });
        for version in VERSIONS {
            let hello = hello(version);
            assert_eq!(Hello::decode(&hello.encode()).unwrap(), hello);
            assert!(LetGo::decode(&hello.encode()).is_err());
            let error = Error::new(ErrorCode::NO_RESOURCE, "full");
            let refused = decode_welcome(&encode_refusal(version, &error), Version::Two).unwrap();
            let error = Error::new(ErrorCode::NO_RESOURCE, "the peer refused: full");
            assert_eq!(refused, Welcome::Refused { version, error });
            let mut regions = vec![in_a_file(); 3];
            if version == Version::Two {
                regions[1] = on_a_device();
            }
            let bytes = encode_welcome(version, &regions).unwrap();
            assert_eq!(decode_welcome(&bytes, version).unwrap(), Welcome::Regions(regions));
            assert!(decode_welcome(&bytes[..bytes.len() - 1], version).is_err());
            let most = vec![in_a_file(); MAX_REGIONS + 1];
            let bytes = encode_welcome(version, &most).unwrap();
            assert!(decode_welcome(&bytes, version).unwrap_err().message.contains("too many"));
        }
        let mut unknown = encode_welcome(Version::Two, &[in_a_file()]).unwrap();
        unknown[28] = 2;
        let error = decode_welcome(&unknown, Version::Two).unwrap_err();
        assert!(error.message.contains("unknown kind"), "{error}");
        let most = vec![on_a_device(); MAX_REGIONS];
        assert!(encode_welcome(Version::Two, &most).unwrap().len() <= MESSAGE_BYTES);
    }

    #[test]
    fn version_1_is_what_processes_of_version_1_say_and_read() {
        let bytes = [b"hostshm\x01".as_slice(), &[1; 16], &[2; 16], &[3; 16], b"prefill-0"];
        assert_eq!(endpoint().encode(), bytes.concat());
        let bytes = [b"hostshm\x01".as_slice(), &[4; 16], &[5; 16], &[b'n'; 64]];
        assert_eq!(hello(Version::One).encode(), bytes.concat());
        let region = b"\x82\0\0\0\x07\0\0\0\x09\0\0\0\0\0\0\0\0\x10\0\0\0\0\0\0";
        let bytes = [b"hostshm\x01\0\0\0\0".as_slice(), region, region];
        assert_eq!(encode_welcome(Version::One, &[in_a_file(); 2]).unwrap(), bytes.concat());
        assert_eq!(encode_welcome(Version::One, &[in_a_file(), on_a_device()]), None);
        let refusal = encode_refusal(Version::One, &Error::new(ErrorCode::VERSION, "no"));
        assert_eq!(refusal, [b"hostshm\x01".as_slice(), &ErrorCode::VERSION.0.to_le_bytes(), b"no"].concat());
    }

    #[test]
    fn regions_are_read_in_the_version_that_was_asked_for_and_no_other() {
        for (asked, answered) in [(Version::One, Version::Two), (Version::Two, Version::One)] {
            let bytes = encode_welcome(answered, &[in_a_file(); 2]).unwrap();
            let error = decode_welcome(&bytes, asked).unwrap_err();
            assert!(error.message.contains("another version than the hello"), "{error}");
        }
    }

    #[test]
    fn another_version_is_named() {
        let error = |mut bytes: Vec<u8>, decode: fn(&[u8]) -> Option<Error>| {
            bytes[7] = 9;
            decode(&bytes).unwrap()
        };
        for error in [
            error(endpoint().encode(), |bytes| Endpoint::decode(bytes).err()),
            error(hello(Version::One).encode(), |bytes| Hello::decode(bytes).err()),
            error(encode_welcome(Version::Two, &[]).unwrap(), |bytes| {
                decode_welcome(bytes, Version::Two).err()
            }),
        ] {
            assert_eq!(error.code, ErrorCode::VERSION);
            assert!(error.message.contains("version 9"), "{error}");
        }
    }
}
