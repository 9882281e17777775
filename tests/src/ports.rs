//! Ports for programs that are told where to listen.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports that no kernel gives to connections (Linux: from 32768 on) and Mooncake does not draw its own from (up to 17000).
const PORTS: std::ops::Range<u32> = 18000..32000;

/// An address of 127.0.0.1 at which no process listens now.
///
/// A port that the kernel has chosen is no such thing: as soon as it is closed, any connection of this machine may get it as its own
/// end, even the one that looks whether the program listens yet. Processes begin at different ports, and a process gets each once.
///
/// # Panics
/// When all ports are taken.
pub fn unused() -> SocketAddr {
    listener().local_addr().expect("a listener has an address")
}

/// A listener whose port no other test gets when it is closed, nor the kernel gives to a connection.
///
/// # Panics
/// When all ports are taken.
pub fn listener() -> TcpListener {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // A prime, so that processes started one after the other begin far apart.
    let start = std::process::id().wrapping_mul(4099);
    let ports = PORTS.end - PORTS.start;
    for _ in 0..ports {
        let turn = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = PORTS.start + start.wrapping_add(turn) % ports;
        let address =
            SocketAddr::from((Ipv4Addr::LOCALHOST, u16::try_from(port).expect("ports are 16 bits")));
        if let Ok(listener) = TcpListener::bind(address) {
            return listener;
        }
    }
    panic!("every port of {PORTS:?} is taken");
}
