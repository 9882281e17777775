//! Everything in front of the workers, put together: registry, router and HTTP API on two listeners.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use axum::http::HeaderName;
use host_grammar::{Compiler, Vocabulary};
use host_wire::clock;
use host_wire::endpoint::{self, ApiTls, Listener};
use host_wire::proto::registry_server::RegistryServer;
use host_wire::random::random_u64;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::Routes;

use super::audit::Audit;
use super::connections::{self, HttpListener, Limits, Places};
pub use super::http::About;
use super::http::{App, Audience, TextWork, Unread, Uploads};
use super::identity::{Hosts, Identities, Keys, Origins};
use super::metrics::Metrics;
use super::registry::{Policy, Registry, Terms};
use super::router::{Retry, Router, Waits, warm_up};
use crate::text::TextModel;

/// The configuration of a router.
#[derive(Clone)]
pub struct FrontConfig {
    /// Name that clients give as `model` and that workers must announce.
    pub model: String,
    /// Other names that clients may give.
    pub aliases: Vec<String>,
    /// Facts about the server that clients can read.
    pub about: About,
    /// Origins whose web pages may use the API.
    pub origins: Origins,
    /// Tokenizer, chat template and end tokens.
    pub text: TextModel,
    /// How routes are chosen.
    pub policy: Policy,
    /// The limits of retries.
    pub retry: Retry,
    /// How long requests wait for workers.
    pub waits: Waits,
    /// Whether a worker gets requests only after it has served a dummy request.
    pub warm_up: bool,
    /// A worker not heard of for this long gets no new requests.
    pub worker_timeout: Duration,
    /// Requests on a worker not heard of for this long are given up.
    pub lost_after: Duration,
    /// Most workers that the registry accepts.
    pub max_workers: usize,
    /// Most requests at once. A request beyond the limit is answered 503. A request of a client that already has its
    /// [share](super::shares) is answered 429.
    pub max_requests: usize,
    /// Largest request body, in bytes.
    pub max_body: usize,
    /// Most bodies that are received from clients at once. A body beyond the limit is answered 503. A body of a client that
    /// already has its share is answered 429.
    pub max_uploads: usize,
    /// Most bytes of these bodies in all. One body must fit. Bodies beyond the limit are answered as for `max_uploads`.
    pub max_upload_bytes: usize,
    /// Most bytes of bodies that are parsed and tokenized, or wait for that. One body must fit. Bodies beyond the limit are
    /// answered as for `max_uploads`.
    pub max_text_bytes: usize,
    /// Most bodies, or texts of templates, above 1 MiB that are parsed and tokenized at once. One of 8 MiB may take 3 GB.
    pub longest_texts: usize,
    /// The limits of grammars, checked before grammars are sent to workers.
    pub grammars: host_grammar::Limits,
    /// Most bytes of answers that are not sent yet. One answer must fit. Beyond the limit, requests are answered as for
    /// `max_uploads`, and generations that are streamed wait.
    pub max_answer_bytes: usize,
    /// Most tokens of a chat answer when the request names no number, as far as the model's context has room for them.
    pub default_max_tokens: u32,
    /// Longest wait for a whole request body.
    pub body_timeout: Duration,
    /// The limits of HTTP connections.
    pub connections: Limits,
    /// Keys of tenants. If absent, requests need no key.
    pub keys: Option<Arc<Keys>>,
    /// A header in which a trusted gateway names the tenant.
    pub tenant_header: Option<HeaderName>,
    /// The certificate of the HTTP API. If absent, the API speaks plain text. The operators' listener uses the certificate only
    /// where other machines reach that listener.
    pub tls: Option<ApiTls>,
    /// Names under which clients address the server. If absent, a listener on the loopback interface accepts local names only,
    /// and other listeners accept any name. Operators without keys may only use [`Hosts::for_operators`].
    pub hosts: Option<Hosts>,
    /// Becomes true when the server accepts requests and workers can serve them, for the first time.
    pub ready: watch::Sender<bool>,
    /// Whether every request has a line in the log.
    pub log_requests: bool,
    /// How often a comment is sent to a client that waits for the next event of its stream. If absent, none is sent.
    pub stream_keep_alive: Option<Duration>,
    /// Time that requests under way have to end by themselves at shutdown.
    pub drain: Duration,
}

impl FrontConfig {
    /// The defaults for a model.
    #[must_use]
    pub fn new(model: String, text: TextModel) -> Self {
        Self {
            model,
            aliases: Vec::new(),
            about: About { created: clock::unix_seconds(), ..About::default() },
            origins: Origins::default(),
            text,
            policy: Policy::default(),
            retry: Retry::default(),
            waits: Waits::default(),
            warm_up: true,
            worker_timeout: Duration::from_secs(3),
            lost_after: Duration::from_secs(10),
            max_workers: 4096,
            max_requests: 1024,
            max_body: 8 << 20,
            max_uploads: 4096,
            max_upload_bytes: 256 << 20,
            max_text_bytes: 256 << 20,
            longest_texts: 1,
            grammars: host_grammar::Limits::default(),
            max_answer_bytes: 256 << 20,
            default_max_tokens: 1024,
            body_timeout: Duration::from_secs(30),
            connections: Limits::new(Duration::from_secs(30)),
            keys: None,
            tenant_header: None,
            tls: None,
            hosts: None,
            ready: watch::Sender::new(false),
            log_requests: true,
            stream_keep_alive: None,
            drain: Duration::from_secs(30),
        }
    }
}

/// How often the file of keys is checked for changes.
const LOOK_AT_KEYS: Duration = Duration::from_secs(1);

/// Reads the file of keys again when it changes, until the server stops.
async fn follow_keys(keys: Option<Arc<Keys>>, mut stop: watch::Receiver<bool>) {
    let Some(keys) = keys else { return };
    let mut wrong = String::new();
    loop {
        tokio::select! {
            () = clock::sleep(LOOK_AT_KEYS) => {}
            _ = stop.wait_for(|&stop| stop) => return,
        }
        let read = Arc::clone(&keys);
        let Ok(read) = tokio::task::spawn_blocking(move || read.reload()).await else { return };
        match read {
            Ok(true) => tracing::info!(keys = keys.count(), "the API keys have changed"),
            Ok(false) => {}
            // Logs the same error once, not every second.
            Err(error) if error.to_string() == wrong => continue,
            Err(error) => {
                tracing::warn!(%error, "the API keys stay as they were");
                wrong = error.to_string();
                continue;
            }
        }
        wrong.clear();
    }
}

/// Makes `ready` true when workers can serve requests.
async fn note_ready(registry: Registry, ready: watch::Sender<bool>) {
    loop {
        let change = registry.change();
        if registry.snapshot().unusable.is_none() {
            ready.send_replace(true);
            return;
        }
        change.await;
    }
}

/// The sockets on which HTTP is served.
#[derive(Debug)]
pub struct HttpListeners {
    /// For clients.
    pub clients: TcpListener,
    /// For operators. If absent, operators use the listener for clients.
    pub operators: Option<HttpListener>,
}

/// One listener for clients and operators.
impl From<TcpListener> for HttpListeners {
    fn from(clients: TcpListener) -> Self {
        Self { clients, operators: None }
    }
}

/// Most connections of operators: scrapers, load balancers and a few commands.
const OPERATORS_CONNECTIONS: usize = 64;

/// Time for connections to close after the last request was ended.
const HANG_UP: Duration = Duration::from_secs(1);

/// Serves the HTTP API and the workers' `Registry` until `shutdown` resolves. HTTP has one listener, or one for clients and one
/// for operators. `control` is the listener of the registry. After `shutdown`, new requests are refused, requests under way have
/// [`FrontConfig::drain`] to end, and the rest end with an error.
///
/// The router calls workers with the credentials of `control`, the listener that they call.
///
/// # Errors
/// When a listener fails.
pub async fn serve(
    config: FrontConfig,
    http: impl Into<HttpListeners>,
    control: impl Into<Listener>,
    shutdown: impl Future<Output = ()> + Send,
) -> anyhow::Result<()> {
    let (stop, stopping) = watch::channel(false);
    let (close, closing) = watch::channel(false);
    let control = control.into();
    let registry = Registry::new(Terms {
        model: config.model.clone(),
        worker_timeout: config.worker_timeout,
        lost_after: config.lost_after,
        max_workers: config.max_workers,
        warm_up: config.warm_up,
        policy: config.policy,
        seed: random_u64().context("no randomness for routing")?,
        credentials: control.credentials().clone(),
    });
    let metrics = Arc::new(Metrics::new());
    let HttpListeners { clients, operators } = http.into();
    let clients = HttpListener::from(clients).with_tls(config.tls.clone());
    let identities = |listener: &HttpListener| {
        let is_local = listener.is_local().context("an HTTP listener has no address")?;
        let standard = if is_local { Hosts::Local } else { Hosts::Any };
        let hosts = config.hosts.clone().unwrap_or(standard);
        anyhow::Ok(Identities {
            keys: config.keys.clone(),
            tenant_header: None,
            hosts,
            origins: config.origins.clone(),
        })
    };
    let of_clients = Identities { tenant_header: config.tenant_header, ..identities(&clients)? };
    // No gateway stands before the operators' listener, so it reads no tenant header.
    let of_operators = operators.as_ref().map(identities).transpose()?;
    let limits = (config.retry, config.waits);
    let router = Router::new(registry.clone(), limits, config.max_requests, Arc::clone(&metrics), closing);
    let audit = Audit::default();
    let places = Places::new(config.connections, config.max_requests, audit.clone());
    let app = Arc::new(App {
        model: config.model,
        aliases: config.aliases,
        about: config.about,
        text: config.text,
        router: router.clone(),
        metrics,
        max_body: config.max_body,
        body_timeout: config.body_timeout,
        default_max_tokens: config.default_max_tokens,
        log_requests: config.log_requests,
        stream_keep_alive: config.stream_keep_alive,
        stall: config.connections.head,
        connections: places.shares(),
        audit: audit.clone(),
        uploads: Uploads::new(config.max_uploads, config.max_upload_bytes),
        text_work: TextWork::new(config.max_text_bytes, config.longest_texts),
        grammars: Compiler::new(&Vocabulary::bytes(), config.grammars).context("grammars of bytes")?,
        unread: Unread::new(config.max_answer_bytes),
        stopping: stopping.clone(),
    });

    let stopped = |mut signal: watch::Receiver<bool>| async move {
        // An error means that the server is gone, which is a stop too.
        drop(signal.wait_for(|&stop| stop).await);
    };
    let follow_keys = follow_keys(config.keys, stopping.clone());
    tokio::spawn(follow_keys);
    let warm_up = tokio::spawn(warm_up(router.registry().clone()));
    let note_ready = tokio::spawn(note_ready(router.registry().clone(), config.ready));
    let audience = if operators.is_some() { Audience::Clients } else { Audience::All };
    // The operators' listener serves as long as the clients' one, whatever happens on its connections.
    let mut serve_operators = JoinSet::new();
    if let Some((listener, identities)) = operators.zip(of_operators) {
        let routes = app.routes(Audience::Operators, identities);
        let most = config.connections.connections.min(OPERATORS_CONNECTIONS);
        let places = Places::new(Limits { connections: most, ..config.connections }, 0, audit);
        serve_operators.spawn(connections::serve(listener, routes, places, stopping.clone()));
    }
    let serve_http = connections::serve(clients, app.routes(audience, of_clients), places, stopping);
    let mut serve_http = std::pin::pin!(serve_http);
    // Workers keep reporting while requests drain, so the control listener ends with `close`.
    let calls = Routes::new(RegistryServer::new(registry));
    let serve_control = endpoint::serve(control, calls, stopped(close.subscribe()));
    let mut serve_control = std::pin::pin!(serve_control);

    tokio::select! {
        // This future ends only after a stop.
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
    // Gives answers to operators time to arrive, among them the answer to a drain that ends this process.
    drop(clock::timeout(HANG_UP, serve_operators.join_next()).await);
    warm_up.abort();
    note_ready.abort();
    serve_operators.abort_all();
    Ok(())
}
