//! Ports for programs that are told where to listen.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

/// Ports that the kernel gives to no connection (Linux gives those from 32768 on) and that Mooncake does not choose by itself (it
/// chooses up to 17000).
const PORTS: std::ops::Range<u32> = 18000..32000;

/// An address of 127.0.0.1 at which no process listens now.
///
/// The kernel must not choose the port: as soon as such a port is closed, any connection of this machine may get it as its own
/// end, even the connection that checks whether the program listens yet. Processes begin at different ports, and a process gets
/// each port once.
///
/// # Panics
/// When all ports are taken.
pub fn unused() -> SocketAddr {
    listener().local_addr().expect("a listener has an address")
}

/// A listener on a port that no other test gets after the close, and that the kernel gives to no connection.
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
