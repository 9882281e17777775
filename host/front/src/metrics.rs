//! The counters of the router, and their text for Prometheus.

use std::fmt;

use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry as Exposition;

use super::registry::{Snapshot, WorkerState};
use super::routing_metrics::RoutingSeries;

/// Labels of `host_requests_total`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// The path of a served endpoint.
    pub endpoint: &'static str,
    /// `ok`, `cancelled`, `invalid`, `busy`, `over_share`, `unavailable`, `broken`, `late` or `failed`.
    pub outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    role: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WorkerLabels {
    worker: String,
    role: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProtocolLabels {
    worker: String,
    role: &'static str,
}

/// The resources of a router that clients hold now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Requests under way.
    pub requests: usize,
    /// Connections, of the listener for clients.
    pub connections: usize,
    /// Bodies that are being received.
    pub uploads: usize,
    /// Bytes of these bodies.
    pub upload_bytes: usize,
    /// Bytes of bodies that are parsed and tokenized, or wait for that.
    pub text_bytes: usize,
    /// Bytes of answers that are not sent.
    pub answer_bytes: usize,
    /// Grammars that wait for their turn to be compiled, counted for each client that waits for them.
    pub grammars: usize,
}

/// All series of a router. Times are in seconds.
pub struct Metrics {
    /// Requests by endpoint and outcome.
    pub requests: Family<RequestLabels, Counter>,
    /// Tries after the first.
    pub retries: Counter,
    /// Tries that continued an answer which had begun.
    pub resumed: Counter,
    /// From the request's arrival to its first token.
    pub first_token: Histogram,
    /// Between two tokens of one answer.
    pub inter_token: Histogram,
    /// Tokens of prompts.
    pub prompt_tokens: Counter,
    /// Tokens that came from workers, including those of answers that were cancelled or began again.
    pub output_tokens: Counter,
    /// Prompt tokens that workers found in their caches.
    pub cached_tokens: Counter,
    /// Prompt tokens that the router expected workers to find in their caches, for the same requests.
    pub expected_tokens: Counter,
    /// KV bytes that decode workers received through transfer backends.
    pub transferred_bytes: Counter,
    running: Gauge,
    connections: Gauge,
    uploads: Gauge,
    upload_bytes: Gauge,
    text_bytes: Gauge,
    answer_bytes: Gauge,
    grammars: Gauge,
    workers: Family<RoleLabels, Gauge>,
    protocols: Family<ProtocolLabels, Gauge>,
    pages: Family<WorkerLabels, Gauge>,
    worker_requests: Family<WorkerLabels, Gauge>,
    routing: RoutingSeries,
    /// The lock allows one scrape at a time, because each scrape sets the gauges of workers anew.
    exposition: Mutex<Exposition>,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All at zero.
    #[must_use]
    pub fn new() -> Self {
        let mut exposition = Exposition::with_prefix("host");
        let metrics = Self {
            requests: Family::default(),
            retries: Counter::default(),
            resumed: Counter::default(),
            // The buckets: 1 ms to 131 s, and 0.25 ms to 8 s.
            first_token: Histogram::new(exponential_buckets(0.001, 2.0, 18)),
            inter_token: Histogram::new(exponential_buckets(0.000_25, 2.0, 16)),
            prompt_tokens: Counter::default(),
            output_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            expected_tokens: Counter::default(),
            transferred_bytes: Counter::default(),
            running: Gauge::default(),
            connections: Gauge::default(),
            uploads: Gauge::default(),
            upload_bytes: Gauge::default(),
            text_bytes: Gauge::default(),
            answer_bytes: Gauge::default(),
            grammars: Gauge::default(),
            workers: Family::default(),
            protocols: Family::default(),
            pages: Family::default(),
            worker_requests: Family::default(),
            routing: RoutingSeries::default(),
            exposition: Mutex::new(Exposition::default()),
        };
        exposition.register("requests", "Requests by endpoint and outcome", metrics.requests.clone());
        exposition.register("retries", "Tries after the first", metrics.retries.clone());
        exposition.register(
            "resumed",
            "Tries that went on with an answer that had begun",
            metrics.resumed.clone(),
        );
        exposition.register(
            "time_to_first_token_seconds",
            "From the request's arrival to its first token",
            metrics.first_token.clone(),
        );
        exposition.register(
            "inter_token_seconds",
            "Between two tokens of one answer",
            metrics.inter_token.clone(),
        );
        exposition.register("prompt_tokens", "Tokens of prompts", metrics.prompt_tokens.clone());
        exposition.register(
            "output_tokens",
            "Tokens of answers, also of those cancelled or begun again",
            metrics.output_tokens.clone(),
        );
        exposition.register(
            "cached_prompt_tokens",
            "Prompt tokens that workers found in their caches",
            metrics.cached_tokens.clone(),
        );
        exposition.register(
            "expected_cached_prompt_tokens",
            "Prompt tokens that the router expected workers to find in their caches",
            metrics.expected_tokens.clone(),
        );
        exposition.register(
            "transferred_bytes",
            "KV bytes that decode workers received through transfer backends",
            metrics.transferred_bytes.clone(),
        );
        exposition.register("requests_running", "Requests under way", metrics.running.clone());
        exposition.register("connections", "Connections of clients", metrics.connections.clone());
        exposition.register("uploads", "Bodies on their way from clients", metrics.uploads.clone());
        exposition.register("upload_bytes", "Bytes of bodies on their way", metrics.upload_bytes.clone());
        exposition.register(
            "text_bytes",
            "Bytes of bodies that wait to be parsed and tokenized, or are",
            metrics.text_bytes.clone(),
        );
        exposition.register(
            "answer_bytes",
            "Bytes of answers that are made and not sent",
            metrics.answer_bytes.clone(),
        );
        exposition.register(
            "grammars_waiting",
            "Grammars of clients that wait to be compiled",
            metrics.grammars.clone(),
        );
        exposition.register("workers", "Workers by role and state", metrics.workers.clone());
        exposition.register(
            "worker_protocol",
            "Version of the control protocol that is spoken with a worker",
            metrics.protocols.clone(),
        );
        exposition.register("worker_pages", "Pages of a worker by state", metrics.pages.clone());
        exposition.register(
            "worker_requests",
            "Requests of a worker by state",
            metrics.worker_requests.clone(),
        );
        metrics.routing.register(&mut exposition);
        Self { exposition: Mutex::new(exposition), ..metrics }
    }

    /// The text of all series, with the workers as they are now.
    ///
    /// # Errors
    /// When a series cannot be written.
    pub fn text(&self, workers: &Snapshot, held: Held) -> Result<String, fmt::Error> {
        let exposition = self.exposition.lock();
        for (gauge, amount) in [
            (&self.running, held.requests),
            (&self.connections, held.connections),
            (&self.uploads, held.uploads),
            (&self.upload_bytes, held.upload_bytes),
            (&self.text_bytes, held.text_bytes),
            (&self.answer_bytes, held.answer_bytes),
            (&self.grammars, held.grammars),
        ] {
            gauge.set(i64::try_from(amount).unwrap_or(i64::MAX));
        }
        self.workers.clear();
        self.protocols.clear();
        self.pages.clear();
        self.worker_requests.clear();
        for worker in &workers.workers {
            let role = worker.role.name();
            let state = match worker.state {
                WorkerState::Live => "live",
                WorkerState::Suspected(_) => "suspected",
                WorkerState::Draining => "draining",
                WorkerState::Warming(_) => "warming",
            };
            self.workers.get_or_create(&RoleLabels { role, state }).inc();
            let name = worker.info.name.clone();
            let protocol = ProtocolLabels { worker: name, role };
            self.protocols.get_or_create(&protocol).set(i64::from(worker.protocol.0));
            let labels = |state| WorkerLabels { worker: worker.info.name.clone(), role, state };
            let load = &worker.load;
            for (state, pages) in [
                ("free", load.pages_free),
                ("held", load.pages_held),
                ("cached", load.pages_cached),
                ("quarantined", load.pages_quarantined),
            ] {
                self.pages.get_or_create(&labels(state)).set(i64::from(pages));
            }
            for (state, requests) in [("queued", load.queued), ("running", load.running)] {
                self.worker_requests.get_or_create(&labels(state)).set(i64::from(requests));
            }
        }
        self.routing.set(workers);
        let mut text = String::new();
        encode(&mut text, &exposition)?;
        Ok(text)
    }
}
