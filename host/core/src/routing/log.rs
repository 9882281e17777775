//! The event log that a worker keeps so that routers can follow its cache.
//!
//! The log mirrors the cache (which page has which name), numbers the changes, and remembers the latest ones. A router
//! that has followed up to some number gets the changes after it. A router that is further behind than the log
//! remembers gets the whole mirror instead. So the log never waits for a router, and its size has a bound.

use std::collections::VecDeque;

use super::event::{KvEvent, SnapshotPart};
use super::key::BlockKey;
use crate::ids::PageId;
use crate::radix::{After, CacheEvent, PageHash};

/// Keys in one event at most: bounds the message it travels in, and the time that applying it takes.
pub const EVENT_KEYS: usize = 1024;

/// Changes of one worker's cache, numbered from 1 without gaps.
#[derive(Debug)]
pub struct EventLog {
    page_tokens: usize,
    /// The name of each cached page, by page.
    names: Vec<Option<PageHash>>,
    /// The latest events, oldest first.
    events: VecDeque<KvEvent>,
    /// Number of the oldest of them.
    first: u64,
    /// The sum of their weights, see [`weight`].
    weight: usize,
    limit: usize,
}

/// The events after a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// These events, the first of which has the next number. If there are none, nothing has happened since.
    Events(Vec<KvEvent>),
    /// The log does not remember them any more, or never knew that number: a snapshot is needed.
    Forgotten,
}

/// Everything that is cached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The last event that is in it.
    pub number: u64,
    /// The names of all pages.
    pub keys: Vec<BlockKey>,
}

impl Snapshot {
    /// The snapshot in parts of at most [`EVENT_KEYS`], at least one.
    #[must_use]
    pub fn parts(&self) -> Vec<SnapshotPart> {
        let chunks: Vec<&[BlockKey]> = self.keys.chunks(EVENT_KEYS).collect();
        let count = chunks.len().max(1);
        (0..count)
            .map(|part| SnapshotPart {
                number: self.number,
                part: u32::try_from(part).unwrap_or(u32::MAX),
                last: part + 1 == count,
                keys: chunks.get(part).map(|keys| keys.to_vec()).unwrap_or_default(),
            })
            .collect()
    }
}

/// An event costs about as much memory as four keys beside its keys.
fn weight(event: &KvEvent) -> usize {
    4 + match event {
        KvEvent::Stored(keys) | KvEvent::Removed(keys) => keys.len(),
        KvEvent::Cleared => 0,
    }
}

impl EventLog {
    /// A log for a worker with so many pages. Changes of about `remembered` pages are kept for routers that missed
    /// them.
    #[must_use]
    pub fn new(pages: u32, page_tokens: u32, remembered: usize) -> Self {
        Self {
            page_tokens: page_tokens as usize,
            names: vec![None; pages as usize],
            events: VecDeque::new(),
            first: 1,
            weight: 0,
            limit: remembered,
        }
    }

    /// Number of the last event, or 0 before the first.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.first + self.events.len() as u64 - 1
    }

    /// Takes note of a change. Pages that the worker does not have, or that follow one that is not cached, are
    /// skipped: a scheduler sends none.
    pub fn record(&mut self, event: &CacheEvent) {
        match event {
            CacheEvent::Stored { after, pages, tokens } => {
                let before = match after {
                    After::Nothing(seed) => Some(*seed),
                    After::Page(page) => self.names.get(page.0 as usize).copied().flatten(),
                };
                let Some(mut name) = before else { return };
                let mut keys = Vec::with_capacity(pages.len());
                for (page, tokens) in pages.iter().zip(tokens.chunks_exact(self.page_tokens)) {
                    name = name.next(tokens);
                    let Some(place) = self.names.get_mut(page.0 as usize) else { return };
                    *place = Some(name);
                    keys.push(BlockKey::of(&name));
                }
                self.append(keys, KvEvent::Stored);
            }
            CacheEvent::Removed(pages) => {
                let named = |page: &PageId| self.names.get_mut(page.0 as usize)?.take();
                let keys = pages.iter().filter_map(named).map(|name| BlockKey::of(&name)).collect();
                self.append(keys, KvEvent::Removed);
            }
            CacheEvent::Cleared => {
                self.names.fill(None);
                self.push(KvEvent::Cleared);
            }
        }
    }

    fn append(&mut self, keys: Vec<BlockKey>, event: fn(Vec<BlockKey>) -> KvEvent) {
        if keys.len() <= EVENT_KEYS {
            if !keys.is_empty() {
                self.push(event(keys));
            }
            return;
        }
        for keys in keys.chunks(EVENT_KEYS) {
            self.push(event(keys.to_vec()));
        }
    }

    fn push(&mut self, event: KvEvent) {
        self.weight += weight(&event);
        self.events.push_back(event);
        while self.weight > self.limit {
            let Some(oldest) = self.events.pop_front() else { break };
            self.weight -= weight(&oldest);
            self.first += 1;
        }
    }

    /// The events after event `number`: at most about [`EVENT_KEYS`] keys, and at least one event if there is any.
    #[must_use]
    pub fn after(&self, number: u64) -> Replay {
        if number > self.last() || number + 1 < self.first {
            return Replay::Forgotten;
        }
        let mut together = 0;
        let fits = |event: &&KvEvent| {
            let first = together == 0;
            together += weight(event);
            first || together <= EVENT_KEYS
        };
        let passed = usize::try_from(number + 1 - self.first).unwrap_or(usize::MAX);
        Replay::Events(self.events.iter().skip(passed).take_while(fits).cloned().collect())
    }

    /// Everything that is cached now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot { number: self.last(), keys: self.names.iter().flatten().map(BlockKey::of).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: PageHash = PageHash([7; 32]);

    fn stored(after: After, pages: std::ops::Range<u32>) -> CacheEvent {
        let tokens = pages.clone().flat_map(|page| [page, page]).collect();
        CacheEvent::Stored { after, pages: pages.map(PageId).collect(), tokens }
    }

    #[test]
    fn names_are_those_of_the_hash_chain() {
        let mut log = EventLog::new(8, 2, 100);
        log.record(&stored(After::Nothing(SEED), 0..2));
        log.record(&stored(After::Page(PageId(1)), 5..6));
        let mut name = SEED;
        let names: Vec<PageHash> = [0_u32, 1, 5]
            .iter()
            .map(|page| {
                name = name.next(&[*page, *page]);
                name
            })
            .collect();
        let keys: Vec<BlockKey> = names.iter().map(BlockKey::of).collect();
        assert_eq!(
            log.after(0),
            Replay::Events(vec![KvEvent::Stored(keys[..2].to_vec()), KvEvent::Stored(keys[2..].to_vec())])
        );
        log.record(&CacheEvent::Removed(vec![PageId(5), PageId(6)]));
        assert_eq!(log.after(2), Replay::Events(vec![KvEvent::Removed(keys[2..].to_vec())]));
        assert_eq!(log.snapshot(), Snapshot { number: 3, keys: keys[..2].to_vec() });
    }

    #[test]
    fn what_is_too_long_ago_is_forgotten_and_numbers_from_another_life_too() {
        let mut log = EventLog::new(2, 2, 100);
        let rounds = 300;
        for _ in 0..rounds {
            log.record(&stored(After::Nothing(SEED), 0..2));
            log.record(&CacheEvent::Removed(vec![PageId(0), PageId(1)]));
        }
        assert_eq!(log.last(), 2 * rounds);
        assert_eq!(log.after(0), Replay::Forgotten);
        assert_eq!(log.after(2 * rounds), Replay::Events(Vec::new()));
        assert_eq!(log.after(2 * rounds + 1), Replay::Forgotten);
        assert_eq!(log.after(u64::MAX), Replay::Forgotten);
        assert!(matches!(log.after(2 * rounds - 1), Replay::Events(events) if events.len() == 1));
        assert!(log.weight <= log.limit, "{} of {}", log.weight, log.limit);
    }

    #[test]
    fn long_events_and_snapshots_travel_in_parts() {
        let pages = 3 * EVENT_KEYS as u32 + 1;
        let mut log = EventLog::new(pages, 2, 10_000);
        log.record(&stored(After::Nothing(SEED), 0..pages));
        assert_eq!(log.last(), 4);
        let Replay::Events(events) = log.after(0) else { panic!("all of it is remembered") };
        assert_eq!(events.len(), 1, "as much as fits");
        let parts = log.snapshot().parts();
        assert_eq!(parts.len(), 4);
        assert!(parts.iter().all(|part| part.number == 4 && part.last == (part.part == 3)));
        assert_eq!(parts.iter().map(|part| part.keys.len()).sum::<usize>(), pages as usize);
        assert_eq!(EventLog::new(4, 2, 100).snapshot().parts().len(), 1, "an empty cache is news too");
    }
}
