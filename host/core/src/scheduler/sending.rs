//! Prefill's side of a room: taking decode's reserves, sending pages, letting go.

use std::ops::Range;

use super::ending::Ending;
use super::job::Job;
use super::roles::Counterpart;
use super::stage::Stage;
use super::{Action, PageWrite, Scheduler};
use crate::aux_row::AuxRow;
use crate::batch::Sequence;
use crate::hand_over::{Orphan, Outgoing, TransferPart, Wanted};
use crate::ids::{Instance, Room, Time};
use crate::message::{Body, Reserve};
use crate::request::{Failure, FailureCode, FinishReason};
use crate::transfer::Tag;

impl Job {
    /// Pages that are complete once the first `computed` positions are. The prompt's last page counts once the whole
    /// prompt is computed.
    fn whole_pages(&self, computed: usize, page_tokens: usize) -> usize {
        let prompt = self.request.prompt.len();
        if computed >= prompt { prompt.div_ceil(page_tokens) } else { computed / page_tokens }
    }

    /// Pages that the batch being computed completes, and how many of their layers were sent, if layers may be sent before the
    /// batch ends.
    fn completing(&self, page_tokens: usize) -> Option<(Range<usize>, u32)> {
        self.outgoing.as_ref()?.completing(self.whole_pages(self.stage().in_batch()?, page_tokens))
    }
}

impl Scheduler {
    /// What prefill expects of a reserve for a job.
    pub(super) fn wanted(&self, job: &Job) -> Wanted {
        let prompt = job.request.prompt.len();
        Wanted {
            prompt,
            page_tokens: self.config.page_tokens as usize,
            namespace: job.request.namespace.fingerprint(),
            tails: self.cache.tails(prompt),
        }
    }

    /// Why a job is not sent as decode asks for it, or `None` if it is.
    pub(super) fn refusal(&self, job: &Job, attempt: u32, reserve: &Reserve) -> Option<String> {
        if job.request.scores.is_some() {
            return Some("the request asks the prefill worker for log probabilities alone".into());
        }
        self.wanted(job).misfit(attempt, reserve)
    }

    #[allow(clippy::too_many_arguments)] // one argument per field of the message
    pub(super) fn reserve_asked(
        &mut self,
        now: Time,
        from: Instance,
        question: u64,
        room: Room,
        attempt: u32,
        reserve: Reserve,
        actions: &mut Vec<Action>,
    ) {
        let answer = match self.take_reserve(now, from, question, room, attempt, reserve) {
            Ok(()) => Body::Reserved,
            Err((message, retryable)) => Body::Refused { message, retryable },
        };
        let answer = self.outbox.answer(question, room, attempt, answer);
        self.send(from, answer, actions);
        self.push_pages(room, actions);
        self.transfer_moved(now, room);
    }

    /// Takes note of progress in a transfer: the wait for it starts anew. Does nothing before the prompt is computed.
    pub(super) fn transfer_moved(&mut self, now: Time, room: Room) {
        let inflight = |job: &&mut Job| *job.stage() == Stage::Inflight;
        let Some(job) = self.jobs.get_mut(&room).filter(inflight) else { return };
        let Some(outgoing) = &mut job.outgoing else { return };
        outgoing.moved = Some(now);
        if let Some(job) = self.jobs.get(&room) {
            let deadline = self.job_deadline(job);
            self.deadlines.set(room, deadline);
        }
    }

    /// When a job's transfer last made progress, once its prompt is computed.
    pub(super) fn transfer_since(&self, job: &Job) -> Option<Time> {
        let outgoing = job.outgoing.as_ref()?;
        let moved = outgoing.moved?;
        // Writes count as under way while other writes to the same peer make progress.
        Some(if outgoing.tags.is_empty() { moved } else { moved.max(self.peers.last_moved(outgoing.peer)) })
    }

    /// The peer of the oldest write that has not settled. Younger ones may wait behind it in the plugin.
    fn oldest_write(&self) -> Option<Instance> {
        let own = self.writes.first_key_value();
        let own = own.and_then(|(tag, room)| Some((*tag, self.jobs.get(room)?.outgoing.as_ref()?.peer)));
        let left = self.leftovers.iter();
        let left = left.filter_map(|(room, left)| Some((self.cache.first_unsettled(*room)?, left.writes?.0)));
        own.into_iter().chain(left).min().map(|(_, peer)| peer)
    }

    /// Handles writes of an ended request that do not settle, so that its pages stay in quarantine: cuts off their peer.
    pub(super) fn unsettled(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let writes = self.cache.unsettled(room);
        let Some((peer, session)) = self.leftovers.get(&room).and_then(|leftovers| leftovers.writes) else {
            return;
        };
        // There is nothing to cut off if the connection is not in use any more.
        if writes == 0 || !self.peers.is_current(peer, session) {
            return;
        }
        if self.oldest_write() != Some(peer) {
            self.peers.moved(peer, now);
        }
        let patient = self.peers.last_moved(peer).after(self.config.transfer_patience);
        if patient > now {
            return self.settling.set(room, patient);
        }
        self.stats.transfers_stalled += 1;
        actions.push(Action::Stalled { room, peer, writes, waited: self.config.transfer_patience });
        self.peer_lost(now, (peer, session), false, actions);
    }

    /// Ends a transfer that made no progress for too long. If some of its writes have not settled, cuts off their peer.
    pub(super) fn transfer_stalled(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let Some(outgoing) = self.jobs.get(&room).and_then(|job| job.outgoing.as_ref()) else { return };
        let (peer, session, writes) = (outgoing.peer, outgoing.session, outgoing.tags.len());
        if writes > 0 && self.oldest_write() != Some(peer) {
            self.peers.moved(peer, now);
            return self.transfer_moved(now, room);
        }
        let seconds = self.config.transfer_patience.as_secs();
        let message = match writes {
            0 => format!(
                "all KV was written to worker {peer}, which has not confirmed for {seconds} s that it arrived"
            ),
            _ => format!("no write of KV to worker {peer} has ended for {seconds} s"),
        };
        self.stats.transfers_stalled += 1;
        actions.push(Action::Stalled { room, peer, writes, waited: self.config.transfer_patience });
        self.fail(now, room, Failure::new(FailureCode::Transfer, message), actions);
        if writes > 0 {
            self.peer_lost(now, (peer, session), false, actions);
        }
    }

    fn take_reserve(
        &mut self,
        now: Time,
        from: Instance,
        question: u64,
        room: Room,
        attempt: u32,
        reserve: Reserve,
    ) -> Result<(), (String, bool)> {
        if self.config.role.counterpart() != Counterpart::Reserve {
            return Err(("this worker is not a prefill worker".into(), false));
        }
        if self.cache.is_quarantined(room) {
            return Err(("the request has ended on the prefill worker".into(), true));
        }
        let Some(job) = self.jobs.get(&room) else {
            let orphan = Orphan { peer: from, question, attempt, reserve, since: now };
            let kept = self.orphans.keep(room, orphan, self.config.max_queued as usize);
            return kept.map_err(|most| (format!("{most} rooms wait for their requests already"), true));
        };
        if let Some(refusal) = self.refusal(job, attempt, &reserve) {
            return Err((refusal, false));
        }
        let session = self.peers.session(from);
        let Some(job) = self.jobs.get_mut(&room) else { return Ok(()) };
        match &mut job.outgoing {
            Some(outgoing) if outgoing.peer != from => {
                Err((format!("room {room} is being sent to worker {}", outgoing.peer), false))
            }
            Some(outgoing) => {
                outgoing.ask_again(session, attempt, reserve);
                Ok(())
            }
            None => {
                let page_tokens = self.config.page_tokens;
                job.outgoing = Some(Outgoing::new((from, session), attempt, reserve, page_tokens));
                Ok(())
            }
        }
    }

    pub(super) fn written(&mut self, now: Time, tag: Tag, error: Option<String>, actions: &mut Vec<Action>) {
        let owner = self.writes.remove(&tag).and_then(|room| {
            let outgoing = self.jobs.get_mut(&room)?.outgoing.as_mut()?;
            outgoing.tags.remove(&tag).then_some((room, outgoing.peer))
        });
        let left = || Some(self.leftovers.get(&self.cache.room_of_write(tag)?)?.writes?.0);
        if let Some(peer) = owner.map(|(_, peer)| peer).or_else(left) {
            self.peers.moved(peer, now);
        }
        let owner = owner.map(|(room, _)| room);
        match (owner, error) {
            (Some(room), Some(error)) => {
                let message = format!("KV pages could not be written to the decode worker: {error}");
                self.fail(now, room, Failure::new(FailureCode::Transfer, message), actions);
            }
            (Some(room), None) => {
                self.push_pages(room, actions);
                self.transfer_moved(now, room);
            }
            (None, _) => {
                let cleared = self.cache.write_settled(tag);
                self.finish_clearing(cleared, actions);
            }
        }
    }

    #[allow(clippy::too_many_arguments)] // one argument per field of the message
    pub(super) fn commit_asked(
        &mut self,
        now: Time,
        from: Instance,
        question: u64,
        room: Room,
        attempt: u32,
        actions: &mut Vec<Action>,
    ) {
        let answer = self.outbox.answer(question, room, attempt, Body::Committed);
        self.send(from, answer, actions);
        let committed = self.jobs.get(&room).and_then(|job| job.outgoing.as_ref());
        if committed.is_some_and(|outgoing| outgoing.peer == from && outgoing.attempt == attempt) {
            self.finish(now, room, FinishReason::Prefill, actions);
        }
    }

    /// Ends a room that decode gives up. The answer comes when nothing of the room is in flight, and from then on
    /// nothing will be.
    #[allow(clippy::too_many_arguments)] // one argument per field of the message
    pub(super) fn abort_asked(
        &mut self,
        now: Time,
        from: Instance,
        question: u64,
        room: Room,
        attempt: u32,
        actions: &mut Vec<Action>,
    ) {
        self.peers.remember_abort(from, question, room);
        self.orphans.forget(room, from);
        let answer = (from, question, attempt);
        if let Some(leftovers) = self.leftovers.get_mut(&room) {
            if !leftovers.answer.contains(&answer) {
                leftovers.answer.push(answer);
            }
            return;
        }
        let ours = self
            .jobs
            .get(&room)
            .is_some_and(|job| job.outgoing.as_ref().is_none_or(|outgoing| outgoing.peer == from));
        match ours.then(|| self.jobs.remove(&room)).flatten() {
            Some(job) => {
                self.outbox.forget_room(room);
                self.stats.failed += 1;
                let failure = Failure::new(FailureCode::PeerFailed, "the decode worker gave the request up");
                actions.push(Action::Fail { room, failure });
                self.retire(now, room, job, Ending::Early(vec![answer]), actions);
            }
            None => self.answer_aborts(room, vec![answer], actions),
        }
    }

    pub(super) fn answer_aborts(
        &mut self,
        room: Room,
        aborts: Vec<(Instance, u64, u32)>,
        actions: &mut Vec<Action>,
    ) {
        for (peer, question, attempt) in aborts {
            let answer = self.outbox.answer(question, room, attempt, Body::Drained);
            self.send(peer, answer, actions);
        }
    }

    pub(super) fn expire_orphans(&mut self, now: Time, actions: &mut Vec<Action>) {
        let timeout = self.config.bootstrap_timeout;
        for (room, orphan) in self.orphans.take_older(|since| since.after(timeout) <= now) {
            let message = "the prefill worker never got this request from the router".to_owned();
            let body = Body::PrefillFailed { message, retryable: true };
            let message = self.outbox.request(now, orphan.peer, room, orphan.attempt, body);
            self.send(orphan.peer, message, actions);
        }
    }

    /// After how many layers the executor must report progress in a batch, as the sequence with the smallest groups
    /// needs it. 0 for no reports.
    pub(super) fn finest_group(&self, sequences: &[Sequence]) -> u32 {
        if !self.cache.pages_hold_all_layers() {
            return 0;
        }
        let groups = sequences.iter().filter_map(|sequence| {
            let job = self.jobs.get(&sequence.room)?;
            let (pages, _) = job.completing(self.config.page_tokens as usize)?;
            self.config.layer_groups.group(pages.len())
        });
        groups.min().unwrap_or(0)
    }

    /// Sends the finished layers of pages that the batch completes. The last layers are sent when the batch is done.
    pub(super) fn layers_done(&mut self, batch: u64, layers: u32, actions: &mut Vec<Action>) {
        let rule = self.config.layer_groups;
        if batch != self.last_batch || layers >= rule.layers() {
            return;
        }
        let page_tokens = self.config.page_tokens as usize;
        let ready = |room: &Room| {
            let job = self.jobs.get(room)?;
            let (pages, begun) = job.completing(page_tokens)?;
            let group = rule.group(pages.len())?;
            (layers >= begun + group).then_some((*room, pages, begun))
        };
        let mut ready: Vec<(Room, Range<usize>, u32)> = self.running.iter().filter_map(ready).collect();
        ready.sort_unstable_by_key(|(room, ..)| *room);
        for (room, pages, begun) in ready {
            self.send_part(room, pages, begun..layers, actions);
            self.stats.layer_parts_sent += 1;
        }
    }

    /// Sends computed pages that were not sent: whole pages while the prompt is computed, and at its end everything that is left,
    /// with the aux row. Does nothing for a request without a transfer.
    pub(super) fn push_pages(&mut self, room: Room, actions: &mut Vec<Action>) {
        let page_tokens = self.config.page_tokens as usize;
        let sent = self.jobs.get_mut(&room).filter(|job| job.outgoing.is_some());
        let Some(job) = sent else { return };
        // With sliding layers, a request whose restore fails gives its pages up, so no write may be reading them.
        if !self.cache.continues_anywhere() && matches!(*job.stage(), Stage::Loading(_)) {
            return;
        }
        let last = *job.stage() == Stage::Inflight;
        // The pages of the recompute range are there already.
        let whole = job.whole_pages(job.kv.computed().max(job.kv.recompute().end), page_tokens);
        let computing = job.stage().in_batch().is_some();
        let next = job.outgoing.as_mut().and_then(|outgoing| outgoing.next(room, whole, computing, last));
        if let Some((pages, first)) = next {
            self.send_part(room, pages, first..self.config.layer_groups.layers(), actions);
        }
    }

    /// Sends some layers of some pages as the room's next part.
    fn send_part(&mut self, room: Room, pages: Range<usize>, layers: Range<u32>, actions: &mut Vec<Action>) {
        let completes = layers.end == self.config.layer_groups.layers();
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let last = completes && *job.stage() == Stage::Inflight;
        let Some(slot) = job.aux else { return };
        let first = if last { job.answer.first.clone() } else { None };
        let Some(outgoing) = &mut job.outgoing else { return };
        self.last_tag += 1;
        let tag = Tag(self.last_tag);
        let part = outgoing.part(room, tag, pages.clone(), layers.clone(), completes, last);
        self.writes.insert(tag, room);
        let aux = first.map(|first| {
            let row = AuxRow {
                room,
                attempt: outgoing.attempt,
                prompt_tokens: outgoing.reserve.prompt_tokens,
                cached_tokens: job.origin.cached,
                pages: u32::try_from(outgoing.len()).unwrap_or(u32::MAX),
                first,
            };
            (row, slot, outgoing.reserve.aux_slot)
        });
        let (to, session) = (outgoing.peer, outgoing.session);
        // Decode gets the window once, and behind everything else.
        let window = part.target.len() - pages.len();
        let window = self.cache.window_tail(&job.tokens(), &job.kv, window);
        let source = [job.kv.pages(pages), &window].concat();
        let TransferPart { notice, target, first_page } = part;
        self.stats.pages_sent += u64::from(notice.pages);
        actions.push(Action::Write(PageWrite {
            tag,
            to,
            session,
            notice,
            source,
            target,
            first_page,
            layers,
            aux,
        }));
    }
}
