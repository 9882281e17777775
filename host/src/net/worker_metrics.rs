//! A worker's own `/metrics` and `/health`, on its control port.

mod below;
mod pace;

use std::sync::Arc;

use axum::http::header;
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::proto::WorkerInfo;
use super::{cache_metrics, staging_metrics};
use crate::plugins::{Kind, Services};
use crate::worker::Handle;

/// Reads the scheduler's counters when somebody asks.
struct WorkerCollector(Handle);

impl std::fmt::Debug for WorkerCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WorkerCollector")
    }
}

impl Collector for WorkerCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let stats = self.0.stats();
        let pool = stats.pool;
        {
            let pages = ConstGauge::new(0_i64);
            let mut family = encoder.encode_descriptor(
                "host_kv_pages",
                "Pages of the KV pool, by where they are",
                None,
                pages.metric_type(),
            )?;
            for (place, count) in [
                ("free", pool.free),
                ("held", pool.held),
                ("cached", pool.cached),
                ("quarantined", pool.quarantined),
            ] {
                let count = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
                count.encode(family.encode_family(&[("state", place)])?)?;
            }
        }
        let ranks = self.0.info().identity.as_ref().map_or(1, |identity| identity.ranks);
        let gauges = [
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
            ("host_ranks", "Tensor-parallel ranks of the worker", ranks as usize),
        ];
        for (name, help, value) in gauges {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        pace::encode(&stats, &mut encoder)?;
        let counters = [
            ("host_batches", "Batches computed", stats.batches),
            ("host_prefill_tokens", "Prompt tokens computed", stats.prefill_tokens),
            ("host_decode_tokens", "Decode steps computed", stats.decode_tokens),
            (
                "host_retractions",
                "Times that a request gave its KV pages up for others and went back to the queue",
                stats.retractions,
            ),
            (
                "host_restored_tokens",
                "Tokens whose KV a retracted request found cached when it went on",
                stats.restored_tokens,
            ),
            (
                "host_recomputed_tokens",
                "Tokens whose KV was computed again after a retraction",
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
                "host_messages_repeated",
                "Control messages repeated for want of an answer",
                stats.messages_repeated,
            ),
            (
                "host_messages_stale",
                "Control messages dropped as given up by their sender",
                stats.messages_stale,
            ),
            ("host_requests_finished", "Requests that ended with a complete answer", stats.finished),
            ("host_requests_failed", "Requests that ended without a complete answer", stats.failed),
        ];
        for (name, help, value) in counters {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
        }
        below::encode(&stats.hierarchy, &self.0.tiers(), &mut encoder)?;
        encode_lanes(&self.0, &mut encoder)?;
        cache_metrics::encode(&mut encoder, &stats, self.0.page_bytes())?;
        staging_metrics::encode(&mut encoder, &self.0.links().staging_stats())?;
        encode_plugins(&mut encoder)
    }
}

/// What went over the lanes between ranks, by the way it went.
fn encode_lanes(worker: &Handle, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let ways = worker.links().counters().ways().map(|(kind, way)| (kind, way.read()));
    let series = [
        ("host_lane_bytes", "Bytes written to peers' ranks", ways.map(|(kind, read)| (kind, read.0))),
        (
            "host_lane_descriptors",
            "Writes that bytes to peers' ranks took",
            ways.map(|(kind, read)| (kind, read.1)),
        ),
    ];
    for (name, help, counts) in series {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (kind, count) in counts {
            ConstCounter::new(count).encode(family.encode_family(&[("kind", kind)])?)?;
        }
    }
    Ok(())
}

/// What this process's plugins count, under their ids. A label names the number, so that two plugins cannot clash.
fn encode_plugins(encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let plugins = Services::all();
    for (family, help, wanted) in [
        ("host_plugin_counter", "Numbers that plugins count", Kind::Counter),
        ("host_plugin_gauge", "Numbers that plugins keep", Kind::Gauge),
    ] {
        let kind = match wanted {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
        };
        let mut family = encoder.encode_descriptor(family, help, None, kind)?;
        for (id, services) in &plugins {
            for word in services.words().into_iter().filter(|word| word.kind == wanted) {
                let labels = [("plugin", id.as_str()), ("name", word.name.as_str())];
                let encoder = family.encode_family(&labels)?;
                match wanted {
                    Kind::Counter => ConstCounter::new(word.value()).encode(encoder)?,
                    Kind::Gauge => {
                        ConstGauge::new(i64::try_from(word.value()).unwrap_or(i64::MAX)).encode(encoder)?;
                    }
                }
            }
        }
    }
    let (name, help) = ("host_plugin_log_lines_left_out", "Log lines of a plugin beyond 200 in a second");
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (id, services) in &plugins {
        let lines = ConstCounter::new(services.lines_left_out());
        lines.encode(family.encode_family(&[("plugin", id.as_str())])?)?;
    }
    Ok(())
}

/// `/metrics` (Prometheus text) and `/health` (this worker's own liveness, nobody else's).
pub fn routes(worker: Handle, info: &WorkerInfo) -> axum::Router {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(WorkerCollector(worker)));
    let registry = Arc::new(registry);
    let health = serde_json::json!({ "status": "ok", "name": info.name, "role": info.role }).to_string();
    let metrics = move || async move {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _written = prometheus_client::encoding::text::encode(&mut text, &registry);
        ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], text)
    };
    axum::Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(move || async move { ([(header::CONTENT_TYPE, "application/json")], health) }))
}
