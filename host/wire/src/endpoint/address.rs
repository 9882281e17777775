//! The addresses at which processes are reached, and at which they listen.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use tokio::net::{TcpStream, UnixStream};
use tonic::transport::Uri;

use crate::clock;

/// The longest path of a socket, in bytes: `sun_path` has 108, the last of which is 0.
pub(super) const LONGEST_PATH: usize = 107;

/// How long to probe whether a process listens at an address.
const PROBE: Duration = Duration::from_millis(500);

/// The address at which other processes reach a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// `http://HOST:PORT`: plain text over TCP.
    Plain(Host),
    /// `https://HOST:PORT`: TLS over TCP.
    Tls(Host),
    /// `unix:PATH`: a Unix socket.
    Unix(PathBuf),
}

/// A machine, and a port on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Host {
    /// Its name, or an IP address without brackets.
    pub name: String,
    /// The port, not 0.
    pub port: u16,
}

/// The reason why a text is not an address. Each message continues a sentence that begins with the text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadAddress {
    /// The text cannot be parsed.
    #[error("is not an address ({0})")]
    NotOne(String),
    /// The address is of another kind.
    #[error("does not begin with http://, https:// or unix:")]
    Scheme,
    /// The address has no host.
    #[error("names no host")]
    NoHost,
    /// The address has no port, or port 0.
    #[error("names no port")]
    NoPort,
    /// The address has a path or a query.
    #[error("has something after the port")]
    More,
    /// The path cannot be that of a socket.
    #[error("is not the absolute path of a socket, of at most {LONGEST_PATH} bytes")]
    Path,
    /// The text is not an address to listen at.
    #[error("is neither IP:PORT nor unix:PATH")]
    NoPlace,
}

impl Host {
    /// Whether the host may be another machine. A name that cannot be resolved now counts as this machine, although it may be
    /// resolved later.
    #[must_use]
    pub fn may_be_elsewhere(&self) -> bool {
        use std::net::ToSocketAddrs as _;
        match self.name.parse::<IpAddr>() {
            Ok(address) => !address.is_loopback(),
            Err(_name) => (self.name.as_str(), self.port)
                .to_socket_addrs()
                .is_ok_and(|mut addresses| addresses.any(|address| !address.ip().is_loopback())),
        }
    }
}

impl From<SocketAddr> for Host {
    fn from(address: SocketAddr) -> Self {
        Self { name: address.ip().to_string(), port: address.port() }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Plain(host) => write!(f, "http://{host}"),
            Address::Tls(host) => write!(f, "https://{host}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for Address {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        if let Some(path) = socket_path(text) {
            return path.map(Address::Unix);
        }
        let uri: Uri = text
            .parse()
            .map_err(|error: tonic::codegen::http::uri::InvalidUri| BadAddress::NotOne(error.to_string()))?;
        let kind = match uri.scheme_str() {
            Some("http") => Address::Plain,
            Some("https") => Address::Tls,
            _ => return Err(BadAddress::Scheme),
        };
        let name = uri.host().filter(|host| !host.is_empty()).ok_or(BadAddress::NoHost)?;
        let port = uri.port_u16().filter(|port| *port > 0).ok_or(BadAddress::NoPort)?;
        if uri.path().len() > 1 || uri.query().is_some() {
            return Err(BadAddress::More);
        }
        Ok(kind(Host { name: name.trim_matches(['[', ']']).to_owned(), port }))
    }
}

impl Address {
    /// Whether no process listens at the address. True only if the machine itself says so. No answer proves nothing: the network
    /// may be the cause.
    pub async fn is_unused(&self) -> bool {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        let probe = async {
            match self {
                Address::Plain(host) | Address::Tls(host) => {
                    let stream = TcpStream::connect((host.name.as_str(), host.port)).await?;
                    // If no process listens at a port, the kernel may give that port to the connection itself, which then
                    // connects to itself.
                    let is_its_own_peer = stream.local_addr()? == stream.peer_addr()?;
                    if is_its_own_peer { Err(ConnectionRefused.into()) } else { Ok(()) }
                }
                Address::Unix(path) => UnixStream::connect(path).await.map(drop),
            }
        };
        match clock::timeout(PROBE, probe).await {
            // A Unix socket that is not found is gone. A host name that is not found may be found later.
            Ok(Err(error)) if error.kind() == NotFound => matches!(self, Address::Unix(_)),
            Ok(Err(error)) => error.kind() == ConnectionRefused,
            _ => false,
        }
    }
}

/// The path of `unix:PATH`, if it is one.
fn socket_path(text: &str) -> Option<Result<PathBuf, BadAddress>> {
    let rest = text.strip_prefix("unix:")?;
    let path = Path::new(rest.strip_prefix("//").unwrap_or(rest));
    let fits = path.is_absolute() && path.as_os_str().len() <= LONGEST_PATH && !rest.contains('\0');
    Some(if fits { Ok(path.to_owned()) } else { Err(BadAddress::Path) })
}

/// The address at which a process listens for others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAt {
    /// An address of this machine. Port 0 takes a free port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl ListenAt {
    /// A free port of the loopback interface.
    #[must_use]
    pub fn loopback() -> Self {
        Self::Tcp(([127, 0, 0, 1], 0).into())
    }

    /// Whether processes of other machines may reach the address.
    #[must_use]
    pub fn is_reachable_from_elsewhere(&self) -> bool {
        matches!(self, Self::Tcp(address) if !address.ip().is_loopback())
    }
}

impl fmt::Display for ListenAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl FromStr for ListenAt {
    type Err = BadAddress;

    fn from_str(text: &str) -> Result<Self, BadAddress> {
        match socket_path(text) {
            Some(path) => path.map(Self::Unix),
            None => {
                text.parse().map(Self::Tcp).map_err(|_neither: std::net::AddrParseError| BadAddress::NoPlace)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_written_as_it_is_read() {
        for text in
            ["http://127.0.0.1:1", "https://worker-7.local:4000", "http://[::1]:9", "unix:/run/host/a.sock"]
        {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("unix:///a/b".parse(), Ok(Address::Unix("/a/b".into())));
        assert_eq!(
            "https://[::1]:9".parse(),
            Ok(Address::Tls(Host { name: "::1".into(), port: 9 })),
            "names are looked up without brackets"
        );
    }

    #[test]
    fn what_is_no_address_is_said() {
        let long = format!("unix:/{}", "a".repeat(LONGEST_PATH));
        for (text, why) in [
            ("", "is not an address"),
            ("nonsense", "does not begin with"),
            ("ftp://a:1", "does not begin with"),
            ("http://a", "names no port"),
            ("https://a:0", "names no port"),
            ("http://a:1/v1", "after the port"),
            ("unix:relative", "absolute path"),
            (&long, "at most 107 bytes"),
        ] {
            let error = text.parse::<Address>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        assert!(long.strip_suffix('a').unwrap().parse::<Address>().is_ok());
    }

    #[test]
    fn a_process_listens_at_an_ip_address_or_a_socket() {
        for text in ["127.0.0.1:0", "[::]:80", "unix:/a"] {
            assert_eq!(text.parse::<ListenAt>().unwrap().to_string(), text);
        }
        assert_eq!("localhost:80".parse::<ListenAt>(), Err(BadAddress::NoPlace));
        assert!(!ListenAt::loopback().is_reachable_from_elsewhere());
        assert!("[::]:80".parse::<ListenAt>().unwrap().is_reachable_from_elsewhere());
    }

    #[tokio::test]
    async fn an_address_is_unused_when_the_machine_says_so() {
        let folder = tempfile::tempdir().unwrap();
        let socket = Address::Unix(folder.path().join("a.sock"));
        assert!(socket.is_unused().await, "no file");
        let listener = tokio::net::UnixListener::bind(folder.path().join("a.sock")).unwrap();
        assert!(!socket.is_unused().await);
        drop(listener);
        assert!(socket.is_unused().await, "a file that its process left");
        // The port is bound and not listened at, so no other process can get it meanwhile.
        let tcp = tokio::net::TcpSocket::new_v4().unwrap();
        tcp.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let port = Address::Plain(tcp.local_addr().unwrap().into());
        assert!(port.is_unused().await);
        let _listener = tcp.listen(1).unwrap();
        assert!(!port.is_unused().await);
    }
}
