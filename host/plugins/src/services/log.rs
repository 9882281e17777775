//! A plugin's lines in the host's log, under the plugin's id and with a limit per second.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use host_plugin_api::Level;
use parking_lot::Mutex;

/// Limit of lines of one plugin per second. Further lines are counted and not written.
pub(super) const LINES_PER_SECOND: u32 = 200;

/// Limit of characters in a line.
const LONGEST_LINE: usize = 2000;

/// The log of one plugin.
pub(super) struct Log {
    id: String,
    /// The level that the plugin checks before it formats a line. Never freed: the plugin holds it until the process ends.
    level: &'static AtomicU64,
    started: Instant,
    budget: Mutex<Budget>,
    left_out: AtomicU64,
}

impl Log {
    #[expect(
        clippy::disallowed_methods,
        reason = "only the pace of log lines depends on it, nothing that is decided"
    )]
    pub(super) fn new(id: &str) -> Self {
        let log = Self {
            id: id.to_owned(),
            level: Box::leak(Box::new(AtomicU64::new(0))),
            started: Instant::now(),
            budget: Mutex::default(),
            left_out: AtomicU64::new(0),
        };
        log.update_level();
        log
    }

    pub(super) fn level(&self) -> &'static AtomicU64 {
        self.level
    }

    pub(super) fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// Sets the level to the one that the process's filter lets through now.
    pub(super) fn update_level(&self) {
        let enabled = [
            tracing::enabled!(target: "plugin", tracing::Level::ERROR),
            tracing::enabled!(target: "plugin", tracing::Level::WARN),
            tracing::enabled!(target: "plugin", tracing::Level::INFO),
            tracing::enabled!(target: "plugin", tracing::Level::DEBUG),
            tracing::enabled!(target: "plugin", tracing::Level::TRACE),
        ];
        let level = enabled.iter().take_while(|enabled| **enabled).count();
        self.level.store(level as u64, Ordering::Relaxed);
    }

    /// Writes a line. Beyond the limit it only counts the line.
    pub(super) fn line(&self, level: u32, target: &str, message: &str) {
        let mut budget = self.budget.lock();
        let (write, left_out) = budget.take(self.started.elapsed());
        drop(budget);
        if left_out > 0 {
            let id = self.id.as_str();
            tracing::warn!(target: "plugin", "plugin {id}: {left_out} lines were left out, {LINES_PER_SECOND} per second are written");
        }
        if !write {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let (id, from, text) = (self.id.as_str(), plain(target, 200), plain(message, LONGEST_LINE));
        match Level(level) {
            Level::ERROR => tracing::error!(target: "plugin", from, "plugin {id}: {text}"),
            Level::WARN => tracing::warn!(target: "plugin", from, "plugin {id}: {text}"),
            Level::INFO => tracing::info!(target: "plugin", from, "plugin {id}: {text}"),
            Level::DEBUG => tracing::debug!(target: "plugin", from, "plugin {id}: {text}"),
            // A newer plugin may have further levels. They count as TRACE.
            _ => tracing::trace!(target: "plugin", from, "plugin {id}: {text}"),
        }
    }
}

/// The lines that were written in the current second.
#[derive(Default)]
struct Budget {
    second: u64,
    written: u32,
    left_out: u64,
}

impl Budget {
    /// Whether to write a line now, and how many were left out in the seconds before this one.
    fn take(&mut self, since_start: Duration) -> (bool, u64) {
        let mut left_out = 0;
        if since_start.as_secs() != self.second {
            left_out = std::mem::take(&mut self.left_out);
            *self = Self { second: since_start.as_secs(), written: 0, left_out: 0 };
        }
        if self.written == LINES_PER_SECOND {
            self.left_out += 1;
            return (false, left_out);
        }
        self.written += 1;
        (true, left_out)
    }
}

/// One line of bounded length: a plugin cannot write lines that look like the host's own.
fn plain(text: &str, most: usize) -> String {
    let mut plain = String::new();
    for (at, c) in text.trim_end().chars().enumerate() {
        if at == most {
            plain.push_str("...");
            break;
        }
        if c.is_control() { plain.extend(c.escape_default()) } else { plain.push(c) }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_cut_off_each_second_and_its_size_is_told_in_the_next() {
        let mut budget = Budget::default();
        for second in 1..4 {
            let at = |millis| Duration::from_secs(second) + Duration::from_millis(millis);
            let said: Vec<_> = (0..1000).map(|millis| budget.take(at(millis))).collect();
            assert_eq!(said.iter().filter(|(write, _)| *write).count(), 200);
            assert_eq!(said[0].1, if second == 1 { 0 } else { 800 }, "second {second}");
            assert!(said[1..].iter().all(|(_, left_out)| *left_out == 0));
        }
    }

    #[test]
    fn a_line_stays_one_line_of_bounded_length() {
        assert_eq!(plain("two\nlines\x1b[31m\r\n", 100), "two\\nlines\\u{1b}[31m");
        assert_eq!(plain(&"ä".repeat(101), 100), "ä".repeat(100) + "...");
    }
}
