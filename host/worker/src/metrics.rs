//! A worker's own `/metrics` and `/health`.

mod cache;
mod offload;
mod pace;
mod plugins;
mod series;
mod staging;
mod texts;

use std::fmt::Error;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse as _;
use axum::routing::get;
use host_core::scheduler::Stats;
use host_wire::exposition::Format;
use host_wire::proto::WorkerInfo;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;

use crate::Handle;
use crate::peers::Peers;
use crate::registration::Readiness;
use series::Series;
use texts::Texts;

/// Reads the scheduler's counters when `/metrics` is read.
struct WorkerCollector(Handle, Peers);

impl std::fmt::Debug for WorkerCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WorkerCollector")
    }
}

impl Collector for WorkerCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let (worker, stats) = (&self.0, self.0.stats());
        let series = &mut Series::new(encoder);
        scheduler(&stats, series)?;
        let ranks = worker.info().identity.as_ref().map_or(1, |identity| identity.ranks);
        series.gauges([("host_ranks", "Tensor-parallel ranks of the worker", ranks)])?;
        let peers = self.1.protocols();
        series.gauge_by(
            "host_peers",
            "Peers that are connected, by the version of the control protocol that is spoken with them",
            peers.into_iter().map(|(version, peers)| ([("protocol", version.to_string())], peers)),
        )?;
        pace::encode(&stats, series)?;
        offload::encode(worker, &stats.hierarchy, series)?;
        lanes(worker, series)?;
        cache::encode(&stats, worker.page_bytes(), series)?;
        staging::encode(&worker.links().staging_stats(), series)?;
        plugins::encode(series)
    }
}

/// Writes the scheduler's series: pages, requests, messages, and the work for them.
fn scheduler(stats: &Stats, series: &mut Series<'_>) -> Result<(), Error> {
    let pool = stats.pool;
    let places = [
        ("free", pool.free),
        ("held", pool.held),
        ("cached", pool.cached),
        ("quarantined", pool.quarantined),
    ];
    series.gauge_by(
        "host_kv_pages",
        "Pages of the KV pool, by where they are",
        places.map(|(state, pages)| ([("state", state)], pages)),
    )?;
    series.gauges([
        ("host_requests_queued", "Requests that wait for pages or for their other leg", stats.queued),
        ("host_requests_active", "Requests that compute or have a transfer under way", stats.active),
        (
            "host_rooms_quarantined",
            "Ended requests whose pages may still be written",
            stats.quarantined_rooms,
        ),
        (
            "host_peers_unfenced",
            "Peers cut off without proof that none of their writes lands",
            stats.unfenced_peers,
        ),
        ("host_messages_unanswered", "Control messages repeated until answered", stats.unanswered),
    ])?;
    series.counters([
        ("host_batches", "Batches computed", stats.batches),
        ("host_prefill_tokens", "Prompt tokens computed", stats.prefill_tokens),
        ("host_decode_tokens", "Positions of answers computed", stats.decode_tokens),
        ("host_drafted_tokens", "Tokens guessed and verified", stats.drafted_tokens),
        ("host_drafted_tokens_right", "Guessed tokens that were right", stats.drafts_right),
        (
            "host_late_draws",
            "Draws put off to the next step, because what a grammar allows was not known in time",
            stats.late_draws,
        ),
        (
            "host_retractions",
            "Times that a request gave its KV pages up for others and went back to the queue",
            stats.retractions,
        ),
        (
            "host_restored_tokens",
            "Tokens whose KV a preempted request found cached when it went on",
            stats.restored_tokens,
        ),
        (
            "host_restored_offload_tokens",
            "Tokens whose KV a preempted request restored from offload tiers when it went on",
            stats.restored_offload_tokens,
        ),
        (
            "host_recomputed_tokens",
            "Tokens whose KV was computed again after a preemption",
            stats.recomputed_tokens,
        ),
        (
            "host_window_recomputed_tokens",
            "Tokens computed again for the window at the end of a cached prefix alone",
            stats.window_recomputed_tokens,
        ),
        (
            "host_allocator_faults",
            "Page allocators put out of service because of what they answered",
            stats.page_source_faults,
        ),
        ("host_pages_received", "KV pages that arrived and were verified", stats.pages_received),
        ("host_pages_sent", "KV pages written to peers", stats.pages_sent),
        (
            "host_layer_parts_sent",
            "Parts of transfers sent while later layers were computed",
            stats.layer_parts_sent,
        ),
        ("host_integrity_failures", "Transfers that were not what was sent", stats.integrity_failures),
        (
            "host_transfers_stalled",
            "Transfers given up because no write ended, or the other worker confirmed no arrival",
            stats.transfers_stalled,
        ),
        (
            "host_messages_repeated",
            "Control messages repeated for want of an answer",
            stats.messages_repeated,
        ),
        ("host_messages_stale", "Control messages dropped as given up by their sender", stats.messages_stale),
        ("host_requests_finished", "Requests that ended with a complete answer", stats.finished),
        ("host_requests_failed", "Requests that ended without a complete answer", stats.failed),
    ])
}

/// Writes the series of the lanes between ranks, direct and staged.
fn lanes(worker: &Handle, series: &mut Series<'_>) -> Result<(), Error> {
    let ways = worker.links().counters().ways().map(|(kind, way)| ([("kind", kind)], way.read()));
    let bytes = ways.map(|(kind, (bytes, _))| (kind, bytes));
    series.counter_by("host_lane_bytes", "Bytes written to peers' ranks", bytes)?;
    let writes = ways.map(|(kind, (_, writes))| (kind, writes));
    series.counter_by("host_lane_descriptors", "Writes that bytes to peers' ranks took", writes)
}

/// `/metrics` (Prometheus text), `/health` and `/health/live` (this worker's own liveness, not its peers'), and `/health/ready`
/// (200 while a router sends it requests).
pub fn routes(worker: Handle, peers: Peers, info: &WorkerInfo, readiness: Readiness) -> axum::Router {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(WorkerCollector(worker, peers)));
    let texts = Texts::of(registry);
    let health = serde_json::json!({ "status": "ok", "name": info.name, "role": info.role }).to_string();
    let metrics = move |headers: HeaderMap| async move {
        let accepted = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
        let format = Format::accepted(accepted);
        match texts.now(format).await {
            Some(text) => ([(header::CONTENT_TYPE, format.media_type())], text).into_response(),
            None => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    };
    let health = get(move || async move { ([(header::CONTENT_TYPE, "application/json")], health) });
    let ready = move || async move {
        let (status, text) = if readiness.is_ready() {
            (StatusCode::OK, "ok")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not registered with a router, or draining")
        };
        let body = serde_json::json!({ "status": text }).to_string();
        (status, [(header::CONTENT_TYPE, "application/json")], body)
    };
    axum::Router::new()
        .route("/metrics", get(metrics))
        .route("/health", health.clone())
        .route("/health/live", health)
        .route("/health/ready", get(ready))
}
