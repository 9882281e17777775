//! Listens for HTTP: for clients, and for operators if they have an address of their own.

use std::net::SocketAddr;

use host_front::connections::HttpListener;
use host_front::front::HttpListeners;
use host_wire::endpoint::{Credentials, ListenAt, Listener, bind_socket};
use rustix::fd::{BorrowedFd, FromRawFd, OwnedFd};
use tokio::net::{TcpListener, UnixListener};

use super::Refused;
use super::clients::Clients;
use super::settings::Settings;

/// Listens at the addresses in the settings.
///
/// # Errors
/// When an address is in use.
pub async fn listen(settings: &Settings, clients: &Clients) -> anyhow::Result<HttpListeners> {
    let address = settings.http_address();
    let bound = TcpListener::bind(address).await;
    let public = bound
        .map_err(|error| Refused(format!("cannot listen on {address}: {error}; change --host or --port")))?;
    let operators = match &clients.operators {
        None => None,
        Some(at) => Some(of_operators(open(at)?, at, clients)?),
    };
    Ok(HttpListeners { clients: public, operators })
}

/// A socket for operators.
///
/// # Errors
/// When the address is in use.
pub fn open(at: &ListenAt) -> Result<OwnedFd, Refused> {
    let opened = match at {
        ListenAt::Tcp(address) => bind_tcp(*address),
        ListenAt::Unix(path) => bind_socket(path),
    };
    opened.map_err(|error| Refused(format!("cannot listen on {at}: {error}; change --admin")))
}

fn bind_tcp(address: SocketAddr) -> std::io::Result<OwnedFd> {
    let listener = std::net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener.into())
}

/// The URL of a socket for operators.
///
/// # Errors
/// When the socket has no address.
pub fn url_of_operators(socket: &OwnedFd, at: &ListenAt, clients: &Clients) -> anyhow::Result<String> {
    Ok(match at {
        ListenAt::Unix(_) => at.to_string(),
        ListenAt::Tcp(_) => {
            let address = std::net::TcpListener::from(socket.try_clone()?).local_addr()?;
            url(address, clients.tls.is_some() && at.is_reachable_from_elsewhere())
        }
    })
}

/// The URL of an address.
pub fn url(address: SocketAddr, is_tls: bool) -> String {
    let scheme = if is_tls { "https" } else { "http" };
    format!("{scheme}://{address}")
}

/// Makes the listener for operators. It uses TLS if other machines can reach it, because API keys could be read in transit
/// otherwise.
fn of_operators(socket: OwnedFd, at: &ListenAt, clients: &Clients) -> anyhow::Result<HttpListener> {
    Ok(match at {
        ListenAt::Unix(_) => HttpListener::from(UnixListener::from_std(socket.into())?),
        ListenAt::Tcp(_) => {
            let tls = clients.tls.clone().filter(|_tls| at.is_reachable_from_elsewhere());
            HttpListener::from(TcpListener::from_std(socket.into())?).with_tls(tls)
        }
    })
}

/// Takes the sockets that the supervisor opened and handed down: HTTP, control, and one for operators if they have an address of
/// their own.
///
/// # Errors
/// When the descriptors are not such sockets.
pub fn inherited(numbers: &[i32], clients: &Clients) -> anyhow::Result<(HttpListeners, Listener)> {
    let (http, control, operators) = match (numbers, &clients.operators) {
        (&[http, control], None) => (http, control, None),
        (&[http, control, operators], Some(at)) => (http, control, Some((operators, at))),
        (_, None) => return Err(refused("two sockets are handed down, HTTP and control")),
        (_, Some(_)) => return Err(refused("three sockets are handed down, HTTP, control and operators'")),
    };
    if http == control || operators.is_some_and(|(operators, _)| operators == http || operators == control) {
        return Err(refused(&format!("{http} cannot be both sockets")));
    }
    let http = TcpListener::from_std(std::net::TcpListener::from(inherited_socket(http)?))?;
    let control = Listener::inherited(inherited_socket(control)?, Credentials::SameUser)?;
    let operators = match operators {
        None => None,
        Some((number, at)) => Some(of_operators(inherited_socket(number)?, at, clients)?),
    };
    Ok((HttpListeners { clients: http, operators }, control))
}

fn refused(why: &str) -> anyhow::Error {
    Refused(format!("--listen-fds: {why}")).into()
}

/// Takes one of the sockets. No other may have this number.
fn inherited_socket(number: i32) -> anyhow::Result<OwnedFd> {
    let refused = || refused(&format!("{number} is not a handed-down socket"));
    if number < 3 {
        return Err(refused());
    }
    // SAFETY: nothing in this process listens yet. So a listening socket was open when the process started, and it stays open,
    // because only the caller takes it. For any other number the calls return an error or `false`.
    let found = unsafe { BorrowedFd::borrow_raw(number) };
    if !rustix::net::sockopt::socket_acceptconn(found).unwrap_or(false) {
        return Err(refused());
    }
    // The socket is not inherited further: no child of this process should listen on it.
    rustix::io::fcntl_setfd(found, rustix::io::FdFlags::CLOEXEC)?;
    // SAFETY: the supervisor opened this descriptor for this process alone. It was open a moment ago, and nothing else here knows
    // its number.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Prints the URL for operators, before the line with the URL for clients.
pub fn say_operators(url: &str) {
    println!("host: operators are served on {url}");
}
