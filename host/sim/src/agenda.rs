//! The virtual clock, and the events that lie ahead.

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::Time;

/// The time, and all events that lie ahead of it.
///
/// Events that are due at the same time happen in the order in which they were [put off](Self::after), so nothing
/// depends on how a map is laid out.
#[derive(Debug)]
pub struct Agenda<T> {
    now: Time,
    ahead: BTreeMap<(Time, u64), T>,
    order: u64,
}

impl<T> Default for Agenda<T> {
    fn default() -> Self {
        Self { now: Time::default(), ahead: BTreeMap::new(), order: 0 }
    }
}

impl<T> Agenda<T> {
    /// The time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// Lets `what` happen after this wait.
    pub fn after(&mut self, wait: Duration, what: T) {
        self.order += 1;
        self.ahead.insert((self.now.after(wait), self.order), what);
    }

    /// The time of the next event.
    #[must_use]
    pub fn next(&self) -> Option<Time> {
        self.ahead.keys().next().map(|(at, _)| *at)
    }

    /// Advances to a time, unless the time is past.
    pub fn go_to(&mut self, time: Time) {
        self.now = self.now.max(time);
    }

    /// Takes the next event that is due.
    pub fn take_due(&mut self) -> Option<T> {
        let first = self.ahead.first_entry()?;
        (first.key().0 <= self.now).then(|| first.remove())
    }

    /// Takes all events ahead for which `wanted` is true, in order.
    pub fn take_where(&mut self, wanted: impl Fn(&T) -> bool) -> Vec<T> {
        let keys: Vec<_> = self.ahead.iter().filter(|(_, what)| wanted(what)).map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| self.ahead.remove(&key)).collect()
    }

    /// All events ahead, in order.
    pub fn ahead(&self) -> impl Iterator<Item = &T> {
        self.ahead.values()
    }

    /// All events ahead, in order, to be changed.
    pub fn ahead_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.ahead.values_mut()
    }

    /// Whether no event lies ahead.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ahead.is_empty()
    }
}
