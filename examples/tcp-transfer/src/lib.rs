//! A transfer backend over TCP. The transfer kit brings queue, memory, peers, threads and fences.
//!
//! To adapt it to your network, change [`sender`] and [`receiver`], the two ends of a connection.

mod endpoint;
mod receiver;
mod sender;

use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use host_plugin_api::{Error, ErrorCode, Opening, Result, TransferLimits};
use host_transfer_kit::threaded::{Connection, Network, Threaded};
use host_transfer_kit::{Frontend, random};

use endpoint::Endpoint;

/// The endpoint of an instance, and the thread that accepts connections.
pub struct Tcp {
    endpoint: Endpoint,
    acceptor: Mutex<Option<JoinHandle<()>>>,
}

/// Opens an instance. `opening.config` is the user's `[plugin.NAME]` table as TOML. Without a key `address` the instance is reached
/// on this machine alone. To add keys, declare each in plugin.toml, and read the text with the crate `toml`.
///
/// # Errors
/// `CONFIG` for an invalid address, `IO` when the instance cannot listen, `INVALID_ARGUMENT` for an invalid name.
pub fn open(opening: &Opening) -> Result<Frontend<Threaded<Tcp>>> {
    let io = |error: std::io::Error| Error::new(ErrorCode::IO, format!("cannot listen: {error}"));
    let listener = TcpListener::bind((address(&opening.config)?, 0)).map_err(io)?;
    let endpoint = Endpoint { token: random()?, address: listener.local_addr().map_err(io)? };
    // Most writes in one submission, and most submissions that were accepted and not fetched.
    let limits = TransferLimits::new(1024, 64);
    let threaded = Threaded::open(opening, limits, |station| {
        let token = endpoint.token;
        let acceptor = station.thread("accept", move |own| receiver::accept(own, &listener, token))?;
        Ok(Tcp { endpoint, acceptor: Mutex::new(Some(acceptor)) })
    })?;
    Ok(Frontend::new(threaded))
}

// The plugin's entry: writes plugin.toml into the file and exports the factory.
host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

/// The key `address`. One key needs no parser. With more keys, take `toml`.
fn address(config: &str) -> Result<IpAddr> {
    let Some(value) = config.lines().find_map(|line| line.trim().strip_prefix("address")) else {
        return Ok(Ipv4Addr::LOCALHOST.into());
    };
    let value = value.trim_start().trim_start_matches('=').trim().trim_matches(['"', '\'']);
    value.parse().map_err(|error| Error::new(ErrorCode::CONFIG, format!("address {value:?}: {error}")))
}

impl Network for Tcp {
    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(self.endpoint.to_bytes())
    }

    fn connect(&self, own_name: &str, peer_name: &str, endpoint: &[u8]) -> Result<Connection> {
        let other = || Error::new(ErrorCode::VERSION, "the endpoint is of another backend or version");
        let endpoint = Endpoint::from_bytes(endpoint).ok_or_else(other)?;
        sender::connect(own_name, &endpoint).map_err(|error| {
            let text = format!("{peer_name} at {} does not answer: {error}", endpoint.address);
            Error::new(ErrorCode::PEER_LOST, text)
        })
    }

    fn stop(&self) -> bool {
        // The thread checks after each connection whether the instance ends. A connection from here wakes the thread up.
        drop(TcpStream::connect(self.endpoint.address));
        let acceptor = self.acceptor.lock().unwrap_or_else(PoisonError::into_inner).take();
        acceptor.is_none_or(|acceptor| acceptor.join().is_ok())
    }
}
