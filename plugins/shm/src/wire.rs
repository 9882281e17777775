//! Bytes that cross between instances: the endpoint, and the two messages of a handshake. Little endian, versioned.

use host_plugin_api::{Error, ErrorCode, Result};

use crate::regions::{MAX_REGIONS, RegionCard};

const MAGIC: [u8; 8] = *b"hostshm\x01";
/// Longest name of an instance.
pub const NAME_BYTES: usize = 64;
/// Longest message of a handshake.
pub const MESSAGE_BYTES: usize = 256 + MAX_REGIONS * 24;

/// Sixteen random bytes: a secret or an identity.
pub type Random = [u8; 16];

/// What [`endpoint`](host_plugin_api::TransferBackend::endpoint) returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Names the abstract socket.
    pub socket: Random,
    /// Whoever knows it may connect.
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
pub type Welcome = Result<Vec<RegionCard>>;

impl Endpoint {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.socket.iter().chain(&self.token).chain(&self.instance));
        bytes.extend(self.name.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, "an endpoint")?;
        let (socket, token, instance) = (at.array()?, at.array()?, at.array()?);
        Ok(Self { socket, token, instance, name: at.name()? })
    }
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.token.iter().chain(&self.instance));
        bytes.extend(self.name.as_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, "a hello")?;
        let (token, instance) = (at.array()?, at.array()?);
        Ok(Self { token, instance, name: at.name()? })
    }
}

/// Encodes a [`Welcome`].
pub fn encode_welcome(welcome: std::result::Result<&[RegionCard], &Error>) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    match welcome {
        Ok(cards) => {
            bytes.extend(0i32.to_le_bytes());
            for card in cards {
                bytes.extend(card.id.to_le_bytes());
                bytes.extend(card.generation.to_le_bytes());
                bytes.extend(card.length.to_le_bytes());
                bytes.extend(card.fd_offset.to_le_bytes());
            }
        }
        Err(error) => {
            bytes.extend(error.code.0.to_le_bytes());
            bytes.extend(error.message.bytes().take(200));
        }
    }
    bytes
}

/// Decodes a [`Welcome`]; the outer error says that the bytes are none.
pub fn decode_welcome(bytes: &[u8]) -> Result<Welcome> {
    let mut at = Reader::new(bytes, "a welcome")?;
    let code = i32::from_le_bytes(at.array()?);
    if code != 0 {
        let text = String::from_utf8_lossy(at.bytes);
        return Ok(Err(Error::new(ErrorCode(code), format!("the peer refused: {text}"))));
    }
    let mut cards = Vec::new();
    while !at.bytes.is_empty() {
        cards.push(RegionCard {
            id: u32::from_le_bytes(at.array()?),
            generation: u32::from_le_bytes(at.array()?),
            length: u64::from_le_bytes(at.array()?),
            fd_offset: u64::from_le_bytes(at.array()?),
        });
    }
    if cards.len() > MAX_REGIONS {
        return Err(at.wrong("too many regions"));
    }
    Ok(Ok(cards))
}

struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8], what: &'static str) -> Result<Self> {
        let mut at = Self { bytes, what };
        match at.array::<8>() {
            Ok(MAGIC) => Ok(at),
            Ok(magic) if magic[..7] == MAGIC[..7] => {
                let text = format!("{what} of version {}, this plugin speaks {}", magic[7], MAGIC[7]);
                Err(Error::new(ErrorCode::VERSION, text))
            }
            _ => Err(Error::new(ErrorCode::VERSION, format!("{what} of another kind, both sides need shm"))),
        }
    }

    fn wrong(&self, why: &str) -> Error {
        Error::new(ErrorCode::INVALID_ARGUMENT, format!("{} is damaged: {why}", self.what))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (array, rest) = self.bytes.split_first_chunk().ok_or_else(|| self.wrong("too short"))?;
        self.bytes = rest;
        Ok(*array)
    }

    /// The rest, as an instance's name.
    fn name(&mut self) -> Result<String> {
        let text = std::str::from_utf8(self.bytes).ok();
        let name = text.filter(|t| !t.is_empty() && t.len() <= NAME_BYTES);
        name.map(str::to_owned).ok_or_else(|| self.wrong("its name is not 1 to 64 bytes of text"))
    }
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
        let cards = vec![RegionCard { id: 130, generation: 7, length: 9, fd_offset: 4096 }; 3];
        let bytes = encode_welcome(Ok(&cards));
        assert_eq!(decode_welcome(&bytes).unwrap().unwrap(), cards);
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
