//! Connections of the control plane: where a process listens, how another one connects, and how each checks the other.
//!
//! Both sides take an [`Address`] and [`Credentials`]. Nothing else in the host opens or accepts a connection of the control plane.
//!
//! | Credentials | Address | Accepted peers |
//! | --- | --- | --- |
//! | [`Credentials::SameUser`] | `unix:PATH` | processes of the same user, and of root |
//! | [`Credentials::Tls`] | `https://HOST:PORT` | processes with a certificate of the cluster's authority |
//! | [`Credentials::None`] | `http://HOST:PORT` | every process that reaches the address |
//!
//! Both sides check the peer before a byte of the protocol is read or written. A peer that does not pass gets no answer. Even
//! where every process is accepted, web pages in the browsers of those machines are not.
//!
//! [`ApiTls`] and [`Authorities`] are for connections of the HTTP API, which other crates accept and open.

mod address;
pub mod authority;
mod channel;
mod connection;
mod credentials;
mod directory;
#[cfg(test)]
mod fixture;
mod listener;
mod pages;
mod reason;
mod refusals;
mod serve;
mod tls;
mod unread;

use std::time::Duration;

pub use address::{Address, BadAddress, Host, ListenAt};
pub use channel::{channel, is_unconnected};
pub use credentials::{Credentials, Mismatch, check_user};
pub use directory::SocketDirectory;
pub use listener::{Listener, bind_socket};
pub use pages::{host_name, is_local_host};
pub use reason::reason;
pub use refusals::Refusals;
pub use serve::{serve, serve_watched};
pub use tls::{
    AcceptedTls, ApiTls, Authorities, ConnectedTls, NoAuthorities, Tls, TlsError, TlsSource, is_untrusted,
};

/// The name in every certificate. Peers are checked against it and not against their addresses, so that a certificate is good at
/// any address.
pub const NAME: &str = "host-cluster";

/// Longest time until a name is resolved.
const RESOLVE: Duration = Duration::from_secs(5);
/// Longest time until a connection is made, its TLS handshake included. Longer in tests, which check other properties.
const CONNECT: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 2 });
/// Longest time that an accepted connection may take to show its certificate, or to send a first byte where no certificate is
/// needed. Longer in tests, which check other properties.
const HANDSHAKE: Duration = Duration::from_secs(if cfg!(test) { 300 } else { 5 });
/// Most calls of one connection at once: more than a worker queues and runs. Further ones wait at the caller.
const MAX_CALLS: u32 = 1 << 14;
/// How often each side asks a silent connection for a sign of life.
const PING_EVERY: Duration = Duration::from_secs(5);
/// Time after which a connection without a sign of life is closed. Work for its other end is then cancelled.
const PING_WAIT: Duration = Duration::from_secs(10);
