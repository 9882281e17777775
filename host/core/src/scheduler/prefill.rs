//! The prefill side of a room: where decode wants its pages, sending them, letting go.

use super::job::{Job, Outgoing};
use super::{Action, Role, Scheduler};
use crate::ids::{Instance, Room, Time};
use crate::message::{Body, Reserve};
use crate::request::{Failure, FailureCode, FinishReason};
use crate::transfer::Tag;

/// A reserve that came before its request.
#[derive(Debug)]
pub(super) struct Orphan {
    pub peer: Instance,
    pub question: u64,
    pub attempt: u32,
    pub reserve: Reserve,
    pub since: Time,
}

impl Scheduler {
    /// Why a reserve does not belong to a job, if it does not.
    ///
    /// The first attempt brings everything behind what decode holds or restores; a later one may ask for a span of it.
    pub(super) fn misfit(&self, job: &Job, attempt: u32, reserve: &Reserve) -> Option<String> {
        let prompt = job.request.prompt.len();
        let page_tokens = self.config.page_tokens as usize;
        let prefix = reserve.decode_prefix_len as usize;
        if reserve.prompt_tokens as usize != prompt {
            let said = reserve.prompt_tokens;
            return Some(format!("decode expects a prompt of {said} tokens, prefill has one of {prompt}"));
        }
        if reserve.namespace != job.request.namespace.fingerprint() {
            return Some("decode and prefill were given different cache namespaces for the request".into());
        }
        if prefix > prompt || !prefix.is_multiple_of(page_tokens) {
            return Some(format!(
                "decode claims to hold {prefix} tokens of {prompt}: it must be whole pages of {page_tokens}"
            ));
        }
        let expected = prompt.div_ceil(page_tokens) - prefix / page_tokens;
        let fits = reserve.pages.len() == expected || (attempt > 1 && reserve.pages.len() < expected);
        if !fits {
            let offered = reserve.pages.len();
            return Some(format!("decode offers {offered} pages where {expected} are to be sent"));
        }
        let (offered, [least, most]) = (reserve.window.len(), self.tails(&job.request));
        let fits = offered == least || offered == most || (attempt > 1 && offered == 0);
        let takes = if least == most { least.to_string() } else { format!("{least} or {most}") };
        (!fits).then(|| format!("decode offers {offered} pages for the window, which takes {takes}"))
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
        if self.config.role != Role::Prefill {
            return Err(("this worker is not a prefill worker".into(), false));
        }
        if self.quarantine.contains(room) {
            return Err(("the request has ended on the prefill worker".into(), true));
        }
        let Some(job) = self.jobs.get(&room) else {
            if !self.orphans.contains_key(&room) && self.orphans.len() >= self.config.max_queued as usize {
                return Err((format!("{} rooms wait for their requests already", self.orphans.len()), true));
            }
            // What was asked for last counts, whatever comes last.
            if self.orphans.get(&room).is_some_and(|orphan| orphan.attempt > attempt) {
                return Ok(());
            }
            self.orphans.insert(room, Orphan { peer: from, question, attempt, reserve, since: now });
            return Ok(());
        };
        if let Some(refusal) = self.misfit(job, attempt, &reserve) {
            return Err((refusal, false));
        }
        let page_tokens = self.config.page_tokens;
        let whom = (from, self.peers.session(from));
        let Some(job) = self.jobs.get_mut(&room) else { return Ok(()) };
        match &mut job.outgoing {
            Some(outgoing) if outgoing.peer != from => {
                Err((format!("room {room} is being sent to worker {}", outgoing.peer), false))
            }
            // A repeat.
            Some(outgoing) if outgoing.attempt >= attempt => Ok(()),
            Some(outgoing) => {
                let tags = std::mem::take(&mut outgoing.tags);
                *outgoing = Outgoing { tags, ..Outgoing::new(whom, attempt, reserve, page_tokens) };
                Ok(())
            }
            None => {
                job.outgoing = Some(Outgoing::new(whom, attempt, reserve, page_tokens));
                Ok(())
            }
        }
    }

    pub(super) fn written(&mut self, now: Time, tag: Tag, error: Option<String>, actions: &mut Vec<Action>) {
        let owner = self.jobs.iter_mut().find_map(|(room, job)| {
            let outgoing = job.outgoing.as_mut()?;
            outgoing.tags.remove(&tag).then_some(*room)
        });
        match (owner, error) {
            (Some(room), Some(error)) => {
                let message = format!("KV pages could not be written to the decode worker: {error}");
                self.fail(now, room, Failure::new(FailureCode::Transfer, message), actions);
            }
            (Some(room), None) => self.push_pages(room, actions),
            (None, _) => {
                let cleared = self.quarantine.update(&mut self.pool, |_, touchers| {
                    touchers.tags.remove(&tag);
                });
                self.finish_clearing(cleared, actions);
            }
        }
    }

    pub(super) fn commit_asked(
        &mut self,
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
            self.finish(room, FinishReason::Prefill, actions);
        }
    }

    /// Decode gives a room up: answered when nothing of it is in flight, and from then on nothing will be.
    pub(super) fn abort_asked(
        &mut self,
        from: Instance,
        question: u64,
        room: Room,
        attempt: u32,
        actions: &mut Vec<Action>,
    ) {
        self.peers.remember_abort(from, question, room);
        if self.orphans.get(&room).is_some_and(|orphan| orphan.peer == from) {
            self.orphans.remove(&room);
        }
        let answer = (from, question, attempt);
        if let Some(entry) = self.quarantine.get_mut(room) {
            if !entry.answer.contains(&answer) {
                entry.answer.push(answer);
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
                self.retire(room, job, vec![answer], actions);
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
        let expired: Vec<(Room, Orphan)> =
            self.orphans.extract_if(.., |_, orphan| orphan.since.after(timeout) <= now).collect();
        for (room, orphan) in expired {
            let message = "the prefill worker never got this request from the router".to_owned();
            let body = Body::PrefillFailed { message, retryable: true };
            let message = self.outbox.request(now, orphan.peer, room, orphan.attempt, body);
            self.send(orphan.peer, message, actions);
        }
    }
}
