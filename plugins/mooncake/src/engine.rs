//! Mooncake's transfer engine, whichever way it is reached. What is above knows only this.

pub mod c;
pub mod find;
pub mod idle_connections;
pub mod python;

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use host_transfer_kit::RegionDescriptor;

/// Between two probes of an engine that ends.
const PROBE: Duration = Duration::from_millis(2);
/// How long to probe an engine's port of messages in vain before the connections before ours are shut, and between two times,
pub const VAIN: Duration = Duration::from_millis(200);
/// and all ports of something that has connections of others', which may be at work.
pub const VAIN_AMONG_OTHERS: Duration = Duration::from_secs(3);

/// Memory of ours that an engine is told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub length: u64,
}

impl Range {
    /// All of a region.
    pub fn of(region: &RegionDescriptor) -> Self {
        Self { address: region.address, length: region.length }
    }
}

/// One write, as an engine takes it: bytes that follow each other on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Address here.
    pub from: u64,
    /// Address at the peer.
    pub to: u64,
    /// Bytes.
    pub length: u64,
}

/// A write or a group of them that an engine works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Mooncake's batch.
    pub batch: u64,
    /// Runs in it.
    pub runs: u32,
    /// Of which so many, from the first on, are done.
    pub ended: u32,
}

/// How a ticket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Mooncake may still read our memory, or write the peer's.
    Running,
    /// Everything is in the peer's memory.
    Done,
    /// Something failed. Others may go on until the engine ends.
    Failed,
}

/// Why a message could not be given to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undelivered {
    /// No process listens there.
    Refused,
    /// Something else, which may pass.
    Other(String),
}

/// One of Mooncake's engines: its sockets, its threads, its list of registered memory. Dropping it ends all of them, which
/// may take a moment. From then on nothing of its memory is read or written by it.
///
/// Any thread may call any method. Those that talk to peers may block for seconds.
pub trait Engine: Send + Sync {
    /// Where other engines find this one: host and port.
    fn session(&self) -> &str;

    /// Lets peers write here, and lets us write from here.
    ///
    /// # Errors
    /// What Mooncake answered.
    fn register(&self, ranges: &[Range]) -> Result<(), String>;

    /// Takes memory back. Writes that have begun go on.
    ///
    /// # Errors
    /// What Mooncake answered.
    fn unregister(&self, ranges: &[Range]) -> Result<(), String>;

    /// Meets another engine. The answer names it in submissions.
    ///
    /// # Errors
    /// When it cannot be reached.
    fn open(&self, session: &str) -> Result<Target, String>;

    /// Starts writes to another engine. Adds a ticket for each group that was started.
    ///
    /// # Errors
    /// When something was not started. What was started is among the tickets.
    fn submit(&self, to: &Target, runs: &[Run], tickets: &mut Vec<Ticket>) -> Result<(), String>;

    /// How a ticket stands. Not to be polled again after the end.
    fn poll(&self, ticket: &mut Ticket) -> State;

    /// Gives a text to another engine, which keeps it until its messages are taken.
    ///
    /// `look` makes sure first that a process listens there, where Mooncake would not say. That is as much work as the message
    /// itself.
    ///
    /// # Errors
    /// When it was certainly not delivered. No error does not say that it was.
    fn notify(&self, session: &str, text: &str, look: bool) -> Result<(), Undelivered>;

    /// The texts that came.
    fn messages(&self) -> Vec<String>;
}

/// Another engine, as an engine knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Host and port.
    pub session: String,
    /// Mooncake's number for it, where it has one.
    pub segment: i32,
}

/// A Mooncake that was found and loaded.
pub trait Driver: Send + Sync {
    /// Starts an engine.
    ///
    /// # Errors
    /// What Mooncake answered.
    fn engine(&self) -> Result<Box<dyn Engine>, String>;

    /// What it is, for people.
    fn describe(&self) -> String;
}

/// Name under which our messages travel. Mooncake's users share its mailbox.
pub const MESSAGE_NAME: &str = "host.mooncake";

/// How long the look whether a process listens may take.
const LOOK: Duration = Duration::from_secs(5);

/// Whether a process listens there.
///
/// What Mooncake answers does not tell a peer that is gone from one that is slow, nor from a process that has no descriptor left
/// to look with.
///
/// # Errors
/// `Refused` only when the peer's machine says that no process listens.
pub fn look_for(session: &str) -> Result<(), Undelivered> {
    let other = |error: std::io::Error| Undelivered::Other(format!("{session}: {error}"));
    let address = session.to_socket_addrs().map_err(other)?.next();
    let Some(address) = address else { return Err(Undelivered::Other(format!("{session} has no address"))) };
    match TcpStream::connect_timeout(&address, LOOK) {
        Ok(_there) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Err(Undelivered::Refused),
        Err(error) => Err(other(error)),
    }
}

/// Ends an engine while its ports are probed: its listener looks once a second whether it should end, and otherwise only when
/// a connection comes. That is 10 ms instead of half a second, during which the wheel holds Python's lock. An idle connection
/// would keep it for a minute, and is shut.
pub fn end_quickly(ports: &[u16], vain: Duration, end: impl FnOnce()) {
    let ended = AtomicBool::new(false);
    // It listens on all addresses of this machine. With many before it a probe is not taken, either.
    let is_shut = |port: &&u16| {
        let probed = TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, **port)), PROBE);
        probed.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    };
    std::thread::scope(|scope| {
        let probe = || {
            let mut patience = Instant::now() + vain;
            while !ended.load(Ordering::SeqCst) && ports.iter().filter(is_shut).count() < ports.len() {
                if Instant::now() >= patience {
                    for port in ports {
                        idle_connections::shut(*port);
                    }
                    patience = Instant::now() + vain;
                }
                std::thread::sleep(PROBE);
            }
        };
        // Without a thread it takes as long as it takes.
        let _probing =
            std::thread::Builder::new().name("mooncake-probe".to_owned()).spawn_scoped(scope, probe).is_ok();
        end();
        ended.store(true, Ordering::SeqCst);
    });
}
