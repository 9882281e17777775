//! Whether the process of another instance lives.
//!
//! NIXL reports that a message could not be sent. Its error is the same for a peer that is dead and for a network that is
//! broken. Only of a dead peer is it certain that nothing more lands. So each instance listens on a TCP socket of its own,
//! beside NIXL, and sends its addresses to the instances that connect to it. To a connection there it writes its identity,
//! and holds the connection as long as it lives.
//!
//! An instance connects to these addresses of its peer. The one that answers with the peer's identity is *proven*: it
//! leads to that process. The process is gone when
//! - the held connection ends in order: the peer's kernel ends it, or
//! - the held connection broke, and then the proven address refuses a connection or another instance answers there. This
//!   relies on a network in which no firewall, proxy or other machine answers in the name of the peer's machine.
//!
//! Silence and broken connections prove nothing.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use host_plugin_api::{Level, log};
use host_transfer_kit::Random;
use nix::ifaddrs::getifaddrs;
use nix::net::if_::InterfaceFlags;
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_keepalive, set_tcp_keepcnt, set_tcp_keepidle, set_tcp_keepintvl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};

/// Most addresses of an instance.
pub const MAX_ADDRESSES: usize = 16;
/// Most addresses of one instance that are asked at a time.
const AT_A_TIME: usize = 4;
/// Connections taken at a time.
const TAKEN: usize = 16;
/// How often held connections are checked for callers that have gone.
const CHECKED: Duration = Duration::from_secs(1);
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long after a question the next one comes: at first, and at most.
const AGAIN: Duration = Duration::from_millis(100);
const SELDOM: Duration = Duration::from_secs(10);
/// When the kernel asks at the other end of a held connection whether it is there: after this silence, and as often.
const SILENCE: Duration = Duration::from_secs(15);
const ASKED: Duration = Duration::from_secs(5);
const TIMES: u32 = 6;

/// The sockets on which an instance answers that it lives. They close with it.
pub struct Presence {
    listeners: Vec<TcpListener>,
    held: Vec<TcpStream>,
    /// Most connections that it holds. Further ones end without an identity, which proves nothing.
    most: usize,
    checked: Instant,
    identity: Random,
}

impl Presence {
    /// Listens on the addresses of these network devices, a list as in the configuration. For `all`, and for a device
    /// that is no network interface, on those of all interfaces. Addresses that cannot be listened on are left out, with
    /// a warning if none remains. `most`: connections that it holds.
    pub fn open(devices: &str, identity: Random, most: usize) -> Self {
        let mut listeners = Vec::new();
        for address in addresses(devices) {
            let listening = TcpListener::bind((address, 0)).and_then(|listener| {
                listener.set_nonblocking(true)?;
                Ok(listener)
            });
            match listening {
                Ok(listener) => listeners.push(listener),
                Err(error) => log!(Level::DEBUG, "{address} cannot be listened on: {error}"),
            }
        }
        if listeners.is_empty() {
            log!(
                Level::WARN,
                "no address of the devices {devices:?} can be listened on: if this process is killed, peers cannot prove \
                 that it is gone, and their fences time out"
            );
        }
        Self { listeners, held: Vec::new(), most, checked: Instant::now(), identity }
    }

    /// Where it listens.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(|listener| listener.local_addr().ok()).collect()
    }

    /// Answers the connections that wait, and lets go of those whose callers have gone. Does not block.
    pub fn answer(&mut self, now: Instant) {
        let mut left = TAKEN;
        for listener in &self.listeners {
            while left > 0
                && let Ok((mut caller, _)) = listener.accept()
            {
                left -= 1;
                // A caller that went without a word would have its place for ever.
                let kept = caller.set_nonblocking(true).is_ok() && keep_alive(&caller).is_ok();
                let room = self.held.len() < self.most && kept;
                // A new connection has room for so few bytes.
                if room && caller.write_all(&self.identity).is_ok() {
                    self.held.push(caller);
                }
            }
        }
        if now.duration_since(self.checked) >= CHECKED {
            self.checked = now;
            // A caller says nothing.
            let waits = |caller: &mut TcpStream| {
                caller.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
            };
            self.held.retain_mut(waits);
        }
    }
}

/// Lets the kernel ask whether the other end is there.
fn keep_alive(socket: impl AsFd) -> Result<(), Errno> {
    set_socket_keepalive(&socket, true)?;
    set_tcp_keepidle(&socket, SILENCE)?;
    set_tcp_keepintvl(&socket, ASKED)?;
    set_tcp_keepcnt(&socket, TIMES)
}

/// The addresses of these devices.
fn addresses(devices: &str) -> Vec<IpAddr> {
    let names: Vec<&str> = devices.split(',').map(str::trim).collect();
    let found: Vec<(String, IpAddr)> = getifaddrs()
        .into_iter()
        .flatten()
        .filter(|interface| interface.flags.contains(InterfaceFlags::IFF_UP))
        .filter_map(|interface| {
            let storage = interface.address?;
            let v4 = storage.as_sockaddr_in().map(|address| IpAddr::V4(address.ip()));
            // An address of the link alone means another interface at the peer.
            let v6 = storage.as_sockaddr_in6().map(|address| address.ip());
            let v6 = v6.filter(|ip| !ip.is_unicast_link_local()).map(IpAddr::V6);
            Some((interface.interface_name, v4.or(v6)?))
        })
        .collect();
    let named = |name: &&str| found.iter().any(|(interface, _)| interface == name);
    let all = !names.iter().all(named);
    found
        .iter()
        .filter(|(interface, _)| all || names.contains(&interface.as_str()))
        .map(|(_, address)| *address)
        .take(MAX_ADDRESSES)
        .collect()
}

/// What a connection to an address of an instance has found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Lives,
    Gone,
    /// Nothing is proven. The next question may come at once.
    Broken,
    Unknown,
}

/// A connection to an address of an instance.
struct Connection {
    address: SocketAddr,
    /// `None` when it was refused at once.
    socket: Option<OwnedFd>,
    heard: Vec<u8>,
    since: Instant,
}

impl Connection {
    /// Begins to connect. `None` when this process cannot.
    fn begin(address: SocketAddr, now: Instant) -> Option<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(family, SocketType::STREAM, flags, None).ok()?;
        keep_alive(&socket).ok()?;
        let socket = match connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => Some(socket),
            Err(Errno::CONNREFUSED) => None,
            Err(_) => return None,
        };
        Some(Self { address, socket, heard: Vec::new(), since: now })
    }

    /// Reads the identity. The answer, once there is one.
    fn ask(&mut self, instance: Random, now: Instant) -> Option<Answer> {
        let Some(socket) = &self.socket else { return Some(Answer::Gone) };
        let mut bytes = [0; size_of::<Random>()];
        match rustix::io::read(socket, &mut bytes) {
            Ok(0) => Some(Answer::Unknown),
            Ok(count) => {
                self.heard.extend(&bytes[..count]);
                let found = self.heard.first_chunk::<{ size_of::<Random>() }>()?;
                Some(if *found == instance { Answer::Lives } else { Answer::Gone })
            }
            Err(Errno::CONNREFUSED) => Some(Answer::Gone),
            Err(Errno::CONNRESET) => Some(Answer::Broken),
            Err(Errno::AGAIN | Errno::INTR) if now.duration_since(self.since) < PATIENCE => None,
            Err(_) => Some(Answer::Unknown),
        }
    }

    /// Looks whether it ends, once it has answered.
    fn watch(&self) -> Answer {
        let Some(socket) = &self.socket else { return Answer::Broken };
        match rustix::io::read(socket, &mut [0]) {
            Ok(0) => Answer::Gone,
            // More than an identity is no answer of an instance.
            Ok(_) => Answer::Broken,
            Err(Errno::AGAIN | Errno::INTR) => Answer::Lives,
            Err(_) => Answer::Broken,
        }
    }
}

/// What an instance knows about the process of another one.
pub struct Inquiry {
    offered: Vec<SocketAddr>,
    proven: Option<SocketAddr>,
    held: Option<Connection>,
    asked: Vec<Connection>,
    /// Addresses to ask as soon as others have answered.
    to_ask: VecDeque<SocketAddr>,
    next: Instant,
    wait: Duration,
}

impl Inquiry {
    /// No address is known.
    pub fn new(now: Instant) -> Self {
        let (offered, asked, to_ask) = (Vec::new(), Vec::new(), VecDeque::new());
        Self { offered, proven: None, held: None, asked, to_ask, next: now, wait: AGAIN }
    }

    /// Takes the addresses that the instance has sent, unless one is proven.
    pub fn offer(&mut self, addresses: Vec<SocketAddr>, now: Instant) {
        if self.proven.is_none() && self.offered != addresses {
            self.offered = addresses;
            self.urge(now);
        }
    }

    /// Makes the next question come at once.
    fn urge(&mut self, now: Instant) {
        (self.next, self.wait) = (now, AGAIN);
    }

    /// Whether an address is proven.
    pub fn has_proven(&self) -> bool {
        self.proven.is_some()
    }

    /// Whether no address can be proven: none was sent.
    pub fn is_hopeless(&self) -> bool {
        self.offered.is_empty()
    }

    /// Takes answers, and asks. True when the instance's process is proven to be gone. Does not block.
    pub fn look(&mut self, instance: Random, now: Instant) -> bool {
        match self.held.as_ref().map(Connection::watch) {
            Some(Answer::Lives) => return false,
            Some(Answer::Gone) => return true,
            Some(_) => {
                self.held = None;
                self.urge(now);
            }
            None => {}
        }
        for mut connection in std::mem::take(&mut self.asked) {
            match connection.ask(instance, now) {
                None => self.asked.push(connection),
                Some(Answer::Lives) => {
                    self.proven = Some(connection.address);
                    self.held = Some(connection);
                    (self.asked, self.to_ask) = (Vec::new(), VecDeque::new());
                    self.wait = AGAIN;
                    return false;
                }
                // An address that is not proven may be another machine's.
                Some(Answer::Gone) if self.proven == Some(connection.address) => return true,
                Some(Answer::Broken) => self.next = now,
                Some(Answer::Gone | Answer::Unknown) => {}
            }
        }
        if self.asked.is_empty() && self.to_ask.is_empty() && now >= self.next {
            self.to_ask = self.proven.map_or_else(|| self.offered.clone(), |proven| vec![proven]).into();
            self.next = now + self.wait;
            self.wait = (self.wait * 2).min(SELDOM);
        }
        while self.asked.len() < AT_A_TIME
            && let Some(address) = self.to_ask.pop_front()
        {
            self.asked.extend(Connection::begin(address, now));
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use host_tests::wait::poll_until;
    use rustix::net::connect_unspec;

    use super::*;

    const OWN: Random = [7; 16];

    /// Looks again and again, with the presence answering, until `found`.
    fn until(
        inquiry: &mut Inquiry,
        mut answering: Option<&mut Presence>,
        found: impl Fn(&Inquiry, bool) -> bool,
    ) {
        poll_until("an answer", || {
            let now = Instant::now();
            if let Some(presence) = &mut answering {
                presence.answer(now);
            }
            let gone = inquiry.look(OWN, now);
            if found(inquiry, gone) {
                return Ok(());
            }
            let (asked, proven, held) = (inquiry.asked.len(), inquiry.proven, inquiry.held.is_some());
            Err(format!("gone: {gone}, {asked} asked, proven: {proven:?}, held: {held}"))
        });
    }

    fn proven(presence: &mut Presence) -> Inquiry {
        let mut inquiry = Inquiry::new(Instant::now());
        assert!(inquiry.is_hopeless(), "no address was offered");
        inquiry.offer(presence.addresses(), Instant::now());
        until(&mut inquiry, Some(presence), |inquiry, gone| {
            assert!(!gone && !inquiry.is_hopeless());
            inquiry.has_proven()
        });
        assert!(inquiry.asked.is_empty(), "the other addresses are of no use");
        inquiry
    }

    /// Breaks the held connection, as a network does.
    fn break_held(inquiry: &Inquiry) {
        let held = inquiry.held.as_ref().and_then(|held| held.socket.as_ref()).unwrap();
        connect_unspec(held.as_fd()).unwrap();
    }

    #[test]
    fn a_process_is_gone_when_its_held_connection_ends_in_order() {
        let mut presence = Presence::open("lo", OWN, 8);
        let mut inquiry = proven(&mut presence);
        for _ in 0..100 {
            presence.answer(Instant::now() + CHECKED);
            assert!(!inquiry.look(OWN, Instant::now()), "the connection is held");
        }
        drop(presence);
        until(&mut inquiry, None, |_, gone| gone);
    }

    #[test]
    fn after_a_break_the_proven_address_is_asked_and_proves_the_end_when_it_refuses() {
        let mut presence = Presence::open("lo", OWN, 8);
        let mut inquiry = proven(&mut presence);
        break_held(&inquiry);
        assert!(!inquiry.look(OWN, Instant::now()) && inquiry.held.is_none(), "a break proves nothing");
        until(&mut inquiry, Some(&mut presence), |inquiry, gone| {
            assert!(!gone, "it lives");
            inquiry.held.is_some()
        });
        break_held(&inquiry);
        drop(presence);
        until(&mut inquiry, None, |_, gone| gone);
    }

    #[test]
    fn another_instance_at_the_proven_address_proves_that_the_process_is_gone() {
        let mut presence = Presence::open("lo", OWN, 8);
        let mut inquiry = proven(&mut presence);
        break_held(&inquiry);
        presence.identity = [8; 16];
        until(&mut inquiry, Some(&mut presence), |_, gone| gone);
    }

    #[test]
    fn an_address_that_was_never_proven_proves_nothing() {
        let presence = Presence::open("lo", OWN, 8);
        let addresses = presence.addresses();
        drop(presence);
        let mut inquiry = Inquiry::new(Instant::now());
        inquiry.offer(addresses, Instant::now());
        until(&mut inquiry, None, |inquiry, gone| {
            assert!(!gone && !inquiry.has_proven());
            inquiry.wait > AGAIN * 2 && inquiry.asked.is_empty()
        });
    }

    #[test]
    fn silence_proves_nothing_and_ends_with_patience() {
        let mut presence = Presence::open("lo", OWN, 8);
        let mut inquiry = proven(&mut presence);
        break_held(&inquiry);
        let now = Instant::now();
        assert!(!inquiry.look(OWN, now) && inquiry.asked.len() == 1);
        assert!(!inquiry.look(OWN, now + PATIENCE / 2) && inquiry.asked[0].since == now);
        // The next question takes its place.
        assert!(!inquiry.look(OWN, now + PATIENCE) && inquiry.asked[0].since == now + PATIENCE);
    }

    #[test]
    fn callers_without_room_get_no_identity_and_callers_that_went_leave_room() {
        let mut presence = Presence::open("lo", OWN, 8);
        let address = presence.addresses()[0];
        assert!(address.ip().is_loopback());
        let caller = TcpStream::connect(address).unwrap();
        poll_until("the caller to be held", || {
            presence.answer(Instant::now());
            if presence.held.is_empty() { Err("none is held") } else { Ok(()) }
        });
        let spare = || TcpStream::connect(address).unwrap();
        let filler: Vec<TcpStream> = (1..8).map(|_| presence.held[0].try_clone().unwrap()).collect();
        presence.held.extend(filler);
        let mut refused = spare();
        refused.set_nonblocking(true).unwrap();
        let count = poll_until("the refused caller to hear of it", || {
            presence.answer(Instant::now());
            refused.read(&mut [0; 16])
        });
        assert_eq!(count, 0, "it ends before an identity");
        drop(caller);
        poll_until("the caller that went to leave room", || {
            presence.answer(Instant::now() + CHECKED);
            let held = presence.held.len();
            if held == 0 { Ok(()) } else { Err(format!("{held} are held")) }
        });
    }

    #[test]
    fn a_device_that_is_no_interface_means_all_of_them() {
        let lo = addresses("lo");
        assert!(!lo.is_empty() && lo.iter().all(IpAddr::is_loopback));
        assert!(addresses("all").len() >= lo.len() && addresses("mlx5_0:1") == addresses("all"));
    }
}
