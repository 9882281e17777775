//! Accepts connections: limits their number, and checks the other end of each.
//!
//! Connections of a cluster's processes last, and connections beyond the limit are refused. Without credentials, each client has
//! its share of the connections. Connections that only watch a process are passing: each sends a short request, and a new one
//! takes the place of the oldest of its client, or of all.

mod strangers;

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use super::HANDSHAKE;
use super::address::{Address, LONGEST_PATH, ListenAt};
use super::connection::{Connection, ConnectionPlace, Stream};
use super::credentials::{Credentials, check_user};
use super::refusals::Refusals;
use super::tls::Tls;
use super::unread::{self, Unread};
use crate::clock;
use crate::shares::{Client, NoShare, Shares};
use strangers::Strangers;

/// Most connections where descriptors are not the limit.
const MOST_CONNECTIONS: usize = 1 << 14;
/// The limit of connections is at least this, even where descriptors are few.
const FEWEST_CONNECTIONS: usize = 64;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Checked connections that wait for the server.
const CHECKED: usize = 16;
/// Pause after the system had no resources to accept a connection.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// Listens for other processes.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    credentials: Credentials,
    /// Most connections at once. Further ones are closed.
    most: usize,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Plain text.
impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::new(Socket::Tcp(listener), Credentials::None)
    }
}

impl Listener {
    fn new(socket: Socket, credentials: Credentials) -> Self {
        // Takes a quarter of this process's descriptors: clients of the HTTP API may have the rest.
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
        let most = usize::try_from(descriptors).unwrap_or(usize::MAX);
        Self { socket, credentials, most: most.clamp(FEWEST_CONNECTIONS, MOST_CONNECTIONS) }
    }

    /// Listens at an address. The file of a socket that another process left is replaced.
    ///
    /// # Errors
    /// When the address is taken, or does not fit the credentials.
    pub async fn bind(at: &ListenAt, credentials: Credentials) -> io::Result<Self> {
        let socket = match at {
            ListenAt::Tcp(address) => Socket::Tcp(TcpListener::bind(address).await?),
            ListenAt::Unix(path) => Socket::Unix(UnixListener::from_std(bind_socket(path)?.into())?),
        };
        Self::new(socket, credentials).checked()
    }

    /// Takes over a socket that listens already.
    ///
    /// # Errors
    /// When the socket's address does not fit the credentials.
    pub fn inherited(socket: OwnedFd, credentials: Credentials) -> io::Result<Self> {
        let socket = if is_unix(&socket)? {
            Socket::Unix(UnixListener::from_std(socket.into())?)
        } else {
            Socket::Tcp(TcpListener::from_std(socket.into())?)
        };
        Self::new(socket, credentials).checked()
    }

    fn checked(self) -> io::Result<Self> {
        match self.credentials.fit(&self.address()?) {
            Ok(()) => Ok(self),
            Err(mismatch) => Err(io::Error::new(io::ErrorKind::InvalidInput, mismatch)),
        }
    }

    /// Sets the limit of connections at once. Further ones are closed.
    #[must_use]
    pub fn at_most(self, connections: usize) -> Self {
        Self { most: connections.max(1), ..self }
    }

    /// The address at which it listens.
    ///
    /// # Errors
    /// When the socket has no address.
    pub fn address(&self) -> io::Result<Address> {
        match &self.socket {
            Socket::Tcp(socket) => {
                let host = socket.local_addr()?.into();
                Ok(match self.credentials {
                    Credentials::Tls(_) => Address::Tls(host),
                    _ => Address::Plain(host),
                })
            }
            Socket::Unix(socket) => {
                let address = socket.local_addr()?;
                let path = address.as_pathname().ok_or_else(|| io::Error::other("the socket has no path"))?;
                Ok(Address::Unix(path.to_owned()))
            }
        }
    }

    /// The credentials by which peers are checked.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// The connections whose other end passed the check, until the stream is dropped. These connections last.
    pub(super) fn incoming(self) -> ReceiverStream<io::Result<Connection>> {
        let places = Places::Lasting {
            connections: Shares::new(self.most),
            unread: Shares::new(unread::OF_ALL),
            are_shared: matches!(self.credentials, Credentials::None),
        };
        self.accepting(places)
    }

    /// The same as [`incoming`](Self::incoming), for passing connections.
    pub(super) fn passing(self) -> ReceiverStream<io::Result<Connection>> {
        let places = Places::Passing(Mutex::new(Strangers::at_most(self.most.min(strangers::MOST))));
        self.accepting(places)
    }

    fn accepting(self, places: Places) -> ReceiverStream<io::Result<Connection>> {
        let (checked, connections) = mpsc::channel(CHECKED);
        tokio::spawn(accept(self, places, checked));
        ReceiverStream::new(connections)
    }
}

/// Whether a socket is a Unix socket.
///
/// # Errors
/// When it is no socket.
fn is_unix(socket: &OwnedFd) -> io::Result<bool> {
    Ok(rustix::net::sockopt::socket_domain(socket)? == AddressFamily::UNIX)
}

/// A Unix socket that listens at a path and is open to its owner only. A file that another process left there is replaced.
///
/// # Errors
/// When a process listens there, or when the path is that of another kind of file.
pub fn bind_socket(path: &Path) -> io::Result<OwnedFd> {
    if path.as_os_str().len() > LONGEST_PATH {
        let length = path.as_os_str().len();
        let message = format!("the path of a socket has {LONGEST_PATH} bytes at most, and this {length}");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let address = SocketAddrUnix::new(path)?;
    if let Ok(found) = std::fs::symlink_metadata(path) {
        let is_left = found.file_type().is_socket()
            && rustix::net::connect(&socket()?, &address) == Err(rustix::io::Errno::CONNREFUSED);
        if !is_left {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        std::fs::remove_file(path)?;
    }
    let listening = socket()?;
    rustix::net::bind(&listening, &address)?;
    // Set before it listens, because nothing can connect before that.
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    rustix::net::listen(&listening, BACKLOG)?;
    Ok(listening)
}

/// A process that connected.
enum PeerStream {
    Tcp(TcpStream, SocketAddr),
    Unix(tokio::net::UnixStream),
}

impl Socket {
    async fn accept(&self) -> io::Result<PeerStream> {
        match self {
            Socket::Tcp(socket) => {
                let (connection, address) = socket.accept().await?;
                // Sends each message in a packet of its own: waiting for more would add to the latency of every token.
                if let Err(error) = connection.set_nodelay(true) {
                    tracing::debug!(%error, "cannot send small packets at once");
                }
                Ok(PeerStream::Tcp(connection, address))
            }
            Socket::Unix(socket) => {
                socket.accept().await.map(|(connection, _unnamed)| PeerStream::Unix(connection))
            }
        }
    }
}

impl PeerStream {
    fn name(&self) -> String {
        match self {
            PeerStream::Tcp(_, address) => address.to_string(),
            PeerStream::Unix(connection) => match connection.peer_cred() {
                Ok(process) => format!("process {} of user {}", process.pid().unwrap_or(0), process.uid()),
                Err(_unknown) => "a process".to_owned(),
            },
        }
    }
}

/// Whether the error concerns one connection only, so that the next can be accepted at once.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

async fn accept(listener: Listener, places: Places, checked: mpsc::Sender<io::Result<Connection>>) {
    let Listener { socket, credentials, most: _ } = listener;
    let refusals = Arc::new(Refusals::of(places.what()));
    let server = Server { checked, places: Arc::new(places), refusals };
    let mut strangers = Strangers::at_most(strangers::MOST);
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            () = server.checked.closed() => return,
        };
        let caller = match accepted {
            Ok(caller) => caller,
            Err(error) if is_of_one_connection(&error) => continue,
            Err(error) => {
                tracing::warn!(%error, "no control connection can be accepted; trying again");
                clock::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        match (caller, &credentials) {
            (PeerStream::Unix(connection), _) => match check_user(&connection) {
                Ok(()) => {
                    let here = Ipv4Addr::LOCALHOST.into();
                    server.take(Stream::Unix(connection), here, &"a process of this user").await;
                }
                Err(error) => server.refusals.note(&PeerStream::Unix(connection).name(), &error),
            },
            (PeerStream::Tcp(connection, address), credentials) => {
                let (credentials, of_task) = (credentials.clone(), server.clone());
                let task = tokio::spawn(async move {
                    let begun = async {
                        match credentials {
                            Credentials::Tls(tls) => shake_hands(&tls, connection).await,
                            _ => first_byte(connection).await,
                        }
                    };
                    match clock::timeout(HANDSHAKE, begun).await {
                        Ok(Ok(stream)) => of_task.take(stream, address.ip(), &address).await,
                        // Probes of ports end in this way.
                        Ok(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                            tracing::debug!(%address, "a control connection ended before it had begun");
                        }
                        Ok(Err(error)) => of_task.refusals.note(&address, &error),
                        Err(_elapsed) => {
                            of_task
                                .refusals
                                .note(&address, &format_args!("it said nothing within {HANDSHAKE:?}"));
                        }
                    }
                });
                if strangers.meet(address.ip(), task.abort_handle()) {
                    let why = "too many connections at once say nothing or show no certificate; the oldest is closed";
                    server.refusals.note(&address, &why);
                }
            }
        }
    }
}

/// The server behind a listener.
#[derive(Clone)]
struct Server {
    checked: mpsc::Sender<io::Result<Connection>>,
    /// Places for checked connections. Unchecked connections take none of them.
    places: Arc<Places>,
    refusals: Arc<Refusals>,
}

/// The places for a listener's connections.
enum Places {
    /// For connections that last.
    Lasting {
        connections: Shares,
        unread: Shares,
        /// Whether each client has a share of the connections. Processes that have proved to be of the cluster may have any
        /// number.
        are_shared: bool,
    },
    /// For passing connections: newer ones take the places of older ones.
    Passing(Mutex<Strangers<oneshot::Sender<()>>>),
}

impl Places {
    /// The connections' name in logs.
    fn what(&self) -> &'static str {
        match self {
            Places::Lasting { .. } => "a control",
            Places::Passing(_) => "a metrics",
        }
    }

    /// A place for a connection from this address, the limit of its unread answers, and whether an older connection has lost its
    /// place.
    ///
    /// # Errors
    /// The reason why there is no place.
    fn place(&self, from: IpAddr) -> Result<(ConnectionPlace, Unread, bool), String> {
        let client = Client::at(from);
        match self {
            Places::Lasting { connections, unread, are_shared } => {
                let taken =
                    if *are_shared { connections.take(&client, 1) } else { connections.take_any(&client, 1) };
                let most = connections.total();
                let place = taken.map_err(|no| match no {
                    NoShare::Full => format!("{most} connections are open, which is the limit"),
                    NoShare::Client => format!("its address has its share of the {most} connections"),
                })?;
                Ok((ConnectionPlace::Lasting { _share: place }, Unread::new(unread.clone(), client), false))
            }
            Places::Passing(strangers) => {
                let (newer, taken) = oneshot::channel();
                let ended = strangers.lock().meet(from, newer);
                let unread = Unread::new(Shares::new(unread::OF_ONE), client);
                Ok((ConnectionPlace::Passing(taken), unread, ended))
            }
        }
    }
}

impl Server {
    /// Gives a connection to the server if there is a place for it.
    async fn take(&self, stream: Stream, address: IpAddr, from: &(dyn Display + Sync)) {
        let (place, unread, ended) = match self.places.place(address) {
            Ok(taken) => taken,
            Err(why) => return self.refusals.note(from, &why),
        };
        if ended {
            self.refusals.note(from, &"too many are open at once; the oldest is closed");
        }
        // A send error is ignored: a server that has ended takes no connections.
        drop(self.checked.send(Ok(Connection { stream, place, unread })).await);
    }
}

async fn shake_hands(tls: &Tls, connection: TcpStream) -> io::Result<Stream> {
    tls.accept(connection).await.map(|stream| Stream::Tls(Box::new(stream.into())))
}

/// Waits until the other end has sent something.
async fn first_byte(connection: TcpStream) -> io::Result<Stream> {
    match connection.peek(&mut [0]).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(Stream::Tcp(connection)),
    }
}

#[cfg(test)]
mod tests;
