//! Receiving: one thread accepts connections, and each connection has a thread.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::Arc;

use host_plugin_api::{ErrorCode, NOTIFICATION_BYTES, Notification, NotificationKind};

use crate::Shared;

/// First bytes of an endpoint. Another version of the protocol has other ones.
const MAGIC: &[u8; 8] = b"WIRE0002";
/// First byte of a submission.
pub const DATA: u8 = 1;
/// First byte of a deliberate end.
pub const GOODBYE: u8 = 2;
/// The answer to a peer that may write.
pub const WELCOME: u8 = 3;
/// Bytes copied at once. It bounds how long the lock on the memory is held.
pub const BUFFER: usize = 64 << 10;

/// How to reach an instance. The token keeps other programs out of its memory.
#[derive(Clone)]
pub struct Endpoint {
    pub address: SocketAddrV4,
    token: [u8; 16],
}

impl Endpoint {
    const BYTES: usize = MAGIC.len() + 16 + 4 + 2;

    pub fn of(listener: &TcpListener) -> std::io::Result<Self> {
        let mut token = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut token)?;
        match listener.local_addr()? {
            SocketAddr::V4(address) => Ok(Self { address, token }),
            SocketAddr::V6(_) => Err(std::io::Error::other("an IPv6 address")),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let (address, port) = (self.address.ip().octets(), self.address.port().to_le_bytes());
        [&MAGIC[..], &self.token, &address, &port].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (token, rest) = rest.split_at_checked(16)?;
        let (address, port) = rest.split_at_checked(4)?;
        let address: [u8; 4] = address.try_into().ok()?;
        let port = u16::from_le_bytes(port.try_into().ok()?);
        let address = SocketAddrV4::new(Ipv4Addr::from(address), port);
        Some(Self { token: token.try_into().ok()?, address })
    }
}

pub fn accept(shared: &Arc<Shared>, listener: &TcpListener, endpoint: &Endpoint) {
    let mut threads: Vec<std::thread::JoinHandle<()>> = Vec::new();
    for stream in listener.incoming() {
        if shared.queues.closed() {
            break;
        }
        threads.retain(|thread| !thread.is_finished());
        let Ok(stream) = stream else { continue };
        if threads.len() >= crate::MAX_PEERS {
            continue;
        }
        let (shared, endpoint) = (Arc::clone(shared), endpoint.clone());
        let thread = std::thread::Builder::new().name("receive".into());
        // Without a thread the connection is closed, and the peer sees that.
        if let Ok(thread) = thread.spawn(move || serve(&shared, stream, &endpoint)) {
            threads.push(thread);
        }
    }
    // A peer that connected during the shutdown was not cut with the others.
    shared.regions.cut(|_| true);
    for thread in threads {
        let _panicked = thread.join();
    }
}

fn serve(shared: &Shared, mut stream: TcpStream, endpoint: &Endpoint) {
    let Ok(Some(name)) = hello(&mut stream, endpoint) else { return };
    let Ok(clone) = stream.try_clone() else { return };
    let Some(writer) = shared.regions.admit(&name, clone) else { return };
    let welcomed = !shared.queues.closed() && stream.write_all(&[WELCOME]).is_ok();
    let mut buffer = vec![0; BUFFER];
    let on_purpose = welcomed && receive(shared, &mut stream, writer, &name, &mut buffer).is_ok();
    // The peer is dismissed first: after PEER_LOST nothing of it may land. The host gets no PEER_LOST for an end that one of the
    // two sides wanted.
    if shared.regions.dismiss(writer) && !on_purpose {
        shared.queues.notify(notification(NotificationKind::PEER_LOST, &name, &[]));
    }
}

/// The peer's name, if it has the endpoint's token.
fn hello(stream: &mut TcpStream, endpoint: &Endpoint) -> std::io::Result<Option<String>> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(crate::patience(stream.peer_addr()?.ip())))?;
    let mut start = [0; Endpoint::BYTES + 1];
    stream.read_exact(&mut start)?;
    let mut name = vec![0; start[Endpoint::BYTES].into()];
    stream.read_exact(&mut name)?;
    stream.set_read_timeout(None)?;
    let known = start[..Endpoint::BYTES] == endpoint.to_bytes() && name.len() <= 64;
    Ok(String::from_utf8(name).ok().filter(|_| known))
}

/// Lands submissions until the peer says goodbye (`Ok`) or is lost.
fn receive(
    shared: &Shared,
    stream: &mut TcpStream,
    writer: u64,
    name: &str,
    buffer: &mut [u8],
) -> std::io::Result<()> {
    loop {
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        match kind[0] {
            DATA => {}
            GOODBYE => return Ok(()),
            _ => return Err(std::io::Error::other("the peer speaks another protocol")),
        }
        let (writes, length) = (word(stream)?, word(stream)? as usize);
        let mut payload = [0; NOTIFICATION_BYTES];
        stream.read_exact(&mut payload)?;
        let mut status = 0;
        for _ in 0..writes {
            let (region, generation, length) = (word(stream)?, word(stream)?, word(stream)?);
            let mut offset = [0; 8];
            stream.read_exact(&mut offset)?;
            let offset = u64::from_le_bytes(offset);
            // A write lands whole or not at all. In both cases its bytes are read, to get to the next write.
            let fits = shared.regions.holds(region, Some(generation), offset, length);
            let mut at = 0;
            while at < length as usize {
                let piece = &mut buffer[..(length as usize - at).min(BUFFER)];
                stream.read_exact(piece)?;
                // The region is looked up for each piece, because it may be gone by then.
                if !fits || !shared.regions.land(writer, region, generation, offset + at as u64, piece) {
                    status = ErrorCode::INVALID_ARGUMENT.0;
                }
                at += piece.len();
            }
        }
        // All data of the submission has landed: only now may the host get the notification.
        if status == 0 && length > 0 {
            let payload = &payload[..length.min(NOTIFICATION_BYTES)];
            shared.queues.notify(notification(NotificationKind::ARRIVED, name, payload));
        }
        stream.write_all(&status.to_le_bytes())?;
    }
}

fn word(stream: &mut TcpStream) -> std::io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn notification(kind: NotificationKind, name: &str, text: &[u8]) -> Notification {
    let mut made = Notification {
        kind,
        length: text.len() as u32,
        peer_name_length: name.len() as u32,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    };
    made.payload[..text.len()].copy_from_slice(text);
    made.peer_name[..name.len()].copy_from_slice(name.as_bytes());
    made
}
