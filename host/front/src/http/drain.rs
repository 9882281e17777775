//! `POST /drain?worker=NAME`: a worker takes no more requests, finishes those that it has, and ends.

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use host_wire::clock;
use host_wire::proto::DrainRequest;
use host_wire::proto::worker_client::WorkerClient;
use serde::Deserialize;
use serde_json::json;

use super::error::ApiError;
use super::{Shared, json as json_response};

/// The query of the endpoint.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    /// The name of a worker, or its instance where two workers have the same name.
    worker: String,
}

/// Answers 202 as soon as the worker drains. `/health` shows how far it is.
pub(super) async fn handle(
    State(app): Shared,
    named: Result<Query<Named>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, ApiError> {
    let Ok(Query(Named { worker: wanted })) = named else {
        return Err(ApiError::field("worker", "say which worker has to drain: POST /drain?worker=NAME"));
    };
    let workers = app.router.registry().workers();
    let is_wanted = |name: &str, instance: u64| name == wanted || format!("{instance:016x}") == wanted;
    let mut found = workers.iter().filter(|(worker, _)| is_wanted(&worker.name, worker.instance.0));
    let Some((worker, role)) = found.next() else {
        let names: Vec<&str> = workers.iter().map(|(worker, _)| worker.name.as_str()).collect();
        let message = format!("no worker is called {wanted:?}; there are {}", names.join(", "));
        return Err(ApiError::not_found(message));
    };
    if found.next().is_some() {
        let message = format!("two workers are called {wanted:?}: name the instance that /health shows");
        return Err(ApiError::field("worker", message));
    }
    let cannot = |why: String| {
        ApiError::bad_worker(format!(
            "worker {:?} at {} could not be told to drain: {why}",
            worker.name, worker.address
        ))
    };
    if !worker.protocol.knows_draining() {
        let protocol = worker.protocol;
        return Err(cannot(format!(
            "version {protocol} of the control protocol, which is spoken with it, has no such call; send its process SIGTERM"
        )));
    }
    let request = DrainRequest { instance: worker.instance.0 };
    let mut client = WorkerClient::new(worker.channel.clone());
    let patience = app.router.waits().reply;
    let reply = clock::timeout(patience, client.drain(request)).await;
    let why = match reply {
        Ok(Ok(_drains)) => {
            let instance = format!("{:016x}", worker.instance.0);
            let body = json!({"draining": worker.name, "role": role.name(), "instance": instance});
            return Ok((StatusCode::ACCEPTED, json_response(&body)).into_response());
        }
        Ok(Err(status)) => status.message().to_owned(),
        Err(_elapsed) => format!("no answer within {patience:?}"),
    };
    Err(cannot(why))
}
