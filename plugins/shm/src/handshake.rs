//! The handshake, from both sides. [`Version`] describes its two versions.
//!
//! A sender says hello in the newest version. A receiver that does not know this version refuses in a version of its
//! own. The sender then dials again and says hello in that version.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use host_plugin_api::{Error, ErrorCode, Level, Result, log};
use host_transfer_kit::locked;
use rustix::io::Errno;

use crate::control::{ControlPage, DevicePage};
use crate::inbound::Inbound;
use crate::mapping::{SharedPage, Writers};
use crate::outbound::Welcomed;
use crate::pages::Pages;
use crate::shared::{Core, MAX_PEERS};
use crate::socket;
use crate::wire::{Endpoint, Hello, Version, Welcome, decode_welcome, encode_refusal, encode_welcome};

/// What a receiver of version 1 cannot do, for [`too_old`].
pub const SENT: &str = "be sent what is in the memory of a GPU";

/// Connects to the instance that made an endpoint, and that the host calls `name`.
pub fn say_hello(core: &Core, name: &str, endpoint: &Endpoint) -> Result<Welcomed> {
    let mut version = Version::NEWEST;
    loop {
        let (socket, answer, fds) = dial(core, name, endpoint, version)?;
        match decode_welcome(&answer, version)? {
            Welcome::Regions(regions) => return Ok(Welcomed { version, socket, regions, fds }),
            Welcome::Refused { version: known, error } if is_older(&error, known, version) => {
                if !core.regions.devices().is_empty() {
                    return Err(too_old(name, SENT));
                }
                log!(
                    Level::INFO,
                    "{name} speaks version 1 of shm's handshake, its shm plugin is older than this one"
                );
                version = known;
            }
            Welcome::Refused { error, .. } => return Err(error),
        }
    }
}

/// Whether a receiver refused because it knows only versions before the one that it was asked in.
fn is_older(error: &Error, known: Version, asked: Version) -> bool {
    error.code == ErrorCode::VERSION && known < asked
}

fn dial(
    core: &Core,
    name: &str,
    endpoint: &Endpoint,
    version: Version,
) -> Result<(OwnedFd, Vec<u8>, Vec<OwnedFd>)> {
    let own = &core.endpoint;
    let hello = Hello { version, token: endpoint.token, instance: own.instance, name: own.name.clone() };
    let process = core.process.iter().filter(|_| version == Version::Two);
    let process: Vec<_> = process.map(AsFd::as_fd).collect();
    let timeout = core.config.connect_timeout();
    socket::dial(&endpoint.socket, &hello.encode(), &process, timeout).map_err(|e| match e {
        Errno::CONNREFUSED | Errno::CONNRESET | Errno::PIPE | Errno::AGAIN => {
            let text = format!("no process answers for {name} on this machine: {e}");
            Error::new(ErrorCode::PEER_LOST, text)
        }
        e => Error::new(ErrorCode::IO, format!("cannot connect to {name}: {e}")),
    })
}

/// The error for a peer that speaks version 1 alone, so that it cannot do `what`.
pub fn too_old(name: &str, what: &str) -> Error {
    let text = format!("the shm plugin of {name} is older than this one and cannot {what}: update it");
    Error::new(ErrorCode::VERSION, text)
}

/// Answers a hello. An error in it harms only this connection.
pub fn greet(core: &Core, stranger: &OwnedFd) {
    let Ok((bytes, fds)) = socket::receive(stranger) else { return };
    let process = fds.into_iter().next();
    if let Err(refusal) = Hello::decode(&bytes).and_then(|hello| admit(core, stranger, process, hello)) {
        log!(Level::WARN, "a connection was refused: {refusal}");
        let version = Version::of(&bytes).unwrap_or(Version::NEWEST);
        // A failure is ignored: the connection is closed after this, which tells the peer the same.
        let _undelivered = socket::send(stranger, &encode_refusal(version, &refusal), &[]);
    }
}

fn admit(core: &Core, stranger: &OwnedFd, process: Option<OwnedFd>, hello: Hello) -> Result<()> {
    let Hello { version, token, instance, name } = hello;
    if token != core.endpoint.token {
        return Err(Error::new(ErrorCode::PEER_LOST, "this endpoint is of an instance that is gone"));
    }
    let io = |e| Error::new(ErrorCode::IO, format!("cannot set up the connection: {e}"));
    let (control, control_fd) =
        SharedPage::<ControlPage>::create("host-shm-control", Writers::All).map_err(io)?;
    let create_device_page = || SharedPage::<DevicePage>::create("host-shm-device", Writers::All);
    let device = (version == Version::Two).then(create_device_page).transpose().map_err(io)?;
    let (device, device_fd) = device.unzip();
    let socket = stranger.try_clone().map_err(|e| Error::new(ErrorCode::IO, e.to_string()))?;
    let peer = Arc::new(Inbound::new(instance, name, (socket, process), Pages { control, device }));
    {
        let mut inbound = locked(&core.inbound);
        if inbound.len() >= MAX_PEERS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_PEERS} peers are connected")));
        }
        // The peer is in the list before it gets the means to write, so that no fence misses it.
        inbound.push(peer.clone());
    }
    let sent = core.regions.offer(|descriptors, live, regions| {
        let welcome = encode_welcome(version, descriptors);
        let welcome = welcome.ok_or_else(|| too_old(&peer.name, "write to the memory of a GPU"))?;
        let mut fds = vec![control_fd.as_fd(), live, core.instance.event.as_fd()];
        fds.extend(device_fd.iter().map(AsFd::as_fd));
        fds.extend_from_slice(regions);
        socket::send(stranger, &welcome, &fds).map_err(io)
    });
    if sent.is_err() {
        peer.finish();
    }
    sent
}
