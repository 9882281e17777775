//! Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::audit::Refusal;
use crate::router::Failure;
use crate::text::TextError;

/// Most characters of a client's text that a message repeats: a client chooses the length of its headers and paths.
const MOST_REPEATED: usize = 100;

/// A client's text, as a message repeats it.
fn repeated(text: &str) -> String {
    match text.char_indices().nth(MOST_REPEATED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// An error, as a client sees it.
#[derive(Clone, Debug)]
pub(super) struct ApiError {
    pub status: StatusCode,
    message: String,
    kind: &'static str,
    param: Option<String>,
    code: Option<&'static str>,
    /// Seconds after which another try makes sense.
    retry_after: Option<u32>,
    /// Clients that repeat requests by themselves should not repeat this one.
    is_final: bool,
    /// The client should make a new connection, perhaps to another server.
    hangs_up: bool,
    /// The reason that the audit log gives.
    refusal: Option<Refusal>,
    /// Only a turn for longer texts is missing.
    wants_longer_turn: bool,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: String) -> Self {
        Self {
            status,
            message,
            kind,
            param: None,
            code: None,
            retry_after: None,
            is_final: false,
            hangs_up: false,
            refusal: None,
            wants_longer_turn: false,
        }
    }

    /// The request is wrong as a whole.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message.into())
    }

    /// One field is wrong.
    pub fn field(name: &str, message: impl Into<String>) -> Self {
        Self { param: Some(name.to_owned()), ..Self::invalid(message) }
    }

    /// The request has a field that this server does not support.
    pub fn unsupported(name: &str, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::field(name, message) }
    }

    pub fn not_found(message: String) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    pub fn unknown_model<'a>(name: &str, served: impl Iterator<Item = &'a String>) -> Self {
        let (name, served) = (repeated(name), served.map(|name| format!("{name:?}")).collect::<Vec<_>>());
        let message = format!("the model {name:?} is not served here; this server has {}", served.join(", "));
        Self { param: Some("model".into()), code: Some("model_not_found"), ..Self::not_found(message) }
    }

    pub fn method(method: &Method, path: &str) -> Self {
        let message = format!("{} does not take {}", repeated(path), repeated(method.as_str()));
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    pub fn too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes, which is the limit");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// The template makes a longer text of a conversation than this. `wants_longer_turn`: it may be longer in a turn for longer texts.
    pub fn long_text(field: &str, most: usize, wants_longer_turn: bool) -> Self {
        let message = format!(
            "the chat template makes more than {most} bytes of text from {field}, which is the limit (--max-body-bytes, but 8 to 64 \
             MiB); send less"
        );
        Self { wants_longer_turn, ..Self::field(field, message) }
    }

    pub fn unreadable(error: &axum::Error) -> Self {
        Self::invalid(format!("the request body could not be read: {error}"))
    }

    pub fn slow_body(limit: Duration, elapsed: &tokio::time::error::Elapsed) -> Self {
        let message = format!("the request body did not arrive within {} s: {elapsed}", limit.as_secs_f64());
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message)
    }

    /// The server takes no more requests now.
    pub fn busy(message: String) -> Self {
        Self {
            code: Some("server_busy"),
            retry_after: Some(1),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message)
        }
    }

    /// All of one resource is taken.
    pub fn full(message: String, refusal: Refusal) -> Self {
        Self { refusal: Some(refusal), ..Self::busy(message) }
    }

    /// This server ends. The connection is of no more use.
    pub fn stopping() -> Self {
        Self { hangs_up: true, ..Self::busy("the server is shutting down; try again soon".to_owned()) }
    }

    /// The server takes no more from this client now, because the client has its share of `what`.
    pub fn over_share(what: &str, refusal: Refusal) -> Self {
        Self::limited(
            format!(
                "this client has as many {what} as its share of this server allows; send more when some have been answered"
            ),
            refusal,
        )
    }

    /// The client has to read answers first.
    pub fn unread(refusal: Refusal) -> Self {
        let message = "this client has as many bytes of answers that it has not read as its share of this server allows; read some \
                       of them first";
        Self::limited(message.to_owned(), refusal)
    }

    fn limited(message: String, refusal: Refusal) -> Self {
        Self {
            code: Some("rate_limit_exceeded"),
            retry_after: Some(1),
            refusal: Some(refusal),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message)
        }
    }

    /// The answer is longer than the limit of all answers, so no client could get it at once.
    pub fn too_long_an_answer(limit: usize) -> Self {
        Self::invalid(format!(
            "the answer has more than {limit} bytes, which is the limit of all answers (--max-answer-bytes); ask for less at once, or \
             for a stream"
        ))
    }

    /// The request has no valid key or tenant.
    pub fn no_key(message: &str, refusal: Refusal) -> Self {
        Self {
            code: Some("invalid_api_key"),
            refusal: Some(refusal),
            ..Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message.to_owned())
        }
    }

    pub fn not_an_operator(path: &str) -> Self {
        let message = format!("{path} is for operators: use an API key that has admin = true");
        Self::forbidden(message, Refusal::NotOperator)
    }

    /// A gateway's client asks for an operator's endpoint.
    pub fn of_a_tenant(path: &str, header: &HeaderName) -> Self {
        let message = format!(
            "{path} is for operators, and {header} names a tenant: call it at the address that --admin names"
        );
        Self::forbidden(message, Refusal::NotOperator)
    }

    fn forbidden(message: String, refusal: Refusal) -> Self {
        Self { refusal: Some(refusal), ..Self::new(StatusCode::FORBIDDEN, "permission_error", message) }
    }

    pub fn not_local(path: &str) -> Self {
        let message = format!(
            "{path} is taken from this machine alone, because this server has no API keys: start it with --api-keys, and use \
             one that has admin = true"
        );
        Self::forbidden(message, Refusal::NotLocal)
    }

    /// Nothing is served at this path. `where_else` says more.
    pub fn nothing_at(path: &str, where_else: &str) -> Self {
        Self::not_found(format!("there is nothing at {}{where_else}", repeated(path)))
    }

    /// An operator's path at the clients' address.
    pub fn served_elsewhere(path: &str) -> Self {
        let error = Self::nothing_at(path, " here: it is served at the address that --admin names");
        Self { refusal: Some(Refusal::NotOperator), ..error }
    }

    pub fn wrong_host(host: &str) -> Self {
        let host = repeated(host);
        let message = format!(
            "this server is not addressed as {host:?}: use its address or localhost, or start it with --allowed-hosts"
        );
        let error = Self::new(StatusCode::MISDIRECTED_REQUEST, "invalid_request_error", message);
        Self { refusal: Some(Refusal::Host), ..error }
    }

    pub fn cross_origin(origin: &str) -> Self {
        let origin = repeated(origin);
        let message = format!(
            "a web page of {origin:?} may not use this server; if that is the server's own name, start it with --allowed-hosts"
        );
        Self::forbidden(message, Refusal::Origin)
    }

    pub fn not_json(kind: &str) -> Self {
        let kind = repeated(kind);
        let message = format!("the body is {kind:?}; send JSON with Content-Type: application/json");
        let error = Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message);
        Self { refusal: Some(Refusal::ContentType), ..error }
    }

    /// A worker does not do what an operator asked for.
    pub fn bad_worker(message: String) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "server_error", message)
    }

    pub fn internal(message: String) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Whether the request may be prepared in a turn for longer texts.
    pub fn wants_longer_turn(&self) -> bool {
        self.wants_longer_turn
    }

    /// The outcome's name in `host_requests_total`.
    pub fn outcome(&self) -> &'static str {
        match (self.status, self.code) {
            (StatusCode::SERVICE_UNAVAILABLE, Some("server_busy")) => "busy",
            (StatusCode::TOO_MANY_REQUESTS, _) => "over_share",
            (StatusCode::SERVICE_UNAVAILABLE, _) => "unavailable",
            (_, Some("answer_broken")) => "broken",
            (_, Some("timeout")) => "late",
            (status, _) if status.is_client_error() => "invalid",
            _ => "failed",
        }
    }

    /// The message for a person.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The code for programs.
    pub fn code(&self) -> Option<&'static str> {
        self.code
    }

    /// The error as JSON, for a body or an event.
    pub fn json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::TooLong { .. } | Failure::TooLongText { .. } => {
                Self { code: Some("context_length_exceeded"), ..Self::invalid(message) }
            }
            Failure::Refused(_) => Self::invalid(message),
            Failure::Busy(_) => Self::full(message, Refusal::AllRequests),
            Failure::OverShare => Self::over_share("requests under way", Refusal::Requests),
            Failure::Unavailable(_) => {
                Self { code: Some("unavailable"), retry_after: Some(5), ..Self::busy(message) }
            }
            Failure::Late(_) => Self {
                code: Some("timeout"),
                is_final: true,
                ..Self::new(StatusCode::REQUEST_TIMEOUT, "timeout_error", message)
            },
            Failure::Broken(_) => Self { code: Some("answer_broken"), ..Self::internal(message) },
            Failure::Internal(_) => Self::internal(message),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, super::json(&self.json())).into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.hangs_up {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if let Some(refusal) = self.refusal {
            response.extensions_mut().insert(refusal);
        }
        if self.is_final {
            // OpenAI's clients repeat a request that is answered 408, unless this header forbids it.
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
