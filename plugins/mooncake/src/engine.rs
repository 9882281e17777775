//! Mooncake's transfer engine, behind one interface for both ways to reach it. The rest of the plugin knows only this.

pub mod c;
pub mod find;
pub mod idle_connections;
pub mod python;

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use host_transfer_kit::RegionDescriptor;

/// Time between two probes of an engine that ends.
const PROBE: Duration = Duration::from_millis(2);
/// How long the message port of an engine is probed in vain before all its connections are shut, and the time until the next try.
pub const VAIN: Duration = Duration::from_millis(200);
/// The same for all ports of a component that has connections of other users, which may be in use.
pub const VAIN_AMONG_OTHERS: Duration = Duration::from_secs(3);

/// Memory of this process that is registered with an engine.
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
    /// How many of the runs, from the first on, are done.
    pub ended: u32,
}

/// The state of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Mooncake may still read this process's memory, or write the peer's.
    Running,
    /// Everything is in the peer's memory.
    Done,
    /// A run failed. Other runs may go on until the engine ends.
    Failed,
}

/// Why a message could not be given to a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undelivered {
    /// No process listens there.
    Refused,
    /// Another failure, which may pass.
    Other(String),
}

/// One of Mooncake's engines: its sockets, its threads, its list of registered memory. Dropping it ends all of them,
/// which may take a moment. From then on the engine reads and writes none of its memory.
///
/// Any thread may call any method. Those that talk to peers may block for seconds.
pub trait Engine: Send + Sync {
    /// Where other engines find this one: host and port.
    fn session(&self) -> &str;

    /// Lets peers write to these ranges, and lets this engine write from them.
    ///
    /// # Errors
    /// What Mooncake answered.
    fn register(&self, ranges: &[Range]) -> Result<(), String>;

    /// Ends the registration of memory. Writes that have begun go on.
    ///
    /// # Errors
    /// What Mooncake answered.
    fn unregister(&self, ranges: &[Range]) -> Result<(), String>;

    /// Connects to another engine. Submissions name that engine with the returned target.
    ///
    /// # Errors
    /// When it cannot be reached.
    fn open(&self, session: &str) -> Result<Target, String>;

    /// Starts writes to another engine. Adds a ticket for each group that was started.
    ///
    /// # Errors
    /// When a group was not started. The groups that were started are among the tickets.
    fn submit(&self, to: &Target, runs: &[Run], tickets: &mut Vec<Ticket>) -> Result<(), String>;

    /// Returns the state of a ticket. Not to be polled again after the end.
    fn poll(&self, ticket: &mut Ticket) -> State;

    /// Sends a text to another engine, which keeps it until its messages are taken.
    ///
    /// With `look`, checks first that a process listens there, where Mooncake would not say. That is as much work as
    /// the message itself.
    ///
    /// # Errors
    /// When the text was certainly not delivered. `Ok` does not say that it was.
    fn notify(&self, session: &str, text: &str, look: bool) -> Result<(), Undelivered>;

    /// Takes the texts that have arrived.
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

    /// Describes the driver, for people.
    fn describe(&self) -> String;
}

/// Name of this plugin's messages. All users of Mooncake share its mailbox.
pub const MESSAGE_NAME: &str = "host.mooncake";

/// How long the check whether a process listens may take.
const LOOK: Duration = Duration::from_secs(5);

/// Whether a process listens there.
///
/// Mooncake's answer is the same for a peer that is gone, for a slow peer, and when this process has no descriptor left
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

/// Ends an engine quickly, with probes of its ports. The engine's listener checks once a second whether it should end,
/// and otherwise only when a connection comes. With probes the end takes 10 ms instead of half a second, during which
/// the wheel holds Python's lock. An idle connection would delay the end for a minute, and is shut.
pub fn end_quickly(ports: &[u16], vain: Duration, end: impl FnOnce()) {
    let ended = AtomicBool::new(false);
    // The engine listens on all addresses of this machine. With many connections before it a probe is not taken, either.
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
        // Without a thread there are no probes, and the end takes longer.
        let _probing =
            std::thread::Builder::new().name("mooncake-probe".to_owned()).spawn_scoped(scope, probe).is_ok();
        end();
        ended.store(true, Ordering::SeqCst);
    });
}
