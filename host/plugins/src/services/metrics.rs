//! Counters and gauges that plugins write and `/metrics` reads.

use std::sync::atomic::{AtomicU64, Ordering};

use host_plugin_api::abi::services::{COUNTER, GAUGE};
use host_plugin_api::services::{LONGEST_WORD_NAME, MOST_WORDS};
use host_plugin_api::{Error, ErrorCode, Result};
use parking_lot::Mutex;

/// The kind of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The value only grows.
    Counter,
    /// The value goes up and down.
    Gauge,
}

/// A named metric.
#[derive(Clone, Debug)]
pub struct Metric {
    /// Its name, which the plugin chooses: letters, digits and `_`.
    pub name: String,
    /// The kind of the metric.
    pub kind: Kind,
    value: &'static AtomicU64,
}

impl Metric {
    /// Its value now.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }
}

/// A value in a cache line of its own, so that threads that count different things do not slow each other down.
#[repr(align(128))]
struct Padded(AtomicU64);

/// One plugin's metrics. Never freed: the plugin's threads may hold them until the process ends.
#[derive(Default)]
pub(super) struct Metrics(Mutex<Vec<Metric>>);

impl Metrics {
    pub(super) fn all(&self) -> Vec<Metric> {
        self.0.lock().clone()
    }

    pub(super) fn get(&self, kind: u32, name: &str) -> Result<&'static AtomicU64> {
        let invalid = |text: String| Error::new(ErrorCode::INVALID_ARGUMENT, text);
        let kind = match kind {
            COUNTER => Kind::Counter,
            GAUGE => Kind::Gauge,
            other => return Err(invalid(format!("this host knows no kind {other} of number"))),
        };
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.chars().all(plain) {
            return Err(invalid(format!(
                "{name:?} cannot name a number: use a lower-case letter, then letters, digits and _"
            )));
        }
        if name.len() > LONGEST_WORD_NAME {
            return Err(invalid(format!(
                "a number's name has {} bytes, {LONGEST_WORD_NAME} are allowed",
                name.len()
            )));
        }
        let mut metrics = self.0.lock();
        if let Some(metric) = metrics.iter().find(|metric| metric.name == name) {
            if metric.kind != kind {
                return Err(invalid(format!("{name} is a {:?} already", metric.kind).to_lowercase()));
            }
            return Ok(metric.value);
        }
        if metrics.len() >= MOST_WORDS {
            let text = format!("no room for {name}: a plugin has {MOST_WORDS} counters and gauges at most");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        let value = &Box::leak(Box::new(Padded(AtomicU64::new(0)))).0;
        metrics.push(Metric { name: name.to_owned(), kind, value });
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_and_bounded_in_length_and_number() {
        let metrics = Metrics::default();
        let long = "a".repeat(LONGEST_WORD_NAME + 1);
        for wrong in ["", "1st", "_x", "Copies", "a-b", "a b", "größe", "a\nb", &long] {
            let code = metrics.get(COUNTER, wrong).unwrap_err().code;
            assert_eq!(code, ErrorCode::INVALID_ARGUMENT, "{wrong:?}");
        }
        assert_eq!(metrics.get(7, "a").unwrap_err().code, ErrorCode::INVALID_ARGUMENT);
        for number in 0..MOST_WORDS {
            metrics.get(COUNTER, &format!("n{number}")).unwrap();
        }
        assert_eq!(metrics.get(COUNTER, "one_more").unwrap_err().code, ErrorCode::NO_RESOURCE);
        metrics.get(COUNTER, "n0").unwrap();
        assert_eq!(metrics.get(GAUGE, "n0").unwrap_err().message, "n0 is a counter already");
        assert_eq!(metrics.all().len(), MOST_WORDS);
    }
}
