//! Admission: requests enter the queue, and get their pages.

use super::batching::MOST_SCORED;
use super::job::Job;
use super::peers::PeerState;
use super::roles::Counterpart;
use super::stage::Stage;
use super::{Action, Scheduler};
use crate::cache::{Need, Pages, Prefix};
use crate::hand_over::{Incoming, Outgoing};
use crate::ids::{Room, Time};
use crate::message::Body;
use crate::radix::NamespaceKey;
use crate::request::{Failure, FailureCode, Request};

/// How often a request that lacks pages may be skipped for later ones.
const MOST_SKIPS: u32 = 32;
/// The most requests that a tick finds to lack pages before it stops looking: each costs a walk through the cache.
const LACKING: usize = 64;

impl Scheduler {
    pub(super) fn submit(&mut self, now: Time, request: Request, actions: &mut Vec<Action>) {
        let room = request.room;
        let acceptable = self.acceptable(&request);
        if let Err(failure) = acceptable.and_then(|()| self.take_place(now, &request, actions)) {
            self.stats.failed += 1;
            actions.push(Action::Fail { room, failure });
            return;
        }
        if let Some(peer) = request.prefill.clone()
            && self.peers.wants_connection(peer.instance)
        {
            self.peers.connecting(peer.instance);
            actions.push(Action::Connect { peer, floor: self.outbox.next_floor() });
        }
        self.arrivals += 1;
        let (client, priority) = (request.client, request.priority);
        let mut job = Job::new(request, now, 0, self.arrivals);
        if let Some(orphan) = self.orphans.take(room) {
            if let Some(refusal) = self.refusal(&job, orphan.attempt, &orphan.reserve) {
                let refused = Body::Refused { message: refusal.clone(), retryable: false };
                let answer = self.outbox.answer(orphan.question, room, orphan.attempt, refused);
                self.send(orphan.peer, answer, actions);
                let failure = Failure::new(FailureCode::Invalid, refusal);
                self.stats.failed += 1;
                actions.push(Action::Fail { room, failure });
                return;
            }
            job.outgoing = Some(Outgoing::new(
                (orphan.peer, self.peers.session(orphan.peer)),
                orphan.attempt,
                orphan.reserve,
                self.config.page_tokens,
            ));
        }
        job.turn = self.turns.enter(client, priority, job.request.answered > 0);
        self.deadlines.set(room, self.job_deadline(&job));
        self.jobs.insert(room, job);
        self.enqueue(room);
        self.fetch(now, room);
    }

    fn acceptable(&self, request: &Request) -> Result<(), Failure> {
        let fail = |code, message: String| Err(Failure::new(code, message));
        let config = &self.config;
        if self.draining {
            return fail(FailureCode::ShuttingDown, "the worker is shutting down".into());
        }
        if self.jobs.contains_key(&request.room) || self.cache.is_quarantined(request.room) {
            return fail(FailureCode::Invalid, format!("room {} is in use", request.room));
        }
        if request.prompt.is_empty() {
            return fail(FailureCode::Invalid, "the prompt is empty: send at least one token".into());
        }
        if let Some(token) = request.prompt.iter().find(|token| **token >= config.vocabulary) {
            let vocabulary = config.vocabulary;
            return fail(
                FailureCode::Invalid,
                format!(
                    "the prompt holds token {token}, but the model's token ids end at {}",
                    vocabulary - 1
                ),
            );
        }
        if !request.namespace.is_bounded() {
            let most = NamespaceKey::MAX_PART;
            return fail(
                FailureCode::Invalid,
                format!("extra_key or cache_salt is longer than {most} bytes"),
            );
        }
        if !request.sampling.shaping.as_ref().is_none_or(|shaping| shaping.is_sound()) {
            let message = "a penalty or a bias of the request is no number that can be computed with";
            return fail(FailureCode::Invalid, message.into());
        }
        if request.max_new_tokens == 0 {
            return fail(FailureCode::Invalid, "max_new_tokens is 0: ask for at least one token".into());
        }
        if config.role.is_sent_kv() && request.scores.is_some() {
            let message =
                "a decode worker computes no prompts: ask a prefill worker for their log probabilities";
            return fail(FailureCode::Invalid, message.into());
        }
        if config.role.is_sent_kv() && request.prefill.is_none() {
            return fail(FailureCode::Invalid, "a decode worker needs to be told the prefill worker".into());
        }
        let (prompt, answer) = (request.prompt.len(), config.role.answer_tokens(request));
        if prompt + answer > config.max_tokens as usize {
            return fail(
                FailureCode::TooLong,
                format!(
                    "{prompt} prompt tokens + {answer} to generate exceed the {} of this worker",
                    config.max_tokens
                ),
            );
        }
        if let Some((pages, part, limit)) = self.cache.too_long(self.most_positions(request)) {
            return fail(
                FailureCode::TooLong,
                format!(
                    "{prompt} prompt tokens + {answer} to generate need {pages} pages of KV cache{part}, the pool has {limit}"
                ),
            );
        }
        Ok(())
    }

    /// Makes sure that the queue has a place. If it is full, the request that would be admitted last fails, if it would
    /// be admitted later than this one.
    fn take_place(&mut self, now: Time, request: &Request, actions: &mut Vec<Action>) -> Result<(), Failure> {
        let most = self.config.max_queued;
        if self.queue.len() < most as usize {
            return Ok(());
        }
        let full = Failure::new(FailureCode::Busy, format!("the queue is full ({most} requests)"));
        let turn = self.turns.next(request.client, request.priority, request.answered > 0);
        let Some(last) = self.last_after(now, request.priority, turn) else { return Err(full) };
        self.fail(now, last, full, actions);
        Ok(())
    }

    /// Admits in order of [urgency](super::urgency) and of arrival, preempted requests first. A request whose other leg is not
    /// there yet is passed over, and so is a request that waits for the pages of another ([`sharing`](super::sharing)). A request
    /// that lacks pages may be skipped for later ones that fit, but only [`MOST_SKIPS`] times: then the queue waits behind it, so
    /// that it gets the next free pages.
    ///
    /// A request fits when there are pages for its known tokens, and headroom for it and for all running requests. If
    /// nothing runs, the first request needs no headroom.
    pub(super) fn admit(&mut self, now: Time, actions: &mut Vec<Action>) {
        self.order_queue(now);
        let mut at = 0;
        let mut lacking: Vec<Room> = Vec::new();
        let mut admitted: Vec<(Room, Need, Option<Prefix>)> = Vec::new();
        let (most_active, mut resumed) = (self.most_active(), self.being_resumed());
        let mut promised = Pages::default();
        let mut headroom = self.promised_headroom();
        let mut scoring = self.tokens_to_score();
        while let Some(room) = self.queue.get(at).copied() {
            let Some(job) = self.jobs.get(&room) else { unreachable!("{room:?} is queued without a job") };
            let ready = match self.config.role.counterpart_of(&job.request) {
                // A preempted request goes straight into the steps.
                _ if job.stage().is_preempted() => self.may_join(resumed),
                Counterpart::None => true,
                Counterpart::Reserve => job.outgoing.is_some(),
                Counterpart::Connection => self.prefill_is_ready(job),
            };
            let worn = job.stage().waiting().is_some_and(|waiting| waiting.skipped >= MOST_SKIPS);
            let active = self.jobs.len() - self.queue.len();
            if admitted.len() >= self.aux_free.len() || active >= most_active {
                break;
            }
            // More of them would hold pages and go no faster: a step scores few tokens.
            let scores_wait = job.request.scores.is_some() && scoring >= MOST_SCORED;
            if !ready || scores_wait || self.follows(now, job) || self.cache.waits_for_storage(room) {
                at += 1;
                continue;
            }
            let prefix = self.cache.probe(now, &job.tokens(), promised);
            if prefix.as_ref().is_some_and(|prefix| self.follow(now, room, prefix)) {
                self.cache.forgo(prefix);
                at += 1;
                continue;
            }
            let Some(job) = self.jobs.get(&room) else { unreachable!("{room:?} is queued without a job") };
            let need = self.need(job, prefix.as_ref());
            let first = admitted.is_empty() && self.jobs.len() == self.queue.len();
            let kept = if first { Pages::default() } else { headroom + need.headroom };
            if !self.cache.can_have(promised + need.now + kept) {
                self.cache.forgo(prefix);
                if worn {
                    break;
                }
                self.cache.yields(room);
                lacking.push(room);
                at += 1;
                if lacking.len() >= LACKING {
                    break;
                }
                continue;
            }
            // Cached pages of a preempted request may be in an offload tier by now.
            if self.fetch_preempted(now, room) {
                self.cache.forgo(prefix);
                continue;
            }
            resumed += usize::from(self.jobs.get(&room).is_some_and(|job| job.stage().is_preempted()));
            promised += need.now;
            headroom += need.headroom;
            if let Some(job) = self.jobs.get(&room).filter(|job| job.request.scores.is_some()) {
                scoring += job.known();
            }
            self.queue.remove(at);
            self.lead(room, prefix.as_ref());
            admitted.push((room, need, prefix));
            let mut worn = false;
            for room in &lacking {
                if let Some(waiting) = self.jobs.get_mut(room).and_then(|job| job.waiting_mut()) {
                    waiting.skipped += 1;
                    worn |= waiting.skipped >= MOST_SKIPS;
                }
            }
            if worn {
                break;
            }
        }
        // Makes room once for all admitted requests.
        self.cache.make_free(promised);
        let mut went_on = Vec::new();
        for (room, need, prefix) in admitted {
            let computes = !self.config.role.is_sent_kv();
            went_on.extend(prefix.as_ref().filter(|_| computes).map(|prefix| (room, prefix.page())));
            self.admit_one(now, room, need, prefix, actions);
        }
        // Only now, because saves may evict pages from host memory that the requests above were to get from there.
        for (room, page) in went_on {
            if let Some(job) = self.jobs.get_mut(&room) {
                let (tokens, kv) = job.holding();
                self.cache.save_windows(&tokens, kv, [page]);
            }
        }
    }

    /// Tokens of prompts that are admitted and not scored yet.
    fn tokens_to_score(&self) -> usize {
        let jobs = self.running.iter().filter_map(|room| self.jobs.get(room));
        jobs.filter(|job| job.request.scores.is_some()).map(Job::uncomputed).sum()
    }

    pub(super) fn prefill_is_ready(&self, job: &Job) -> bool {
        let Some(peer) = &job.request.prefill else { return false };
        self.peers.state(peer.instance) == Some(&PeerState::Ready)
    }

    fn admit_one(
        &mut self,
        now: Time,
        room: Room,
        need: Need,
        found: Option<Prefix>,
        actions: &mut Vec<Action>,
    ) {
        let page_tokens = self.config.page_tokens as usize;
        let (Some(job), Some(aux)) = (self.jobs.get_mut(&room), self.aux_free.pop()) else {
            unreachable!("{room:?} is queued without a job, or admission did not count aux rows")
        };
        job.aux = Some(aux);
        let (tokens, kv) = job.holding();
        let resumes = tokens.resumes;
        let admitted = self.cache.admit(now, &tokens, kv, need, found);
        let cached = admitted.from * page_tokens;
        let covered = admitted.covered();
        if resumes {
            // This job resumes because its promised pages failed before it had any KV. Now it has `cached` tokens.
            if !job.was_preempted() {
                job.has_cached(cached);
            }
            self.stats.restored_tokens += cached as u64;
        } else {
            job.begin_with(cached);
            self.stats.cached_tokens += cached as u64;
            self.stats.offload_tokens += ((covered - admitted.prefix) * page_tokens) as u64;
        }
        let peer = job.request.prefill.as_ref().map(|peer| peer.instance);
        match peer.filter(|_| self.config.role.is_sent_kv() && !resumes) {
            Some(peer) => {
                job.has_cached(covered * page_tokens);
                let pages = covered..job.request.prompt.len().div_ceil(page_tokens);
                let (from, window) = ((peer, self.peers.session(peer)), job.kv.window_len());
                self.reserve(now, room, Incoming::new(from, pages, window, now), actions);
            }
            _ if admitted.restored.is_some() => job.enter(Stage::Loading(admitted.prefix..covered)),
            _ => {
                job.enter(Stage::Running(None));
                self.running.push(room);
                // Cached pages can be sent while the rest is computed.
                self.push_pages(room, actions);
            }
        }
    }
}
