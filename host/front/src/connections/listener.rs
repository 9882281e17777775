//! The sockets on which HTTP connections arrive.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr};

use host_wire::endpoint::{ApiTls, check_user};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// A socket that clients connect to, with TLS or without.
#[derive(Debug)]
pub struct HttpListener {
    socket: Socket,
    pub(super) tls: Option<ApiTls>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// A client that has connected.
#[derive(Debug)]
pub(super) enum ClientStream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// HTTP without TLS.
impl From<TcpListener> for HttpListener {
    fn from(listener: TcpListener) -> Self {
        Self { socket: Socket::Tcp(listener), tls: None }
    }
}

/// HTTP for processes of the same user, and of root.
impl From<UnixListener> for HttpListener {
    fn from(listener: UnixListener) -> Self {
        Self { socket: Socket::Unix(listener), tls: None }
    }
}

impl HttpListener {
    /// Adds TLS, if there is a certificate. On a Unix socket, the certificate is ignored.
    #[must_use]
    pub fn with_tls(self, tls: Option<ApiTls>) -> Self {
        let tls = tls.filter(|_tls| matches!(self.socket, Socket::Tcp(_)));
        Self { tls, ..self }
    }

    /// Whether only processes of this machine reach it.
    ///
    /// # Errors
    /// When the socket has no address.
    pub fn is_local(&self) -> io::Result<bool> {
        match &self.socket {
            Socket::Tcp(socket) => Ok(socket.local_addr()?.ip().is_loopback()),
            Socket::Unix(_) => Ok(true),
        }
    }

    /// Accepts the next client. The address of a client of a Unix socket is this machine's.
    pub(super) async fn accept(&self) -> io::Result<(ClientStream, IpAddr)> {
        match &self.socket {
            Socket::Tcp(socket) => {
                let (connection, address) = socket.accept().await?;
                Ok((ClientStream::Tcp(connection), address.ip()))
            }
            Socket::Unix(socket) => {
                let (connection, _unnamed) = socket.accept().await?;
                Ok((ClientStream::Unix(connection), Ipv4Addr::LOCALHOST.into()))
            }
        }
    }
}

impl ClientStream {
    /// Checks that a process at a Unix socket belongs to this user, or to root.
    pub(super) fn check(&self) -> io::Result<()> {
        match self {
            ClientStream::Tcp(_) => Ok(()),
            ClientStream::Unix(connection) => check_user(connection),
        }
    }
}

/// The address in the form that a starting program prints.
impl fmt::Display for HttpListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        match &self.socket {
            Socket::Tcp(socket) => match socket.local_addr() {
                Ok(address) => write!(f, "{scheme}://{address}"),
                Err(_closed) => write!(f, "{scheme}://"),
            },
            Socket::Unix(socket) => {
                let address = socket.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                write!(f, "unix:{}", path.unwrap_or_else(|| "".as_ref()).display())
            }
        }
    }
}
