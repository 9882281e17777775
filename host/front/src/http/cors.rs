//! Cross-origin requests (CORS): the questions that browsers ask before a page of another origin may use this server, and the
//! answers.

use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::identity::Origins;

/// Seconds for which a browser remembers the answer.
const REMEMBERED: &str = "600";
/// Headers of an answer that pages may read.
const SHOWN: &str = "x-request-id, retry-after";
/// Headers that pages may send: keys, and the settings that a request has beside its body.
const TAKEN: &str = "authorization, content-type, x-api-key, x-request-id, x-session-id, x-request-timeout";

/// The origin of the page that sends a request, if that origin may use this server.
pub(super) fn page(origins: &Origins, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    origins.allow(origin.to_str().ok()?).then(|| origin.clone())
}

/// Whether the request is a preflight: a browser asks what a page may do.
pub(super) fn is_question(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The answer to a preflight.
pub(super) fn answer() -> Response {
    let allowed = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST"),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, TAKEN),
        (header::ACCESS_CONTROL_MAX_AGE, REMEMBERED),
    ];
    (StatusCode::NO_CONTENT, allowed).into_response()
}

/// Adds the headers that let the page read the answer.
pub(super) fn permit(mut answer: Response, page: Option<HeaderValue>) -> Response {
    if let Some(origin) = page {
        let headers = answer.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(SHOWN));
        headers.append(header::VARY, HeaderValue::from_static("origin"));
    }
    answer
}
