//! The services that the host offers to plugins: a log, metrics and wake-ups.
//!
//! There is one set for each plugin id in a process. It is made when the plugin is first loaded, and kept until the process ends,
//! like the library itself. A plugin that is loaded again, or opened several times, gets the same metrics again.

mod event;
mod log;
mod metrics;
mod table;
mod waker;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};

use host_plugin_api::abi::services::{HostObject, HostRole, HostWord, object_of};
use host_plugin_api::abi::{AbiResult, RResult, RStr};
use host_plugin_api::{ErrorCode, c};

use log::Log;
use metrics::Metrics;
pub use metrics::{Kind, Metric};
use parking_lot::Mutex;
pub use waker::Waker;

/// Limit of the plugin ids with services in one process.
const MOST_PLUGINS: usize = 256;

/// One plugin's services.
pub struct Services {
    log: Log,
    metrics: Metrics,
    /// Wakers of the open instances. Entries of closed instances are dropped when a waker is added.
    wakers: Mutex<Vec<Weak<Waker>>>,
    /// The table that a plugin in C was given.
    table: OnceLock<&'static c::Services>,
}

static ALL: Mutex<BTreeMap<String, Arc<Services>>> = Mutex::new(BTreeMap::new());

impl Services {
    /// The services of the plugin with this id.
    ///
    /// # Errors
    /// Beyond 256 ids in one process.
    pub fn of(id: &str) -> Result<Arc<Self>, String> {
        let mut all = ALL.lock();
        if let Some(services) = all.get(id) {
            services.log.update_level();
            return Ok(services.clone());
        }
        if all.len() >= MOST_PLUGINS {
            return Err(format!("{MOST_PLUGINS} plugins were loaded into this process, which is the most"));
        }
        let services = Arc::new(Self {
            log: Log::new(id),
            metrics: Metrics::default(),
            wakers: Mutex::default(),
            table: OnceLock::new(),
        });
        all.insert(id.to_owned(), services.clone());
        Ok(services)
    }

    /// The services of all plugins of this process, by plugin id.
    #[must_use]
    pub fn all() -> Vec<(String, Arc<Self>)> {
        let all = ALL.lock();
        all.iter().map(|(id, services)| (id.clone(), services.clone())).collect()
    }

    /// The plugin's counters and gauges, in the order in which it named them.
    #[must_use]
    pub fn metrics(&self) -> Vec<Metric> {
        self.metrics.all()
    }

    /// Number of log lines of the plugin that were left out because there were too many.
    #[must_use]
    pub fn lines_left_out(&self) -> u64 {
        self.log.left_out()
    }

    /// Makes the waker for an instance whose `event_fd` is `WAKES`. The host waits on its descriptor.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn waker(&self) -> std::io::Result<Arc<Waker>> {
        let waker = Arc::new(Waker::new()?);
        let mut wakers = self.wakers.lock();
        wakers.retain(|waker| waker.strong_count() > 0);
        wakers.push(Arc::downgrade(&waker));
        Ok(waker)
    }

    /// The services as a plugin in C gets them.
    pub(super) fn table(self: &Arc<Self>) -> &'static c::Services {
        self.table.get_or_init(|| table::of(self))
    }

    /// The services as a plugin in Rust gets them.
    #[must_use]
    pub fn object(self: &Arc<Self>) -> HostObject {
        object_of(Offered(self.clone()))
    }
}

/// The services with panics caught: a panic of the host must not unwind through the plugin that called.
struct Offered(Arc<Services>);

fn contained<R>(call: impl FnOnce() -> R) -> Option<R> {
    // The panic's payload is leaked, because dropping it may panic.
    catch_unwind(AssertUnwindSafe(call)).map_err(std::mem::forget).ok()
}

impl HostRole for Offered {
    fn level(&self) -> HostWord {
        HostWord { value: self.0.log.level() }
    }

    fn log(&self, level: u32, target: RStr<'_>, message: RStr<'_>) {
        let _written = contained(|| self.0.log.line(level, target.as_str(), message.as_str()));
    }

    fn word(&self, kind: u32, name: RStr<'_>) -> AbiResult<HostWord> {
        let metric: Option<Result<&'static AtomicU64, _>> =
            contained(|| self.0.metrics.get(kind, name.as_str()));
        match metric {
            Some(Ok(value)) => RResult::ROk(HostWord { value }),
            Some(Err(error)) => RResult::RErr(error.into()),
            None => {
                let text = "the host panicked while it made the metric";
                RResult::RErr(host_plugin_api::Error::new(ErrorCode::INTERNAL, text).into())
            }
        }
    }

    fn wake(&self) {
        let wakers = self.0.wakers.lock();
        wakers.iter().filter_map(Weak::upgrade).for_each(|waker| waker.wake());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_meets_its_own_metrics_again_and_no_others() {
        let (one, other) = (Services::of("test.one").unwrap(), Services::of("test.other").unwrap());
        let metric = |services: &Services, kind, name| services.metrics.get(kind, name);
        metric(&one, 0, "copies").unwrap().fetch_add(3, std::sync::atomic::Ordering::Relaxed);
        let again = Services::of("test.one").unwrap();
        assert_eq!(metric(&again, 0, "copies").unwrap().load(std::sync::atomic::Ordering::Relaxed), 3);
        assert_eq!(metric(&other, 0, "copies").unwrap().load(std::sync::atomic::Ordering::Relaxed), 0);
        assert_eq!(one.metrics().len(), 1);
    }
}
