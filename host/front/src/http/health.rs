//! Endpoints for operators: `/health` and `/metrics`.

use std::collections::BTreeSet;

use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use host_wire::exposition;
use serde_json::{Value, json};

use super::error::ApiError;
use super::guard::is_operator;
use super::{Shared, json as json_response, typed};
use crate::identity::Caller;
use crate::registry::{Following, WorkerState};

/// `/health`: 200 while at least one set of workers can serve a request.
pub(super) async fn health(State(app): Shared, caller: Option<Extension<Caller>>) -> Response {
    let unusable = app.router.registry().unusable();
    let (status, text) = match unusable {
        None => (StatusCode::OK, "ok"),
        Some(_) => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    if !is_operator(caller.as_deref()) {
        return (status, json_response(&json!({"status": text}))).into_response();
    }
    let now = app.router.registry().snapshot();
    let workers: Vec<Value> = now
        .workers
        .iter()
        .map(|worker| {
            let (state, why) = match &worker.state {
                WorkerState::Live => ("live", None),
                WorkerState::Suspected(why) => ("suspected", Some(why)),
                WorkerState::Draining => ("draining", None),
                WorkerState::Warming(why) => ("warming", Some(why)),
            };
            // Each rank of a worker has an entry of its own, so the plugins are collected in a set.
            let plugins: BTreeSet<&str> =
                worker.info.transfer.iter().map(|way| way.plugin.as_str()).collect();
            json!({
                "name": worker.info.name,
                "role": worker.role.name(),
                "state": state,
                "why": why,
                "instance": format!("{:016x}", worker.info.instance),
                "protocol": worker.protocol.0,
                "address": worker.info.address,
                "metrics": worker.info.metrics,
                "max_tokens": worker.info.max_tokens,
                "transfer_plugins": plugins,
                "in_flight": worker.in_flight,
                "queued": worker.load.queued,
                "running": worker.load.running,
                "pages": {
                    "total": worker.info.pages,
                    "free": worker.load.pages_free,
                    "held": worker.load.pages_held,
                    "cached": worker.load.pages_cached,
                    "quarantined": worker.load.pages_quarantined,
                },
                "cache": {
                    "followed": matches!(worker.following, Following::At(_)),
                    "event": match worker.following { Following::At(event) => Some(event), _ => None },
                    "why": match &worker.following { Following::Lost(why) => Some(why), _ => None },
                    "known_pages": worker.known_pages,
                },
                "silent_seconds": worker.silent.as_secs_f64(),
            })
        })
        .collect();
    let body = json!({
        "status": text,
        "model": app.model,
        "why": unusable,
        "max_tokens": now.max_tokens,
        "requests_running": app.router.running(),
        "workers": workers,
        "refused_pairs": now.refused_pairs,
        "routing": {
            "policy": now.policy.name(),
            "decisions": now.decisions.all,
            "expected_cached": now.decisions.cached,
            "index_pages": now.cache.pages,
            "sessions": now.cache.sessions,
        },
    });
    (status, json_response(&body)).into_response()
}

/// `/health/live`: 200 as long as this process answers.
pub(super) async fn live() -> Response {
    json_response(&json!({"status": "ok"}))
}

/// `/health/ready`: 200 while requests are taken and at least one set of workers can serve them.
pub(super) async fn ready(State(app): Shared) -> Response {
    let text = if app.is_stopping() {
        "draining"
    } else if app.router.registry().unusable().is_some() {
        "unavailable"
    } else {
        "ok"
    };
    let status = if text == "ok" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, json_response(&json!({"status": text}))).into_response()
}

/// `/metrics`, in the format that the request accepts.
pub(super) async fn metrics(State(app): Shared, headers: HeaderMap) -> Result<Response, ApiError> {
    let workers = app.router.registry().snapshot();
    let text = app
        .metrics
        .text(&workers, app.held())
        .map_err(|error| ApiError::internal(format!("metrics could not be written: {error}")))?;
    let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (kind, text) = exposition::in_format(accepted, text);
    Ok(typed(kind, text))
}
