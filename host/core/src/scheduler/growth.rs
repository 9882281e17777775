//! How many pages a request has, needs next, and may need soon.
//!
//! A request is admitted with pages for what is known of it: its prompt, and after a retraction its answer so far. The
//! answer's pages come one by one as it grows. So that those who run seldom run into each other, admission leaves
//! [`Config::reserved_decode_tokens`](super::Config::reserved_decode_tokens) of *headroom* for each of them, counted from
//! where it is now and not beyond what it may generate. Headroom is a promise of admission and no allocation: until it
//! is used the pages are free, or hold cached prefixes.

use super::job::Job;
use super::pace::Load;
use super::prefix::Prefix;
use super::{Role, Scheduler};
use crate::ids::Room;
use crate::request::Request;

/// Pages of both [components](crate::pool::Component).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Pages {
    pub full: usize,
    pub window: usize,
}

impl std::ops::AddAssign for Pages {
    fn add_assign(&mut self, other: Self) {
        self.full += other.full;
        self.window += other.window;
    }
}

impl std::ops::Add for Pages {
    type Output = Pages;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

impl std::iter::Sum for Pages {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Pages::default(), std::ops::Add::add)
    }
}

/// What admission looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// Pages for the tokens known so far, and for the window parts that come with a transfer or from below the pool.
    pub now: Pages,
    /// Pages beyond for which there must be room.
    pub headroom: Pages,
}

impl Scheduler {
    /// Tokens that this worker generates for the request.
    pub(super) fn answer_tokens(&self, request: &Request) -> usize {
        match self.config.role {
            Role::Prefill => 1,
            Role::Decode | Role::Aggregated => request.max_new_tokens as usize,
        }
    }

    pub(super) fn pages_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.config.page_tokens as usize)
    }

    /// Positions that will have KV when the answer is as long as it may get: the last token drawn is never computed.
    pub(super) fn most_positions(&self, request: &Request) -> usize {
        request.prompt.len() + self.answer_tokens(request) - 1
    }

    /// What a waiting job needs beside what is locked for it.
    pub(super) fn need(&self, job: &Job, prefix: Option<&Prefix>) -> Need {
        let (now, ahead) = (self.pages_for(job.known()), self.ahead(job));
        let window = self.window_need(job, prefix, ahead.max(now));
        let locked = prefix.map_or(0, |prefix| prefix.lock.pages());
        Need {
            now: Pages { full: now - locked, window: window.now },
            headroom: Pages { full: ahead.saturating_sub(now), window: window.headroom },
        }
    }

    /// Pages that the job will have when it has used its headroom.
    fn ahead(&self, job: &Job) -> usize {
        let reserved = self.config.reserved_decode_tokens as usize;
        self.pages_for(self.most_positions(&job.request).min(job.known() + reserved))
    }

    /// Pages that those past the queue may ask for soon.
    pub(super) fn promised_headroom(&self) -> Pages {
        if self.config.role == Role::Prefill && self.config.window.is_none() {
            return Pages::default();
        }
        let active = self.jobs.values().filter(|job| job.held.is_some());
        let headroom = |job: &Job| {
            let (ahead, pages) = (self.ahead(job), job.table.len());
            Pages { full: ahead.saturating_sub(pages), window: self.window_headroom(job, ahead.max(pages)) }
        };
        active.map(headroom).sum()
    }

    /// Tokens of longer pieces in a step that also decodes, at most: what the target for the time between tokens
    /// allows, but a page in any case, so that everything comes to an end. Without a target a worker that otherwise
    /// only decodes takes small pieces of what it must compute again; those who decode hardly notice.
    pub(super) fn piece_beside(&self, load: &Load) -> usize {
        let page = self.config.page_tokens as usize;
        let chunk = self.config.chunk_tokens as usize;
        let whole = if self.config.role == Role::Decode { chunk / 8 } else { chunk };
        self.pace.tokens_beside(load).unwrap_or(whole).clamp(page.min(chunk), chunk)
    }

    /// Finds pages for a plan (each job with the position up to which it is to be computed), with `give_up` those of copies
    /// that have not begun, if need be; false when there are too few.
    pub(super) fn grow(&mut self, plan: &[(Room, usize)], give_up: bool) -> bool {
        let missing = |scheduler: &Self, room: &Room, end: usize| {
            scheduler.jobs.get(room).map_or(Pages::default(), |job| Pages {
                full: scheduler.pages_for(end).saturating_sub(job.table.len()),
                window: scheduler.window_missing(job, end),
            })
        };
        let needed: Pages = plan.iter().map(|(room, end)| missing(self, room, *end)).sum();
        if needed == Pages::default() {
            return true;
        }
        if give_up {
            self.give_up_saves(needed);
        }
        if !self.can_have(needed) {
            return false;
        }
        self.make_free(needed);
        for (room, end) in plan {
            let needed = missing(self, room, *end);
            let Some(job) = self.jobs.get_mut(room).filter(|_| needed != Pages::default()) else { continue };
            let pages = (self.pool.allocate(needed.full), self.pool.allocate_window(needed.window));
            let (Some(held), (Some(pages), Some(window))) = (&mut job.held, pages) else {
                unreachable!("{room:?} runs without pages, or pages that were counted are not there")
            };
            job.window.own.append(window);
            job.table.extend_from_slice(pages.ids());
            held.append(pages);
        }
        true
    }
}
