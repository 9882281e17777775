//! The bytes that a peer needs to connect, and the first bytes that both ends of a connection send.

use std::net::SocketAddr;
use std::time::Duration;

use host_transfer_kit::Random;

/// The first bytes of an endpoint. Another version of the protocol has other first bytes.
const MAGIC: &[u8; 8] = b"WIRE0003";
/// First byte of a submission.
pub const DATA: u8 = 1;
/// The sender ends the connection on purpose.
pub const GOODBYE: u8 = 2;
/// The answer to a peer that may write.
pub const WELCOME: u8 = 3;
/// Bytes copied at once.
pub const BUFFER: usize = 64 << 10;

/// Longest wait for a peer at the beginning. On this machine a process is slow only when it gets no processor.
pub fn patience(peer: SocketAddr) -> Duration {
    Duration::from_secs(if peer.ip().is_loopback() { 60 } else { 2 })
}

/// How to reach an instance. The token keeps other programs out of its memory.
pub struct Endpoint {
    pub token: Random,
    pub address: SocketAddr,
}

impl Endpoint {
    pub fn to_bytes(&self) -> Vec<u8> {
        [&MAGIC[..], &self.token, self.address.to_string().as_bytes()].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (token, address) = bytes.strip_prefix(MAGIC)?.split_first_chunk()?;
        Some(Self { token: *token, address: std::str::from_utf8(address).ok()?.parse().ok()? })
    }
}
