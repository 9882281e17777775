//! The first check of every request: the name that it is addressed to, the web page that sent it, and its caller.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use host_wire::audit::AUDIT;
use host_wire::shares::Client;

use super::error::ApiError;
use super::{App, Audience, Entrance, cors};
use crate::audit::Refusal;
use crate::connections::Peer;
use crate::identity::{Caller, Hosts, Identities, Unknown};

/// Endpoints that only operators may use where requests need keys.
const OF_OPERATORS: [&str; 3] = ["/flush_cache", "/drain", "/metrics"];
/// Endpoints that need no key, because load balancers call them. Without an operator's key they tell only the state.
const OF_ALL: [&str; 3] = ["/health", "/health/live", "/health/ready"];

/// Refuses a request that a web page of another origin sends, that is addressed to a name that is not this server's, that is not
/// JSON, or that has no known caller. Handlers find the [`Caller`] among the request's extensions.
pub(super) async fn guard(State(entrance): State<Arc<Entrance>>, request: Request, next: Next) -> Response {
    let Entrance { app, audience, identities } = &*entrance;
    // The listener adds the peer to each request of its connections.
    let known = request.extensions().get::<Peer>().map(|peer| peer.0);
    let address = known.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    let headers = request.headers();
    let (hosts, host) = (&identities.hosts, addressed(request.uri(), headers));
    let path = request.uri().path();
    // Pages of other origins may not use the operators' endpoints.
    let page = (!is_of_operators(path)).then(|| cors::page(&identities.origins, headers)).flatten();
    if page.is_some() && cors::is_question(request.method(), headers) && is_addressed(hosts, host).is_ok() {
        return cors::permit(cors::answer(headers, identities.tenant_header.as_ref()), page);
    }
    let is_page = match page {
        Some(_) => Ok(()),
        None => is_own_page(hosts, headers, host),
    };
    let checked = is_addressed(hosts, host).and(is_page).and_then(|()| is_json(request.method(), headers));
    // Where operators have a listener of their own, the clients' listener serves no operators' endpoint.
    let operates = is_of_operators(path) && *audience != Audience::Clients;
    let is_of_all = OF_ALL.contains(&path);
    // Without keys, an operator is known by the address alone. A page that was loaded under another name has the same address.
    let is_named = identities.keys.is_some() || host.is_none_or(|host| hosts.for_operators().allow(host));
    let known = identities.caller(headers, address);
    let logged = known.as_ref().ok().cloned();
    let caller = checked.and_then(|()| match known {
        Ok(caller) if operates && !caller.admin => Err(not_an_operator(identities, path)),
        Ok(_) if operates && !is_named => Err(ApiError::wrong_host(host.unwrap_or_default())),
        Ok(_) if operates && !may_change(identities.keys.is_some(), request.method(), address) => {
            Err(ApiError::not_local(path))
        }
        Ok(caller) => {
            let admin = caller.admin && is_named && *audience != Audience::Clients;
            Ok(Some(Caller { admin, ..caller }))
        }
        Err(_unknown) if is_of_all => Ok(None),
        Err(unknown) => Err(refused(unknown, identities.tenant_header.as_ref())),
    });
    let answer = match caller {
        Ok(_) if app.is_stopping() && !is_of_all && path != "/metrics" => {
            ApiError::stopping().into_response()
        }
        Ok(caller) => {
            let changes = operates && request.method() == Method::POST;
            if changes {
                // Before it is carried out, so that a caller that hangs up is logged, too.
                let client = caller.as_ref().map(Caller::logged);
                let asked = request.uri().query().map(shortened);
                tracing::info!(target: AUDIT, client, %address, path, asked, "an operator's request");
            }
            let answer = match caller {
                Some(caller) => answered(app, caller, request, next).await,
                None => app.unread.count(&Client::at(address), next.run(request).await).await,
            };
            if changes {
                let status = answer.status().as_u16();
                tracing::info!(target: AUDIT, status, "the operator's request is answered");
            }
            answer
        }
        Err(error) => app.unread.count(&Client::at(address), error.into_response()).await,
    };
    // Logs the refusals of the guard, and those of handlers.
    if let Some(refusal) = answer.extensions().get::<Refusal>() {
        let client = logged.as_ref().map(Caller::logged);
        app.audit.request(*refusal, client.as_deref(), address);
    }
    cors::permit(answer, page)
}

/// A query as it is logged.
fn shortened(query: &str) -> String {
    const LONGEST: usize = 256;
    query.chars().take(LONGEST).collect()
}

/// Runs a caller's request and counts the answer until it is sent. A client that already has its share of unread answers gets no
/// other request served. Operators' changes are not limited: a change cannot be undone, so the operator must get the answer.
async fn answered(app: &App, caller: Caller, mut request: Request, next: Next) -> Response {
    let client = caller.client.clone();
    request.extensions_mut().insert(caller);
    let is_post = request.method() == Method::POST;
    if is_post && is_of_operators(request.uri().path()) {
        return next.run(request).await;
    }
    if is_post && let Err(refused) = app.unread.check(&client) {
        return refused.into_response();
    }
    app.unread.count(&client, next.run(request).await).await
}

/// The error for a caller that is not an operator. Without keys, the clients of a gateway are not operators.
fn not_an_operator(identities: &Identities, path: &str) -> ApiError {
    match (&identities.keys, &identities.tenant_header) {
        (None, Some(header)) => ApiError::of_a_tenant(path, header),
        _ => ApiError::not_an_operator(path),
    }
}

/// Whether a path is for operators only.
pub(super) fn is_of_operators(path: &str) -> bool {
    OF_OPERATORS.contains(&path)
}

/// Whether an operator's request with this method is allowed from this address. Without keys every client counts as an operator,
/// and only clients of this machine may change something.
fn may_change(has_keys: bool, method: &Method, address: IpAddr) -> bool {
    has_keys || method != Method::POST || address.to_canonical().is_loopback()
}

/// Whether a request may see all that `/health` can say.
pub(super) fn is_operator(caller: Option<&Caller>) -> bool {
    caller.is_some_and(|caller| caller.admin)
}

/// The name under which a request addresses this server. Browsers always send one.
fn addressed<'a>(uri: &'a Uri, headers: &'a HeaderMap) -> Option<&'a str> {
    // HTTP/2 has the name in the address.
    let given = uri.authority().map(|authority| authority.as_str());
    given.or_else(|| headers.get(header::HOST)?.to_str().ok())
}

fn is_addressed(hosts: &Hosts, host: Option<&str>) -> Result<(), ApiError> {
    match host {
        Some(host) if !hosts.allow(host) => Err(ApiError::wrong_host(host)),
        _ => Ok(()),
    }
}

/// Checks the page that sent the request. Browsers name the page for each request that may change something. Other programs send
/// no origin.
fn is_own_page(hosts: &Hosts, headers: &HeaderMap, host: Option<&str>) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let page = origin.to_str().ok().and_then(|origin| origin.split_once("://"));
    match (page, host) {
        (Some((_scheme, page)), Some(host)) if page.eq_ignore_ascii_case(host) => Ok(()),
        // A proxy may have changed the name that the request is addressed to.
        (Some((_scheme, page)), _) if hosts.name(page) => Ok(()),
        _ => Err(ApiError::cross_origin(&String::from_utf8_lossy(origin.as_bytes()))),
    }
}

/// Types that a web page may send to another origin without a preflight. curl uses the last one by default.
const OF_FORMS: [&str; 3] = ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded"];

fn is_json(method: &Method, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(kind) = headers.get(header::CONTENT_TYPE).filter(|_| method == Method::POST) else {
        return Ok(());
    };
    let kind = String::from_utf8_lossy(kind.as_bytes());
    let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let is_json = essence == "application/json" || essence.ends_with("+json") || essence == OF_FORMS[2];
    if is_json { Ok(()) } else { Err(ApiError::not_json(&kind)) }
}

fn refused(unknown: Unknown, tenant_header: Option<&header::HeaderName>) -> ApiError {
    match unknown {
        Unknown::NoKey => {
            let message = "this server needs an API key: send it as Authorization: Bearer KEY";
            ApiError::no_key(message, Refusal::NoKey)
        }
        Unknown::WrongKey => ApiError::no_key("the API key is not one of this server's", Refusal::WrongKey),
        Unknown::NoTenant => {
            let name = tenant_header.map_or("", header::HeaderName::as_str);
            let message = format!(
                "the gateway names no tenant: {name} must come once, with 1 to 128 visible ASCII characters"
            );
            ApiError::no_key(&message, Refusal::NoTenant)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_keys_other_machines_read_and_change_nothing() {
        let (here, there) = ([127, 0, 0, 2].into(), [192, 0, 2, 7].into());
        assert!(may_change(false, &Method::POST, here));
        assert!(may_change(false, &Method::POST, "::ffff:127.0.0.1".parse().unwrap()), "a listener on ::");
        assert!(!may_change(false, &Method::POST, there));
        assert!(may_change(false, &Method::GET, there), "metrics are read from elsewhere");
        assert!(may_change(true, &Method::POST, there), "its key was looked at");
    }
}
