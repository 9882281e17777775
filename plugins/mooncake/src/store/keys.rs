//! Keeps an instance from removing a value that it reads.
//!
//! Mooncake reads a value in two steps: it asks the master where the value lies, and copies it from there. Mooncake carries
//! out a removal between the two steps, although the value is being read. The memory then goes to the next value, and the
//! read copies that value. So a removal of a key waits until the reads of the key that are under way have ended, and a read
//! that begins meanwhile finds nothing. No thread waits for that: the thread whose read ends last carries out the removal.
//!
//! Between instances there is no such order. The host seals its values, so it does not take one value for another.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use host_plugin_api::TierPage;
use host_transfer_kit::locked;

/// A page of a batch of deletes that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The batch, and the page's number in it.
    pub index: u32,
    pub number: u32,
    pub page: TierPage,
    since: Instant,
}

type Bytes = [u8; 32];

#[derive(Debug, Default)]
struct State {
    /// Reads under way of each key.
    reading: BTreeMap<Bytes, u32>,
    /// Keys that are being removed or wait for their removal, and how many removals each has.
    removing: BTreeMap<Bytes, u32>,
    waiting: Vec<Waiting>,
}

/// The keys that are in use, and those that wait to be removed.
#[derive(Debug, Default)]
pub struct Keys(Mutex<State>);

impl Keys {
    /// Whether a read may begin. If so, the caller [ends](Self::read) it later. If not, the key is being removed.
    pub fn may_read(&self, page: &TierPage) -> bool {
        let mut state = locked(&self.0);
        let may = !state.removing.contains_key(&page.key.0);
        if may {
            *state.reading.entry(page.key.0).or_insert(0) += 1;
        }
        may
    }

    /// Ends these reads. Returns the removals that waited for them and may be carried out now.
    pub fn read<'a>(&self, pages: impl Iterator<Item = &'a TierPage>) -> Vec<Waiting> {
        let mut state = locked(&self.0);
        let mut free = BTreeSet::new();
        for page in pages {
            if less(&mut state.reading, &page.key.0) {
                free.insert(page.key.0);
            }
        }
        taken(&mut state.waiting, |waiting| free.contains(&waiting.page.key.0))
    }

    /// Whether a removal may be carried out now. If not, it waits for reads. In both cases the caller
    /// [ends](Self::removed) it once.
    pub fn may_remove(&self, now: Instant, index: u32, number: u32, page: &TierPage) -> bool {
        let mut state = locked(&self.0);
        *state.removing.entry(page.key.0).or_insert(0) += 1;
        let may = !state.reading.contains_key(&page.key.0);
        if !may {
            state.waiting.push(Waiting { index, number, page: *page, since: now });
        }
        may
    }

    /// Ends a removal.
    pub fn removed(&self, page: &TierPage) {
        less(&mut locked(&self.0).removing, &page.key.0);
    }

    /// Takes the removals that have waited for `patience`. They wait no more.
    pub fn expire(&self, now: Instant, patience: Duration) -> Vec<Waiting> {
        let long = |waiting: &Waiting| now.saturating_duration_since(waiting.since) >= patience;
        taken(&mut locked(&self.0).waiting, long)
    }
}

/// Takes out the entries that `wanted` accepts.
fn taken(waiting: &mut Vec<Waiting>, wanted: impl FnMut(&Waiting) -> bool) -> Vec<Waiting> {
    let (taken, left) = std::mem::take(waiting).into_iter().partition(wanted);
    *waiting = left;
    taken
}

/// Takes one off a key's count. True when none is left.
fn less(counts: &mut BTreeMap<Bytes, u32>, key: &Bytes) -> bool {
    let Some(count) = counts.get_mut(key) else { return false };
    *count -= 1;
    let none = *count == 0;
    if none {
        counts.remove(key);
    }
    none
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_plugin_api::Key;

    fn page(key: u8) -> TierPage {
        TierPage { key: Key([key; 32]), ..TierPage::default() }
    }

    #[test]
    fn a_removal_waits_for_the_last_read_and_a_read_that_comes_later_finds_nothing() {
        let (keys, now) = (Keys::default(), Instant::now());
        assert!(keys.may_read(&page(1)) && keys.may_read(&page(1)));
        assert!(!keys.may_remove(now, 7, 0, &page(1)), "it is being read");
        assert!(keys.may_remove(now, 7, 1, &page(2)), "another key");
        assert!(!keys.may_read(&page(1)) && !keys.may_read(&page(2)));
        assert_eq!(keys.read([page(1)].iter()), []);
        let ready = keys.read([page(1)].iter());
        assert_eq!(ready.iter().map(|ready| (ready.index, ready.number)).collect::<Vec<_>>(), [(7, 0)]);
        assert!(!keys.may_read(&page(1)), "not yet");
        ready.iter().for_each(|ready| keys.removed(&ready.page));
        keys.removed(&page(2));
        assert!(keys.may_read(&page(1)) && keys.may_read(&page(2)));
    }

    #[test]
    fn a_removal_that_waits_too_long_ends_and_is_carried_out_no_more() {
        let (keys, now) = (Keys::default(), Instant::now());
        assert!(keys.may_read(&page(1)));
        assert!(!keys.may_remove(now, 7, 0, &page(1)));
        let patience = Duration::from_secs(5);
        assert_eq!(keys.expire(now + patience - Duration::from_nanos(1), patience), []);
        assert_eq!(keys.expire(now + patience, patience).len(), 1);
        keys.removed(&page(1));
        assert_eq!(keys.read([page(1)].iter()), [], "it ended");
        assert!(keys.may_remove(now, 8, 0, &page(1)));
    }
}
