//! The HTTP API: OpenAI's completions and chat completions, SGLang's `/generate`, health, models and metrics.

mod answer;
mod apart;
mod ask;
mod chat;
mod completions;
mod conversation;
mod cors;
mod drain;
mod error;
mod fields;
mod flush;
#[doc(hidden)]
pub mod fuzzing;
mod generate;
mod guard;
mod health;
mod info;
mod logprobs;
mod openapi;
mod outflow;
mod paths;
mod prompt;
mod record;
#[cfg(test)]
mod reference;
mod respond;
mod responses;
mod sampling;
mod spoken;
mod structured;
mod text_work;
mod tokens;
mod tools;
mod unread;
mod upload;
mod values;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Extension, Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use host_grammar::Compiler;
use host_wire::audit::REQUEST;
use host_wire::clock;
use host_wire::random::random_u64;
use host_wire::shares::{Client, Share, Shares};
use tokio::sync::watch;
use tracing::Instrument;

use self::error::ApiError;
use super::audit::Audit;
use super::identity::Identities;
use super::metrics::{Held, Metrics};
use super::router::Router;
use crate::text::TextModel;
pub use text_work::TextWork;
pub use unread::Unread;
pub use upload::Uploads;

/// The state that all handlers share.
pub struct App {
    /// Name that clients give as `model`.
    pub model: String,
    /// Other names that clients may give.
    pub aliases: Vec<String>,
    /// Facts about the server that clients can read.
    pub about: About,
    /// Tokenizer, chat template and end tokens of the model.
    pub text: TextModel,
    /// Carries requests to workers.
    pub router: Router,
    /// The counters of the router.
    pub metrics: Arc<Metrics>,
    /// Largest request body, in bytes.
    pub max_body: usize,
    /// Longest wait for a whole request body.
    pub body_timeout: Duration,
    /// Most tokens of a chat answer when the request names no number.
    pub default_max_tokens: u32,
    /// Whether every request has a line in the log.
    pub log_requests: bool,
    /// How often a comment is sent to a client that waits for the next event. If absent, none is sent.
    pub stream_keep_alive: Option<Duration>,
    /// Longest time in which a client may take nothing of its answer.
    pub stall: Duration,
    /// Limits and counts of bodies that are being received from clients.
    pub uploads: Uploads,
    /// Connections of clients.
    pub connections: Shares,
    /// Where refusals are logged.
    pub(crate) audit: Audit,
    /// Permits for parsing and tokenizing bodies, and the limit of bytes that wait for it.
    pub text_work: TextWork,
    /// Compiles clients' grammars over bytes.
    pub grammars: Compiler,
    /// Limits and counts of answers that clients have not read.
    pub unread: Unread,
    /// Becomes true when the server ends and takes no new requests.
    pub stopping: watch::Receiver<bool>,
}

/// Facts about a server that clients can read before they send requests.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// When the model was made, in seconds since 1970: the same at every start.
    pub created: u64,
    /// The path of the model.
    pub model_path: Option<String>,
    /// The path of the tokenizer, if it is not in the model's folder.
    pub tokenizer_path: Option<String>,
}

/// The callers that a listener serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// All callers, where there is one listener.
    All,
    /// Clients, where operators have a listener of their own.
    Clients,
    /// Operators: they watch and change the server.
    Operators,
}

impl Audience {
    fn nothing_at(self, path: &str) -> ApiError {
        match self {
            Audience::Clients if guard::is_of_operators(path) => ApiError::served_elsewhere(path),
            Audience::Operators => {
                let here = " at the address that --admin names: it is for /drain, /flush_cache, /metrics and /health";
                ApiError::nothing_at(path, here)
            }
            _ => ApiError::nothing_at(path, ""),
        }
    }
}

/// The state of the checks in front of the handlers of a listener.
struct Entrance {
    app: Arc<App>,
    audience: Audience,
    /// How callers are identified.
    identities: Identities,
}

impl App {
    /// The names of the served model. Answers have the first one.
    fn names(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.model).chain(&self.aliases)
    }

    /// Checks that a client means the served model.
    fn check_name(&self, name: &str) -> Result<(), ApiError> {
        match self.names().any(|served| served == name) {
            true => Ok(()),
            false => Err(ApiError::unknown_model(name, self.names())),
        }
    }

    fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// The resources that clients hold now.
    fn held(&self) -> Held {
        let (uploads, upload_bytes) = self.uploads.taken();
        Held {
            requests: self.router.running(),
            connections: self.connections.taken(),
            uploads,
            upload_bytes,
            text_bytes: self.text_work.taken(),
            answer_bytes: self.unread.taken(),
            grammars: self.grammars.waiting(),
        }
    }

    /// The routes of the HTTP API on a listener.
    pub fn routes(self: &Arc<Self>, audience: Audience, identities: Identities) -> axum::Router {
        let mut served = paths::of_all();
        if audience != Audience::Operators {
            served.extend(paths::of_clients());
        }
        if audience != Audience::Clients {
            served.extend(paths::of_operators());
        }
        let routes = axum::Router::new();
        let routes = served.into_iter().fold(routes, |routes, (path, method)| routes.route(path, method));
        let document = openapi::Document::new(identities.keys.is_some());
        let entrance = Arc::new(Entrance { app: Arc::clone(self), audience, identities });
        routes
            .layer(Extension(document))
            .fallback(async move |request: Request| audience.nothing_at(request.uri().path()))
            .method_not_allowed_fallback(|request: Request| async move {
                ApiError::method(request.method(), request.uri().path())
            })
            .layer(middleware::from_fn_with_state(entrance, guard::guard))
            .layer(middleware::from_fn(identify))
            .with_state(Arc::clone(self))
    }

    /// Reads the whole body. Also returns the client's share of the bytes that are being received, which is held until the bytes
    /// count as text.
    async fn body(&self, client: &Client, request: Request) -> Result<(Bytes, Share), ApiError> {
        let declared = request
            .headers()
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > self.max_body as u64) {
            return Err(ApiError::too_large(self.max_body));
        }
        let read = self.uploads.receive(client, request.into_body(), self.max_body);
        match clock::timeout(self.body_timeout, read).await {
            Ok(received) => received,
            Err(elapsed) => Err(ApiError::slow_body(self.body_timeout, &elapsed)),
        }
    }
}

/// Shared state, as an extractor of handlers.
type Shared = State<Arc<App>>;

/// The id of a request, in logs and in its answer.
#[derive(Clone, Debug)]
struct RequestId(String);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_REQUEST_ID: usize = 128;
/// Most bytes of a path in a log line.
const MAX_LOGGED_PATH: usize = 128;

/// Gives each request an id (the client's, if it sent a usable one), a span, and the header in the answer.
async fn identify(mut request: Request, next: Next) -> Response {
    let given = request.headers().get(&REQUEST_ID).and_then(|id| id.to_str().ok()).filter(|id| {
        !id.is_empty() && id.len() <= MAX_REQUEST_ID && id.bytes().all(|byte| byte.is_ascii_graphic())
    });
    let id = match given {
        Some(id) => id.to_owned(),
        None => match random_u64() {
            Ok(random) => format!("{random:016x}"),
            Err(error) => {
                return ApiError::internal(format!("no randomness for a request id: {error}"))
                    .into_response();
            }
        },
    };
    let path: String = request.uri().path().chars().take(MAX_LOGGED_PATH).collect();
    let span = tracing::info_span!(target: REQUEST, "request", id, path);
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).instrument(span).await;
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// An answer with this content type.
fn typed(kind: &'static str, body: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, kind)], body.into()).into_response()
}

/// A JSON answer.
fn json(value: &serde_json::Value) -> Response {
    json_text(value.to_string())
}

/// A JSON answer whose text is given.
fn json_text(text: String) -> Response {
    typed("application/json", text)
}
