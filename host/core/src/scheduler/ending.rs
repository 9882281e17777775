//! The end of requests: the one function by which they leave, and the deadlines.

use super::job::Job;
use super::peers::PeerState;
use super::roles::Counterpart;
use super::stage::Stage;
use super::{Action, Scheduler};
use crate::cache::Touches;
use crate::ids::{Instance, Room, Time};
use crate::message::Body;
use crate::request::{Failure, FailureCode};

/// The things of an ended request that stay until nothing touches its pages.
#[derive(Debug, Default)]
pub(super) struct Leftovers {
    pub aux: Option<u32>,
    /// Whether our transfer threads were told of the room and have to forget it.
    pub opened: bool,
    /// Peer and session of own writes that have not settled.
    pub writes: Option<(Instance, u64)>,
    /// Aborts to answer then: peer, message id and attempt.
    pub answer: Vec<(Instance, u64, u32)>,
}

/// How a request ends.
#[derive(Debug)]
pub(super) enum Ending {
    /// With its last token, or with decode's word that all has arrived.
    Complete,
    /// Before that. These aborts are answered once nothing is in flight.
    Early(Vec<(Instance, u64, u32)>),
}

impl Scheduler {
    pub(super) fn job_deadline(&self, job: &Job) -> Time {
        let whole = job.submitted.after(self.config.request_timeout);
        if let Some(moved) = self.transfer_since(job) {
            return whole.min(moved.after(self.config.transfer_patience));
        }
        let waits_for_leg = job.stage().is_queued()
            // Not for prefill legs. Decode asks for its pages when it has pages and a place in its steps, which may take as
            // long as a request may. Until then a prefill leg holds nothing here, and the router ends it when the other leg is
            // gone.
            && self.config.role.is_sent_kv()
            && !self.prefill_is_ready(job);
        match waits_for_leg {
            true => whole.min(job.submitted.after(self.config.bootstrap_timeout)),
            false => whole,
        }
    }

    pub(super) fn expire(&mut self, now: Time, actions: &mut Vec<Action>) {
        for room in self.deadlines.due(now) {
            let Some(job) = self.jobs.get(&room) else { continue };
            let deadline = self.job_deadline(job);
            if deadline > now {
                // Its other leg is there by now.
                self.deadlines.set(room, deadline);
                continue;
            }
            let moved = self.transfer_since(job);
            if moved.is_some_and(|moved| now.since(moved) >= self.config.transfer_patience) {
                self.transfer_stalled(now, room, actions);
                continue;
            }
            let awaits = self.config.role.counterpart_of(&job.request);
            let unasked = awaits == Counterpart::Reserve && job.outgoing.is_none();
            let message = match now.since(job.submitted) < self.config.request_timeout {
                true => "the prefill worker could not be reached in time",
                false if unasked => "the decode worker did not ask for this request's KV in time",
                false => "the request took longer than the worker's request timeout",
            };
            self.fail(now, room, Failure::new(FailureCode::Timeout, message), actions);
        }
        for room in self.settling.due(now) {
            self.unsettled(now, room, actions);
        }
        // From now on requests whose patience is over are looked at like all others.
        self.patience.due(now);
        self.expire_orphans(now, actions);
    }

    /// Ends a request without a complete answer, and tells the client and the other leg.
    pub(super) fn fail(&mut self, now: Time, room: Room, failure: Failure, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.remove(&room) else { return };
        self.tell_other_leg(now, &job, &failure, actions);
        self.stats.failed += 1;
        actions.push(Action::Fail { room, failure });
        self.retire(now, room, job, Ending::Early(Vec::new()), actions);
    }

    fn tell_other_leg(&mut self, now: Time, job: &Job, failure: &Failure, actions: &mut Vec<Action>) {
        let room = job.request.room;
        let (peer, attempt, body) = match (job.stage(), &job.outgoing) {
            (Stage::Transfer(incoming) | Stage::Verifying(incoming) | Stage::Restoring(incoming), _)
                if self.peers.may_write(incoming.peer, incoming.session) =>
            {
                (incoming.peer, incoming.attempt, Body::Abort)
            }
            (_, Some(outgoing)) => {
                let message = failure.message.clone();
                let body = Body::PrefillFailed { message, retryable: failure.retryable };
                (outgoing.peer, outgoing.attempt, body)
            }
            _ => return,
        };
        self.outbox.forget_room(room);
        if self.peers.state(peer) == Some(&PeerState::Ready) {
            let message = self.outbox.request(now, peer, room, attempt, body);
            self.send(peer, message, actions);
        }
    }

    /// The one way out: frees everything that a job holds, or sets it aside for as long as something may touch it.
    ///
    /// Where the transfer backend does not prove that writes have settled, the peer of a transfer that ends early is fenced:
    /// until then everything that was sent counts as in flight.
    pub(super) fn retire(
        &mut self,
        now: Time,
        room: Room,
        mut job: Job,
        ending: Ending,
        actions: &mut Vec<Action>,
    ) {
        self.queue.retain(|other| *other != room);
        self.running.retain(|other| *other != room);
        self.ready.retain(|other| *other != room);
        self.leaders.remove(room);
        self.deadlines.remove(room);
        self.patience.remove(room);
        self.turns.leave(job.request.client, job.request.priority);
        let loads = self.cache.forget(room);
        let unproven = self.unproven(&job, &ending);
        let to = job.outgoing.as_ref().map(|outgoing| (outgoing.peer, outgoing.session));
        let tags = job.outgoing.take().map(|outgoing| outgoing.tags).unwrap_or_default();
        for tag in &tags {
            self.writes.remove(tag);
        }
        let writes = to.filter(|_| !tags.is_empty());
        let (opened, writer, receiver) = match job.stage() {
            Stage::Transfer(incoming) | Stage::Verifying(incoming) => {
                actions.push(Action::CloseRoom { room });
                let writes = self.peers.may_write(incoming.peer, incoming.session);
                (true, Some(incoming.peer).filter(|_| writes), true)
            }
            // The room is being closed already, and its pages are being reclaimed.
            Stage::Reclaiming(reclaiming) => (true, reclaiming.writer, reclaiming.receiver),
            _ => (false, unproven.map(|(peer, _)| peer), false),
        };
        let batch = job.stage().in_batch().is_some();
        let verification = matches!(*job.stage(), Stage::Verifying(_));
        let touches = Touches { writer, batch, verification, receiver, tags, loads };
        let answer = match ending {
            // All writes have arrived.
            Ending::Complete => Vec::new(),
            Ending::Early(answer) => {
                actions.extend(touches.tags.iter().map(|tag| Action::CancelWrite(*tag)));
                answer
            }
        };
        if writes.is_some() {
            self.settling.set(room, now.after(self.config.transfer_patience));
        }
        let leftovers = Leftovers { aux: job.aux, opened, answer, writes };
        self.leftovers.insert(room, leftovers);
        if self.cache.release(room, job.kv, touches) {
            self.finish_clearing([room], actions);
        }
        if let Some((peer, session)) = unproven
            && self.peers.is_current(peer, session)
        {
            let why = format!(
                "the connection to worker {peer} was cut: a transfer over it ended early, and the transfer plugin does not \
                 declare \"settled\""
            );
            self.cut_off(now, peer, &why, actions);
        }
    }

    /// Peer and session of a transfer that ends early and whose writes may still land, because the backend does not prove that
    /// they have settled. `None` for other transfers.
    fn unproven(&self, job: &Job, ending: &Ending) -> Option<(Instance, u64)> {
        let outgoing = job.outgoing.as_ref()?;
        let sent = matches!(ending, Ending::Early(_)) && outgoing.has_sent() && !self.config.settles;
        // An earlier connection was fenced when the next one began.
        let open = self.peers.may_write(outgoing.peer, outgoing.session);
        (sent && open).then_some((outgoing.peer, outgoing.session))
    }
}
