//! Bytes that cross between instances: the endpoint, and the messages between fronts. Little endian, versioned.

use host_plugin_api::{Error, ErrorCode, Result};

use crate::regions::{Card, MAX_REGIONS};

const MAGIC: [u8; 8] = *b"hostnxl\x02";
/// Longest name of an instance.
pub const NAME_BYTES: usize = 64;
/// Longest metadata of an agent that is taken.
const METADATA_BYTES: usize = 1 << 20;
/// Longest reason that is sent.
const REASON_BYTES: usize = 512;

/// Stands for the device of memory that is no device's.
const HOST_MEMORY: u32 = u32::MAX;

/// Sixteen random bytes: a secret or an identity.
pub type Random = [u8; 16];

/// What [`endpoint`](host_plugin_api::TransferBackend::endpoint) returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whoever knows it may connect.
    pub token: Random,
    /// Identity of the instance.
    pub instance: Random,
    /// The name it was opened under.
    pub name: String,
    /// Metadata of its front.
    pub front: Vec<u8>,
}

impl Endpoint {
    pub fn encode(&self) -> Vec<u8> {
        let mut to = MAGIC.to_vec();
        to.extend(self.token.iter().chain(&self.instance));
        put(&mut to, self.name.as_bytes());
        put(&mut to, &self.front);
        to
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, "the endpoint")?;
        let endpoint =
            Self { token: at.array()?, instance: at.array()?, name: at.name()?, front: at.metadata()? };
        at.end()?;
        Ok(endpoint)
    }
}

/// A message from one front to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who says it.
    pub instance: Random,
    /// The connection it is about, as the side that connected numbers it; 0 where it is about none.
    pub connection: u64,
    pub body: Body,
}

/// See the variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// I want to write into your memory; this is how you answer me.
    Hello { token: Random, name: String, front: Vec<u8> },
    /// Here is a door, and what lies behind it.
    Welcome { door: Vec<u8>, regions: Vec<Card> },
    /// No.
    Refused { code: i32, reason: String },
    /// Close the door of my connection.
    Cut,
    /// It is closed: nothing that was sent through it lands any more.
    CutDone,
    /// I have closed the door of your connection.
    Closed,
    /// All my doors are closed and my agents gone.
    Bye,
    /// Are you there? Asked so that a broken connection shows.
    Ping,
    /// Yes.
    Pong,
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        let mut to = MAGIC.to_vec();
        to.extend(self.instance);
        to.extend(self.connection.to_le_bytes());
        match &self.body {
            Body::Hello { token, name, front } => {
                to.push(1);
                to.extend(token);
                put(&mut to, name.as_bytes());
                put(&mut to, front);
            }
            Body::Welcome { door, regions } => {
                to.push(2);
                put(&mut to, door);
                to.extend((regions.len() as u32).to_le_bytes());
                for card in regions {
                    to.extend(card.id.to_le_bytes());
                    to.extend(card.generation.to_le_bytes());
                    to.extend(card.address.to_le_bytes());
                    to.extend(card.length.to_le_bytes());
                    to.extend(card.device.unwrap_or(HOST_MEMORY).to_le_bytes());
                }
            }
            Body::Refused { code, reason } => {
                to.push(3);
                to.extend(code.to_le_bytes());
                let end = (0..=reason.len().min(REASON_BYTES)).rev().find(|at| reason.is_char_boundary(*at));
                put(&mut to, &reason.as_bytes()[..end.unwrap_or(0)]);
            }
            Body::Cut => to.push(4),
            Body::CutDone => to.push(5),
            Body::Closed => to.push(6),
            Body::Bye => to.push(7),
            Body::Ping => to.push(8),
            Body::Pong => to.push(9),
        }
        to
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, "a message")?;
        let (instance, connection) = (at.array()?, u64::from_le_bytes(at.array()?));
        let [kind] = at.array()?;
        let body = match kind {
            1 => Body::Hello { token: at.array()?, name: at.name()?, front: at.metadata()? },
            2 => Body::Welcome { door: at.metadata()?, regions: at.cards()? },
            3 => Body::Refused { code: i32::from_le_bytes(at.array()?), reason: at.reason()? },
            4 => Body::Cut,
            5 => Body::CutDone,
            6 => Body::Closed,
            7 => Body::Bye,
            8 => Body::Ping,
            9 => Body::Pong,
            other => return Err(at.wrong(&format!("kind {other} is unknown"))),
        };
        at.end()?;
        Ok(Self { instance, connection, body })
    }
}

fn put(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u32).to_le_bytes());
    to.extend(bytes);
}

struct Reader<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8], what: &'static str) -> Result<Self> {
        match bytes.first_chunk::<8>() {
            Some(&MAGIC) => Ok(Self { bytes: &bytes[8..], what }),
            Some(magic) if magic[..7] == MAGIC[..7] => {
                let text = format!("{what} is of version {}, this plugin speaks {}", magic[7], MAGIC[7]);
                Err(Error::new(ErrorCode::VERSION, text))
            }
            _ => {
                let text = format!("{what} is of another kind, both sides need nixl");
                Err(Error::new(ErrorCode::VERSION, text))
            }
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

    fn piece(&mut self, most: usize) -> Result<&'a [u8]> {
        let length = u32::from_le_bytes(self.array()?) as usize;
        if length > most || length > self.bytes.len() {
            return Err(self.wrong("a length that cannot be"));
        }
        let (piece, rest) = self.bytes.split_at(length);
        self.bytes = rest;
        Ok(piece)
    }

    fn name(&mut self) -> Result<String> {
        let text = std::str::from_utf8(self.piece(NAME_BYTES)?).ok().filter(|text| !text.is_empty());
        text.map(str::to_owned).ok_or_else(|| self.wrong("its name is not 1 to 64 bytes of text"))
    }

    fn metadata(&mut self) -> Result<Vec<u8>> {
        self.piece(METADATA_BYTES).map(<[u8]>::to_vec)
    }

    fn reason(&mut self) -> Result<String> {
        self.piece(REASON_BYTES).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    fn cards(&mut self) -> Result<Vec<Card>> {
        let count = u32::from_le_bytes(self.array()?) as usize;
        if count > MAX_REGIONS {
            return Err(self.wrong("too many regions"));
        }
        let mut cards = Vec::with_capacity(count);
        for _ in 0..count {
            let (id, generation) = (u32::from_le_bytes(self.array()?), u32::from_le_bytes(self.array()?));
            let (address, length) = (u64::from_le_bytes(self.array()?), u64::from_le_bytes(self.array()?));
            let device = u32::from_le_bytes(self.array()?);
            let device = Some(device).filter(|device| *device != HOST_MEMORY);
            if address.checked_add(length).is_none() {
                return Err(self.wrong("a region past the end of all addresses"));
            }
            cards.push(Card { id, generation, address, length, device });
        }
        Ok(cards)
    }

    fn end(&self) -> Result<()> {
        if self.bytes.is_empty() { Ok(()) } else { Err(self.wrong("too long")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded_and_every_cut_is_an_error() {
        let endpoint =
            Endpoint { token: [1; 16], instance: [2; 16], name: "prefill-0".into(), front: vec![3; 170] };
        let bytes = endpoint.encode();
        assert_eq!(Endpoint::decode(&bytes).unwrap(), endpoint);
        assert!((0..bytes.len()).all(|cut| Endpoint::decode(&bytes[..cut]).is_err()));
        let card = Card { id: 1, generation: 2, address: 4096, length: 8192, device: Some(3) };
        for body in [
            Body::Hello { token: [4; 16], name: "n".repeat(64), front: vec![0; 9] },
            Body::Welcome { door: vec![5; 300], regions: vec![card; 3] },
            Body::Refused { code: -10, reason: "full".into() },
            Body::Cut,
            Body::CutDone,
            Body::Closed,
            Body::Bye,
            Body::Ping,
            Body::Pong,
        ] {
            let message = Message { instance: [9; 16], connection: 77, body };
            let bytes = message.encode();
            assert_eq!(Message::decode(&bytes).unwrap(), message);
            assert!((0..bytes.len()).all(|cut| Message::decode(&bytes[..cut]).is_err()), "{message:?}");
        }
    }

    #[test]
    fn damage_and_other_versions_are_named() {
        let card = Card { id: 1, generation: 2, address: u64::MAX, length: 1, device: None };
        let body = Body::Welcome { door: Vec::new(), regions: vec![card] };
        let bytes = Message { instance: [0; 16], connection: 1, body }.encode();
        assert!(Message::decode(&bytes).unwrap_err().message.contains("past the end"));
        let long = Body::Refused { code: -1, reason: "ü".repeat(400) };
        let bytes = Message { instance: [0; 16], connection: 1, body: long }.encode();
        let Body::Refused { reason, .. } = Message::decode(&bytes).unwrap().body else { panic!("refused") };
        assert_eq!(reason, "ü".repeat(256));
        let mut bytes = Message { instance: [0; 16], connection: 1, body: Body::Bye }.encode();
        bytes[7] = 9;
        let error = Message::decode(&bytes).unwrap_err();
        assert!(error.code == ErrorCode::VERSION && error.message.contains("version 9"), "{error}");
    }
}
