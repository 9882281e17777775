//! How many pages a request may need soon, and finding pages for the next step.
//!
//! A request is admitted with pages for its known tokens: its prompt, and after a preemption its answer so far. The
//! answer's pages come one by one as it grows. So that running requests seldom take pages from each other, admission
//! leaves [`Config::reserved_decode_tokens`](super::Config::reserved_decode_tokens) of *headroom* for each of them,
//! counted from its present length and not beyond the longest answer that it may generate. On workers where no request
//! is [preempted](Scheduler::preempts), the headroom covers the longest answer. Headroom is a promise of admission and
//! no allocation: until it is used the pages are free, or hold cached prefixes.

use super::Scheduler;
use super::job::Job;
use super::pace::Load;
use super::stage::Stage;
use crate::cache::{Need, Pages, Prefix};
use crate::ids::Room;
use crate::request::Request;

impl Scheduler {
    /// Positions that will have KV when the answer is as long as it may get: the last token drawn is never computed.
    pub(super) fn most_positions(&self, request: &Request) -> usize {
        request.prompt.len() + self.config.role.answer_tokens(request) - 1
    }

    /// Pages that a waiting job needs beyond the locked ones.
    pub(super) fn need(&self, job: &Job, prefix: Option<&Prefix>) -> Need {
        self.cache.need(&job.tokens(), prefix, self.ahead(job))
    }

    /// Pages that the job will have when it has used its headroom.
    fn ahead(&self, job: &Job) -> usize {
        let most = self.most_positions(&job.request);
        let reserved = self.config.reserved_decode_tokens as usize;
        self.cache.pages_for(if self.preempts() { most.min(job.known() + reserved) } else { most })
    }

    /// Pages that admitted requests may ask for soon.
    pub(super) fn promised_headroom(&self) -> Pages {
        let headroom = |job: &Job| {
            let chunk = match *job.stage() {
                Stage::Running(_) | Stage::Loading(_) => job.uncomputed(),
                _ => 1,
            };
            self.cache.headroom(&job.kv, self.ahead(job), chunk)
        };
        self.jobs.values().filter(|job| job.kv.is_admitted()).map(headroom).sum()
    }

    /// Most tokens of prompts and recomputed ones in a step that also decodes. The target for the time between tokens
    /// limits them, but a page is always allowed, so that every prompt comes to an end.
    pub(super) fn chunk_beside(&self, load: &Load) -> usize {
        let page = self.config.page_tokens as usize;
        let chunk = self.config.chunk_tokens as usize;
        let whole = self.config.role.chunk_beside(chunk);
        self.pace.tokens_beside(load).unwrap_or(whole).clamp(page.min(chunk), chunk)
    }

    /// Finds pages for a plan (each job with the position up to which it is to be computed). With `give_up` it also
    /// takes pages from copies that have not begun, if necessary. Returns `false` when there are too few.
    pub(super) fn grow(&mut self, plan: &[(Room, usize)], give_up: bool) -> bool {
        let missing = |scheduler: &Self, room: &Room, end: usize| {
            let job = scheduler.jobs.get(room);
            job.map_or(Pages::default(), |job| scheduler.cache.missing(&job.kv, end))
        };
        let needed: Pages = plan.iter().map(|(room, end)| missing(self, room, *end)).sum();
        if needed == Pages::default() {
            return true;
        }
        if give_up {
            self.cache.give_up_saves(needed);
        }
        if !self.cache.can_have(needed) {
            return false;
        }
        self.cache.make_free(needed);
        for (room, end) in plan {
            let needed = missing(self, room, *end);
            if needed != Pages::default()
                && let Some(job) = self.jobs.get_mut(room)
            {
                self.cache.extend(*room, &mut job.kv, needed);
            }
        }
        true
    }
}
