//! Cross-origin requests (CORS): the questions that browsers ask before a page of another origin may use this server, and the
//! answers.

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};

use crate::identity::Origins;

/// Seconds for which a browser remembers the answer.
const REMEMBERED: &str = "600";
/// Headers of an answer that pages may read.
const SHOWN: &str = "x-request-id, retry-after, x-should-retry";
/// Headers that pages may send where the browser names none: keys, and the settings that a request has beside its body.
const TAKEN: &str = "authorization, content-type, x-api-key, x-request-id, x-session-id, x-request-timeout";
/// Most headers of a page that an answer repeats, and the most bytes of their names. OpenAI's client sends about fifteen.
const MOST_NAMES: usize = 64;
const MOST_BYTES: usize = 2048;

/// The origin of the page that sends a request, if that origin may use this server.
pub(super) fn page(origins: &Origins, headers: &HeaderMap) -> Option<HeaderValue> {
    let origin = headers.get(header::ORIGIN)?;
    origins.allow(origin.to_str().ok()?).then(|| origin.clone())
}

/// Whether the request is a preflight: a browser asks what a page may do.
pub(super) fn is_question(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The answer to a preflight. It allows the headers that the page wants to send, because OpenAI's client sends some about itself.
/// `of_gateway` is the header in which a gateway names tenants. No page may send it.
pub(super) fn answer(headers: &HeaderMap, of_gateway: Option<&HeaderName>) -> Response {
    let taken = wanted(headers, of_gateway).unwrap_or(HeaderValue::from_static(TAKEN));
    let allowed = [
        (header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST")),
        (header::ACCESS_CONTROL_ALLOW_HEADERS, taken),
        (header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(REMEMBERED)),
        (header::VARY, HeaderValue::from_static("access-control-request-headers")),
    ];
    (StatusCode::NO_CONTENT, allowed).into_response()
}

/// The headers that a preflight names, without that of a gateway. `None` if it names none, one that is no name, or too many.
fn wanted(headers: &HeaderMap, of_gateway: Option<&HeaderName>) -> Option<HeaderValue> {
    let lines = headers.get_all(header::ACCESS_CONTROL_REQUEST_HEADERS).iter().map(HeaderValue::to_str);
    let asked = lines.collect::<Result<Vec<&str>, _>>().ok()?.join(",");
    if asked.len() > MOST_BYTES {
        return None;
    }
    let names = asked.split(',').map(str::trim).filter(|name| !name.is_empty());
    let names = names.map(|name| HeaderName::from_bytes(name.as_bytes()));
    let mut names = names.collect::<Result<Vec<HeaderName>, _>>().ok()?;
    names.retain(|name| Some(name) != of_gateway);
    if names.is_empty() || names.len() > MOST_NAMES {
        return None;
    }
    let names: Vec<&str> = names.iter().map(HeaderName::as_str).collect();
    HeaderValue::from_str(&names.join(", ")).ok()
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
