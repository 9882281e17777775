//! What may happen, and what has.

use host_core::hierarchy::{HierarchyStats, PrefetchPolicy, WritePolicy};

use super::World;

/// How likely each mishap is: per message, per write, per request, per step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub loss: f64,
    pub repeat: f64,
    pub abort: f64,
    pub flip: f64,
    pub death: f64,
    pub disconnect: f64,
    /// Per batch of the prefill worker: it fails, some of its layers computed.
    pub executor: f64,
    /// Not a mishap: prefill sends pages in groups of layers.
    pub layers: bool,
    /// Not a mishap: answers are long, and little is kept ready for them, so that requests lose their pages again.
    pub pressure: bool,
    /// Not a mishap: a target for the time between tokens lets few decode at once.
    pub paced: bool,
    /// Not a mishap: both workers keep their pages for requests that begin alike.
    pub cache: bool,
    /// Not one either: somebody empties both caches.
    pub flush: f64,
    /// Nor this: clients that are answered say something more, two times in three.
    pub talk: bool,
    /// Nor this: host memory and storage lie below the pools.
    pub below: bool,
    /// When pages go there.
    pub write: WritePolicy,
    /// How long requests wait for them.
    pub prefetch: PrefetchPolicy,
    /// Per batch and per page: storage is late, hangs, loses, cuts off, refuses or tells lies.
    pub tier: f64,
    /// Per page: a copy between pool and host memory fails.
    pub copy: f64,
    /// Nor this: half of the requests have the same prompt.
    pub alike: bool,
    /// Nor this: some layers of the model see the newest tokens only.
    pub window: bool,
    /// Nor this: many requests go on from somewhere in one of two prompts, and few layers see little.
    pub forks: bool,
}

impl Faults {
    /// What can go wrong between two workers and their clients, all of it, and each often enough to meet the others.
    pub fn of_every_kind() -> Self {
        Self {
            loss: 0.2,
            repeat: 0.2,
            abort: 0.3,
            flip: 0.05,
            death: 0.005,
            disconnect: 0.005,
            ..Self::default()
        }
    }
}

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub finished: u64,
    pub turns: u64,
    pub failed: u64,
    pub quarantined: u64,
    pub deaths: u64,
    pub disconnects: u64,
    pub fences_failed: u64,
    pub copies: u64,
    /// Rooms that were given up while their pages were copied.
    pub closed_late: u64,
    pub integrity_failures: u64,
    pub messages_repeated: u64,
    pub messages_stale: u64,
    pub cached_tokens: u64,
    pub evicted_pages: u64,
    pub layer_parts_sent: u64,
    pub batches_failed: u64,
    pub shared_transfers: u64,
    pub flushed_in_use: u64,
    pub retractions: u64,
    pub restored_tokens: u64,
    pub restored_offload_tokens: u64,
    pub recomputed_tokens: u64,
    pub window_recomputed_tokens: u64,
    pub hung: u64,
    pub promised_host: u64,
    pub promised_storage: u64,
    pub promised_windows: u64,
    pub loaded: u64,
    pub restores_failed: u64,
    pub renegotiated: u64,
    pub computed_instead: u64,
    pub saved: u64,
    pub written: u64,
    pub dropped: u64,
}

impl Outcome {
    pub fn add(&mut self, other: Outcome) {
        self.finished += other.finished;
        self.turns += other.turns;
        self.failed += other.failed;
        self.quarantined += other.quarantined;
        self.deaths += other.deaths;
        self.disconnects += other.disconnects;
        self.fences_failed += other.fences_failed;
        self.copies += other.copies;
        self.closed_late += other.closed_late;
        self.integrity_failures += other.integrity_failures;
        self.messages_repeated += other.messages_repeated;
        self.messages_stale += other.messages_stale;
        self.cached_tokens += other.cached_tokens;
        self.evicted_pages += other.evicted_pages;
        self.layer_parts_sent += other.layer_parts_sent;
        self.batches_failed += other.batches_failed;
        self.shared_transfers += other.shared_transfers;
        self.flushed_in_use += other.flushed_in_use;
        self.retractions += other.retractions;
        self.restored_tokens += other.restored_tokens;
        self.restored_offload_tokens += other.restored_offload_tokens;
        self.recomputed_tokens += other.recomputed_tokens;
        self.window_recomputed_tokens += other.window_recomputed_tokens;
        self.hung += other.hung;
        self.promised_host += other.promised_host;
        self.promised_storage += other.promised_storage;
        self.promised_windows += other.promised_windows;
        self.loaded += other.loaded;
        self.restores_failed += other.restores_failed;
        self.renegotiated += other.renegotiated;
        self.computed_instead += other.computed_instead;
        self.saved += other.saved;
        self.written += other.written;
        self.dropped += other.dropped;
    }
}

impl World {
    pub fn outcome(&self) -> Outcome {
        let stats = [self.prefill.scheduler.stats(), self.decode.scheduler.stats()];
        let below =
            |count: fn(&HierarchyStats) -> u64| stats.iter().map(|s| count(&s.hierarchy)).sum::<u64>();
        let tiers = [&self.prefill, &self.decode].map(|worker| worker.scheduler.tier_stats());
        let count = |ended| self.clients.values().filter(|client| client.ended == Some(ended)).count() as u64;
        Outcome {
            finished: count(true),
            failed: count(false),
            integrity_failures: stats[1].integrity_failures,
            messages_repeated: stats.iter().map(|s| s.messages_repeated).sum(),
            messages_stale: stats.iter().map(|s| s.messages_stale).sum(),
            cached_tokens: stats.iter().map(|s| s.cached_tokens).sum(),
            evicted_pages: stats.iter().map(|s| s.evicted_pages).sum(),
            layer_parts_sent: stats.iter().map(|s| s.layer_parts_sent).sum(),
            shared_transfers: stats.iter().map(|s| s.shared_transfers).sum(),
            retractions: stats[1].retractions,
            restored_tokens: stats[1].restored_tokens,
            restored_offload_tokens: stats[1].restored_offload_tokens,
            recomputed_tokens: stats[1].recomputed_tokens,
            window_recomputed_tokens: stats.iter().map(|s| s.window_recomputed_tokens).sum(),
            promised_host: below(|s| s.promised_host),
            promised_storage: below(|s| s.promised_storage),
            promised_windows: below(|s| s.promised_windows),
            loaded: below(|s| s.loaded),
            restores_failed: below(|s| s.restores_failed),
            renegotiated: below(|s| s.renegotiated),
            computed_instead: below(|s| s.computed_instead),
            saved: below(|s| s.saved),
            dropped: below(|s| s.dropped),
            written: tiers.iter().flatten().map(|tier| tier.written).sum(),
            ..self.outcome
        }
    }
}
