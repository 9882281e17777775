//! News of a worker's radix cache, in the form of the wire.

use host_core::routing::{BlockKey, KvEvent, SnapshotPart};

use crate::proto::{self, cache_event, cache_news};

fn write_keys(keys: &[BlockKey]) -> Vec<u64> {
    keys.iter().map(|key| key.0).collect()
}

fn read_keys(keys: Vec<u64>) -> Vec<BlockKey> {
    keys.into_iter().map(BlockKey).collect()
}

/// Writes a part of a snapshot.
#[must_use]
pub fn write_part(part: &SnapshotPart) -> proto::CacheNews {
    let SnapshotPart { number, part, last, keys } = part;
    let part = proto::CacheSnapshotPart { number: *number, part: *part, last: *last, keys: write_keys(keys) };
    proto::CacheNews { news: Some(cache_news::News::Snapshot(part)) }
}

/// Writes events, the first of which has this number.
#[must_use]
pub fn write_batch(first: u64, events: &[KvEvent]) -> proto::CacheNews {
    let keys = |keys: &[BlockKey]| proto::CacheKeys { keys: write_keys(keys) };
    let events = events.iter().map(|event| proto::CacheEvent {
        event: Some(match event {
            KvEvent::Stored(stored) => cache_event::Event::Stored(keys(stored)),
            KvEvent::Removed(removed) => cache_event::Event::Removed(keys(removed)),
            KvEvent::Cleared => cache_event::Event::Cleared(proto::CacheCleared {}),
        }),
    });
    let batch = proto::CacheBatch { first, events: events.collect() };
    proto::CacheNews { news: Some(cache_news::News::Batch(batch)) }
}

/// News that a router gets from a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum News {
    /// Events, the first of which has this number.
    Events(u64, Vec<KvEvent>),
    /// A part of a snapshot.
    Part(SnapshotPart),
}

/// Reads news from a worker, or returns `None` when they cannot be read.
///
/// News cannot be read when the message follows no known schema, when it numbers events from 0, and when the last number has no
/// successor.
#[must_use]
pub fn read(news: proto::CacheNews) -> Option<News> {
    match news.news? {
        cache_news::News::Snapshot(part) => Some(News::Part(SnapshotPart {
            number: Some(part.number).filter(|number| *number < u64::MAX)?,
            part: part.part,
            last: part.last,
            keys: read_keys(part.keys),
        })),
        cache_news::News::Batch(batch) => {
            let next = batch.first.checked_add(batch.events.len() as u64);
            if batch.first == 0 || next.is_none() {
                return None;
            }
            let events = batch.events.into_iter().map(|event| {
                Some(match event.event? {
                    cache_event::Event::Stored(stored) => KvEvent::Stored(read_keys(stored.keys)),
                    cache_event::Event::Removed(removed) => KvEvent::Removed(read_keys(removed.keys)),
                    cache_event::Event::Cleared(_) => KvEvent::Cleared,
                })
            });
            Some(News::Events(batch.first, events.collect::<Option<_>>()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_survives_the_wire() {
        let keys = || vec![BlockKey(u64::MAX), BlockKey(0)];
        let events = vec![KvEvent::Stored(keys()), KvEvent::Removed(keys()), KvEvent::Cleared];
        assert_eq!(read(write_batch(7, &events)), Some(News::Events(7, events)));
        let part = SnapshotPart { number: 9, part: 2, last: true, keys: keys() };
        assert_eq!(read(write_part(&part)), Some(News::Part(part)));
        assert_eq!(read(proto::CacheNews::default()), None);
    }

    #[test]
    fn numbers_that_no_event_has_are_refused() {
        let part = |number| SnapshotPart { number, part: 0, last: true, keys: Vec::new() };
        let cleared = [KvEvent::Cleared];
        assert!(read(write_part(&part(0))).is_some(), "a snapshot before the first event");
        assert!(read(write_part(&part(u64::MAX - 1))).is_some());
        assert_eq!(read(write_part(&part(u64::MAX))), None);
        assert!(read(write_batch(1, &[])).is_some());
        assert!(read(write_batch(u64::MAX - 1, &cleared)).is_some());
        for (first, events) in [(0, &[][..]), (0, &cleared), (u64::MAX, &cleared)] {
            assert_eq!(read(write_batch(first, events)), None, "{first}, {} events", events.len());
        }
    }
}
