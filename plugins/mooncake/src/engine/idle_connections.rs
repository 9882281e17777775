//! Finds idle connections to an engine and shuts them.
//!
//! On the port of its messages Mooncake takes one connection after the other and reads each to its end, for up to a
//! minute. An idle connection (of a scan of ports, of a peer that was stopped) delays all messages to the engine for
//! that long, and the engine's end. A message takes milliseconds, and this plugin repeats its own when one gets lost.
//! So idle connections on this port are shut.

use std::collections::{BTreeSet, HashMap};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::sockopt::socket_acceptconn;
use rustix::net::{getpeername, getsockname};

/// How long a connection may stay open.
pub const PATIENCE: Duration = Duration::from_secs(1);

/// The port in what Mooncake calls a session.
pub fn port(session: &str) -> Option<u16> {
    session.rsplit_once(':').and_then(|(_, port)| port.parse().ok())
}

/// The ports on which this process listens.
pub fn listening() -> BTreeSet<u16> {
    let port = |number| {
        // SAFETY: as in `connection`. The result is a hint: its ports are probed, and nothing else is done with them.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        let listens = socket_acceptconn(borrowed).is_ok_and(|listens| listens);
        let local = getsockname(borrowed).ok().filter(|_| listens)?;
        Some(SocketAddr::try_from(local).ok()?.port())
    };
    numbers().filter_map(port).collect()
}

/// The descriptors of this process.
fn numbers() -> impl Iterator<Item = RawFd> {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

/// A connection of this process, through a duplicated descriptor, whose number no other file gets meanwhile.
struct Connection {
    stream: TcpStream,
    port: u16,
    peer: SocketAddr,
}

/// The accepted connections of these ports.
fn connections(ports: &[u16]) -> Vec<Connection> {
    those(|local, _| ports.contains(&local.port()))
}

/// The connections of this process whose addresses are wanted.
fn those(wanted: impl Fn(SocketAddr, SocketAddr) -> bool) -> Vec<Connection> {
    numbers().filter_map(|number| connection(number, &wanted)).collect()
}

fn connection(number: RawFd, wanted: &impl Fn(SocketAddr, SocketAddr) -> bool) -> Option<Connection> {
    // SAFETY: the descriptor was open a moment ago. Another thread may have closed it since, which is an error here, or
    // may have opened something else with its number. Therefore the addresses of the duplicate are checked again.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let local = SocketAddr::try_from(getsockname(borrowed).ok()?).ok()?;
    // A socket that listens has no peer.
    let peer = SocketAddr::try_from(getpeername(borrowed).ok()??).ok()?;
    if !wanted(local, peer) {
        return None;
    }
    let kept: OwnedFd = fcntl_dupfd_cloexec(borrowed, 0).ok()?;
    let stream = TcpStream::from(kept);
    let (local, peer) = (stream.local_addr().ok()?, stream.peer_addr().ok()?);
    wanted(local, peer).then_some(Connection { stream, port: local.port(), peer })
}

/// Shuts all connections of a port. Returns how many.
pub fn shut(port: u16) -> usize {
    connections(&[port]).iter().filter(|one| one.stream.shutdown(Shutdown::Both).is_ok()).count()
}

/// Shuts all connections of this process to these addresses. Returns how many.
pub fn hang_up(peers: &[SocketAddr]) -> usize {
    those(|_, peer| peers.contains(&peer))
        .iter()
        .filter(|one| one.stream.shutdown(Shutdown::Both).is_ok())
        .count()
}

/// Remembers which connections were there when it last looked.
#[derive(Default)]
pub struct Watch(HashMap<(u16, SocketAddr), Instant>);

impl Watch {
    /// Shuts the connections of these ports that it has seen for `PATIENCE`. Returns how many.
    pub fn look(&mut self, ports: &[u16], now: Instant) -> usize {
        let there = connections(ports);
        self.0.retain(|key, _| there.iter().any(|one| (one.port, one.peer) == *key));
        let too_long = |one: &&Connection| {
            let since = self.0.entry((one.port, one.peer)).or_insert(now);
            now.saturating_duration_since(*since) >= PATIENCE
        };
        there.iter().filter(too_long).filter(|one| one.stream.shutdown(Shutdown::Both).is_ok()).count()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_is_idle_too_long_is_shut_and_nothing_else() {
        let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (listener, other) = (listen(), listen());
        let ports = [&listener, &other].map(|listener| listener.local_addr().unwrap().port());
        let connect = |listener: &TcpListener| {
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (client, listener.accept().unwrap().0)
        };
        let (mut idle, _accepted) = connect(&listener);
        let (elsewhere, _other_accepted) = connect(&other);
        elsewhere.set_nonblocking(true).unwrap();
        let (mut watch, start) = (Watch::default(), Instant::now());
        assert_eq!(watch.look(&ports[..1], start), 0);
        let (late, _late_accepted) = connect(&listener);
        late.set_nonblocking(true).unwrap();
        assert_eq!(watch.look(&ports[..1], start + PATIENCE / 2), 0);
        assert_eq!(watch.look(&ports[..1], start + PATIENCE), 1);
        assert_eq!(idle.read(&mut [0]).unwrap(), 0);
        for mut open in [&late, &elsewhere] {
            assert_eq!(open.read(&mut [0]).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        }
        // The listener takes new connections.
        connect(&listener);
        assert!(ports.iter().all(|port| listening().contains(port)));
        assert!(!listening().contains(&late.local_addr().unwrap().port()));
        assert_eq!(shut(ports[1]), 1);
    }

    #[test]
    fn the_port_is_what_follows_the_last_colon() {
        assert_eq!(port("127.0.0.1:15001"), Some(15001));
        assert_eq!(port("[::1]:15001"), Some(15001));
        assert_eq!((port("h"), port("h:x"), port("h:70000")), (None, None, None));
    }
}
