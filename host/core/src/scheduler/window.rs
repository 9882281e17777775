//! The window parts of a request's KV: what it has of them, needs next, and no longer needs.
//!
//! ```text
//! token pages     0 . . . . . . . first . . . . . . . . . . . . . . end
//! window parts    gone            cached, kept by its lock   own    none yet
//! ```
//!
//! A job whose KV comes from elsewhere has the parts that its first step sees from admission on ([`WindowShape::tail`]), and
//! with a cache to leave them in those that it could go on with if it lost its pages ([`WindowShape::kept_tail`]); they
//! arrive with the last part of the transfer. One that computes gets parts for each piece just before it is computed
//! ([`growth`](super::growth)), and before its first one those that it restores from [below the pool](crate::hierarchy). When a batch is done, the parts that no later position sees are given back: the job's
//! own to the pool, cached ones to the tree. So what a prompt takes here depends on the window and not on its length.
//!
//! Where the full parts of a prefix are cached and the window at its end is not, the job may compute that again from the full
//! parts ([`WindowShape::reach`]): it begins before the end of its prefix, at [`Job::again`], with no window at all, so that
//! what it makes of the first positions is of no use to anybody. Those parts are given back before the tree gets any.
//!
//! Nobody but batches touches parts that are given back: a transfer sends those of the prompt's end, which stay until the
//! job ends, and what arrives belongs to steps that have not begun.

use std::ops::Range;

use super::job::Job;
use super::prefix::Prefix;
use super::stage::Stage;
use super::{Role, Scheduler};
use crate::ids::{PageId, Room};
use crate::pool::HeldPages;
use crate::radix::PrefixLock;
use crate::request::Request;
use crate::window::{WindowPages, WindowShape};

/// The window parts of one job; nothing for models without sliding layers.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The token page of the first part.
    pub first: usize,
    /// Cached parts in front, as many as the job's lock keeps.
    pub cached: Vec<PageId>,
    /// The job's own, behind them.
    pub own: HeldPages,
}

impl Window {
    /// The pages of all parts, in order.
    pub(super) fn pages(&self) -> impl Iterator<Item = PageId> {
        self.cached.iter().chain(self.own.ids()).copied()
    }

    /// Pages of all parts.
    pub(super) fn len(&self) -> usize {
        self.cached.len() + self.own.ids().len()
    }

    /// The token page after the last that has its part.
    fn end(&self, shape: WindowShape) -> usize {
        self.first + self.len() / shape.parts as usize
    }

    /// The pages of some token pages.
    fn parts(&self, shape: WindowShape, token_pages: &Range<usize>) -> Vec<PageId> {
        let parts = shape.parts as usize;
        self.pages().skip((token_pages.start - self.first) * parts).take(token_pages.len() * parts).collect()
    }
}

/// What is looked for at admission, in pages of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WindowNeed {
    pub now: usize,
    pub headroom: usize,
}

/// Parts between two token pages that are kept at once, computed in pieces of so many positions.
fn kept(shape: WindowShape, token_pages: Range<usize>, piece: usize, page_tokens: usize) -> usize {
    shape.parts as usize * token_pages.len().min(shape.most_kept(piece.max(1), page_tokens))
}

impl Job {
    /// The positions that a batch which begins where the job is computes for their window alone.
    pub(super) fn again_in_batch(&self) -> Range<u32> {
        let position = |position: usize| u32::try_from(position).unwrap_or(u32::MAX);
        position(self.again.start)..position(self.again.end)
    }
}

impl Scheduler {
    /// Whether the KV of a job that waits comes from elsewhere, so that only its last window comes with it.
    fn arrives(&self, job: &Job) -> bool {
        self.config.role == Role::Decode && *job.stage != Stage::Retracted
    }

    /// Token pages of a prompt whose parts are sent: what decode asks for, which depends on its cache.
    fn tail(&self, shape: WindowShape, job: &Job) -> Range<usize> {
        let (prompt, page_tokens) = (job.request.prompt.len(), self.config.page_tokens as usize);
        if let Some(outgoing) = &job.outgoing {
            let end = prompt.div_ceil(page_tokens);
            return end - outgoing.reserve.window.len() / shape.parts as usize..end;
        }
        match self.cache.is_some() && !job.request.no_cache {
            true => shape.kept_tail(prompt, page_tokens),
            false => shape.tail(prompt, page_tokens),
        }
    }

    /// Pages that come with the last part of a transfer.
    pub(super) fn tail_pages(&self, job: &Job) -> usize {
        self.config.window.map_or(0, |shape| self.tail(shape, job).len() * shape.parts as usize)
    }

    /// Pages that a decode worker may ask for with the last part of a prompt's transfer: at least and at most.
    pub(super) fn tails(&self, request: &Request) -> [usize; 2] {
        let (prompt, page_tokens) = (request.prompt.len(), self.config.page_tokens as usize);
        let Some(shape) = self.config.window else { return [0; 2] };
        [shape.tail(prompt, page_tokens), shape.kept_tail(prompt, page_tokens)]
            .map(|tail| tail.len() * shape.parts as usize)
    }

    /// Pages of parts that a sequence of so many token pages must be able to have, computed one by one if need be.
    pub(super) fn least_window(&self, token_pages: usize) -> usize {
        let page_tokens = self.config.page_tokens as usize;
        self.config.window.map_or(0, |shape| kept(shape, 0..token_pages, 1, page_tokens))
    }

    /// What a waiting job needs of parts, if it gets what is locked and may get as long as `end` token pages. One that computes
    /// is counted with pieces of a page: the jobs of a step share its tokens, and where parts are short pieces get shorter.
    pub(super) fn window_need(&self, job: &Job, prefix: Option<&Prefix>, end: usize) -> WindowNeed {
        let Some(shape) = self.config.window else { return WindowNeed::default() };
        let page_tokens = self.config.page_tokens as usize;
        if self.arrives(job) {
            let first = self.tail(shape, job).start;
            let now = self.tail_pages(job);
            let most = kept(shape, first..end.max(first), 1, page_tokens);
            return WindowNeed { now, headroom: most.saturating_sub(now) };
        }
        let parts = shape.parts as usize;
        let (page, from) = prefix.map_or((0, 0), |prefix| (prefix.page(), prefix.from()));
        let cached = prefix.map_or(0, |prefix| prefix.lock.windows()) * parts;
        let now = prefix.map_or(0, Prefix::restored_windows) * parts;
        let piece = (job.known() - from * page_tokens).min(page_tokens);
        let first = if from < page { from } else { shape.first_kept(from * page_tokens, page_tokens) };
        let most = kept(shape, first..end.max(first), piece, page_tokens);
        WindowNeed { now, headroom: most.saturating_sub(cached + now) }
    }

    /// Pages that a job past the queue may ask for, until it is as long as `end` token pages.
    pub(super) fn window_headroom(&self, job: &Job, end: usize) -> usize {
        let Some(shape) = self.config.window else { return 0 };
        let piece = match *job.stage {
            Stage::Running | Stage::Loading(_) => job.known() - job.computed,
            _ => 1,
        };
        let first = job.window.first;
        let page_tokens = self.config.page_tokens as usize;
        let most = kept(shape, first..end.max(first), piece.min(page_tokens), page_tokens);
        most.saturating_sub(job.window.len())
    }

    /// Pages of parts that a job lacks to be computed up to a position.
    pub(super) fn window_missing(&self, job: &Job, end: usize) -> usize {
        let Some(shape) = self.config.window else { return 0 };
        self.pages_for(end).saturating_sub(job.window.end(shape)) * shape.parts as usize
    }

    /// A job is admitted that goes on at this token page: takes over the parts that it got, or notes where its first ones begin.
    pub(super) fn begin_window(&mut self, room: Room, at: usize, own: HeldPages) {
        let (Some(shape), Some(job)) = (self.config.window, self.jobs.get(&room)) else {
            return self.pool.release(own);
        };
        let page_tokens = self.config.page_tokens as usize;
        let first = match self.arrives(job) {
            true => self.tail(shape, job).start,
            false if !job.again.is_empty() => job.again.start / page_tokens,
            false => shape.seen_at(at, page_tokens).start,
        };
        let cached = match (&self.cache, &job.lock) {
            (Some(tree), Some(lock)) => tree.window_pages(lock),
            _ => Vec::new(),
        };
        let Some(job) = self.jobs.get_mut(&room) else { return self.pool.release(own) };
        job.window = Window { first, cached, own };
    }

    /// The parts for a batch that computes up to a position.
    pub(super) fn window_of(&self, job: &Job, end: usize) -> WindowPages {
        let Some(shape) = self.config.window else { return WindowPages::default() };
        let token_pages = job.window.first..self.pages_for(end);
        WindowPages {
            first: u32::try_from(token_pages.start).unwrap_or(u32::MAX),
            pages: job.window.parts(shape, &token_pages),
        }
    }

    /// The pages of the parts that a transfer brings.
    pub(super) fn window_tail(&self, job: &Job) -> Vec<PageId> {
        let Some(shape) = self.config.window else { return Vec::new() };
        job.window.parts(shape, &self.tail(shape, job))
    }

    /// Gives back what no position behind the computed ones sees. No batch is being computed.
    pub(super) fn release_unseen(&mut self, room: Room) {
        let (Some(shape), Some(job)) = (self.config.window, self.jobs.get_mut(&room)) else { return };
        let first = shape.first_kept(job.computed, self.config.page_tokens as usize);
        let parts = shape.parts as usize;
        let unseen = first.saturating_sub(job.window.first);
        let cached = unseen.min(job.window.cached.len() / parts);
        if let (Some(tree), Some(lock)) = (&mut self.cache, &mut job.lock) {
            tree.unlock_windows(lock, cached);
        }
        job.window.cached.drain(..cached * parts);
        let kept = job.window.own.split_off((unseen - cached) * parts);
        self.pool.release(std::mem::replace(&mut job.window.own, kept));
        job.window.first += unseen;
    }

    /// Whether the window at the end of a job's prefix is complete that it computes again. If it is now, gives the parts
    /// back that led there and returns the token page at whose beginning the window is whole.
    pub(super) fn end_again(&mut self, room: Room) -> Option<usize> {
        let (Some(shape), Some(job)) = (self.config.window, self.jobs.get_mut(&room)) else { return None };
        if job.again.is_empty() || job.computed < job.again.end {
            return None;
        }
        let page_tokens = self.config.page_tokens as usize;
        let end = std::mem::take(&mut job.again).end;
        let blurred = shape.first_live(end, page_tokens).saturating_sub(job.window.first);
        let exact = job.window.own.split_off(blurred * shape.parts as usize);
        self.pool.release(std::mem::replace(&mut job.window.own, exact));
        job.window.first += blurred;
        Some(end / page_tokens)
    }

    /// # Panics
    /// When a job has other parts than it must have, or its lock keeps others.
    pub(super) fn audit_windows(&self) {
        for (room, job) in &self.jobs {
            let Some(shape) = self.config.window else {
                assert_eq!(job.window.len(), 0, "{room:?} has window parts of a model without a window");
                continue;
            };
            let parts = shape.parts as usize;
            let locked = job.lock.as_ref().map_or(0, PrefixLock::windows);
            assert_eq!(
                job.window.cached.len(),
                locked * parts,
                "{room:?}: cached parts are kept by its lock"
            );
            assert!(job.window.len().is_multiple_of(parts), "{room:?} has a part in part");
            if job.held.is_none() {
                assert_eq!(job.window.len(), 0, "{room:?} waits and has window parts");
            } else if matches!(*job.stage, Stage::Running | Stage::Ready | Stage::Inflight) {
                let page_tokens = self.config.page_tokens as usize;
                let end = self.pages_for(job.in_batch.unwrap_or(job.computed));
                let first = shape.first_live(job.computed, page_tokens).max(job.again.start / page_tokens);
                assert!(job.window.first <= first, "{room:?} lost a part");
                assert!(job.window.end(shape) >= end, "{room:?} lacks a part");
                let most =
                    shape.most_kept((end * page_tokens).saturating_sub(job.computed).max(1), page_tokens);
                assert!(job.window.len() <= (most + 1) * parts, "{room:?} keeps parts that nobody sees");
            }
        }
    }
}
