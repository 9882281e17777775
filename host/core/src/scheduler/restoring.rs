//! Requests that get pages from the offload tiers: waiting for storage, having pages copied, and continuing without
//! pages that do not come.
//!
//! `docs/internals/request.md` draws the stages.
//!
//! On a decode worker a restore runs beside the transfer of the pages behind it. If promised pages cannot be restored,
//! decode asks prefill for them by another attempt: a [`Reserve`](crate::message::Reserve) that covers them. Prefill has
//! computed or cached the whole prompt and keeps it until `Commit`, which decode sends only when everything is there. If
//! nothing has arrived yet, the new attempt replaces the first one and asks for all pages. Otherwise it asks for the
//! missing span alone, after the first attempt is verified. A request is renegotiated once at most. If prefill is gone
//! by then, or goes while it sends the span, decode computes from the first missing page on. Before that, decode takes
//! back the pages of a span that it had asked for, like those of an ended request.

use std::ops::Range;

use super::job::Job;
use super::peers::PeerState;
use super::stage::Stage;
use super::{Action, Scheduler};
use crate::cache::Restore;
use crate::hand_over::{Incoming, Reclaiming};
use crate::hierarchy::TierEvent;
use crate::ids::{Instance, Room, Time};
use crate::message::Body;

impl Scheduler {
    /// Asks the offload tiers for pages of a waiting request, which is new or was preempted.
    pub(super) fn fetch(&mut self, now: Time, room: Room) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let place = job.place;
        let (tokens, kv) = job.holding();
        self.cache.fetch(now, place, &tokens, kv);
    }

    pub(super) fn tier_event(&mut self, now: Time, event: TierEvent, actions: &mut Vec<Action>) {
        let cleared = self.cache.tier_event(now, event);
        self.finish_clearing(cleared, actions);
        self.after_tiers(now, actions);
    }

    /// Tells the cost model, until the next tick, how many tokens of prompts are computed before those of new requests.
    pub(super) fn tell_backlog(&mut self) {
        let Self { cache, jobs, running, .. } = self;
        let left = |room| jobs.get(room).map_or(0, Job::uncomputed);
        // A job with one token left is decoding.
        cache.set_backlog(|| running.iter().map(left).filter(|left| *left > 1).sum());
    }

    /// Gives up work of the offload tiers that takes too long.
    pub(super) fn expire_tiers(&mut self, now: Time, actions: &mut Vec<Action>) {
        let expired = self.cache.expire_tiers(now);
        actions.extend(expired.into_iter().map(Action::Tier));
        self.after_tiers(now, actions);
    }

    /// Begins as much waiting work as the offload tiers can take.
    pub(super) fn start_tiers(&mut self, now: Time, actions: &mut Vec<Action>) {
        let begun = self.cache.start_tiers(now);
        actions.extend(begun.into_iter().map(Action::Tier));
        self.after_tiers(now, actions);
    }

    fn after_tiers(&mut self, now: Time, actions: &mut Vec<Action>) {
        for room in self.cache.take_changed() {
            let Some(job) = self.jobs.get_mut(&room) else { continue };
            if self.cache.restored(room, &mut job.kv) {
                self.go_on(now, room, actions);
            }
        }
    }

    /// Moves a request on, after its restore or the transfer beside it has ended.
    pub(super) fn go_on(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let (stage, restore) = (job.stage().clone(), job.kv.restore().cloned());
        match (stage, restore) {
            (_, Some(Restore::Pending(_))) => {}
            (Stage::Loading(_), Some(Restore::Missing(_))) if !self.cache.continues_anywhere() => {
                self.restart(room);
            }
            (Stage::Loading(all), restore) => {
                let end = match restore {
                    Some(Restore::Missing(missing)) => missing.start,
                    _ => all.end,
                };
                self.loaded(room, end, actions);
            }
            (Stage::Transfer(incoming), Some(Restore::Missing(missing)))
                if incoming.is_untouched() && self.connected(&incoming) =>
            {
                let covered = self.cache.pages_for(self.jobs[&room].request.prompt.len());
                self.renegotiate(now, room, &incoming, missing.start..covered, actions);
            }
            (Stage::Restoring(incoming), None) => self.received(now, room, &incoming, actions),
            (Stage::Restoring(incoming), Some(Restore::Missing(missing))) => {
                match self.connected(&incoming) {
                    true => self.renegotiate(now, room, &incoming, missing, actions),
                    false => self.compute_instead(room, missing.start),
                }
            }
            _ => {}
        }
    }

    /// Lets a request whose first `pages` pages are there compute the rest.
    fn loaded(&mut self, room: Room, pages: usize, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let before = job.kv.computed();
        let end = self.cache.continue_at(&mut job.kv, pages);
        if job.was_preempted() {
            let restored = end.saturating_sub(before) as u64;
            self.stats.restored_tokens += restored;
            self.stats.restored_offload_tokens += restored;
        } else {
            job.has_cached(end);
        }
        job.enter(Stage::Running(None));
        self.running.push(room);
        self.push_pages(room, actions);
    }

    /// Whether prefill can be asked for something more over the connection of a transfer.
    pub(super) fn connected(&self, incoming: &Incoming) -> bool {
        !incoming.leg_ended
            && self.peers.state(incoming.peer) == Some(&PeerState::Ready)
            && self.peers.session(incoming.peer) == incoming.session
    }

    /// Asks prefill for promised pages that could not be restored.
    fn renegotiate(
        &mut self,
        now: Time,
        room: Room,
        incoming: &Incoming,
        pages: Range<usize>,
        actions: &mut Vec<Action>,
    ) {
        self.cache.count(|stats| {
            stats.renegotiated += 1;
            stats.renegotiated_pages += pages.len() as u64;
        });
        let page_tokens = self.config.page_tokens;
        let mut supplement = false;
        if let Some(job) = self.jobs.get_mut(&room) {
            supplement = matches!(*job.stage(), Stage::Restoring(_));
            let first = u32::try_from(pages.start).unwrap_or(u32::MAX).saturating_mul(page_tokens);
            job.kv.forget_restore();
            job.origin.promised = job.origin.promised.min(first);
            job.origin.cached = job.origin.cached.min(first);
        }
        self.outbox.forget_room(room);
        // A supplement brings no window: that came with the verified attempt.
        self.reserve(now, room, incoming.for_missing(now, pages, supplement), actions);
    }

    /// Takes back the last missing pages, of which prefill will not send all, to compute them here.
    pub(super) fn reclaim(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let Stage::Transfer(incoming) = job.stage() else { return };
        let (peer, attempt, page) = (incoming.peer, incoming.attempt, incoming.pages.start);
        let may_write = self.peers.may_write(peer, incoming.session);
        let writer = Some(peer).filter(|_| may_write);
        job.enter(Stage::Reclaiming(Reclaiming { page, writer, receiver: true }));
        actions.push(Action::CloseRoom { room });
        self.outbox.forget_room(room);
        if may_write && self.peers.state(peer) == Some(&PeerState::Ready) {
            let abort = self.outbox.request(now, peer, room, attempt, Body::Abort);
            self.send(peer, abort, actions);
        }
    }

    /// Takes note that a writer of the pages that a room takes back has ended. After the last one, decode computes
    /// them.
    pub(super) fn reclaimed(
        &mut self,
        room: Room,
        change: impl FnOnce(&mut Reclaiming),
        actions: &mut Vec<Action>,
    ) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let Some(reclaiming) = job.reclaiming() else { return };
        change(reclaiming);
        if reclaiming.is_over() {
            let page = reclaiming.page;
            actions.push(Action::ForgetRoom { room });
            self.compute_instead(room, page);
        }
    }

    /// Lets decode compute the pages that it lacks, because no other worker can send them.
    pub(super) fn compute_instead(&mut self, room: Room, pages: usize) {
        self.cache.count(|stats| stats.computed_instead += 1);
        if !self.cache.continues_anywhere() {
            // The window before the missing pages was never sent.
            return self.restart(room);
        }
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let end = self.cache.continue_at(&mut job.kv, pages);
        // The first token is drawn again when the prompt's last token is computed.
        job.answer.first = None;
        job.has_cached(end);
        job.enter(Stage::Running(None));
        self.running.push(room);
    }

    /// Makes a request of a decode worker ready: all its pages are received or restored.
    fn received(&mut self, now: Time, room: Room, incoming: &Incoming, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        job.enter(Stage::Ready);
        job.kv.has_computed(job.request.prompt.len());
        self.ready.push_back(room);
        self.commit(now, room, incoming, actions);
        self.keep(room);
        if !self.pace.is_set() {
            self.activate(now, actions);
        }
    }

    /// Tells prefill that decode needs nothing more, so that prefill may let go of its pages.
    pub(super) fn commit(&mut self, now: Time, room: Room, incoming: &Incoming, actions: &mut Vec<Action>) {
        let peer: Instance = incoming.peer;
        if self.peers.state(peer) == Some(&PeerState::Ready) {
            let commit = self.outbox.request(now, peer, room, incoming.attempt, Body::Commit);
            self.send(peer, commit, actions);
        }
    }
}
