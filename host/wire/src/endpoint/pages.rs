//! Keeps web pages away from listeners without credentials.
//!
//! A browser sends a page's requests to any port of its machine, some of them without a preflight. Such requests can be
//! recognized: most have the page's origin, and all have the name under which the page addresses the server.

use std::net::IpAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};

use super::refusals::Refusals;
use super::{Address, NAME};

/// The beginning of the content type of every gRPC request. A page needs a permission to send this type, which no listener here
/// gives.
const CALL: &[u8] = b"application/grpc";

/// A `Host` without its port and without the brackets of an IPv6 address.
#[must_use]
pub fn host_name(host: &str) -> &str {
    if let Some((address, _port)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return address;
    }
    host.rsplit_once(':').map_or(host, |(name, _port)| name)
}

/// Whether a `Host` is `localhost` or an IP address. Any other name may be made to resolve to this machine, for a page that was
/// loaded under that name (DNS rebinding).
#[must_use]
pub fn is_local_host(host: &str) -> bool {
    let name = host_name(host);
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

/// The rules of a listener, and its warnings.
#[derive(Debug)]
struct Rules {
    /// Whether it listens on the loopback interface, where only local names are its own.
    is_local: bool,
    refusals: Refusals,
}

/// Refuses requests of web pages to a listener at this address.
pub(super) fn without_pages(routes: Router, address: Option<&Address>) -> Router {
    let is_local = match address {
        Some(Address::Plain(host)) => host.name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback()),
        _ => false,
    };
    let rules = Arc::new(Rules { is_local, refusals: Refusals::of("a control or metrics") });
    routes.layer(from_fn_with_state(rules, of_no_page))
}

/// Refuses requests that are not gRPC, because the servers of services check only the path.
pub(super) fn calls_alone(routes: Router) -> Router {
    routes.layer(from_fn(is_call))
}

async fn of_no_page(State(rules): State<Arc<Rules>>, request: Request, next: Next) -> Response {
    let is_call = request.method() == Method::POST;
    let refused = |status: StatusCode, why: &'static str| {
        rules.refusals.note(&"what may be a web page", &why);
        // Callers of gRPC read a body as messages, so they get the status without one.
        if is_call { status.into_response() } else { (status, why).into_response() }
    };
    let headers = request.headers();
    if headers.contains_key(header::ORIGIN) {
        return refused(StatusCode::FORBIDDEN, "requests of web pages are refused: this one has an Origin");
    }
    // HTTP/2 has the name in the address.
    let given = request.uri().authority().map(|authority| authority.as_str());
    let given = given.or_else(|| Some(headers.get(header::HOST)?.to_str().unwrap_or_default()));
    // Processes of a cluster address each other by the common name.
    let is_own = |host: &str| is_local_host(host) || host == NAME;
    if rules.is_local && given.is_some_and(|host| !is_own(host)) {
        let why = "this listener is addressed as localhost or by an IP address, and this request names another host";
        return refused(StatusCode::MISDIRECTED_REQUEST, why);
    }
    next.run(request).await
}

async fn is_call(request: Request, next: Next) -> Response {
    if request.method() != Method::POST {
        return StatusCode::METHOD_NOT_ALLOWED.into_response();
    }
    let kind = request.headers().get(header::CONTENT_TYPE);
    if kind.is_some_and(|kind| kind.as_bytes().starts_with(CALL)) {
        next.run(request).await
    } else {
        StatusCode::UNSUPPORTED_MEDIA_TYPE.into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_a_page_can_have_are_not_local() {
        for local in
            ["localhost", "LocalHost:8001", "127.0.0.1", "127.0.0.1:8001", "[::1]:8001", "10.1.2.3:1"]
        {
            assert!(is_local_host(local), "{local}");
        }
        for other in
            ["", "evil.example", "localhost.evil.example:8001", "127.0.0.1.evil.example", "host-cluster"]
        {
            assert!(!is_local_host(other), "{other}");
        }
    }
}
