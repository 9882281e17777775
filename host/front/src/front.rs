//! Everything in front of the workers, put together: registry, router and HTTP API on two listeners.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use host_wire::clock;
use host_wire::proto::registry_server::RegistryServer;
use host_wire::random::random_u64;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::wrappers::TcpListenerStream;

use super::connections::{self, Limits};
use super::http::{App, TextWork, Uploads};
use super::metrics::Metrics;
use super::registry::{Policy, Registry, Terms};
use super::router::{Retry, Router};
use crate::text::TextModel;

/// The configuration of a router.
#[derive(Clone)]
pub struct FrontConfig {
    /// Name that clients give as `model` and that workers must announce.
    pub model: String,
    /// Tokenizer, chat template and end tokens.
    pub text: TextModel,
    /// How routes are chosen.
    pub policy: Policy,
    /// The limits of retries.
    pub retry: Retry,
    /// A worker not heard of for this long gets no new requests.
    pub worker_timeout: Duration,
    /// Requests on a worker not heard of for this long are given up.
    pub lost_after: Duration,
    /// Most workers.
    pub max_workers: usize,
    /// Most requests at once; more are answered 503, and those that a client has beyond its [share](super::shares) 429.
    pub max_requests: usize,
    /// Largest request body, in bytes.
    pub max_body: usize,
    /// Most tokens of a chat answer when the request names no number, as far as the model's context has room for them.
    pub default_max_tokens: u32,
    /// Longest wait for a whole request body.
    pub body_timeout: Duration,
    /// The limits of HTTP connections.
    pub connections: Limits,
    /// At shutdown, requests under way have this long to end by themselves.
    pub drain: Duration,
}

impl FrontConfig {
    /// The defaults for a model.
    #[must_use]
    pub fn new(model: String, text: TextModel) -> Self {
        Self {
            model,
            text,
            policy: Policy::default(),
            retry: Retry::default(),
            worker_timeout: Duration::from_secs(3),
            lost_after: Duration::from_secs(10),
            max_workers: 4096,
            max_requests: 1024,
            max_body: 8 << 20,
            default_max_tokens: 1024,
            body_timeout: Duration::from_secs(30),
            connections: Limits::new(Duration::from_secs(30)),
            drain: Duration::from_secs(30),
        }
    }
}

/// How long connections have to take note after the last request was ended.
const HANG_UP: Duration = Duration::from_secs(1);

/// Serves HTTP on one listener and the workers' `Registry` on the other until `shutdown` resolves. Then no connection is
/// accepted any more, requests under way have [`FrontConfig::drain`] to end, and what is left ends with an error.
///
/// # Errors
/// When a listener fails.
pub async fn serve(
    config: FrontConfig,
    http: TcpListener,
    control: TcpListener,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let (stop, stopping) = watch::channel(false);
    let (close, closing) = watch::channel(false);
    let registry = Registry::new(Terms {
        model: config.model.clone(),
        worker_timeout: config.worker_timeout,
        lost_after: config.lost_after,
        max_workers: config.max_workers,
        policy: config.policy,
        seed: random_u64().context("no randomness for routing")?,
    });
    let metrics = Arc::new(Metrics::new());
    let router =
        Router::new(registry.clone(), config.retry, config.max_requests, Arc::clone(&metrics), closing);
    let app = App {
        model: config.model,
        text: config.text,
        router: router.clone(),
        metrics,
        max_body: config.max_body,
        body_timeout: config.body_timeout,
        default_max_tokens: config.default_max_tokens,
        stall: config.connections.head,
        uploads: Uploads::new(config.max_body),
        text_work: TextWork::default(),
    };

    let stopped = |mut signal: watch::Receiver<bool>| async move {
        // An error means that the server is gone, which is a stop too.
        drop(signal.wait_for(|&stop| stop).await);
    };
    let serve_http = connections::serve(http, app.routes(), config.connections, stopping);
    let mut serve_http = std::pin::pin!(serve_http);
    // Workers keep reporting while requests drain, so this one ends with `close`.
    let serve_control = tonic::transport::Server::builder()
        .tcp_nodelay(true)
        .add_service(RegistryServer::new(registry))
        .serve_with_incoming_shutdown(TcpListenerStream::new(control), stopped(close.subscribe()));
    let mut serve_control = std::pin::pin!(serve_control);

    tokio::select! {
        // Only a stop ends it.
        () = &mut serve_http => {}
        ended = &mut serve_control => return ended.context("the control listener failed"),
        () = shutdown => {}
    }
    tracing::info!(running = router.running(), "shutting down");
    stop.send_replace(true);
    let drained = tokio::select! {
        ended = clock::timeout(config.drain, &mut serve_http) => ended.is_ok(),
        ended = &mut serve_control => return ended.context("the control listener failed"),
    };
    close.send_replace(true);
    if !drained {
        tracing::warn!(running = router.running(), "requests did not end in time");
        // Connections that are left do not react.
        drop(clock::timeout(HANG_UP, &mut serve_http).await);
    }
    drop(clock::timeout(HANG_UP, &mut serve_control).await);
    Ok(())
}
