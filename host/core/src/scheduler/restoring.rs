//! Requests that get pages from below the pool: waiting for storage, having pages copied, and going on without what
//! does not come.
//!
//! ```text
//! prefill, aggregated   Queued ─► Loading ─► Running, from the first page that was not restored; of a model with
//!                                               a window Retracted, if all was not
//!
//! both that decode   Retracted ─► Loading ─► Running, likewise ([`retraction`](super::retraction))
//!
//! decode       Queued ─► Transfer ─► Verifying ─► Restoring ─► Ready
//!                           ▲ │ restore failed,       │ │ prefill gone: compute it here
//!                           └─┘ nothing arrived       │ └─────────────────────────────► Running
//!                           ▲                         │ restore failed                     ▲
//!                           └──── the span it lacks ──┘                                    │
//!                           │ prefill gone, or it will not                                 │
//!                           └──────────────────────────────► Reclaiming ─(nobody writes)───┘
//! ```
//!
//! On a decode worker a restore runs beside the transfer of what lies behind it. What was promised and cannot be restored
//! is asked of prefill by another attempt: a [`Reserve`](crate::message::Reserve) that covers it. Prefill has computed or
//! cached the whole prompt and keeps it until `Commit`, which decode says only when everything is there. As long as
//! nothing has arrived the new attempt takes the place of the first and asks for all; else it asks for the missing span
//! alone, when the first is verified. A request is renegotiated once at most. When prefill has gone meanwhile, or goes while
//! it sends the span, decode computes from the first missing page on; pages of a span that was asked for it takes back first,
//! like those of a request that has ended.

use std::ops::Range;

use super::job::{Incoming, Job, Reclaiming, Restore};
use super::peers::PeerState;
use super::stage::Stage;
use super::{Action, Role, Scheduler};
use crate::hierarchy::{End, Hierarchy, Progress, TierAction, TierEvent, Wanted};
use crate::ids::{Instance, Room, Time};
use crate::message::Body;
use crate::radix::PageHash;

impl Job {
    /// Names the job's first `pages` pages.
    pub(super) fn name_pages(&mut self, identity: &PageHash, pages: usize, page_tokens: usize) {
        let mut last = match self.names.last() {
            Some(last) => *last,
            None => identity.namespace(&self.request.namespace),
        };
        for page in self.names.len()..pages {
            let tokens: Vec<u32> =
                (page * page_tokens..(page + 1) * page_tokens).map(|at| self.token(at)).collect();
            last = last.next(&tokens);
            self.names.push(last);
        }
    }
}

impl Scheduler {
    /// Asks what lies below for a request that waits: one that has come, or was retracted.
    pub(super) fn begin_fetch(&mut self, now: Time, room: Room) {
        let (role, page_tokens) = (self.config.role, self.config.page_tokens as usize);
        let (Some(hierarchy), Some(tree), Some(job)) =
            (&mut self.hierarchy, &mut self.cache, self.jobs.get_mut(&room))
        else {
            return;
        };
        let (tokens, computes) = (job.usable_tokens(role), job.computes(role));
        let pages = tokens.len() / page_tokens;
        if job.request.no_cache || pages == 0 {
            return;
        }
        let Some(namespace) = tree.namespace(&job.request.namespace) else { return };
        let shape = self.config.window.filter(|_| computes);
        let windows = shape.map(|shape| (shape, tree.window_parts(namespace, &tokens)));
        let near = match &windows {
            Some((_, near)) => near.len(),
            None => tree.peek(namespace, &tokens),
        };
        job.name_pages(&self.config.identity, pages, page_tokens);
        let names = job.names[..pages].to_vec();
        hierarchy.begin(now, room, Wanted { place: job.place, names, near, is_sent: !computes, windows });
    }

    /// Whether a request in the queue waits for what is being read for it.
    pub(super) fn waits_for_storage(&self, room: Room) -> bool {
        self.hierarchy.as_ref().is_some_and(|hierarchy| hierarchy.waits(room))
    }

    /// A request is admitted, its first `near` pages from L1: begins to restore what lies below for it. Returns the page behind
    /// that, if anything does.
    pub(super) fn begin_restore(&mut self, now: Time, room: Room, near: usize) -> Option<usize> {
        let (hierarchy, job) = (self.hierarchy.as_mut()?, self.jobs.get_mut(&room)?);
        let end = near + hierarchy.restore(now, room, near);
        if end == near {
            return None;
        }
        hierarchy.restore_into(room, &job.table[near..end]);
        job.restore = Some(Restore::Pending(near..end));
        Some(end)
    }

    /// The same for one that goes on at an end, with window parts from below.
    pub(super) fn restore_to(&mut self, now: Time, room: Room, near: usize, end: &End) -> Option<usize> {
        let (hierarchy, job) = (self.hierarchy.as_mut()?, self.jobs.get_mut(&room)?);
        let restored = near..end.reach.end.max(near);
        let pages = [&job.table[restored.clone()], job.window.own.ids()].concat();
        if !hierarchy.restore_end(now, room, near, end, &pages) {
            return None;
        }
        let end = restored.end;
        job.restored_window = Some(end).filter(|_| !job.window.own.ids().is_empty());
        job.restore = Some(Restore::Pending(restored));
        Some(end)
    }

    pub(super) fn tier_event(&mut self, now: Time, event: TierEvent, actions: &mut Vec<Action>) {
        let Some(hierarchy) = &mut self.hierarchy else { return };
        if let Some(load) = hierarchy.handle(now, event) {
            let cleared = self.quarantine.update(&mut self.pool, |_, touchers| {
                touchers.loads.remove(&load);
            });
            self.finish_clearing(cleared, actions);
        }
        self.after_tiers(now, actions);
    }

    /// A request in the queue waits for something that storage cannot give.
    pub(super) fn step_aside(&mut self, room: Room) {
        if let Some(hierarchy) = &mut self.hierarchy {
            hierarchy.step_aside(room);
        }
    }

    /// Until the next tick: what those who come then would be computed after.
    pub(super) fn tell_backlog(&mut self) {
        let Some(hierarchy) = &mut self.hierarchy else { return };
        let left = |room| self.jobs.get(room).map_or(0, |job| job.known() - job.computed);
        // One token is a step of an answer.
        hierarchy.set_backlog(self.running.iter().map(left).filter(|left| *left > 1).sum());
    }

    /// Gives up what takes too long below the pool.
    pub(super) fn expire_tiers(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.with_tiers(now, actions, |hierarchy, now, below| hierarchy.expire(now, below));
    }

    /// Begins what there is room for below the pool.
    pub(super) fn start_tiers(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.with_tiers(now, actions, |hierarchy, now, below| hierarchy.start(now, below));
    }

    fn with_tiers(
        &mut self,
        now: Time,
        actions: &mut Vec<Action>,
        act: impl FnOnce(&mut Hierarchy, Time, &mut Vec<TierAction>),
    ) {
        let Some(hierarchy) = &mut self.hierarchy else { return };
        let mut below = Vec::new();
        act(hierarchy, now, &mut below);
        actions.extend(below.into_iter().map(Action::Tier));
        self.after_tiers(now, actions);
    }

    fn after_tiers(&mut self, now: Time, actions: &mut Vec<Action>) {
        let Some(hierarchy) = &mut self.hierarchy else { return };
        let (changed, released) = (hierarchy.take_changed(), hierarchy.take_released());
        self.released(released);
        for room in changed {
            self.restore_changed(now, room, actions);
        }
    }

    fn restore_changed(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let Some(hierarchy) = &mut self.hierarchy else { return };
        let progress = hierarchy.progress(room);
        let Some(job) = self.jobs.get_mut(&room) else { return };
        job.restore = match progress {
            None | Some(Progress::Pending) => return,
            Some(Progress::Done) => None,
            Some(Progress::Failed(missing)) => {
                let stats = hierarchy.stats_mut();
                stats.restores_failed += 1;
                stats.not_restored += missing.len() as u64;
                Some(Restore::Missing(missing))
            }
        };
        hierarchy.forget(room);
        self.go_on(now, room, actions);
    }

    /// A restore has ended, or what came beside it.
    pub(super) fn go_on(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let (stage, restore) = ((*job.stage).clone(), job.restore.clone());
        match (stage, restore) {
            (_, Some(Restore::Pending(_))) => {}
            // Nobody computes behind a part of a window; what is there of the pages is little without it.
            (Stage::Loading(_), Some(Restore::Missing(_))) if self.config.window.is_some() => {
                self.begin_again(room);
            }
            (Stage::Loading(all), restore) => {
                let end = match restore {
                    Some(Restore::Missing(missing)) => missing.start,
                    _ => all.end,
                };
                self.loaded(room, end, actions);
            }
            (Stage::Transfer(incoming), Some(Restore::Missing(missing)))
                if incoming.arrived.is_empty() && self.connected(&incoming) =>
            {
                let covered = self.pages_for(self.jobs[&room].request.prompt.len());
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
        job.restore = None;
        let end = match job.again.is_empty() {
            true => pages * self.config.page_tokens as usize,
            false => job.again.start,
        };
        let before = std::mem::replace(&mut job.computed, end);
        if job.was_retracted() {
            let restored = end.saturating_sub(before) as u64;
            self.stats.restored_tokens += restored;
            self.stats.restored_below_tokens += restored;
        } else {
            job.cached_tokens = u32::try_from(end).unwrap_or(u32::MAX);
            job.promised_tokens = job.cached_tokens;
        }
        job.stage.enter(Stage::Running);
        self.running.push(room);
        if self.config.role == Role::Prefill {
            self.push_pages(room, actions);
        }
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
        if let Some(hierarchy) = &mut self.hierarchy {
            let stats = hierarchy.stats_mut();
            stats.renegotiated += 1;
            stats.renegotiated_pages += pages.len() as u64;
        }
        let page_tokens = self.config.page_tokens;
        let mut supplement = false;
        if let Some(job) = self.jobs.get_mut(&room) {
            supplement = matches!(*job.stage, Stage::Restoring(_));
            let first = u32::try_from(pages.start).unwrap_or(u32::MAX).saturating_mul(page_tokens);
            job.restore = None;
            job.promised_tokens = job.promised_tokens.min(first);
            job.cached_tokens = job.cached_tokens.min(first);
        }
        self.outbox.forget_room(room);
        // The window came with what is verified.
        let window = if supplement { 0 } else { incoming.window };
        let next = Incoming::new((incoming.peer, incoming.session), incoming.attempt + 1, pages, window, now);
        self.reserve(now, room, Incoming { damaged: incoming.damaged, supplement, ..next }, actions);
    }

    /// Prefill will not send the last pages that are missing, or not all of them: takes them back, to compute them here.
    pub(super) fn reclaim(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let Stage::Transfer(incoming) = &*job.stage else { return };
        let (peer, attempt, page) = (incoming.peer, incoming.attempt, incoming.pages.start);
        let may_write = self.peers.may_write(peer, incoming.session);
        let writer = Some(peer).filter(|_| may_write);
        job.stage.enter(Stage::Reclaiming(Reclaiming { page, writer, receiver: true }));
        actions.push(Action::CloseRoom { room });
        self.outbox.forget_room(room);
        if may_write && self.peers.state(peer) == Some(&PeerState::Ready) {
            let abort = self.outbox.request(now, peer, room, attempt, Body::Abort);
            self.send(peer, abort, actions);
        }
    }

    /// Somebody writes the pages that a room takes back no more.
    pub(super) fn reclaimed(
        &mut self,
        room: Room,
        change: impl FnOnce(&mut Reclaiming),
        actions: &mut Vec<Action>,
    ) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let Some(reclaiming) = job.stage.reclaiming() else { return };
        change(reclaiming);
        if reclaiming.writer.is_none() && !reclaiming.receiver {
            let page = reclaiming.page;
            actions.push(Action::ForgetRoom { room });
            self.compute_instead(room, page);
        }
    }

    /// Decode computes what it lacks, because nobody else can.
    pub(super) fn compute_instead(&mut self, room: Room, pages: usize) {
        if let Some(hierarchy) = &mut self.hierarchy {
            hierarchy.stats_mut().computed_instead += 1;
        }
        if self.config.window.is_some() {
            // The window before the missing pages was never sent.
            return self.begin_again(room);
        }
        let Some(job) = self.jobs.get_mut(&room) else { return };
        job.restore = None;
        job.computed = pages * self.config.page_tokens as usize;
        // Drawn again, when the prompt's last token is computed.
        job.first = None;
        job.cached_tokens = u32::try_from(job.computed).unwrap_or(u32::MAX);
        job.promised_tokens = job.cached_tokens;
        job.stage.enter(Stage::Running);
        self.running.push(room);
    }

    /// Decode: everything is there, received or restored.
    fn received(&mut self, now: Time, room: Room, incoming: &Incoming, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        job.stage.enter(Stage::Ready);
        job.computed = job.request.prompt.len();
        self.ready.push_back(room);
        self.commit(now, room, incoming, actions);
        self.cache_computed(room);
        if !self.pace.is_set() {
            self.let_in(now, actions);
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
