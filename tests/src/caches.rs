//! The caches of a running `host`, as tests see them.

use std::collections::BTreeMap;

use crate::cluster::Cluster;
use crate::wait::until;

/// `[hicache]` for a configuration file. With these costs, restoring always takes less time than computing or transferring, so
/// pages in host memory or storage are restored, however busy the machine is. No deadline passes before a test gives up.
pub const RESTORES: &str = "\
[hicache]
wait-ms = 600000
longest-wait-ms = 600000
[hicache.costs]
compute-token-us = 1000000000
send-page-us = 1000000000
copy-page-us = 1
read-us = 100000000
read-page-us = 1
";

/// For `[plugin.hicache-file]`: no key is missing before the index is read, however long that takes.
pub const LOADED: &str = "load_wait_ms = 600000\n";

/// `[hicache]` for storage that hangs. Restoring is always tried, and requests wait for it as long as by default. All other
/// limits of waiting are longer than a client waits.
pub const TRIES: &str = "\
[hicache]
longest-wait-ms = 600000
[hicache.costs]
compute-token-us = 1000000000
send-page-us = 1000000000
copy-page-us = 1
read-us = 100000
read-page-us = 100000
";

const PAGES: &str = "host_storage_pages_total";

/// Series of pages on their way to the offload tiers, in the order of the way, so that no page is missed between two reads.
const UNDER_WAY: [&str; 3] =
    ["host_hicache_queue_pages", "host_hicache_slots{state=\"filling\"}", "host_storage_queue_pages"];
/// Series of slots that requests or transfers hold.
const HELD: [&str; 2] = ["host_hicache_slots_pinned", "host_hicache_slots{state=\"quarantined\"}"];

impl Cluster {
    /// The sum of the series of the role's worker that start with `starts` and contain `contains`.
    #[must_use]
    pub fn total(&self, role: &str, starts: &str, contains: &str) -> f64 {
        sum(&self.metrics(&self.worker(role)), starts, contains)
    }

    /// Pages with this end at the storage of the role's worker, in all tiers: `read`, `written`, and so on.
    #[must_use]
    pub fn storage_pages(&self, role: &str, end: &str) -> f64 {
        self.total(role, PAGES, &format!("end=\"{end}\""))
    }

    /// Pages with this end at the storage of all workers that live now.
    #[must_use]
    pub fn all_storage_pages(&self, end: &str) -> f64 {
        let end = format!("end=\"{end}\"");
        self.workers().iter().map(|worker| sum(&self.metrics(worker), PAGES, &end)).sum()
    }

    /// Empties all pools and host memory. The router limits the time of each worker, so this asks again when a worker takes
    /// longer.
    ///
    /// # Panics
    /// When the workers have not emptied them after the time that all tests wait.
    pub fn flush(&self) {
        until("all workers to empty their caches", || match self.post("/flush_cache", "") {
            Ok((200, _)) => Ok(()),
            Ok((status, text)) => Err(format!("{status} {text}")),
            Err(error) => Err(error),
        });
    }

    /// Waits until all live workers answer, there is a series that starts with `starts`, and all such series are 0.
    pub fn await_none(&self, starts: &str) {
        self.wait(&format!("{starts} to be 0"), || {
            let metrics: Vec<_> = self.workers().iter().map(|worker| self.metrics(worker)).collect();
            let mut wanted =
                metrics.iter().flatten().filter(|(series, _)| series.starts_with(starts)).peekable();
            metrics.iter().all(|metrics| !metrics.is_empty())
                && wanted.peek().is_some()
                && wanted.all(|(_, value)| *value == 0.0)
        });
    }

    /// Waits until all requests have ended, and no page is on its way to host memory or storage any more.
    pub fn await_written(&self) {
        self.wait("all requests to end", || self.all_free());
        UNDER_WAY.iter().for_each(|series| self.await_none(series));
    }

    /// Waits as `await_written`, and until nothing is held: no page of a pool, no slot, no pin, and nothing of a plugin.
    pub fn await_nothing_held(&self) {
        self.await_written();
        HELD.iter().for_each(|series| self.await_none(series));
    }
}

/// The sum of the series that start with `starts` and contain `contains`.
#[must_use]
pub fn sum(metrics: &BTreeMap<String, f64>, starts: &str, contains: &str) -> f64 {
    let wanted = metrics.iter().filter(|(series, _)| series.starts_with(starts) && series.contains(contains));
    wanted.map(|(_, value)| value).sum()
}
