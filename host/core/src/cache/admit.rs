//! Giving requests their pages: at admission, and while they grow.

use super::{Cache, Holding, Pages, Prefix, Tokens};
use crate::batch::{Scored, Sequence};
use crate::ids::{Room, Time};

/// Pages that must be available to admit a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Pages for the tokens known so far, and for the window parts that come with a transfer or from the offload tiers.
    pub now: Pages,
    /// Further pages that must be available, but are not taken at admission.
    pub headroom: Pages,
}

/// The cached pages with which a request was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Admitted {
    /// Pages from the radix tree.
    pub prefix: usize,
    /// Those of the `prefix` pages of which nothing has to be computed.
    pub from: usize,
    /// The page behind the last one that the offload tiers bring, if they bring any.
    pub restored: Option<usize>,
}

impl Admitted {
    /// The page behind the last one that comes from the radix tree or the offload tiers.
    pub(crate) fn covered(&self) -> usize {
        self.restored.unwrap_or(self.prefix)
    }
}

impl Cache {
    /// Pages that a waiting request needs beyond the locked ones, if it may soon grow to `ahead` pages.
    pub(crate) fn need(&self, tokens: &Tokens<'_>, prefix: Option<&Prefix>, ahead: usize) -> Need {
        let now = self.pages_for(tokens.known());
        let window = self.window_need(tokens, prefix, ahead.max(now));
        let locked = prefix.map_or(0, |prefix| prefix.lock.pages());
        Need {
            now: Pages { full: now - locked, window: window.now },
            headroom: Pages { full: ahead.saturating_sub(now), window: window.headroom },
        }
    }

    /// Pages that an admitted request may ask for until it has grown to `ahead` pages. It is computed in chunks of `chunk`
    /// positions.
    #[inline]
    pub(crate) fn headroom(&self, kv: &Holding, ahead: usize, chunk: usize) -> Pages {
        let pages = kv.table.len();
        Pages { full: ahead.saturating_sub(pages), window: self.window_headroom(kv, ahead.max(pages), chunk) }
    }

    /// Gives a waiting request its pages. They are free: the scheduler has made room for `need` before.
    pub(crate) fn admit(
        &mut self,
        now: Time,
        tokens: &Tokens<'_>,
        kv: &mut Holding,
        need: Need,
        found: Option<Prefix>,
    ) -> Admitted {
        let pages = (self.pool.allocate(need.now.full), self.pool.allocate_window(need.now.window));
        let (Some(pages), Some(window)) = pages else {
            unreachable!("admission counted the pages of {:?}", tokens.room())
        };
        let (page, from) = found.as_ref().map_or((0, 0), |found| (found.page(), found.from()));
        let (lock, end) = found.map_or((None, None), |found| (Some(found.lock), found.end));
        if let (Some(tree), Some(lock)) = (&mut self.tree, &lock) {
            tree.count_use(lock);
            tree.pages(lock, &mut kv.table);
        }
        let prefix = kv.table.len();
        if from < page {
            kv.recompute = from * self.page_tokens..page * self.page_tokens;
        }
        let from = from.min(prefix);
        if !self.sends(tokens) {
            kv.computed = from * self.page_tokens;
        }
        kv.table.extend_from_slice(pages.ids());
        kv.held = Some(pages);
        kv.lock = lock;
        self.begin_window(tokens, kv, page, window);
        let restored = match end {
            Some(end) => self.restore_to(now, tokens.room(), kv, prefix, &end),
            None => self.begin_restore(now, tokens.room(), kv, prefix),
        };
        Admitted { prefix, from, restored }
    }

    /// Pages that a running request lacks to be computed up to a position.
    #[inline]
    pub(crate) fn missing(&self, kv: &Holding, end: usize) -> Pages {
        Pages {
            full: self.pages_for(end).saturating_sub(kv.table.len()),
            window: self.window_missing(kv, end),
        }
    }

    /// Gives a running request so many more pages. The caller has made them free.
    pub(crate) fn extend(&mut self, room: Room, kv: &mut Holding, pages: Pages) {
        let taken = (self.pool.allocate(pages.full), self.pool.allocate_window(pages.window));
        let (Some(held), (Some(pages), Some(window))) = (&mut kv.held, taken) else {
            unreachable!("{room:?} runs without pages, or pages that were counted are not there")
        };
        kv.window.own.append(window);
        kv.table.extend_from_slice(pages.ids());
        held.append(pages);
    }

    /// Takes back the pages behind the first `positions` positions. These pages hold no KV, and nothing reads them.
    pub(crate) fn trim(&mut self, kv: &mut Holding, positions: usize) {
        let pages = self.pages_for(positions);
        let extra = kv.table.len().saturating_sub(pages);
        let Some(held) = &mut kv.held else { return };
        let kept = held.ids().len().saturating_sub(extra);
        if extra > 0 {
            kv.table.truncate(pages);
            self.pool.release(held.split_off(kept));
        }
        self.trim_window(kv, positions);
    }

    /// The sequence that a batch computes for a running request, up to position `end`. The last tokens before `end` are
    /// those of `draft`.
    pub(crate) fn sequence(&self, tokens: &Tokens<'_>, kv: &Holding, end: usize, draft: &[u32]) -> Sequence {
        let position = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
        let known = end - draft.len();
        let scored = tokens.request.scores.map(|top| {
            let next = kv.computed + 1..tokens.prompt().len().min(end + 1);
            Scored { next: tokens.range(next), top }
        });
        Sequence {
            room: tokens.room(),
            tokens: [&tokens.range(kv.computed..known)[..], draft].concat(),
            start: position(kv.computed),
            pages: kv.table[..self.pages_for(end)].to_vec(),
            window: self.window_of(kv, end),
            recompute: position(kv.recompute.start)..position(kv.recompute.end),
            drafted: position(draft.len()),
            sample: (known == tokens.known() && scored.is_none()).then(|| tokens.draw()),
            scored,
        }
    }
}
