//! Decode's side of a room: asking for pages, checking what arrives, continuing with it.

use super::stage::Stage;
use super::{Action, RoomOpening, Scheduler};
use crate::hand_over::{Incoming, Reclaiming};
use crate::ids::{Instance, Room, Time};
use crate::integrity::{Expected, FoundData, verify};
use crate::message::{Body, Reserve};
use crate::notice::Notice;
use crate::request::{Failure, FailureCode};

impl Scheduler {
    /// Tells prefill where to write, for the first time or again.
    pub(super) fn reserve(&mut self, now: Time, room: Room, incoming: Incoming, actions: &mut Vec<Action>) {
        let page_tokens = self.config.page_tokens as usize;
        let Some(job) = self.jobs.get(&room) else { return };
        let Some(aux_slot) = job.aux else { return };
        let window = self.cache.window_tail(&job.tokens(), &job.kv, incoming.window);
        let (peer, attempt) = (incoming.peer, incoming.attempt);
        let prompt = job.request.prompt.len();
        let covered = prompt.div_ceil(page_tokens);
        let pages = job.kv.pages(incoming.pages.clone()).to_vec();
        let parts = u32::try_from(self.config.layer_groups.most_parts(covered)).unwrap_or(u32::MAX);
        let session = incoming.session;
        actions.push(Action::OpenRoom(RoomOpening {
            room,
            attempt,
            peer,
            session,
            pages: [&pages[..], &window].concat(),
            parts,
        }));
        let reserve = Reserve {
            pages,
            window,
            decode_prefix_len: u32::try_from(incoming.pages.start * page_tokens).unwrap_or(u32::MAX),
            prompt_tokens: u32::try_from(prompt).unwrap_or(u32::MAX),
            aux_slot,
            namespace: job.request.namespace.fingerprint(),
        };
        if let Some(job) = self.jobs.get_mut(&room) {
            job.enter(Stage::Transfer(incoming));
        }
        let message = self.outbox.request(now, peer, room, attempt, Body::Reserve(reserve));
        self.send(peer, message, actions);
    }

    pub(super) fn arrived(&mut self, now: Time, notice: Notice, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&notice.room) else { return };
        let covered = self.cache.pages_for(job.request.prompt.len());
        let Some(incoming) = job.transfer() else { return };
        self.peers.heard(incoming.peer, now);
        if incoming.attempt != notice.attempt {
            return;
        }
        let Some(complete) = incoming.take(&notice, self.config.layer_groups.most_parts(covered)) else {
            let message = format!("prefill sent part {} of a transfer that cannot have it", notice.sequence);
            return self.fail(now, notice.room, Failure::new(FailureCode::Transfer, message), actions);
        };
        if complete {
            let incoming = incoming.clone();
            self.cache.learn_transferring(incoming.len(), now.since(incoming.requested));
            let Some(job) = self.jobs.get(&notice.room) else { return };
            let Some(aux_slot) = job.aux else { return };
            let window = self.cache.window_tail(&job.tokens(), &job.kv, incoming.window);
            let pages = [job.kv.pages(incoming.pages.clone()), &window].concat();
            let (room, attempt) = (notice.room, notice.attempt);
            actions.push(Action::Verify { room, attempt, pages, aux_slot });
            if let Some(job) = self.jobs.get_mut(&room) {
                job.enter(Stage::Verifying(incoming));
            }
        }
    }

    pub(super) fn verified(
        &mut self,
        now: Time,
        room: Room,
        attempt: u32,
        found: &FoundData,
        actions: &mut Vec<Action>,
    ) {
        let cleared = self.cache.verification_ended(room);
        self.finish_clearing(cleared, actions);
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let Stage::Verifying(incoming) = job.stage() else { return };
        if incoming.attempt != attempt {
            return;
        }
        let incoming = incoming.clone();
        let peer = incoming.peer;
        // Nothing reads the pages any more. If the job ends from here on, it must not wait for a verification.
        job.enter(Stage::Transfer(incoming.clone()));
        let prompt = job.request.prompt.len();
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let pages = count(incoming.len());
        let expected = Expected { room, attempt, prompt_tokens: count(prompt), pages };
        let verified = verify(expected, found);
        // A token outside the vocabulary would fail its whole batch.
        if let Ok(verified) = &verified
            && verified.first().token >= self.config.vocabulary
        {
            let (token, end) = (verified.first().token, self.config.vocabulary - 1);
            let message = format!(
                "prefill drew token {token}, but the model's token ids end at {end}: start both workers with the same model"
            );
            return self.fail(now, room, Failure::new(FailureCode::Transfer, message), actions);
        }
        match verified {
            Ok(verified) => {
                job.enter(Stage::Restoring(incoming));
                job.origin.cached = job.origin.cached.max(verified.cached_tokens());
                job.origin.transferred_pages += pages;
                job.answer.first = Some(verified.first().clone());
                // Everything that the room could bring is here.
                actions.push(Action::ForgetRoom { room });
                self.stats.pages_received += u64::from(pages);
                self.outbox.forget_room(room);
                self.go_on(now, room, actions);
            }
            Err(mismatch) => {
                self.stats.integrity_failures += 1;
                // Every part of this attempt has arrived, so nothing of it can still be written: the same pages
                // can be asked for again at once.
                let (damaged, supplement) = (incoming.damaged + 1, incoming.supplement);
                let connected = self.connected(&incoming);
                if connected && damaged < self.config.max_attempts {
                    self.outbox.forget_room(room);
                    self.reserve(now, room, incoming.for_damaged(now), actions);
                } else if supplement {
                    actions.push(Action::ForgetRoom { room });
                    self.outbox.forget_room(room);
                    if connected {
                        self.commit(now, room, &incoming, actions);
                    }
                    self.compute_instead(room, incoming.pages.start);
                } else if !connected {
                    let message = format!("{mismatch}, and worker {peer} cannot send it again");
                    self.fail(now, room, Failure::new(FailureCode::PeerLost, message), actions);
                } else {
                    let message = format!("KV pages arrived damaged {damaged} times: {mismatch}");
                    self.fail(now, room, Failure::new(FailureCode::Transfer, message), actions);
                }
            }
        }
    }

    /// Handles that prefill refused or gave up. Decode aborts the room, as after any failure: only `Drained` proves
    /// that no repeat of an earlier message makes prefill write after all. Transfers that have arrived completely need
    /// prefill no longer.
    pub(super) fn prefill_gave_up(
        &mut self,
        now: Time,
        from: Instance,
        room: Room,
        message: String,
        retryable: bool,
        actions: &mut Vec<Action>,
    ) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        if let Some(incoming) = job.received() {
            incoming.leg_ended |= incoming.peer == from;
        }
        let waits = match job.stage() {
            Stage::Transfer(incoming) => incoming.peer == from,
            Stage::Queued(_) => job.request.prefill.as_ref().is_some_and(|peer| peer.instance == from),
            _ => false,
        };
        if waits && job.stage().waits_for_supplement() {
            self.reclaim(now, room, actions);
        } else if waits {
            let failure = Failure { code: FailureCode::PeerFailed, message, retryable };
            self.fail(now, room, failure, actions);
        }
    }

    /// Takes note that none of our threads copies into the pages of a closed room any more.
    pub(super) fn room_closed(&mut self, room: Room, actions: &mut Vec<Action>) {
        let cleared = self.cache.receiver_closed(room);
        self.finish_clearing(cleared, actions);
        self.reclaimed(room, |reclaiming| reclaiming.receiver = false, actions);
    }

    /// Takes note that prefill has nothing of the room in flight any more.
    pub(super) fn drained(&mut self, from: Instance, room: Room, actions: &mut Vec<Action>) {
        let cleared = self.cache.writer_gone(from, Some(room));
        self.finish_clearing(cleared, actions);
        let gone = |reclaiming: &mut Reclaiming| {
            reclaiming.writer = reclaiming.writer.filter(|writer| *writer != from);
        };
        self.reclaimed(room, gone, actions);
    }
}
