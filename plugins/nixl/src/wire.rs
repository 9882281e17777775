//! Messages between the fronts of two instances.

use std::net::SocketAddr;

use host_plugin_api::Result;
use host_transfer_kit::Random;
use host_transfer_kit::wire::{Format, Magic, Message, Reader, put};

use crate::presence::MAX_ADDRESSES;

/// How this plugin writes its bytes. Addresses are metadata of agents.
pub const FORMAT: Format = Format {
    magic: Magic { bytes: *b"hostnxl\x02", plugin: "nixl" },
    address_bytes: 1 << 20,
    check_address: |_| None,
    devices: true,
    kinds: [1, 2, 3, 4, 5, 6, 7],
};

const PING: u8 = 8;
const PONG: u8 = 9;
/// Earlier builds drop it.
const INTRODUCTION: u8 = 10;
/// Longest address as text, in bytes.
const ADDRESS_BYTES: usize = 64;

/// A message from one front to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The sender.
    pub instance: Random,
    /// The connection that it is about, as the side that connected numbers it. 0 when it is about none.
    pub connection: u64,
    pub body: Body,
}

/// See the variants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// About a connection. With a hello goes the metadata of the sender's front, for the answer.
    Connection { message: Message, front: Vec<u8> },
    /// Are you there? Sent so that a broken connection shows.
    Ping,
    /// Yes.
    Pong,
    /// This is how I can be reached: the metadata of my front, and where I answer that I live. Sent before a message that
    /// is no use without it.
    Introduction { front: Vec<u8>, addresses: Vec<SocketAddr> },
}

impl Frame {
    pub fn encode(&self) -> Vec<u8> {
        let mut to = FORMAT.magic.bytes.to_vec();
        to.extend(self.instance);
        to.extend(self.connection.to_le_bytes());
        match &self.body {
            Body::Connection { message, front } => {
                message.encode(&FORMAT, &mut to);
                if matches!(message, Message::Hello { .. }) {
                    put(&mut to, front);
                }
            }
            Body::Ping => to.push(PING),
            Body::Pong => to.push(PONG),
            Body::Introduction { front, addresses } => {
                to.push(INTRODUCTION);
                put(&mut to, front);
                to.push(addresses.len().min(MAX_ADDRESSES) as u8);
                for address in addresses.iter().take(MAX_ADDRESSES) {
                    put(&mut to, address.to_string().as_bytes());
                }
            }
        }
        to
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut at = Reader::new(bytes, &FORMAT.magic, "a message")?;
        let (instance, connection) = (at.array()?, at.number()?);
        let [kind] = at.array()?;
        let body = match Message::decode(kind, &FORMAT, &mut at)? {
            Some(message) => {
                let hello = matches!(message, Message::Hello { .. });
                let front = if hello { at.address(&FORMAT)? } else { Vec::new() };
                Body::Connection { message, front }
            }
            None if kind == PING => Body::Ping,
            None if kind == PONG => Body::Pong,
            None if kind == INTRODUCTION => {
                let front = at.address(&FORMAT)?;
                let [count] = at.array()?;
                if usize::from(count) > MAX_ADDRESSES {
                    return Err(at.wrong("too many addresses"));
                }
                let addresses = (0..count).map(|_| address(&mut at)).collect::<Result<_>>()?;
                Body::Introduction { front, addresses }
            }
            None => return Err(at.wrong(&format!("kind {kind} is unknown"))),
        };
        at.end()?;
        Ok(Self { instance, connection, body })
    }
}

/// Reads an address.
fn address(at: &mut Reader<'_>) -> Result<SocketAddr> {
    let text = at.piece(ADDRESS_BYTES)?;
    let address = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    address.ok_or_else(|| at.wrong("an address that is none"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_is_decoded_and_every_cut_is_an_error() {
        let hello = Message::Hello { token: [4; 16], name: "n".repeat(64) };
        for body in [
            Body::Connection { message: hello, front: vec![0; 9] },
            Body::Connection { message: Message::Cut, front: Vec::new() },
            Body::Ping,
            Body::Pong,
            Body::Introduction { front: vec![5; 3], addresses: Vec::new() },
            Body::Introduction {
                front: Vec::new(),
                addresses: vec!["127.0.0.1:9".parse().unwrap(), "[fd00::1]:65535".parse().unwrap()],
            },
        ] {
            let frame = Frame { instance: [9; 16], connection: 77, body };
            let bytes = frame.encode();
            assert_eq!(Frame::decode(&bytes).unwrap(), frame);
            assert!((0..bytes.len()).all(|cut| Frame::decode(&bytes[..cut]).is_err()), "{frame:?}");
        }
    }

    /// A peer may be of an earlier build.
    #[test]
    fn the_bytes_are_those_of_earlier_versions() {
        let frame = |body| Frame { instance: [9; 16], connection: 0x4d, body };
        let head = [&b"hostnxl\x02"[..], &[9; 16], &[0x4d, 0, 0, 0, 0, 0, 0, 0]].concat();
        let message = Message::Hello { token: [4; 16], name: "ab".into() };
        let bytes = frame(Body::Connection { message, front: vec![7] }).encode();
        let hello = [&[1][..], &[4; 16], &[2, 0, 0, 0], b"ab", &[1, 0, 0, 0, 7]].concat();
        assert_eq!(bytes, [&head[..], &hello].concat());
        for (message, kind) in
            [(Message::Cut, 4), (Message::CutDone, 5), (Message::Closed, 6), (Message::Bye, 7)]
        {
            let bytes = frame(Body::Connection { message, front: Vec::new() }).encode();
            assert_eq!(bytes, [&head[..], &[kind]].concat());
        }
        assert_eq!(frame(Body::Pong).encode(), [&head[..], &[9]].concat());
    }
}
