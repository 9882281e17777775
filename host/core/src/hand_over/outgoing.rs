//! Prefill's side of a hand-over.
//!
//! Pages are sent while the prompt is still computed: whole pages behind each batch, and groups of layers of the pages that the
//! batch completes while later layers are computed. For each attempt prefill keeps a cursor, which is the number of pages that
//! are sent or that decode holds, and the number of layers that it has sent of the next pages:
//!
//! ```text
//!             LayersDone l: layers of cursor..end            LayersDone m: layers l..m
//!   nothing begun ─────────────────────────────► begun(end, l) ─────────────────► begun(end, m)
//!         ▲                                           │
//!         └────── batch done: remaining layers, ──────┘
//!                 cursor = end
//! ```
//!
//! Neither moves back, so every (page, layer) is sent once in an attempt. The last part, with the aux row, is sent after
//! everything else, when the prompt is computed. So decode can count parts without regard to layers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::ids::{Instance, PageId, Room, Time};
use crate::message::Reserve;
use crate::notice::Notice;
use crate::transfer::Tag;

/// State of a transfer on its prefill worker.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outgoing {
    pub peer: Instance,
    /// The session over which decode asked.
    pub session: u64,
    pub attempt: u32,
    pub reserve: Reserve,
    page_tokens: usize,
    /// Pages of the prompt sent so far or held by decode already. The cursor never moves back within an attempt.
    cursor: usize,
    /// Pages behind the cursor of which some layers were sent while the others are still computed.
    begun: Option<Begun>,
    /// Sequence number of the next part.
    sequence: u32,
    /// Whether the last part was sent.
    complete: bool,
    /// Parts that have not settled, of all attempts.
    pub tags: BTreeSet<Tag>,
    /// When the transfer last made progress. Set once the prompt is computed.
    pub moved: Option<Time>,
}

/// Pages from the cursor on, of which the first layers were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Begun {
    /// The page after the last of them, counted from the front of the prompt.
    end: usize,
    /// Layers that were sent, fewer than the model has.
    layers: u32,
}

/// One part of a transfer, as decode sees it.
#[derive(Debug)]
pub(crate) struct TransferPart {
    pub notice: Notice,
    /// Decode's pages.
    pub target: Vec<PageId>,
    /// Place of the first page among the pages of the attempt.
    pub first_page: u32,
}

impl Outgoing {
    /// A new transfer, for which decode asks over a session.
    pub(crate) fn new(
        (peer, session): (Instance, u64),
        attempt: u32,
        reserve: Reserve,
        page_tokens: u32,
    ) -> Self {
        let page_tokens = page_tokens as usize;
        Self {
            peer,
            session,
            attempt,
            cursor: reserve.decode_prefix_len as usize / page_tokens,
            reserve,
            page_tokens,
            begun: None,
            sequence: 0,
            complete: false,
            tags: BTreeSet::new(),
            moved: None,
        }
    }

    /// Begins a later attempt, for which decode asks. An attempt that is no later than the present one is a repeat and
    /// changes nothing.
    pub(crate) fn ask_again(&mut self, session: u64, attempt: u32, reserve: Reserve) {
        if attempt > self.attempt {
            let tags = std::mem::take(&mut self.tags);
            let page_tokens = u32::try_from(self.page_tokens).unwrap_or(u32::MAX);
            *self = Self { tags, ..Self::new((self.peer, session), attempt, reserve, page_tokens) };
        }
    }

    /// Whether anything was sent, in any attempt.
    pub(crate) fn has_sent(&self) -> bool {
        self.attempt > 1 || self.sequence > 0 || !self.tags.is_empty()
    }

    /// The first page of the prompt that decode asked for.
    fn start(&self) -> usize {
        self.reserve.decode_prefix_len as usize / self.page_tokens
    }

    /// The page of the prompt after the last one that decode asked for.
    fn end(&self) -> usize {
        self.start() + self.reserve.pages.len()
    }

    /// Pages that a batch completes, and the number of their layers that were sent, if layers may be sent before the
    /// batch ends. The batch computes whole pages up to `end`. Only a first attempt sends layers ahead, because later
    /// attempts are for pages that are computed already.
    pub(crate) fn completing(&self, end: usize) -> Option<(Range<usize>, u32)> {
        let begun = self.begun.map_or(0, |begun| begun.layers);
        (self.attempt == 1 && !self.complete && end > self.cursor).then_some((self.cursor..end, begun))
    }

    /// The pages to send now, and the first of their layers that was not sent. `None` if there is nothing to send.
    /// The first `whole` pages of the prompt are computed. `computing` says that a batch computes more. `last` says that
    /// nothing is left to compute.
    pub(crate) fn next(
        &mut self,
        room: Room,
        whole: usize,
        computing: bool,
        last: bool,
    ) -> Option<(Range<usize>, u32)> {
        // Another attempt may ask for some pages only.
        let end = whole.min(self.end());
        // Begun pages are completed when their batch has ended, and before any page behind them.
        if self.complete || (computing && self.begun.is_some()) || (end <= self.cursor && !last) {
            return None;
        }
        // Writes of an earlier attempt read the same aux row and write the same pages, so they must settle first.
        if self.attempt > 1 && self.sequence == 0 && !self.tags.is_empty() {
            return None;
        }
        let cursor = self.cursor;
        let layers = self.begun.take().map_or(0, |begun| {
            assert!(begun.end == end, "{room:?} began pages {cursor}..{} and computed {end}", begun.end);
            begun.layers
        });
        Some((cursor..end.max(cursor), layers))
    }

    /// Makes a part of some layers of some pages. If they are the pages' last layers (`completes`), the cursor moves. The
    /// part with the prompt's `last` page also carries the window and the aux row.
    pub(crate) fn part(
        &mut self,
        room: Room,
        tag: Tag,
        pages: Range<usize>,
        layers: Range<u32>,
        completes: bool,
        last: bool,
    ) -> TransferPart {
        let places = pages.start - self.start()..pages.end - self.start();
        let mut target = self.reserve.pages[places.clone()].to_vec();
        if last {
            target.extend_from_slice(&self.reserve.window);
        }
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let completed = if completes { count(target.len()) } else { 0 };
        let notice = Notice { room, attempt: self.attempt, sequence: self.sequence, pages: completed, last };
        match completes {
            true => self.cursor = pages.end,
            false => self.begun = Some(Begun { end: pages.end, layers: layers.end }),
        }
        self.sequence += 1;
        self.complete = last;
        self.tags.insert(tag);
        TransferPart { notice, target, first_page: count(places.start) }
    }

    /// Pages that decode asked for, of prompt and window.
    pub(crate) fn len(&self) -> usize {
        self.reserve.pages.len() + self.reserve.window.len()
    }
}

/// What prefill expects of a reserve.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Tokens of the prompt.
    pub prompt: usize,
    pub page_tokens: usize,
    /// Fingerprint of the namespace.
    pub namespace: u64,
    /// Pages of the window that decode may ask for: the fewest and the most.
    pub tails: [usize; 2],
}

impl Wanted {
    /// Why a reserve does not belong to this request, if it does not.
    ///
    /// A first attempt must ask for all pages behind those that decode holds or restores. A later one may ask for
    /// fewer.
    pub(crate) fn misfit(&self, attempt: u32, reserve: &Reserve) -> Option<String> {
        let (prompt, page_tokens) = (self.prompt, self.page_tokens);
        let prefix = reserve.decode_prefix_len as usize;
        if reserve.prompt_tokens as usize != prompt {
            let said = reserve.prompt_tokens;
            return Some(format!("decode expects a prompt of {said} tokens, prefill has one of {prompt}"));
        }
        if reserve.namespace != self.namespace {
            return Some("decode and prefill were given different cache namespaces for the request".into());
        }
        if prefix > prompt || !prefix.is_multiple_of(page_tokens) {
            return Some(format!(
                "decode claims to hold {prefix} tokens of {prompt}: it must be whole pages of {page_tokens}"
            ));
        }
        let expected = prompt.div_ceil(page_tokens) - prefix / page_tokens;
        let fits = reserve.pages.len() == expected || (attempt > 1 && reserve.pages.len() < expected);
        if !fits {
            let offered = reserve.pages.len();
            return Some(format!("decode offers {offered} pages where {expected} are to be sent"));
        }
        let (offered, [least, most]) = (reserve.window.len(), self.tails);
        let fits = offered == least || offered == most || (attempt > 1 && offered == 0);
        let takes = if least == most { least.to_string() } else { format!("{least} or {most}") };
        (!fits).then(|| format!("decode offers {offered} pages for the window, which takes {takes}"))
    }
}

/// A reserve that came before its request.
#[derive(Debug)]
pub(crate) struct Orphan {
    pub peer: Instance,
    pub question: u64,
    pub attempt: u32,
    pub reserve: Reserve,
    pub since: Time,
}

/// Reserves whose requests have not come from the router yet.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    by_room: BTreeMap<Room, Orphan>,
}

impl Orphans {
    /// Keeps a reserve, if there are fewer than `most`. For one room the reserve of the latest attempt is kept, in
    /// whatever order they come. Fails with the number of kept reserves when there are too many.
    pub(crate) fn keep(&mut self, room: Room, orphan: Orphan, most: usize) -> Result<(), usize> {
        match self.by_room.get(&room) {
            None if self.by_room.len() >= most => Err(self.by_room.len()),
            Some(known) if known.attempt > orphan.attempt => Ok(()),
            _ => {
                self.by_room.insert(room, orphan);
                Ok(())
            }
        }
    }

    /// Takes out the reserve of a room whose request has come.
    pub(crate) fn take(&mut self, room: Room) -> Option<Orphan> {
        self.by_room.remove(&room)
    }

    /// Drops the reserve of a room that decode gives up.
    pub(crate) fn forget(&mut self, room: Room, peer: Instance) {
        if self.by_room.get(&room).is_some_and(|orphan| orphan.peer == peer) {
            self.by_room.remove(&room);
        }
    }

    /// Drops the reserves of a lost peer.
    pub(crate) fn forget_peer(&mut self, peer: Instance) {
        self.by_room.retain(|_, orphan| orphan.peer != peer);
    }

    /// Takes out the reserves that came too long ago.
    pub(crate) fn take_older(&mut self, is_late: impl Fn(Time) -> bool) -> Vec<(Room, Orphan)> {
        self.by_room.extract_if(.., |_, orphan| is_late(orphan.since)).collect()
    }

    /// Arrival time of each reserve.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = Time> {
        self.by_room.values().map(|orphan| orphan.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room(1);

    fn reserve(prefix: u32, pages: u32) -> Reserve {
        Reserve {
            pages: (0..pages).map(PageId).collect(),
            window: vec![PageId(90), PageId(91)],
            decode_prefix_len: prefix,
            prompt_tokens: 40,
            aux_slot: 0,
            namespace: 5,
        }
    }

    fn outgoing(attempt: u32, reserve: Reserve) -> Outgoing {
        Outgoing::new((Instance(7), 3), attempt, reserve, 4)
    }

    #[test]
    fn layers_that_were_begun_are_completed_before_anything_behind_them() {
        let mut outgoing = outgoing(1, reserve(8, 8));
        assert_eq!(outgoing.completing(5), Some((2..5, 0)));
        let begun = outgoing.part(ROOM, Tag(1), 2..5, 0..3, false, false);
        assert_eq!((begun.notice.sequence, begun.notice.pages, begun.first_page), (0, 0, 0));
        assert_eq!(outgoing.next(ROOM, 5, true, false), None, "its batch is being computed");
        assert_eq!(outgoing.completing(5), Some((2..5, 3)));
        assert_eq!(outgoing.next(ROOM, 5, false, false), Some((2..5, 3)));
        let rest = outgoing.part(ROOM, Tag(2), 2..5, 3..8, true, false);
        assert_eq!((rest.notice.sequence, rest.notice.pages, rest.target.len()), (1, 3, 3));
        assert_eq!(outgoing.next(ROOM, 5, false, false), None, "nothing is sent twice");
        assert_eq!(outgoing.next(ROOM, 10, false, true), Some((5..10, 0)));
        let last = outgoing.part(ROOM, Tag(3), 5..10, 0..8, true, true);
        assert_eq!((last.notice.last, last.target.len(), last.first_page), (true, 5 + 2, 3));
        assert_eq!(outgoing.next(ROOM, 10, false, true), None, "the last part was sent");
    }

    #[test]
    fn a_later_attempt_waits_until_the_writes_of_the_one_before_have_settled() {
        let mut outgoing = outgoing(1, reserve(0, 10));
        assert_eq!(outgoing.next(ROOM, 10, false, true), Some((0..10, 0)));
        outgoing.part(ROOM, Tag(1), 0..10, 0..8, true, true);
        outgoing.ask_again(4, 1, reserve(8, 2));
        assert_eq!(outgoing.session, 3, "a repeat changes nothing");
        outgoing.ask_again(4, 2, reserve(8, 2));
        assert_eq!(outgoing.next(ROOM, 10, false, true), None, "the first attempt's write is under way");
        assert_eq!(outgoing.completing(10), None, "later attempts send no layers ahead");
        outgoing.tags.remove(&Tag(1));
        assert_eq!(outgoing.next(ROOM, 10, false, true), Some((2..4, 0)), "the span that was asked for");
    }

    #[test]
    fn a_reserve_that_is_for_another_prompt_is_refused_with_the_reason() {
        let wanted = Wanted { prompt: 40, page_tokens: 4, namespace: 5, tails: [2, 3] };
        assert_eq!(wanted.misfit(1, &reserve(8, 8)), None);
        let refused = [
            (1, Reserve { prompt_tokens: 41, ..reserve(8, 8) }, "a prompt of 41"),
            (1, Reserve { namespace: 6, ..reserve(8, 8) }, "namespaces"),
            (1, reserve(6, 8), "whole pages of 4"),
            (1, reserve(44, 0), "44 tokens of 40"),
            (1, reserve(8, 7), "7 pages where 8"),
            (2, reserve(8, 9), "9 pages where 8"),
            (
                1,
                Reserve { window: Vec::new(), ..reserve(8, 8) },
                "0 pages for the window, which takes 2 or 3",
            ),
        ];
        for (attempt, reserve, reason) in refused {
            let said = wanted.misfit(attempt, &reserve).unwrap_or_default();
            assert!(said.contains(reason), "{said:?} does not speak of {reason:?}");
        }
        assert_eq!(wanted.misfit(2, &Reserve { window: Vec::new(), ..reserve(8, 3) }), None, "a span of it");
    }

    #[test]
    fn of_the_reserves_of_one_room_the_latest_attempt_is_kept() {
        let orphan = |attempt| Orphan {
            peer: Instance(7),
            question: 1,
            attempt,
            reserve: reserve(0, 10),
            since: Time::default(),
        };
        let mut orphans = Orphans::default();
        assert_eq!(orphans.keep(Room(1), orphan(2), 1), Ok(()));
        assert_eq!(orphans.keep(Room(1), orphan(1), 1), Ok(()));
        assert_eq!(orphans.keep(Room(2), orphan(1), 1), Err(1), "there is no room for a second");
        orphans.forget(Room(1), Instance(8));
        assert_eq!(orphans.take(Room(1)).map(|orphan| orphan.attempt), Some(2));
    }
}
