//! Requests that get pages from the offload tiers: waiting for storage, having pages copied, and going on without what
//! does not come.
//!
//! ```text
//! prefill, aggregated   Queued ─► Loading ─► Running, from the first page that was not restored, or,
//!                                               of a model with a window, Preempted, if all was not
//!
//! both that decode   Preempted ─► Loading ─► Running, likewise ([`preemption`](super::preemption))
//!
//! decode       Queued ─► Transfer ─► Verifying ─► Restoring ─► Ready
//!                           ▲ │ restore failed,       │ │ prefill gone: compute it here
//!                           └─┘ nothing arrived       │ └─────────────────────────────► Running
//!                           ▲                         │ restore failed                     ▲
//!                           └──── the span it lacks ──┘                                    │
//!                           │ prefill gone, or it will not                                 │
//!                           └──────────────────────────────► Reclaiming ─(no more writes)──┘
//! ```
//!
//! On a decode worker a restore runs beside the transfer of what lies behind it. What was promised and cannot be
//! restored is asked of prefill by another attempt: a [`Reserve`](crate::message::Reserve) that covers it. Prefill has
//! computed or cached the whole prompt and keeps it until `Commit`, which decode says only when everything is there. As
//! long as nothing has arrived, the new attempt takes the place of the first and asks for all. Otherwise it asks for
//! the missing span alone, when the first is verified. A request is renegotiated once at most. When prefill has gone
//! meanwhile, or goes while it sends the span, decode computes from the first missing page on. Before that, decode takes
//! the pages of a span that was asked for back, like those of a request that has ended.

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
    /// Asks the offload tiers for a waiting request: one that has come, or was preempted.
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

    /// Until the next tick: what requests that come then would be computed after.
    pub(super) fn tell_backlog(&mut self) {
        let Self { cache, jobs, running, .. } = self;
        let left = |room| jobs.get(room).map_or(0, Job::uncomputed);
        // One token is a step of an answer.
        cache.set_backlog(|| running.iter().map(left).filter(|left| *left > 1).sum());
    }

    /// Gives up what takes too long in the offload tiers.
    pub(super) fn expire_tiers(&mut self, now: Time, actions: &mut Vec<Action>) {
        let expired = self.cache.expire_tiers(now);
        actions.extend(expired.into_iter().map(Action::Tier));
        self.after_tiers(now, actions);
    }

    /// Begins what the offload tiers can take.
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

    /// A restore has ended, or what came beside it.
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

    /// The first pages of a request that computes are there, and it computes the rest.
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

    /// Asks prefill for pages that were promised and are not there.
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
        // The window came with what is verified.
        self.reserve(now, room, incoming.for_missing(now, pages, supplement), actions);
    }

    /// Prefill will not send the last pages that are missing, or not all of them: takes them back, to compute them here.
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

    /// One writer of the pages that a room takes back has ended.
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

    /// Decode computes what it lacks, because no other worker can.
    pub(super) fn compute_instead(&mut self, room: Room, pages: usize) {
        self.cache.count(|stats| stats.computed_instead += 1);
        if !self.cache.continues_anywhere() {
            // The window before the missing pages was never sent.
            return self.restart(room);
        }
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let end = self.cache.continue_at(&mut job.kv, pages);
        // Drawn again, when the prompt's last token is computed.
        job.answer.first = None;
        job.has_cached(end);
        job.enter(Stage::Running(None));
        self.running.push(room);
    }

    /// Decode: everything is there, received or restored.
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

    /// Decode needs nothing more of prefill, which may let go.
    pub(super) fn commit(&mut self, now: Time, room: Room, incoming: &Incoming, actions: &mut Vec<Action>) {
        let peer: Instance = incoming.peer;
        if self.peers.state(peer) == Some(&PeerState::Ready) {
            let commit = self.outbox.request(now, peer, room, incoming.attempt, Body::Commit);
            self.send(peer, commit, actions);
        }
    }
}
