//! `POST /flush_cache`: every worker empties its radix cache.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::future::join_all;
use host_wire::clock;
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{FlushCacheReply, FlushCacheRequest};
use serde_json::{Value, json};

use super::{Shared, json as json_response};
use crate::registry::Chosen;

/// Answers 200 when every worker has emptied its cache, else 502. The body has each worker's reply.
pub(super) async fn handle(State(app): Shared) -> Response {
    let (workers, patience) = (app.router.registry().workers(), app.router.waits().reply);
    let replies = join_all(workers.iter().map(|(worker, _)| ask(worker, patience))).await;
    let all = replies.iter().all(Result::is_ok);
    let said: Vec<Value> = workers
        .iter()
        .zip(&replies)
        .map(|((worker, role), reply)| match reply {
            Ok(reply) => json!({
                "name": worker.name,
                "role": role.name(),
                "cache": reply.cache,
                "pages_freed": reply.pages_freed,
                "pages_in_use": reply.pages_in_use,
            }),
            Err(error) => json!({"name": worker.name, "role": role.name(), "error": error}),
        })
        .collect();
    let status = if all { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
    (status, json_response(&json!({"flushed": all, "workers": said}))).into_response()
}

async fn ask(worker: &Chosen, patience: Duration) -> Result<FlushCacheReply, String> {
    let mut client = WorkerClient::new(worker.channel.clone());
    let name = &worker.name;
    match clock::timeout(patience, client.flush_cache(FlushCacheRequest {})).await {
        Ok(Ok(reply)) => Ok(reply.into_inner()),
        Ok(Err(status)) => Err(format!(
            "worker {name:?} at {} could not be told to empty its cache: {}; try again when it is back",
            worker.address,
            status.message()
        )),
        Err(elapsed) => Err(format!(
            "worker {name:?} at {} did not say within {patience:?} that its cache is empty ({elapsed}); try again",
            worker.address
        )),
    }
}
