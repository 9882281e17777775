//! The way in.

use super::growth::{Need, Pages};
use super::job::{Incoming, Job, Outgoing};
use super::peers::PeerState;
use super::prefix::Prefix;
use super::stage::Stage;
use super::{Action, Role, RoomOpening, Scheduler};
use crate::ids::{Room, Time};
use crate::message::{Body, Reserve};
use crate::radix::NamespaceKey;
use crate::request::{Failure, FailureCode, Request};

/// Later requests that may take pages before one that lacks them.
const OVERTAKEN: u32 = 32;
/// Requests that lack pages which one tick looks at: each costs a walk through the cache.
const LACKING: usize = 64;

impl Scheduler {
    pub(super) fn submit(&mut self, now: Time, request: Request, actions: &mut Vec<Action>) {
        let room = request.room;
        if let Err(failure) = self.acceptable(&request) {
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
        let mut job = Job::new(request, now, self.arrivals);
        if let Some(orphan) = self.orphans.remove(&room) {
            if let Some(refusal) = self.misfit(&job, orphan.attempt, &orphan.reserve) {
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
        self.deadlines.set(room, self.job_deadline(&job));
        self.jobs.insert(room, job);
        self.queue.push_back(room);
        self.begin_fetch(now, room);
    }

    fn acceptable(&self, request: &Request) -> Result<(), Failure> {
        let fail = |code, message: String| Err(Failure::new(code, message));
        let config = &self.config;
        if self.draining {
            return fail(FailureCode::ShuttingDown, "the worker is shutting down".into());
        }
        if self.jobs.contains_key(&request.room) || self.quarantine.contains(request.room) {
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
        if request.max_new_tokens == 0 {
            return fail(FailureCode::Invalid, "max_new_tokens is 0: ask for at least one token".into());
        }
        if config.role == Role::Decode && request.prefill.is_none() {
            return fail(FailureCode::Invalid, "a decode worker needs to be told the prefill worker".into());
        }
        let (prompt, answer) = (request.prompt.len(), self.answer_tokens(request));
        if prompt + answer > config.max_tokens as usize {
            return fail(
                FailureCode::TooLong,
                format!(
                    "{prompt} prompt tokens + {answer} to generate exceed the {} of this worker",
                    config.max_tokens
                ),
            );
        }
        let most = self.pages_for(self.most_positions(request));
        let window = self.least_window(most);
        let limits = self.pool.limits();
        for (pages, part, limit) in [
            (most, " for the layers without a window", limits.full),
            (window, " for the layers with one", limits.window),
            (most + window, "", limits.total),
        ] {
            if pages > limit as usize {
                let part = if self.config.window.is_some() { part } else { "" };
                return fail(
                    FailureCode::TooLong,
                    format!(
                        "{prompt} prompt tokens + {answer} to generate need {pages} pages of KV cache{part}, the pool has \
                         {limit}"
                    ),
                );
            }
        }
        if self.queue.len() >= config.max_queued as usize {
            return fail(FailureCode::Busy, format!("the queue is full ({} requests)", config.max_queued));
        }
        Ok(())
    }

    /// Admits in order of arrival, retracted requests first. A request whose other leg is not there yet is passed over,
    /// and so is one that waits for the pages of another ([`sharing`](super::sharing)).
    /// One that lacks pages may be overtaken by later ones that fit, but only [`OVERTAKEN`] times: then the line waits
    /// behind it, so that it gets the next pages that come free.
    ///
    /// A request fits when there are pages for what is known of it, and headroom for it and for all that run. The
    /// first one needs no headroom: nobody is there to take it.
    pub(super) fn admit(&mut self, now: Time, actions: &mut Vec<Action>) {
        let mut at = 0;
        let mut lacking: Vec<Room> = Vec::new();
        let mut admitted: Vec<(Room, Need, Option<Prefix>)> = Vec::new();
        let (most_active, mut resumed) = (self.most_active(), self.being_resumed());
        let mut promised = Pages::default();
        let mut headroom = self.promised_headroom();
        while let Some(room) = self.queue.get(at).copied() {
            let Some(job) = self.jobs.get(&room) else { unreachable!("{room:?} is queued without a job") };
            let ready = match self.config.role {
                // It goes straight into the steps.
                _ if *job.stage == Stage::Retracted => self.may_join(resumed),
                Role::Aggregated => true,
                Role::Prefill => job.outgoing.is_some(),
                Role::Decode => self.prefill_is_ready(job),
            };
            let worn = job.overtaken >= OVERTAKEN;
            let active = self.jobs.len() - self.queue.len();
            if admitted.len() >= self.aux_free.len() || active >= most_active {
                break;
            }
            if !ready || self.follows(now, job) || self.waits_for_storage(room) {
                at += 1;
                continue;
            }
            let prefix = self.find_prefix(now, room, promised);
            if prefix.as_ref().is_some_and(|prefix| self.follow(now, room, &prefix.lock)) {
                self.unlock(prefix.map(|prefix| prefix.lock));
                at += 1;
                continue;
            }
            let Some(job) = self.jobs.get(&room) else { unreachable!("{room:?} is queued without a job") };
            let need = self.need(job, prefix.as_ref());
            let first = admitted.is_empty() && self.jobs.len() == self.queue.len();
            let kept = if first { Pages::default() } else { headroom + need.headroom };
            if !self.can_have(promised + need.now + kept) {
                self.unlock(prefix.map(|prefix| prefix.lock));
                if worn {
                    break;
                }
                self.step_aside(room);
                lacking.push(room);
                at += 1;
                if lacking.len() >= LACKING {
                    break;
                }
                continue;
            }
            // What was cached of it may be below by now.
            if self.fetch_again(now, room) {
                self.unlock(prefix.map(|prefix| prefix.lock));
                continue;
            }
            resumed += usize::from(self.jobs.get(&room).is_some_and(|job| *job.stage == Stage::Retracted));
            promised += need.now;
            headroom += need.headroom;
            self.queue.remove(at);
            self.lead(room, prefix.as_ref().map(|prefix| &prefix.lock));
            admitted.push((room, need, prefix));
            for waits in &lacking {
                if let Some(job) = self.jobs.get_mut(waits) {
                    job.overtaken += 1;
                }
            }
            if lacking.iter().any(|waits| self.jobs.get(waits).is_some_and(|job| job.overtaken >= OVERTAKEN))
            {
                break;
            }
        }
        // Once for all that were admitted.
        self.make_free(promised);
        let mut went_on = Vec::new();
        for (room, need, prefix) in admitted {
            let computes = self.config.role != Role::Decode;
            went_on.extend(prefix.as_ref().filter(|_| computes).map(|prefix| (room, prefix.page())));
            self.admit_one(now, room, need, prefix, actions);
        }
        // Only now: until then everybody found in host memory what was seen there above.
        for (room, page) in went_on {
            self.save_windows(room, [page]);
        }
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
        let pages = (self.pool.allocate(need.now.full), self.pool.allocate_window(need.now.window));
        let ((Some(pages), Some(window)), Some(aux)) = (pages, self.aux_free.pop()) else {
            unreachable!("admission checked pages and aux rows")
        };
        let Some(job) = self.jobs.get_mut(&room) else { unreachable!("{room:?} is queued without a job") };
        let (page, from) = found.as_ref().map_or((0, 0), |found| (found.page(), found.from()));
        let (lock, end) = found.map_or((None, None), |found| (Some(found.lock), found.end));
        if let (Some(tree), Some(lock)) = (&mut self.cache, &lock) {
            tree.count_use(lock);
            tree.pages(lock, &mut job.table);
        }
        let resumed = *job.stage == Stage::Retracted;
        let prefix = job.table.len();
        let page_tokens = self.config.page_tokens as usize;
        if from < page {
            job.again = from * page_tokens..page * page_tokens;
        }
        let from = from.min(prefix);
        if resumed {
            job.go_on_with(from, page_tokens);
            self.stats.restored_tokens += job.computed as u64;
        } else {
            job.begin_with(from, page_tokens, self.config.role);
            self.stats.cached_tokens += u64::from(job.cached_tokens);
        }
        job.table.extend_from_slice(pages.ids());
        job.held = Some(pages);
        job.lock = lock;
        job.aux = Some(aux);
        self.begin_window(room, page, window);
        let Some(job) = self.jobs.get(&room) else { return };
        let peer = job.request.prefill.as_ref().map(|peer| peer.instance);
        let restored = match end {
            Some(end) => self.restore_to(now, room, prefix, &end),
            None => self.begin_restore(now, room, prefix),
        };
        let covered = restored.unwrap_or(prefix);
        if !resumed {
            self.stats.below_tokens += ((covered - prefix) * page_tokens) as u64;
        }
        let Some(job) = self.jobs.get_mut(&room) else { return };
        match (self.config.role, peer) {
            (Role::Decode, Some(peer)) if !resumed => {
                let page_tokens = self.config.page_tokens as usize;
                job.promised_tokens = u32::try_from(covered * page_tokens).unwrap_or(u32::MAX);
                job.cached_tokens = job.promised_tokens;
                let pages = covered..job.request.prompt.len().div_ceil(page_tokens);
                let (whom, window) = ((peer, self.peers.session(peer)), job.window.len());
                self.reserve(now, room, Incoming::new(whom, 1, pages, window, now), actions);
            }
            _ if restored.is_some() => job.stage.enter(Stage::Loading(prefix..covered)),
            _ => {
                job.stage.enter(Stage::Running);
                self.running.push(room);
                if self.config.role == Role::Prefill {
                    // What is cached can be on its way while the rest is computed.
                    self.push_pages(room, actions);
                }
            }
        }
    }

    /// Tells prefill where to write, for the first time or again.
    pub(super) fn reserve(&mut self, now: Time, room: Room, incoming: Incoming, actions: &mut Vec<Action>) {
        let page_tokens = self.config.page_tokens as usize;
        let Some(job) = self.jobs.get(&room) else { return };
        let Some(aux_slot) = job.aux else { return };
        let window = if incoming.window > 0 { self.window_tail(job) } else { Vec::new() };
        let (peer, attempt) = (incoming.peer, incoming.attempt);
        let prompt = job.request.prompt.len();
        let covered = prompt.div_ceil(page_tokens);
        let pages = job.table[incoming.pages.clone()].to_vec();
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
            job.stage.enter(Stage::Transfer(incoming));
        }
        let message = self.outbox.request(now, peer, room, attempt, Body::Reserve(reserve));
        self.send(peer, message, actions);
    }
}
