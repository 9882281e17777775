//! Series that show how the router chooses workers for requests.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry as Exposition;

use super::registry::Snapshot;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct IndexLabels {
    worker: String,
    role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    policy: &'static str,
    expected: &'static str,
}

/// Series of routing. They are set from a snapshot at each scrape, because the registry does the counting.
#[derive(Default)]
pub(super) struct RoutingSeries {
    index_pages: Family<IndexLabels, Gauge>,
    sessions: Gauge,
    decisions: Family<DecisionLabels, Counter>,
    stayed: Counter,
    events: Counter,
    gaps: Counter,
    snapshots: Counter,
}

impl RoutingSeries {
    pub fn register(&self, to: &mut Exposition) {
        let counters = [
            (
                "router_sessions_stayed",
                "Requests that went to the decode worker of their session",
                &self.stayed,
            ),
            ("router_cache_events", "Events of workers' caches applied to the index", &self.events),
            ("router_cache_gaps", "Times that events of a worker's cache were missing", &self.gaps),
            ("router_cache_snapshots", "Snapshots of workers' caches taken", &self.snapshots),
        ];
        for (name, help, counter) in counters {
            to.register(name, help, counter.clone());
        }
        to.register(
            "router_index_pages",
            "Pages that a worker is known to have cached",
            self.index_pages.clone(),
        );
        to.register("router_sessions", "Sessions whose workers are remembered", self.sessions.clone());
        to.register(
            "router_decisions",
            "Routes given, by policy and by whether a worker was expected to hold some of the prompt",
            self.decisions.clone(),
        );
    }

    pub fn set(&self, now: &Snapshot) {
        let count =
            |counter: &Counter<u64, AtomicU64>, value| counter.inner().store(value, Ordering::Relaxed);
        self.index_pages.clear();
        for worker in now.workers.iter().filter(|worker| worker.info.cache_events) {
            let labels = IndexLabels { worker: worker.info.name.clone(), role: worker.role.name() };
            let pages = i64::try_from(worker.known_pages).unwrap_or(i64::MAX);
            self.index_pages.get_or_create(&labels).set(pages);
        }
        let policy = now.policy.name();
        let decisions = |expected| self.decisions.get_or_create_owned(&DecisionLabels { policy, expected });
        count(&decisions("cached"), now.decisions.cached);
        count(&decisions("nothing"), now.decisions.all - now.decisions.cached);
        count(&self.stayed, now.decisions.stayed);
        count(&self.events, now.cache.events);
        count(&self.gaps, now.cache.gaps);
        count(&self.snapshots, now.cache.snapshots);
        self.sessions.set(i64::try_from(now.cache.sessions).unwrap_or(i64::MAX));
    }
}
