//! The pages that one request holds, and the view of a request that the cache works with.

use std::borrow::Cow;
use std::ops::Range;

use crate::ids::{PageId, Room};
use crate::pool::HeldPages;
use crate::radix::{NamespaceKey, PageHash, PrefixLock};
use crate::request::Request;
use crate::sampling::Draw;
use crate::window::WindowShape;

/// The tokens whose KV a request holds or wants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens<'a> {
    pub request: &'a Request,
    /// Tokens drawn so far.
    pub output: &'a [u32],
    /// Whether the request waits to continue after a preemption.
    pub resumes: bool,
    /// Positions that had KV before that.
    pub computed_before: usize,
}

impl<'a> Tokens<'a> {
    pub(crate) fn room(&self) -> Room {
        self.request.room
    }

    pub(super) fn namespace(&self) -> &'a NamespaceKey {
        &self.request.namespace
    }

    pub(crate) fn prompt(&self) -> &'a [u32] {
        &self.request.prompt
    }

    /// The next draw.
    pub(super) fn draw(&self) -> Draw {
        Draw::next(&self.request.sampling, &self.request.prompt, self.request.answered, self.output)
    }

    /// Tokens known so far.
    #[inline]
    pub(crate) fn known(&self) -> usize {
        self.request.prompt.len() + self.output.len()
    }

    /// The token at a position of prompt + output.
    #[inline]
    pub(crate) fn at(&self, position: usize) -> u32 {
        match position.checked_sub(self.request.prompt.len()) {
            None => self.request.prompt[position],
            Some(index) => self.output[index],
        }
    }

    /// The tokens at some positions.
    pub(crate) fn range(&self, positions: Range<usize>) -> Vec<u32> {
        positions.map(|position| self.at(position)).collect()
    }

    /// Tokens whose KV a waiting request may find in a cache. A request that is computed here needs at least one token to
    /// compute. A request whose KV is sent may find all of its prompt. A preempted request looks for its answer, too, but
    /// not for the last token: that token was drawn and never computed, or must be computed for the first draw. A request for
    /// log probabilities of its prompt finds what it computed itself before a preemption.
    pub(crate) fn usable(&self, is_sent: bool) -> Cow<'a, [u32]> {
        let prompt = self.prompt();
        match self.resumes {
            // Each position has to be computed once, for the log probability of the token behind it.
            _ if self.request.scores.is_some() => {
                let told = if self.resumes { self.computed_before } else { 0 };
                Cow::Borrowed(&prompt[..told.min(prompt.len() - 1)])
            }
            true => Cow::Owned(self.range(0..self.known() - 1)),
            false if is_sent => Cow::Borrowed(prompt),
            false => Cow::Borrowed(&prompt[..prompt.len() - 1]),
        }
    }
}

/// The window parts of one request, or nothing for models without sliding layers.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The token page of the first part.
    pub first: usize,
    /// Cached parts in front, as many as the request's lock keeps.
    pub cached: Vec<PageId>,
    /// Parts that the request itself holds, behind the cached ones.
    pub own: HeldPages,
}

impl Window {
    /// Pages of all parts.
    pub(super) fn len(&self) -> usize {
        self.cached.len() + self.own.ids().len()
    }

    /// The token page after the last one that has its window part.
    pub(super) fn end(&self, shape: WindowShape) -> usize {
        self.first + self.len() / shape.parts as usize
    }

    /// The pages with the window parts of some token pages.
    pub(super) fn parts(&self, shape: WindowShape, token_pages: &Range<usize>) -> Vec<PageId> {
        let parts = shape.parts as usize;
        let all = self.cached.iter().chain(self.own.ids()).copied();
        all.skip((token_pages.start - self.first) * parts).take(token_pages.len() * parts).collect()
    }
}

/// Pages of a prompt that come from the offload tiers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Restore {
    /// These pages are on their way.
    Pending(Range<usize>),
    /// These pages could not be restored. Nothing of the restore is under way any more.
    Missing(Range<usize>),
}

/// Everything that one request holds of the cache. Empty while the request waits. Only the cache changes its pages.
#[derive(Debug, Default)]
pub(crate) struct Holding {
    /// The page table: pages for the prompt and for as much of the answer as there is, in order. The locked ones are shared, the
    /// others are held.
    pub(super) table: Vec<PageId>,
    /// Names of the request's first pages, as far as they were needed.
    pub(super) names: Vec<PageHash>,
    /// The pages of the table behind the locked ones, which the request gives back. `None` while it waits.
    pub(super) held: Option<HeldPages>,
    /// Pages that the request holds and no longer uses, because the tree has others with the same contents.
    pub(super) spare: Option<HeldPages>,
    /// The window parts of its KV.
    pub(super) window: Window,
    /// Lock on the cached pages at the front of the table.
    pub(super) lock: Option<PrefixLock>,
    /// The token page at the end of the window that the request restored. `None` once the tree has that window.
    pub(super) restored_window: Option<usize>,
    /// The recompute range: positions up to the end of the cached prefix that are computed only to get the window at
    /// that end. Empty when there are none, and once they are computed.
    pub(super) recompute: Range<usize>,
    /// Positions with KV.
    pub(super) computed: usize,
    /// Pages behind the locked ones that come from the offload tiers.
    pub(super) restore: Option<Restore>,
}

impl Holding {
    /// The empty holding of a request whose first pages have these names.
    pub(crate) fn new(names: Vec<PageHash>) -> Self {
        Self { names, ..Self::default() }
    }

    /// Positions with KV.
    #[inline]
    pub(crate) fn computed(&self) -> usize {
        self.computed
    }

    /// Takes note that a batch, a transfer or a restore has filled the first `positions` positions.
    #[inline]
    pub(crate) fn has_computed(&mut self, positions: usize) {
        self.computed = positions;
    }

    /// The recompute range: positions that are computed only to get the window at their end.
    #[inline]
    pub(crate) fn recompute(&self) -> &Range<usize> {
        &self.recompute
    }

    /// Some pages of the table.
    pub(crate) fn pages(&self, places: Range<usize>) -> &[PageId] {
        &self.table[places]
    }

    /// Pages of window parts.
    pub(crate) fn window_len(&self) -> usize {
        self.window.len()
    }

    /// Whether the request has pages. A waiting request has none.
    #[inline]
    pub(crate) fn is_admitted(&self) -> bool {
        self.held.is_some()
    }

    /// Whether the request keeps a prefix in the radix tree locked.
    pub(crate) fn is_cached(&self) -> bool {
        self.lock.is_some()
    }

    /// State of the request's restore from the offload tiers. `None` without a restore, and once all of its pages are
    /// there.
    pub(crate) fn restore(&self) -> Option<&Restore> {
        self.restore.as_ref()
    }

    /// Ends the restore: its missing pages come from elsewhere.
    pub(crate) fn forget_restore(&mut self) {
        self.restore = None;
    }

    /// Pages that the request itself holds: first those of all layers or of the full-attention ones, then those of its window.
    /// `None` while it waits.
    pub(crate) fn own_pages(&self) -> Option<[&[PageId]; 2]> {
        self.held.as_ref().map(|held| [held.ids(), self.window.own.ids()])
    }

    /// Computes the names of the first pages, as far as they are not known yet.
    pub(super) fn name_pages(
        &mut self,
        tokens: &Tokens<'_>,
        identity: &PageHash,
        pages: usize,
        page_tokens: usize,
    ) {
        let mut last = match self.names.last() {
            Some(last) => *last,
            None => identity.namespace(tokens.namespace()),
        };
        for page in self.names.len()..pages {
            last = last.next(&tokens.range(page * page_tokens..(page + 1) * page_tokens));
            self.names.push(last);
        }
    }
}
