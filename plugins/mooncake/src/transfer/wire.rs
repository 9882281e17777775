//! Frames between the fronts of two instances.
//!
//! They travel as texts, because Mooncake's messages end at a zero byte.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use host_plugin_api::{Error, ErrorCode, NOTIFICATION_BYTES, Result};
use host_transfer_kit::Random;
use host_transfer_kit::wire::{Format, Magic, Message, Reader, put};

/// How this plugin writes its bytes. Addresses are those of engines.
pub const FORMAT: Format = Format {
    magic: Magic { bytes: *b"hostmck\x01", plugin: "mooncake" },
    address_bytes: 300,
    check_address,
    devices: false,
    kinds: [1, 2, 3, 5, 6, 7, 8],
};

const ARRIVED: u8 = 4;
const PING: u8 = 9;
const HEARD: u8 = 10;
const STRANGER: u8 = 11;

/// An address is a host and a port, with nothing in it that Mooncake could take for something else.
fn check_address(address: &[u8]) -> Option<&'static str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
    let text = std::str::from_utf8(address).ok();
    let good = text.and_then(|text| text.rsplit_once(':')).is_some_and(|(host, port)| {
        !host.is_empty() && host.chars().all(plain) && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    (!good).then_some("its address is not a host and a port")
}

/// An address that was checked, as Mooncake takes it.
pub fn session(address: &[u8]) -> String {
    String::from_utf8_lossy(address).into_owned()
}

/// A message from one front to another, with the numbers that make a stream of messages reliable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The sender.
    pub from: Random,
    /// The receiver that the message is for: another instance may have the address by now.
    pub to: Random,
    /// Address of the sender's front.
    pub session: String,
    /// The sender's stream to this instance. A later one replaces an earlier one.
    pub stream: u64,
    /// The message's number in the stream, from 1 on. 0 for a message that is not repeated until it is acknowledged.
    pub number: u64,
    /// The other direction's stream, and its last message that came in order.
    pub heard: (u64, u64),
    /// The connection that it is about, as the side that connected numbers it. 0 when it is about none.
    pub connection: u64,
    pub body: Body,
}

/// See the variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// About a connection.
    Connection(Message),
    /// The data of this submission is in your memory.
    Arrived { payload: Vec<u8> },
    /// Are you there? The acknowledgement is the answer.
    Ping,
    /// Carries nothing but the frame's acknowledgement of the other direction.
    Heard,
    /// I know nothing of you, or am not the instance that you mean.
    Stranger,
}

impl Frame {
    /// Encodes the frame as a text.
    pub fn encode(&self) -> String {
        let mut to = FORMAT.magic.bytes.to_vec();
        to.extend(self.from.iter().chain(&self.to));
        put(&mut to, self.session.as_bytes());
        for number in [self.stream, self.number, self.heard.0, self.heard.1, self.connection] {
            to.extend(number.to_le_bytes());
        }
        match &self.body {
            Body::Connection(message) => message.encode(&FORMAT, &mut to),
            Body::Arrived { payload } => {
                to.push(ARRIVED);
                put(&mut to, payload);
            }
            Body::Ping => to.push(PING),
            Body::Heard => to.push(HEARD),
            Body::Stranger => to.push(STRANGER),
        }
        BASE64_STANDARD.encode(to)
    }

    pub fn decode(text: &str) -> Result<Self> {
        let damaged = || Error::new(ErrorCode::INVALID_ARGUMENT, "a message is damaged: it is not base64");
        let bytes =
            BASE64_STANDARD.decode(text).ok().filter(|bytes| !bytes.is_empty()).ok_or_else(damaged)?;
        let mut at = Reader::new(&bytes, &FORMAT.magic, "a message")?;
        let (from, to, session) = (at.array()?, at.array()?, session(&at.address(&FORMAT)?));
        let (stream, number) = (at.number()?, at.number()?);
        let (heard, connection) = ((at.number()?, at.number()?), at.number()?);
        let [kind] = at.array()?;
        let body = match (Message::decode(kind, &FORMAT, &mut at)?, kind) {
            (Some(message), _) => Body::Connection(message),
            (None, ARRIVED) => Body::Arrived { payload: at.piece(NOTIFICATION_BYTES)?.to_vec() },
            (None, PING) => Body::Ping,
            (None, HEARD) => Body::Heard,
            (None, STRANGER) => Body::Stranger,
            (None, other) => return Err(at.wrong(&format!("kind {other} is unknown"))),
        };
        at.end()?;
        Ok(Self { from, to, session, stream, number, heard, connection, body })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_transfer_kit::wire::Endpoint;

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
        for body in [
            Body::Connection(Message::Hello { token: [4; 16], name: "n".repeat(64) }),
            Body::Connection(Message::Welcome { address: b"h:1".to_vec(), regions: Vec::new() }),
            Body::Arrived { payload: vec![0; 48] },
            Body::Ping,
            Body::Heard,
            Body::Stranger,
        ] {
            let frame = frame(body);
            let text = frame.encode();
            assert_eq!(Frame::decode(&text).unwrap(), frame);
            assert!((0..text.len()).all(|cut| Frame::decode(&text[..cut]).is_err()), "{frame:?}");
        }
        let mut bytes = BASE64_STANDARD.decode(frame(Body::Ping).encode()).unwrap();
        bytes[7] = 9;
        let error = Frame::decode(&BASE64_STANDARD.encode(&bytes)).unwrap_err();
        assert!(error.code == ErrorCode::VERSION && error.message.contains("version 9"), "{error}");
    }

    /// A peer may be of an earlier build.
    #[test]
    fn the_bytes_are_those_of_earlier_versions() {
        let head = {
            let numbers = [3u64, 4, 5, 6, 7].map(u64::to_le_bytes).concat();
            let session = [&[15, 0, 0, 0][..], b"127.0.0.1:15001"].concat();
            [&b"hostmck\x01"[..], &[9; 16], &[8; 16], &session, &numbers].concat()
        };
        for (message, kind) in
            [(Message::Cut, 5), (Message::CutDone, 6), (Message::Closed, 7), (Message::Bye, 8)]
        {
            let bytes = BASE64_STANDARD.decode(frame(Body::Connection(message)).encode()).unwrap();
            assert_eq!(bytes, [&head[..], &[kind]].concat());
        }
        let bytes = BASE64_STANDARD.decode(frame(Body::Arrived { payload: vec![1, 2] }).encode()).unwrap();
        assert_eq!(bytes, [&head[..], &[4, 2, 0, 0, 0, 1, 2]].concat());
    }

    #[test]
    fn a_message_is_base64_with_padding_and_every_other_text_is_refused() {
        let text = frame(Body::Ping).encode();
        assert_eq!(
            text,
            "aG9zdG1jawEJCQkJCQkJCQkJCQkJCQkJCAgICAgICAgICAgICAgICA8AAAAxMjcuMC4wLjE6MTUwMDEDAAAAAAAAAAQAAAAAAAAABQ\
             AAAAAAAAAGAAAAAAAAAAcAAAAAAAAACQ=="
        );
        let unpadded = text.trim_end_matches('=');
        for bad in ["", "Zg", "Zg=", "Z===", "====", "Zg==Zg==", "Zm9\u{e4}", "Zm9-", unpadded] {
            let error = Frame::decode(bad).unwrap_err();
            assert_eq!(error.code, ErrorCode::INVALID_ARGUMENT, "{bad:?}: {error}");
            assert!(error.message.contains("it is not base64"), "{bad:?}: {error}");
        }
        // The standard's alphabet, and not the one for addresses.
        let all = frame(Body::Arrived { payload: vec![0xfb; 6] });
        let text = all.encode();
        assert!(text.contains('+') && text.contains('/'), "{text}");
        assert_eq!(Frame::decode(&text).unwrap(), all);
    }

    #[test]
    fn addresses_that_mooncake_should_not_see_are_refused() {
        for bad in ["", "h", "h:0", "h:70000", "h:1x", "foo://x:1", ":1", "h h:1"] {
            let (token, instance, address) = ([1; 16], [2; 16], bad.into());
            let endpoint = Endpoint { token, instance, name: "n".into(), address };
            assert!(Endpoint::decode(&endpoint.encode(&FORMAT), &FORMAT).is_err(), "{bad:?}");
        }
    }
}
