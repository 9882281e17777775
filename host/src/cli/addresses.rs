//! Whether a worker, its router and its peers can reach each other by the addresses that the settings give.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use axum::http::Uri;

use super::Refused;
use super::settings::Settings;

/// The router's control address by default.
pub const ROUTER: &str = "http://127.0.0.1:8001";

/// The address at which a worker listens for its router and its peers.
#[must_use]
pub fn control(settings: &Settings) -> SocketAddr {
    settings.control.unwrap_or(([127, 0, 0, 1], 0).into())
}

/// Routers of one worker at most: each may follow its cache.
const MAX_ROUTERS: usize = 16;

/// Checks a worker's addresses and returns its routers'.
///
/// # Errors
/// When a router's is not one, or other processes could not reach this worker.
pub fn check_worker(settings: &Settings) -> Result<Vec<String>, Refused> {
    let given = settings.router.as_deref().unwrap_or(ROUTER);
    let routers: Vec<&str> = given.split(',').map(str::trim).collect();
    for (at, router) in routers.iter().enumerate() {
        check_router(settings, router)?;
        if routers[..at].contains(router) {
            return Err(Refused(format!("--router names {router} twice: once is enough")));
        }
    }
    if routers.len() > MAX_ROUTERS {
        return Err(Refused(format!(
            "--router names {} routers: a worker registers with at most {MAX_ROUTERS}",
            routers.len()
        )));
    }
    Ok(routers.into_iter().map(str::to_owned).collect())
}

fn check_router(settings: &Settings, router: &str) -> Result<(), Refused> {
    let wrong = |why: &str| {
        Refused(format!("--router {router:?} {why}: give the router's control address, for example {ROUTER}"))
    };
    let uri: Uri = router.parse().map_err(|error| wrong(&format!("is not an address ({error})")))?;
    if uri.scheme_str() != Some("http") {
        return Err(wrong("does not begin with http://"));
    }
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong("names no host"))?;
    let port = uri.port_u16().filter(|port| *port > 0).ok_or_else(|| wrong("names no port"))?;
    if uri.path().len() > 1 || uri.query().is_some() {
        return Err(wrong("has something after the port"));
    }
    let own = control(settings).ip();
    if own.is_unspecified() {
        return Err(Refused(format!(
            "--control {own} is no address at which other processes reach this worker: give one of this machine's own, \
             for example --control 192.0.2.7:4000, or 127.0.0.1:0 when everything runs here"
        )));
    }
    if own.is_loopback() && elsewhere(host, port) {
        return Err(Refused(format!(
            "the router at {router} may be on another machine, and this worker's --control {own} can be reached from \
             this one only: give an address of this machine that the router and the other workers reach, for example \
             --control 192.0.2.7:4000"
        )));
    }
    Ok(())
}

/// Whether a host may be another machine. A name that cannot be resolved now may be resolved later.
fn elsewhere(host: &str, port: u16) -> bool {
    let literal: Result<IpAddr, _> = host.trim_matches(['[', ']']).parse();
    match literal {
        Ok(address) => !address.is_loopback(),
        Err(_name) => (host, port)
            .to_socket_addrs()
            .is_ok_and(|mut addresses| addresses.any(|address| !address.ip().is_loopback())),
    }
}
