//! Accepts HTTP connections. Limits them to what the descriptors allow and, for each client, to its share. Closes idle ones.
//!
//! A connection is closed when the head of its next request does not arrive in time, or when the connection is quiet for as long.
//! Quiet means: no request on it waits for this server, and its client takes nothing of the answers. A stream of HTTP/2 that is
//! quiet for as long is reset, whatever happens on the other streams of its connection. The duration of an answer that the client
//! reads is not limited.

mod activity;
mod handshake;
mod listener;

use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use activity::{Activity, Streams, Watched};
use axum::extract::Request;
use axum::http::Version;
use host_wire::shares::{Client, Shares};
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};

use super::audit::{Audit, Refusal};
use handshake::shake_hands;
use host_wire::clock;
use host_wire::endpoint::{ApiTls, Refusals};
use host_wire::log_rate::LogRate;
use listener::ClientStream;
pub use listener::HttpListener;

/// The limits of a listener's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest wait for the head of a connection's next request, and for a client to take some of an answer.
    pub head: Duration,
    /// Most connections at once, at least 1. More wait in the listener's queue. A connection of a client that already has its
    /// [share](Shares) is closed at once.
    pub connections: usize,
}

impl Limits {
    /// Allows as many connections as leave a quarter of this process's descriptors for other uses.
    #[must_use]
    pub fn new(head: Duration) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self { head, connections: connections_within(descriptors) }
    }
}

/// The limits of a listener's connections, and the connections that it has.
#[derive(Clone, Debug)]
pub struct Places {
    head: Duration,
    shares: Shares,
    /// Streams of all connections.
    streams: Shares,
    audit: Audit,
}

impl Places {
    /// Places that are all free, at a server that takes so many requests at once.
    pub(crate) fn new(limits: Limits, max_requests: usize, audit: Audit) -> Self {
        let most = limits.connections.clamp(1, MOST_CONNECTIONS);
        let streams = max_requests.saturating_mul(STREAMS_OF_REQUEST).max(LEAST_STREAMS);
        Self { head: limits.head, shares: Shares::new(most), streams: Shares::new(streams), audit }
    }

    /// Connections, by client.
    pub(crate) fn shares(&self) -> Shares {
        self.shares.clone()
    }
}

impl From<Limits> for Places {
    fn from(limits: Limits) -> Self {
        Self::new(limits, 0, Audit::default())
    }
}

/// Most connections where descriptors are not the limit: each costs some kilobytes.
const MOST_CONNECTIONS: usize = 1 << 16;

fn connections_within(descriptors: u64) -> usize {
    let share = usize::try_from(descriptors - descriptors.div_ceil(4)).unwrap_or(usize::MAX);
    share.clamp(1, MOST_CONNECTIONS)
}

/// Shortest time between two warnings of one kind.
const WARN_EVERY: Duration = Duration::from_secs(30);
/// Pause after the system had no resources to accept a connection.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// Most connections at once that are accepted while the server ends. Each is answered that the server ends. A client has its
/// share of them.
const LATE: usize = 64;

/// Serves connections until `stop` becomes true, then waits for the requests under way to end. New connections are served
/// meanwhile, too: their clients are told that the server ends, and do not wait in the listener's queue.
pub async fn serve(
    listener: impl Into<HttpListener>,
    routes: axum::Router,
    places: impl Into<Places>,
    mut stop: watch::Receiver<bool>,
) {
    let (listener, Places { head, shares, streams, audit }) = (listener.into(), places.into());
    let refusals = Arc::new(Refusals::of("an HTTP"));
    let terms = Terms { routes, tls: listener.tls.clone(), head, refusals, streams, audit: audit.clone() };
    let most = shares.total();
    let places = Arc::new(Semaphore::new(most));
    let (mut full, mut refused) = (LogRate::one_in(WARN_EVERY), LogRate::one_in(WARN_EVERY));
    loop {
        if places.available_permits() == 0 && full.line(clock::now()).is_some() {
            tracing::warn!(
                most,
                "as many HTTP connections are open as --max-connections, or else the limit of open files (ulimit -n), allows; new ones wait"
            );
        }
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((place, listener.accept().await?))
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = stopped(&mut stop) => break,
        };
        let (place, (connection, address)) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_of_one_connection(&error) => continue,
            Err(error) => {
                if refused.line(clock::now()).is_some() {
                    tracing::warn!(%error, "no HTTP connection can be accepted; trying again every second");
                }
                tokio::select! {
                    () = clock::sleep(ACCEPT_AGAIN) => continue,
                    () = stopped(&mut stop) => break,
                }
            }
        };
        let Ok(share) = shares.take(&Client::at(address), 1) else {
            audit.connection(Refusal::Connections, address);
            continue;
        };
        let (terms, stop) = (terms.clone(), stop.clone());
        tokio::spawn(async move {
            terms.hold(connection, address, stop).await;
            drop((share, place));
        });
    }
    // All places are free when the last connection has ended. Their number fits into `u32`, because MOST_CONNECTIONS does.
    let all = places.acquire_many(u32::try_from(most).unwrap_or(u32::MAX));
    tokio::select! {
        _all = all => {}
        () = serve_late(&listener, &terms) => {}
    }
}

/// Serves, without end, the connections that arrive while the server ends.
async fn serve_late(listener: &HttpListener, terms: &Terms) {
    let (places, shares) = (Arc::new(Semaphore::new(LATE)), Shares::new(LATE));
    // Each connection has one request only, because the answer closes it. So these connections need no stop signal.
    let (_never, stop) = watch::channel(false);
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((connection, address)) => {
                let Ok(share) = shares.take(&Client::at(address), 1) else { continue };
                let (terms, stop) = (terms.clone(), stop.clone());
                tokio::spawn(async move {
                    terms.hold(connection, address, stop).await;
                    drop((share, place));
                });
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(_refused) => clock::sleep(ACCEPT_AGAIN).await,
        }
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the server is gone, which is a stop too.
    drop(stop.wait_for(|&stop| stop).await);
}

/// Whether the error concerns one connection only, so that the next can be accepted at once.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// The address from which a request came. It is an extension of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// About the longest head of a request, in bytes: as in Node. Keys and cookies are a few kilobytes. Heads count in no client's share, so
/// a connection may not have more. Over HTTP/1 it is the size of the buffers for all that is read and written.
const HEAD_BYTES: usize = HEAD as usize;
const HEAD: u32 = 16 << 10;
/// Most bytes of answers that a stream of HTTP/2 buffers before it sends them.
const UNSENT: usize = 64 << 10;
/// Most streams of an HTTP/2 connection at once: requests that wait, and answers that are not read. A client with more streams
/// opens another connection, or waits. A stream beyond the limit is refused and costs nothing.
const STREAMS: u32 = 200;
/// Least number of HTTP/2 streams of all connections of a listener, of which each address has its share. A stream takes some kilobytes,
/// also one whose request was refused, until its client has read the answer. HTTP/2 refuses a stream beyond the limit, and clients
/// may send its request again. An HTTP/1 connection has one answer at a time, so it counts as a connection alone.
const LEAST_STREAMS: usize = 1 << 14;
/// A listener has at least so many streams for each request that the server takes at once.
const STREAMS_OF_REQUEST: usize = 4;

/// The settings that all connections of a listener share.
#[derive(Clone)]
struct Terms {
    routes: axum::Router,
    tls: Option<ApiTls>,
    head: Duration,
    refusals: Arc<Refusals>,
    /// Streams of all connections.
    streams: Shares,
    audit: Audit,
}

impl Terms {
    /// Serves one connection until it ends.
    async fn hold(self, caller: ClientStream, address: IpAddr, stop: watch::Receiver<bool>) {
        if let Err(error) = caller.check() {
            self.refusals.note(&address, &error);
            return;
        }
        let Self { routes, tls, head, refusals, streams, audit } = self;
        let served = Served { address, routes, head, streams, audit };
        match (caller, tls) {
            (ClientStream::Unix(connection), _) => served.converse(connection, stop).await,
            (ClientStream::Tcp(connection), tls) => {
                // Sends each token in a packet of its own: waiting for more would add to the latency of every token.
                if let Err(error) = connection.set_nodelay(true) {
                    tracing::debug!(%error, "cannot send small packets at once");
                }
                let Some(tls) = tls else {
                    return served.converse(connection, stop).await;
                };
                match shake_hands(&tls, connection, head, stop.clone()).await {
                    Ok(connection) => served.converse(connection, stop).await,
                    // Load balancers probe in this way whether a port is open.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                        tracing::debug!(%address, %error, "an HTTP connection ended before it spoke TLS");
                    }
                    Err(error) => refusals.note(&address, &error),
                }
            }
        }
    }
}

/// An accepted connection, without its bytes.
struct Served {
    address: IpAddr,
    routes: axum::Router,
    head: Duration,
    streams: Shares,
    audit: Audit,
}

impl Served {
    /// Serves the requests of the connection until it ends.
    async fn converse(
        self,
        connection: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        mut stop: watch::Receiver<bool>,
    ) {
        let Self { address, routes, head, streams, audit } = self;
        let activity = Activity::new();
        let routes = TowerToHyperService::new(routes);
        let service = {
            let activity = Arc::clone(&activity);
            service_fn(move |mut request: Request<Incoming>| {
                // Counts the request as waiting until the task of its stream counts it.
                let begins = activity.waits();
                request.extensions_mut().insert(Peer(address));
                let is_stream = request.version() == Version::HTTP_2;
                let stream = is_stream.then(|| streams.take(&Client::at(address), 1)).transpose();
                if stream.is_err() {
                    audit.connection(Refusal::Streams, address);
                }
                let (answer, connection) = (routes.call(request), Arc::clone(&activity));
                async move {
                    let stream = stream.map_err(|_none| h2::Error::from(h2::Reason::REFUSED_STREAM))?;
                    let activity = Activity::current(&connection);
                    let waits = activity.waits();
                    drop(begins);
                    let answer = answer.await.unwrap_or_else(|never| match never {});
                    drop(waits);
                    Ok::<_, h2::Error>(answer.map(|body| Watched::new(body, activity, stream)))
                }
            })
        };
        let mut builder = Builder::new(Streams::new(Arc::clone(&activity), head));
        builder.http1().timer(TokioTimer::new()).header_read_timeout(head).max_buf_size(HEAD_BYTES);
        builder.http2().timer(TokioTimer::new()).keep_alive_interval(head).max_send_buf_size(UNSENT);
        builder.http2().max_concurrent_streams(STREAMS).max_header_list_size(HEAD);
        let mut served = pin!(builder.serve_connection(TokioIo::new(connection), service));
        let mut quiet = pin!(activity.is_quiet_for(head));
        let mut going_on = true;
        loop {
            tokio::select! {
                ended = served.as_mut() => {
                    if let Err(error) = ended {
                        tracing::debug!(error, "an HTTP connection ended early");
                    }
                    return;
                }
                () = quiet.as_mut() => {
                    tracing::debug!(%address, "an HTTP connection was idle, or not read, for too long and is closed");
                    return;
                }
                () = stopped(&mut stop), if going_on => {
                    served.as_mut().graceful_shutdown();
                    going_on = false;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
