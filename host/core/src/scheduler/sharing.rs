//! Prompts with the same prefix that are under way at the same time: later ones wait until the first one's pages are in
//! the cache, and then need only the pages behind those.
//!
//! A request that has been admitted and whose prompt is not complete *leads*. A queued request that it would bring pages for
//! *follows* it. A leader follows no other request, so there are no chains: each wait ends when its leader's prompt is
//! complete or the leader ends for any reason. For models with a window a wait ends when the leader has passed the wanted
//! page. A request whose wait has ended may follow another leader. No request follows for longer than half of the bootstrap
//! timeout, because its other leg waits too.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::Scheduler;
use super::job::Job;
use super::stage::Follows;
use crate::cache::Prefix;
use crate::ids::{Room, Time};
use crate::request::Request;

/// A leader must bring at least one in so many of the pages that a follower lacks. Waiting for fewer would cost the
/// time of a whole prompt and save little: all chats of a server begin with the same few words.
const BRINGS_ONE_IN: usize = 4;
/// So many of a leader's first pages can be found one by one, and behind them one in [`SPARSE`]. That is enough for a
/// follower that lacks so many pages, and a prompt of a million tokens does not hold up the scheduler.
const DENSE: usize = 512;
/// See [`DENSE`].
const SPARSE: usize = 16;
/// Most leaders that are compared for one page of a follower.
const COMPARED: usize = 4;

/// The pages that the leaders will bring, by their tokens.
#[derive(Debug)]
pub(super) struct Leaders {
    seed: u64,
    /// Hash of a page's place and tokens, and the leader that brings it.
    pages: BTreeSet<(u64, Room)>,
    /// The hashes of each leader.
    hashes: BTreeMap<Room, Vec<u64>>,
}

impl Leaders {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed, pages: BTreeSet::new(), hashes: BTreeMap::new() }
    }

    fn hash(&self, place: usize, tokens: &[u32]) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, place, tokens).hash(&mut hasher);
        hasher.finish()
    }

    /// Adds a leader, which brings all whole pages of its prompt behind the first `cached`.
    fn add(&mut self, room: Room, prompt: &[u32], cached: usize, page_tokens: usize) {
        self.remove(room);
        let pages = prompt.chunks_exact(page_tokens).enumerate().skip(cached);
        let pages = pages.filter(|(place, _)| *place < cached + DENSE || place.is_multiple_of(SPARSE));
        let hashes: Vec<u64> = pages.map(|(place, tokens)| self.hash(place, tokens)).collect();
        self.pages.extend(hashes.iter().map(|hash| (*hash, room)));
        self.hashes.insert(room, hashes);
    }

    /// Removes a leader that brings no pages any more, or whose pages are all there.
    pub(super) fn remove(&mut self, room: Room) {
        for hash in self.hashes.remove(&room).unwrap_or_default() {
            self.pages.remove(&(hash, room));
        }
    }

    /// Removes all leaders, because the pages that they bring enter no cache.
    pub(super) fn clear(&mut self) {
        self.pages.clear();
        self.hashes.clear();
    }

    fn contains(&self, room: Room) -> bool {
        self.hashes.contains_key(&room)
    }

    /// Some of the leaders that seem to bring a page, by its hash.
    fn bringing(&self, place: usize, tokens: &[u32]) -> impl Iterator<Item = Room> {
        let hash = self.hash(place, tokens);
        self.pages.range((hash, Room(0))..=(hash, Room(u64::MAX))).map(|(_, room)| *room).take(COMPARED)
    }

    /// Every room that leads, for the audit.
    pub(super) fn rooms(&self) -> impl Iterator<Item = Room> {
        self.hashes.keys().copied()
    }
}

/// Whether the leader's pages are of use for the follower: equal tokens in the same namespace, and the same prefill
/// worker, which computes one after the other anyway.
fn brings(leader: &Request, follower: &Request, head: &[u32]) -> bool {
    leader.prompt.starts_with(head)
        && leader.namespace == follower.namespace
        && leader.prefill == follower.prefill
}

impl Scheduler {
    /// Whether the leader that a request follows has yet to bring the page that the request waits for. Does not look at the
    /// prompt.
    pub(super) fn follows(&self, now: Time, job: &Job) -> bool {
        now < self.follows_until(job)
            && job.stage().waiting().and_then(|waiting| waiting.follows).is_some_and(|follows| {
                self.leaders.contains(follows.leader) && self.is_ahead(follows.leader, follows.page)
            })
    }

    /// Whether a leader has yet to bring a page of its prompt. With a window a leader gives pages to the cache chunk by chunk,
    /// and the window at the end of a page may be gone again before the prompt is complete.
    fn is_ahead(&self, leader: Room, page: usize) -> bool {
        let end = (page + 1) * self.config.page_tokens as usize;
        !self.cache.keeps_each_chunk()
            || self.jobs.get(&leader).is_some_and(|leader| leader.kv.computed() < end)
    }

    /// When a request stops following any leader.
    fn follows_until(&self, job: &Job) -> Time {
        job.submitted.after(self.config.bootstrap_timeout / 2)
    }

    /// Whether a request with this cached prefix must wait for another request. If so, takes note of the leader.
    pub(super) fn follow(&mut self, now: Time, room: Room, prefix: &Prefix) -> bool {
        let Some(job) = self.jobs.get(&room).filter(|job| job.stage().is_queued()) else { return false };
        let leader = if now < self.follows_until(job) { self.leader_of(now, job, prefix) } else { None };
        if leader.is_some() {
            self.patience.set(room, self.follows_until(job));
            self.cache.yields(room);
        }
        let Some(job) = self.jobs.get_mut(&room) else { return false };
        let Some(waiting) = job.waiting_mut() else { return false };
        let cached = waiting.follows.map_or(prefix.complete(), |follows| follows.cached);
        if let Some((leader, page)) = leader {
            waiting.follows = Some(Follows { leader, page, cached });
        }
        leader.is_some()
    }

    /// The leader to wait for, and the page that it must have brought when the wait ends.
    fn leader_of(&self, now: Time, job: &Job, prefix: &Prefix) -> Option<(Room, usize)> {
        let request = &job.request;
        let page = self.config.page_tokens as usize;
        let whole = self.cache.usable_pages(&job.tokens());
        let (cached, lacking) = (prefix.cached(), whole.saturating_sub(prefix.cached()));
        // A leader that brings this page brings those before it.
        let last = (lacking > 0).then(|| cached + lacking.div_ceil(BRINGS_ONE_IN) - 1);
        let sparse = last.and_then(|last| {
            Some(last.next_multiple_of(SPARSE)).filter(|place| *place > last && *place < whole)
        });
        // A leader that computes the window at the end of the cached prefix brings the last page of that prefix, too.
        let window = (prefix.complete() < cached).then(|| cached - 1);
        // A leader that has passed the first of these pages may still bring a window at the end.
        let end = last.filter(|_| self.cache.keeps_each_chunk()).map(|_| whole - 1);
        [last, sparse, window, end].into_iter().flatten().find_map(|last| {
            let head = &request.prompt[..(last + 1) * page];
            let mut leaders = self.leaders.bringing(last, &head[last * page..]);
            // A request waits for no leader that is less urgent.
            let brings = |leader: &Job| {
                let most_urgent = leader.request.priority.min(request.priority);
                leader.urgency(now, most_urgent) <= job.urgency(now, most_urgent)
                    && brings(&leader.request, request, head)
            };
            let leader =
                leaders.find(|room| self.is_ahead(*room, last) && self.jobs.get(room).is_some_and(brings));
            leader.map(|leader| (leader, last))
        })
    }

    /// Makes an admitted request a leader: from now on others may follow it.
    pub(super) fn lead(&mut self, room: Room, prefix: Option<&Prefix>) {
        self.patience.remove(room);
        if !self.config.share_transfers {
            return;
        }
        let (Some(job), Some(prefix)) = (self.jobs.get(&room), prefix) else { return };
        // What is scored comes so slowly that others are faster without it.
        if job.stage().is_preempted() || job.request.scores.is_some() {
            return;
        }
        if let Some(follows) = job.stage().waiting().and_then(|waiting| waiting.follows)
            && prefix.complete() > follows.cached
        {
            self.stats.shared_transfers += 1;
            self.stats.shared_pages += (prefix.complete() - follows.cached) as u64;
        }
        // A leader that recomputes the window at the end of its cached prefix brings the last page of that prefix, too.
        let cached = prefix.cached();
        let known = if prefix.complete() < cached { cached - 1 } else { cached };
        self.leaders.add(room, &job.request.prompt, known, self.config.page_tokens as usize);
    }

    /// # Panics
    /// When a request leads that brings nothing.
    pub(super) fn audit_leaders(&self) {
        for room in self.leaders.rooms() {
            let brings = self.jobs.get(&room).is_some_and(|job| {
                !job.stage().is_queued() && job.kv.is_cached() && job.kv.computed() < job.request.prompt.len()
            });
            assert!(brings, "{room:?} leads and brings nothing");
        }
    }
}
