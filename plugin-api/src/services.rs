//! Services that a plugin may use of its host: log lines, plugin metrics, and a wake, which asks to be polled.
//!
//! [`host()`](host()) gives the services of the host that loaded this plugin. They are available from before the plugin's
//! first factory runs until the end of the process. A host that is older than this module has none of them, and a test
//! that links the plugin instead of loading it has none. Then log lines vanish, metrics are not shown, and a wake has
//! no effect. So a plugin never has to check whether a service is there.
//!
//! Threads: everything here may be called from any thread. Nothing here blocks. [`Counter::add`], [`Gauge::set`] and a
//! log line below the host's level also allocate nothing, so hot calls may use them.
//!
//! ```
//! use host_plugin_api::{Counter, Level, host, log};
//!
//! # fn main() -> host_plugin_api::Result<()> {
//! let copied: Counter = host().counter("bytes_copied")?;    // once, where the instance is opened
//! copied.add(4096);                                         // a relaxed add on a word of the host's
//! log!(Level::DEBUG, "copied {} bytes", 4096);              // formatted only if the host logs it
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::services::{Attached, COUNTER, GAUGE, HostWord, attached};
use crate::error::Result;

/// Answer of [`event_fd`](crate::TransferBackend::event_fd) when the plugin calls [`Host::wake`] instead of owning a descriptor.
pub const WAKES: i32 = -2;

/// Most counters and gauges of one plugin.
pub const MOST_WORDS: usize = 64;

/// Longest name of a counter or gauge, in bytes.
pub const LONGEST_WORD_NAME: usize = 64;

/// How much a log line matters. Smaller numbers matter more. The set is open.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Level(pub u32);

impl Level {
    /// A requested operation failed.
    pub const ERROR: Level = Level(1);
    /// Something is not as it should be, but the plugin continues.
    pub const WARN: Level = Level(2);
    /// Events that an operator wants to know once.
    pub const INFO: Level = Level(3);
    /// Events of single connections.
    pub const DEBUG: Level = Level(4);
    /// Events of single transfers.
    pub const TRACE: Level = Level(5);
}

/// The host that loaded this plugin, if it offers services. See the [module](self).
#[derive(Clone, Copy)]
pub struct Host(Option<&'static Attached>);

/// The services of the host that loaded this plugin.
#[must_use]
pub fn host() -> Host {
    Host(attached())
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Host(attached)" } else { "Host(none)" })
    }
}

impl Host {
    /// Whether the host would write a line of this level. Costs one load of a word of the host's.
    #[inline]
    #[must_use]
    pub fn logs(self, level: Level) -> bool {
        self.0.is_some_and(|host| u64::from(level.0) <= host.level.load(Ordering::Relaxed))
    }

    /// Writes one line into the host's log, under this plugin's id. `target` says which part of the plugin speaks.
    /// [`log!`](crate::log) fills in the module.
    ///
    /// The host writes at most 200 lines per second of a plugin, and then says how many it left out. It cuts long
    /// lines, and shows control characters by their codes.
    pub fn log(self, level: Level, target: &str, message: &str) {
        let Some(host) = self.0.filter(|_host| self.logs(level)) else { return };
        host.object.log(level.0, target.into(), message.into());
    }

    /// Returns the counter with this name: a number that only grows, shown on the worker's `/metrics` with the plugin's
    /// id. The same name gives the same counter, also to another instance.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a name that is not a lower-case letter followed by `[a-z0-9_]`, that is longer than
    /// [`LONGEST_WORD_NAME`] bytes, or that a gauge has already. `NO_RESOURCE` beyond [`MOST_WORDS`] names.
    pub fn counter(self, name: &str) -> Result<Counter> {
        self.word(COUNTER, name).map(Counter)
    }

    /// Returns the gauge with this name: a number that goes up and down. Otherwise the same as [`counter`](Host::counter).
    ///
    /// # Errors
    /// As [`counter`](Host::counter).
    pub fn gauge(self, name: &str) -> Result<Gauge> {
        self.word(GAUGE, name).map(Gauge)
    }

    fn word(self, kind: u32, name: &str) -> Result<&'static AtomicU64> {
        static UNREAD: AtomicU64 = AtomicU64::new(0);
        let Some(host) = self.0 else { return Ok(&UNREAD) };
        let word = host.object.word(kind, name.into()).into_result();
        word.map(|HostWord { value }| value).map_err(Into::into)
    }

    /// Tells the host that an instance of this plugin has something to poll. For instances whose `event_fd` answers [`WAKES`].
    /// Before this call, make the new completion or notification visible to polling. This call never calls back into the plugin.
    pub fn wake(self) {
        if let Some(host) = self.0 {
            host.object.wake();
        }
    }
}

/// A number of the host's that only grows. See [`Host::counter`].
#[derive(Clone, Copy, Debug)]
pub struct Counter(&'static AtomicU64);

impl Counter {
    /// **Hot.** Counts.
    #[inline]
    pub fn add(self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }
}

/// A number of the host's that goes up and down. See [`Host::gauge`].
#[derive(Clone, Copy, Debug)]
pub struct Gauge(&'static AtomicU64);

impl Gauge {
    /// **Hot.** Replaces the value.
    #[inline]
    pub fn set(self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// **Hot.** Adds to the value.
    #[inline]
    pub fn add(self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    /// **Hot.** Subtracts from the value. The same plugin must have added that much before.
    #[inline]
    pub fn sub(self, count: u64) {
        self.0.fetch_sub(count, Ordering::Relaxed);
    }
}

/// Writes one formatted line into the host's log, if the host wants lines of this [`Level`]. Otherwise formats nothing.
///
/// ```
/// host_plugin_api::log!(host_plugin_api::Level::INFO, "listening for {} peers", 4);
/// ```
#[macro_export]
macro_rules! log {
    ($level:expr, $($text:tt)+) => {{
        let (host, level) = ($crate::host(), $level);
        if host.logs(level) {
            host.log(level, module_path!(), &::std::format!($($text)+));
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_host_every_service_is_there_and_does_nothing() {
        let host = host();
        assert!(!host.logs(Level::ERROR));
        host.log(Level::ERROR, "here", "no host logs this");
        host.counter("Any Name").unwrap().add(1);
        host.gauge("any").unwrap().set(1);
        host.wake();
    }
}
