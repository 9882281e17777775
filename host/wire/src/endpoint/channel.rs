//! Connecting to another process.

use std::error::Error;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tonic::Status;
use tonic::codegen::Service;
use tonic::transport::{Channel, Endpoint, Uri};

use super::address::Address;
use super::connection::Stream;
use super::credentials::{Credentials, Mismatch, check_user};
use super::{CONNECT, MAX_CALLS, PING_EVERY, PING_WAIT, RESOLVE};
use crate::clock;

/// The origin of all requests. It names no machine, because credentials identify the other process.
const ORIGIN: &str = "http://host-cluster";
/// Bytes of one answer that the other process may send before the caller reads: about a thousand tokens. Answers that are not
/// read wait in the process that sends them.
const UNREAD_OF_A_CALL: u32 = 16 << 10;
/// Bytes of all answers of a connection: more than all calls together may have unread. So calls whose answers are not read do not
/// hold up others. The HTTP/2 library closes a connection whose many small frames are not read, after an amount that grows with
/// this number: here it takes 2,900 such calls at once.
const UNREAD_OF_ALL: u32 = (1 << 31) - 1;
const _: () = assert!(MAX_CALLS as u64 * (UNREAD_OF_A_CALL as u64) < UNREAD_OF_ALL as u64);

/// A connection that opens when it is first used, and opens again after it broke.
///
/// # Errors
/// When the credentials do not fit addresses of this kind.
pub fn channel(address: &Address, credentials: &Credentials) -> Result<Channel, Mismatch> {
    credentials.fit(address)?;
    let dial = Dial(Arc::new((address.clone(), credentials.clone())));
    let endpoint = Endpoint::from_static(ORIGIN)
        .initial_stream_window_size(UNREAD_OF_A_CALL)
        .initial_connection_window_size(UNREAD_OF_ALL)
        // Clients may hang up as often as they want, and what workers still send for them is no fault of the connection. The library
        // counts small frames for calls that it remembers, and never less, so it remembers none.
        .http2_max_concurrent_reset_streams(0)
        .http2_max_local_error_reset_streams(None)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PING_WAIT)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_with_connector_lazy(dial))
}

/// A connection that could not be made. Nothing was sent over it.
#[derive(Debug, thiserror::Error)]
#[error("{address}: {error}")]
struct Unconnected {
    address: Address,
    error: io::Error,
}

/// Whether a call failed because no connection could be made, so that the other process has received nothing of it.
#[must_use]
pub fn is_unconnected(status: &Status) -> bool {
    let mut cause = status.source();
    while let Some(error) = cause {
        if error.is::<Unconnected>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Connects to one address, whatever address the request names.
#[derive(Clone)]
struct Dial(Arc<(Address, Credentials)>);

impl Service<Uri> for Dial {
    type Response = TokioIo<Stream>;
    type Error = Unconnected;
    type Future = Pin<Box<dyn Future<Output = Result<TokioIo<Stream>, Unconnected>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Unconnected>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let to = Arc::clone(&self.0);
        Box::pin(async move {
            let (address, credentials) = &*to;
            let connected = match resolve(address).await {
                Ok(found) => within(CONNECT, "no connection", connect(address, &found, credentials)).await,
                Err(error) => Err(error),
            };
            connected.map(TokioIo::new).map_err(|error| Unconnected { address: address.clone(), error })
        })
    }
}

/// The addresses that a name stands for.
async fn resolve(address: &Address) -> io::Result<Vec<SocketAddr>> {
    let (Address::Tls(host) | Address::Plain(host)) = address else { return Ok(Vec::new()) };
    let found = tokio::net::lookup_host((host.name.as_str(), host.port));
    Ok(within(RESOLVE, "its name was not resolved", found).await?.collect())
}

async fn within<T>(limit: Duration, what: &str, done: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let elapsed = |_| Err(io::Error::new(io::ErrorKind::TimedOut, format!("{what} within {limit:?}")));
    clock::timeout(limit, done).await.unwrap_or_else(elapsed)
}

async fn connect(address: &Address, found: &[SocketAddr], credentials: &Credentials) -> io::Result<Stream> {
    match (address, credentials) {
        (Address::Unix(path), _) => {
            let connection = UnixStream::connect(path).await?;
            check_user(&connection)?;
            Ok(Stream::Unix(connection))
        }
        (Address::Tls(_), Credentials::Tls(tls)) => {
            let connection = TcpStream::connect(found).await?;
            // Sends each message in a packet of its own: waiting for more would add to the latency of every token.
            connection.set_nodelay(true)?;
            tls.connect(connection).await.map(|stream| Stream::Tls(Box::new(stream.into())))
        }
        (Address::Tls(_), _) => Err(io::Error::other("no certificate to show")),
        (Address::Plain(_), _) => {
            let connection = TcpStream::connect(found).await?;
            connection.set_nodelay(true)?;
            Ok(Stream::Tcp(connection))
        }
    }
}
