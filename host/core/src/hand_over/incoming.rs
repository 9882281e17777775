//! Decode's side of a hand-over.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::ids::{Instance, Time};
use crate::notice::Notice;

/// State of a transfer on its decode worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Incoming {
    pub peer: Instance,
    /// The session over which the transfer was requested.
    pub session: u64,
    pub attempt: u32,
    /// Attempts before this one that arrived damaged.
    pub damaged: u32,
    /// Pages of the prompt that it brings.
    pub pages: Range<usize>,
    /// Pages of the window that it brings: all that the first step sees, or none.
    pub window: usize,
    /// When it was requested.
    pub requested: Time,
    /// Sequence numbers that arrived.
    arrived: BTreeSet<u32>,
    /// The highest sequence number, once known.
    last: Option<u32>,
    /// Whether only these pages are missing: everything else was verified in an earlier attempt.
    pub supplement: bool,
    /// Whether prefill's leg has ended: it sends nothing more.
    pub leg_ended: bool,
}

impl Incoming {
    /// The first attempt of a room.
    pub(crate) fn new(
        (peer, session): (Instance, u64),
        pages: Range<usize>,
        window: usize,
        requested: Time,
    ) -> Self {
        Self {
            peer,
            session,
            attempt: 1,
            damaged: 0,
            pages,
            window,
            requested,
            arrived: BTreeSet::new(),
            last: None,
            supplement: false,
            leg_ended: false,
        }
    }

    /// The next attempt, which asks for these pages only: this worker had said that it holds them, and does not. With
    /// `supplement` everything else is verified, the window as well.
    pub(crate) fn for_missing(&self, now: Time, pages: Range<usize>, supplement: bool) -> Self {
        let window = if supplement { 0 } else { self.window };
        let first = Self::new((self.peer, self.session), pages, window, now);
        Self { attempt: self.attempt + 1, damaged: self.damaged, supplement, ..first }
    }

    /// The next attempt, for the same pages: this one arrived damaged.
    pub(crate) fn for_damaged(&self, now: Time) -> Self {
        let first = Self::new((self.peer, self.session), self.pages.clone(), self.window, now);
        let supplement = self.supplement;
        Self { attempt: self.attempt + 1, damaged: self.damaged + 1, supplement, ..first }
    }

    /// Pages of the pool that it brings.
    pub(crate) fn len(&self) -> usize {
        self.pages.len() + self.window
    }

    /// Whether no part has arrived.
    pub(crate) fn is_untouched(&self) -> bool {
        self.arrived.is_empty()
    }

    /// Takes note of a part that has arrived. Returns whether all parts have, or `None` for a part that cannot belong
    /// to this transfer. `most` is the highest number of parts that a transfer has.
    pub(crate) fn take(&mut self, notice: &Notice, most: usize) -> Option<bool> {
        let beyond = notice.sequence as usize >= most
            || self
                .last
                .is_some_and(|last| notice.sequence > last || (notice.last && notice.sequence != last))
            || (notice.last && self.arrived.last().is_some_and(|highest| *highest > notice.sequence));
        if beyond {
            return None;
        }
        self.arrived.insert(notice.sequence);
        if notice.last {
            self.last = Some(notice.sequence);
        }
        Some(self.last.is_some_and(|last| self.arrived.len() == last as usize + 1))
    }
}

/// Pages that were requested and will not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reclaiming {
    /// The first page that is missing.
    pub page: usize,
    /// Prefill, as long as it may write them.
    pub writer: Option<Instance>,
    /// Whether our own transfer threads may copy staged data into them.
    pub receiver: bool,
}

impl Reclaiming {
    /// Whether nothing writes the pages any more.
    pub(crate) fn is_over(&self) -> bool {
        self.writer.is_none() && !self.receiver
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Room;

    fn part(sequence: u32, last: bool) -> Notice {
        Notice { room: Room(1), attempt: 1, sequence, pages: 1, last }
    }

    fn incoming() -> Incoming {
        Incoming::new((Instance(7), 3), 2..5, 0, Time::default())
    }

    #[test]
    fn a_transfer_is_complete_with_the_last_part_and_all_before_it_in_any_order() {
        let mut incoming = incoming();
        assert_eq!(incoming.take(&part(2, true), 9), Some(false));
        assert_eq!(incoming.take(&part(0, false), 9), Some(false));
        assert_eq!(incoming.take(&part(0, false), 9), Some(false), "a repeat counts once");
        assert_eq!(incoming.take(&part(1, false), 9), Some(true));
    }

    #[test]
    fn parts_that_contradict_each_other_are_refused() {
        let mut after_last = incoming();
        assert_eq!(after_last.take(&part(1, true), 9), Some(false));
        assert_eq!(after_last.take(&part(2, false), 9), None, "behind the last");
        assert_eq!(after_last.take(&part(0, true), 9), None, "another last one");
        let mut before_last = incoming();
        assert_eq!(before_last.take(&part(4, false), 9), Some(false));
        assert_eq!(before_last.take(&part(3, true), 9), None, "a last one before one that arrived");
        assert_eq!(before_last.take(&part(9, false), 9), None, "more parts than pages make");
        assert!(
            before_last.last.is_none() && before_last.arrived.len() == 1,
            "a refused part changes nothing"
        );
    }

    #[test]
    fn later_attempts_count_damage_and_ask_for_what_is_missing() {
        let first = Incoming { window: 2, ..incoming() };
        let second = first.for_damaged(Time::default());
        assert_eq!((second.attempt, second.damaged, second.pages.clone(), second.window), (2, 1, 2..5, 2));
        let span = second.for_missing(Time::default(), 3..4, true);
        assert_eq!((span.attempt, span.damaged, span.len(), span.supplement), (3, 1, 1, true));
        let rest = second.for_missing(Time::default(), 3..5, false);
        assert_eq!((rest.len(), rest.supplement), (4, false));
        assert!(span.for_damaged(Time::default()).supplement, "a damaged supplement stays one");
    }
}
