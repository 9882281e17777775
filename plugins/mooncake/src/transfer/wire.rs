//! Bytes that cross between instances: the endpoint, and the frames between their fronts. Little endian, versioned.
//!
//! Frames travel as texts, because Mooncake's messages end at a zero byte.

mod base64;
mod reader;

use host_plugin_api::{Error, ErrorCode, NOTIFICATION_BYTES, Result};

use super::regions::{Card, MAX_REGIONS};
use reader::Reader;

const MAGIC: [u8; 8] = *b"hostmck\x01";
/// Longest name of an instance.
pub const NAME_BYTES: usize = 64;
/// Longest address of an engine.
const SESSION_BYTES: usize = 300;
/// Longest reason that is sent.
const REASON_BYTES: usize = 512;

/// Sixteen random bytes: a secret or an identity.
pub type Random = [u8; 16];

/// What [`endpoint`](host_plugin_api::TransferBackend::endpoint) returns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Whoever knows it may connect.
    pub token: Random,
    /// Identity of the instance, another one after a restart.
    pub instance: Random,
    /// The name it was opened under.
    pub name: String,
    /// Address of its front, as Mooncake writes it: host and port.
    pub session: String,
}

impl Endpoint {
    pub fn encode(&self) -> Vec<u8> {
        let mut to = MAGIC.to_vec();
        to.extend(self.token.iter().chain(&self.instance));
        put(&mut to, self.name.as_bytes());
        put(&mut to, self.session.as_bytes());
        to
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, "the endpoint")?;
        let endpoint =
            Self { token: at.array()?, instance: at.array()?, name: at.name()?, session: at.session()? };
        at.end()?;
        Ok(endpoint)
    }
}

/// A message from one front to another, with what makes a stream of messages reliable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Who says it.
    pub from: Random,
    /// Who is meant: another instance may have the address by now.
    pub to: Random,
    /// Address of the sender's front.
    pub session: String,
    /// The sender's stream to this instance; a later one replaces an earlier one.
    pub stream: u64,
    /// The message's number in it, from 1 on; 0 for what is not repeated until it is acknowledged.
    pub number: u64,
    /// The other direction's stream, and its last message that came in order.
    pub heard: (u64, u64),
    /// The connection it is about, as the side that connected numbers it; 0 where it is about none.
    pub connection: u64,
    pub body: Body,
}

/// See the variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// I want to write into your memory.
    Hello { token: Random, name: String },
    /// Here is a door, and what lies behind it.
    Welcome { door: String, regions: Vec<Card> },
    /// No.
    Refused { code: i32, reason: String },
    /// What was written for this submission is in your memory.
    Arrived { payload: Vec<u8> },
    /// Close the door of my connection.
    Cut,
    /// It is closed: nothing that was sent through it lands any more.
    CutDone,
    /// I have closed the door of your connection.
    Closed,
    /// All my engines are ended, or will be without another word.
    Bye,
    /// Are you there? The acknowledgement is the answer.
    Ping,
    /// Nothing but what the frame says of the other direction.
    Heard,
    /// I know nothing of you, or am not whom you mean.
    Stranger,
}

impl Frame {
    /// As a text.
    pub fn encode(&self) -> String {
        let mut to = MAGIC.to_vec();
        to.extend(self.from.iter().chain(&self.to));
        put(&mut to, self.session.as_bytes());
        for number in [self.stream, self.number, self.heard.0, self.heard.1, self.connection] {
            to.extend(number.to_le_bytes());
        }
        match &self.body {
            Body::Hello { token, name } => {
                to.push(1);
                to.extend(token);
                put(&mut to, name.as_bytes());
            }
            Body::Welcome { door, regions } => {
                to.push(2);
                put(&mut to, door.as_bytes());
                to.extend((regions.len() as u32).to_le_bytes());
                for card in regions {
                    to.extend(card.id.to_le_bytes());
                    to.extend(card.generation.to_le_bytes());
                    to.extend(card.address.to_le_bytes());
                    to.extend(card.length.to_le_bytes());
                }
            }
            Body::Refused { code, reason } => {
                to.push(3);
                to.extend(code.to_le_bytes());
                let end = (0..=reason.len().min(REASON_BYTES)).rev().find(|at| reason.is_char_boundary(*at));
                put(&mut to, &reason.as_bytes()[..end.unwrap_or(0)]);
            }
            Body::Arrived { payload } => {
                to.push(4);
                put(&mut to, payload);
            }
            Body::Cut => to.push(5),
            Body::CutDone => to.push(6),
            Body::Closed => to.push(7),
            Body::Bye => to.push(8),
            Body::Ping => to.push(9),
            Body::Heard => to.push(10),
            Body::Stranger => to.push(11),
        }
        base64::encode(&to)
    }

    pub fn decode(text: &str) -> Result<Self> {
        let damaged = || Error::new(ErrorCode::INVALID_ARGUMENT, "a message is damaged: it is not base64");
        let bytes = base64::decode(text).ok_or_else(damaged)?;
        let mut at = Reader::new(&bytes, "a message")?;
        let (from, to, session) = (at.array()?, at.array()?, at.session()?);
        let (stream, number) = (at.number()?, at.number()?);
        let (heard, connection) = ((at.number()?, at.number()?), at.number()?);
        let [kind] = at.array()?;
        let body = match kind {
            1 => Body::Hello { token: at.array()?, name: at.name()? },
            2 => Body::Welcome { door: at.session()?, regions: at.cards(MAX_REGIONS)? },
            3 => Body::Refused { code: i32::from_le_bytes(at.array()?), reason: at.text(REASON_BYTES)? },
            4 => Body::Arrived { payload: at.piece(NOTIFICATION_BYTES)?.to_vec() },
            5 => Body::Cut,
            6 => Body::CutDone,
            7 => Body::Closed,
            8 => Body::Bye,
            9 => Body::Ping,
            10 => Body::Heard,
            11 => Body::Stranger,
            other => return Err(at.wrong(&format!("kind {other} is unknown"))),
        };
        at.end()?;
        Ok(Self { from, to, session, stream, number, heard, connection, body })
    }
}

fn put(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend((bytes.len() as u32).to_le_bytes());
    to.extend(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(body: Body) -> Frame {
        let session = "127.0.0.1:15001".to_owned();
        Frame {
            from: [9; 16],
            to: [8; 16],
            session,
            stream: 3,
            number: 4,
            heard: (5, 6),
            connection: 7,
            body,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded_and_every_cut_is_an_error() {
        let session = "10.0.0.1:15267".to_owned();
        let endpoint = Endpoint { token: [1; 16], instance: [2; 16], name: "prefill-0".into(), session };
        let bytes = endpoint.encode();
        assert_eq!(Endpoint::decode(&bytes).unwrap(), endpoint);
        assert!((0..bytes.len()).all(|cut| Endpoint::decode(&bytes[..cut]).is_err()));
        let card = Card { id: 1, generation: 2, address: 4096, length: 8192 };
        for body in [
            Body::Hello { token: [4; 16], name: "n".repeat(64) },
            Body::Welcome { door: "h:1".into(), regions: vec![card; 3] },
            Body::Refused { code: -10, reason: "full".into() },
            Body::Arrived { payload: vec![0; 48] },
            Body::Cut,
            Body::CutDone,
            Body::Closed,
            Body::Bye,
            Body::Ping,
            Body::Heard,
            Body::Stranger,
        ] {
            let frame = frame(body);
            let text = frame.encode();
            assert_eq!(Frame::decode(&text).unwrap(), frame);
            assert!((0..text.len()).all(|cut| Frame::decode(&text[..cut]).is_err()), "{frame:?}");
        }
    }

    #[test]
    fn damage_and_other_versions_are_named() {
        let card = Card { id: 1, generation: 2, address: u64::MAX, length: 1 };
        let text = frame(Body::Welcome { door: "h:1".into(), regions: vec![card] }).encode();
        assert!(Frame::decode(&text).unwrap_err().message.contains("past the end"));
        let text = frame(Body::Refused { code: -1, reason: "ü".repeat(400) }).encode();
        let Body::Refused { reason, .. } = Frame::decode(&text).unwrap().body else { panic!("refused") };
        assert_eq!(reason, "ü".repeat(256));
        let mut bytes = base64::decode(&frame(Body::Bye).encode()).unwrap();
        bytes[7] = 9;
        let error = Frame::decode(&base64::encode(&bytes)).unwrap_err();
        assert!(error.code == ErrorCode::VERSION && error.message.contains("version 9"), "{error}");
    }

    #[test]
    fn addresses_that_mooncake_should_not_see_are_refused() {
        for bad in ["", "h", "h:0", "h:70000", "h:1x", "foo://x:1", ":1", "h h:1"] {
            let endpoint =
                Endpoint { token: [1; 16], instance: [2; 16], name: "n".into(), session: bad.into() };
            assert!(Endpoint::decode(&endpoint.encode()).is_err(), "{bad:?}");
        }
    }
}
