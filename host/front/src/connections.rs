//! Accepts HTTP connections: no more at once than descriptors allow, and idle ones are closed.
//!
//! A connection is closed when the head of its next request is not there in time: the first one after it was accepted, any
//! later one after the answer before. An answer under way may take as long as it takes. Connections of HTTP/2 must send their
//! first request in time, too; later they are probed.

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::extract::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, getrlimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use host_wire::clock;

/// The limits of a listener's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest wait for the head of a connection's next request.
    pub head: Duration,
    /// Most connections at once, at least 1; more wait in the listener's queue.
    pub connections: usize,
}

impl Limits {
    /// As many connections as leave a quarter of this process's descriptors to everything else.
    #[must_use]
    pub fn new(head: Duration) -> Self {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Self { head, connections: connections_within(descriptors) }
    }
}

/// Most connections where descriptors are not the limit: each costs some kilobytes.
const MOST_CONNECTIONS: usize = 1 << 16;

fn connections_within(descriptors: u64) -> usize {
    let share = usize::try_from(descriptors - descriptors.div_ceil(4)).unwrap_or(usize::MAX);
    share.clamp(1, MOST_CONNECTIONS)
}

/// A warning of one kind comes this often at most.
const WARN_EVERY: Duration = Duration::from_secs(30);
/// Pause after the system had no resources to accept a connection.
const ACCEPT_AGAIN: Duration = Duration::from_secs(1);

/// Serves connections until `stop` becomes true, then lets the requests under way end.
pub async fn serve(
    listener: TcpListener,
    routes: axum::Router,
    limits: Limits,
    mut stop: watch::Receiver<bool>,
) {
    let most = limits.connections.clamp(1, MOST_CONNECTIONS);
    let places = Arc::new(Semaphore::new(most));
    let (mut full, mut refused) = (Seldom::default(), Seldom::default());
    loop {
        if places.available_permits() == 0 && full.is_due(clock::now()) {
            tracing::warn!(
                most,
                "as many HTTP connections are open as the limit of open files (ulimit -n) leaves room for; new ones wait"
            );
        }
        let accepted = async {
            let place = Arc::clone(&places).acquire_owned().await.map_err(io::Error::other)?;
            Ok::<_, io::Error>((place, listener.accept().await?.0))
        };
        let accepted = tokio::select! {
            accepted = accepted => accepted,
            () = stopped(&mut stop) => break,
        };
        let (place, connection) = match accepted {
            Ok(accepted) => accepted,
            Err(error) if is_of_one_connection(&error) => continue,
            Err(error) => {
                if refused.is_due(clock::now()) {
                    tracing::warn!(%error, "no HTTP connection can be accepted; trying again every second");
                }
                tokio::select! {
                    () = clock::sleep(ACCEPT_AGAIN) => continue,
                    () = stopped(&mut stop) => break,
                }
            }
        };
        let (routes, stop) = (routes.clone(), stop.clone());
        tokio::spawn(async move {
            hold(connection, routes, limits.head, stop).await;
            drop(place);
        });
    }
    drop(listener);
    // All places are free when the last connection has ended; MOST_CONNECTIONS fits.
    drop(places.acquire_many(u32::try_from(most).unwrap_or(u32::MAX)).await);
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the server is gone, which is a stop too.
    drop(stop.wait_for(|&stop| stop).await);
}

/// Whether the error is of one connection, so that the next can be accepted at once.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Serves one connection until it ends.
async fn hold(connection: TcpStream, routes: axum::Router, head: Duration, mut stop: watch::Receiver<bool>) {
    // A token per packet: waiting for more would add to every token's latency.
    if let Err(error) = connection.set_nodelay(true) {
        tracing::debug!(%error, "cannot send small packets at once");
    }
    let in_use = Arc::new(AtomicBool::new(false));
    let routes = TowerToHyperService::new(routes);
    let service = {
        let in_use = Arc::clone(&in_use);
        service_fn(move |request: Request<Incoming>| {
            in_use.store(true, Ordering::Relaxed);
            let answer = routes.call(request);
            async move { Ok::<_, Infallible>(answer.await.unwrap_or_else(|never| match never {})) }
        })
    };
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(head);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(head);
    let mut served = pin!(builder.serve_connection(TokioIo::new(connection), service));
    // Before it is known which HTTP this is, none of its timers runs.
    let mut first = pin!(clock::sleep(head));
    let (mut waiting, mut going_on) = (true, true);
    loop {
        tokio::select! {
            ended = served.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(error, "an HTTP connection ended early");
                }
                return;
            }
            () = first.as_mut(), if waiting => {
                if !in_use.load(Ordering::Relaxed) {
                    tracing::debug!("an HTTP connection was idle for too long and is closed");
                    return;
                }
                waiting = false;
            }
            () = stopped(&mut stop), if going_on => {
                served.as_mut().graceful_shutdown();
                going_on = false;
            }
        }
    }
}

/// Limits how often a warning is written.
#[derive(Debug, Default)]
struct Seldom {
    last: Option<clock::Instant>,
}

impl Seldom {
    fn is_due(&mut self, now: clock::Instant) -> bool {
        let due = self.last.is_none_or(|last| now.duration_since(last) >= WARN_EVERY);
        if due {
            self.last = Some(now);
        }
        due
    }
}

#[cfg(test)]
mod tests;
