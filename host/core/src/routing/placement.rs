//! The account of work given out, and the cost of another request at each worker.

use std::collections::BTreeMap;

use super::index::{PrefixIndex, WorkerSlot};
use super::key::{BlockKey, KeyMap};
use crate::ids::Room;

/// The weights of missing tokens and of running requests in a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// Tokens of waiting work that one missing token counts for. At 1 the choice is the worker that is expected to be
    /// ready first. Above 1 the choice keeps prefixes together at the price of some waiting, because bringing a prefix
    /// to one more worker costs every later request.
    pub missing: f64,
    /// Tokens for which each request counts while it is on the account.
    pub request: u64,
    /// Whether later requests wait for the missing tokens of earlier ones.
    pub in_turn: bool,
}

impl Weights {
    /// For workers that compute prompts, one after the other. The weight of missing tokens was measured by the replay
    /// benchmark: from 1 to 4 reuse rises by 2 to 3 points and waiting by 1 to 2 %. Beyond 4 it is the other way round.
    pub const PROMPTS: Self = Self { missing: 4.0, request: 0, in_turn: true };

    /// For workers that receive KV and generate, all requests together. A request costs the others a share of every
    /// step for as long as it runs, about as much as receiving some hundred tokens. This number is not measured.
    pub const ANSWERS: Self = Self { missing: 1.0, request: 256, in_turn: false };
}

/// A prompt to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The keys of its whole blocks, or none when the prompt must not be looked up in caches.
    pub blocks: &'a [BlockKey],
    /// Its tokens.
    pub tokens: u64,
    /// Tokens in a block.
    pub block_tokens: u64,
}

/// The cost of a request at one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// In tokens. The least is the best.
    pub tokens: f64,
    /// Blocks of the prompt that the worker holds, or will hold when it comes to this request.
    pub blocks: u32,
    /// Tokens that it will lack.
    pub missing: u64,
}

/// The worker that was chosen for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The worker.
    pub worker: WorkerSlot,
    /// Blocks of the prompt that it holds, or will hold when it comes to this request.
    pub blocks: u32,
}

#[derive(Debug)]
struct Given {
    worker: WorkerSlot,
    /// Tokens for which the request counts.
    tokens: u64,
    /// Blocks that the worker will hold when it has come to the request.
    coming: Vec<BlockKey>,
}

/// The account of the requests that each worker was given and that have not ended.
#[derive(Debug)]
pub struct Placement {
    weights: Weights,
    given: BTreeMap<Room, Given>,
    /// Tokens waiting per slot.
    waiting: Vec<u64>,
    /// Blocks that are on their way, per slot, with how many requests bring each.
    coming: Vec<KeyMap<u32>>,
    /// A sliding mean of what requests count for.
    typical: f64,
}

impl Placement {
    /// An empty account.
    #[must_use]
    pub fn new(weights: Weights) -> Self {
        Self { weights, given: BTreeMap::new(), waiting: Vec::new(), coming: Vec::new(), typical: 0.0 }
    }

    /// The work that a worker still has to do, in tokens.
    #[must_use]
    pub fn waiting(&self, slot: WorkerSlot) -> u64 {
        self.waiting.get(usize::from(slot.0)).copied().unwrap_or(0)
    }

    /// Tokens for which a request counts, as a mean over the latest ones. Estimates requests that other routers have
    /// given out.
    #[must_use]
    pub fn typical(&self) -> f64 {
        self.typical
    }

    /// The cost of a prompt at a worker that holds `held` blocks of it. `elsewhere` is work that other routers gave the
    /// worker, in tokens. `stays` says that the request belongs to a session that this worker served last. Missing
    /// tokens then cost half, because later turns will find them here.
    #[must_use]
    pub fn cost(
        &self,
        slot: WorkerSlot,
        prompt: &Prompt<'_>,
        held: u32,
        elsewhere: f64,
        stays: bool,
    ) -> Cost {
        let blocks = self.with_coming(slot, prompt.blocks, held);
        let missing = prompt.tokens.saturating_sub(u64::from(blocks) * prompt.block_tokens);
        let weight = if stays { self.weights.missing / 2.0 } else { self.weights.missing };
        Cost { tokens: self.waiting(slot) as f64 + elsewhere + weight * missing as f64, blocks, missing }
    }

    /// Writes a request to a worker's account.
    pub fn give(&mut self, room: Room, slot: WorkerSlot, prompt: &Prompt<'_>, cost: &Cost) {
        self.end(room);
        let at = usize::from(slot.0);
        if self.waiting.len() <= at {
            self.waiting.resize(at + 1, 0);
            self.coming.resize_with(at + 1, KeyMap::default);
        }
        let tokens = self.weights.request + if self.weights.in_turn { cost.missing } else { 0 };
        self.typical += (tokens as f64 - self.typical) / 16.0;
        self.waiting[at] += tokens;
        let coming = prompt.blocks.get(cost.blocks as usize..).unwrap_or_default().to_vec();
        for key in &coming {
            *self.coming[at].entry(*key).or_default() += 1;
        }
        self.given.insert(room, Given { worker: slot, tokens, coming });
    }

    /// Chooses among `candidates`, and writes the work to the worker's account. `None` without candidates.
    ///
    /// Equal costs go to the worker with less cached, so that caches fill evenly, then to the lower slot.
    pub fn place(
        &mut self,
        room: Room,
        prompt: &Prompt<'_>,
        index: &PrefixIndex,
        candidates: &[WorkerSlot],
    ) -> Option<Placed> {
        let cached = index.matches(prompt.blocks);
        let held = |slot: WorkerSlot| cached.get(usize::from(slot.0)).copied().unwrap_or(0);
        let costs = candidates.iter().map(|slot| (*slot, self.cost(*slot, prompt, held(*slot), 0.0, false)));
        let (worker, cost) = costs.min_by(|(one, a), (other, b)| {
            let fullness = || index.blocks(*one).cmp(&index.blocks(*other));
            a.tokens.total_cmp(&b.tokens).then_with(fullness).then_with(|| one.cmp(other))
        })?;
        self.give(room, worker, prompt, &cost);
        Some(Placed { worker, blocks: cost.blocks })
    }

    /// Blocks that a worker has, or will have from earlier requests by the time it comes to this one.
    fn with_coming(&self, slot: WorkerSlot, prompt: &[BlockKey], have: u32) -> u32 {
        let Some(coming) = self.coming.get(usize::from(slot.0)).filter(|coming| !coming.is_empty()) else {
            return have;
        };
        let more = prompt.iter().skip(have as usize).take_while(|key| coming.contains_key(*key)).count();
        have + u32::try_from(more).unwrap_or(u32::MAX)
    }

    /// Takes the work of a request off the account. Its blocks still count as on their way until [`end`](Self::end),
    /// because the worker's events arrive in between.
    pub fn done(&mut self, room: Room) {
        if let Some(given) = self.given.get_mut(&room) {
            self.waiting[usize::from(given.worker.0)] -= std::mem::take(&mut given.tokens);
        }
    }

    /// Takes a request off the account, with its blocks. Harmless when repeated.
    pub fn end(&mut self, room: Room) {
        self.done(room);
        let Some(given) = self.given.remove(&room) else { return };
        let coming = &mut self.coming[usize::from(given.worker.0)];
        for key in given.coming {
            if let Some(count) = coming.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    coming.remove(&key);
                }
            }
        }
    }

    /// Removes a worker, with the requests that it was given.
    pub fn remove_worker(&mut self, slot: WorkerSlot) {
        self.given.retain(|_, given| given.worker != slot);
        if let Some(waiting) = self.waiting.get_mut(usize::from(slot.0)) {
            *waiting = 0;
            self.coming[usize::from(slot.0)].clear();
        }
    }

    /// Requests on the account.
    #[must_use]
    pub fn given(&self) -> usize {
        self.given.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::KvEvent;

    fn keys(range: std::ops::Range<u64>) -> Vec<BlockKey> {
        range.map(BlockKey).collect()
    }

    fn prompt(blocks: &[BlockKey], tokens: u64) -> Prompt<'_> {
        Prompt { blocks, tokens, block_tokens: 100 }
    }

    fn two_workers() -> (PrefixIndex, Vec<WorkerSlot>) {
        let mut index = PrefixIndex::default();
        let slots = vec![index.add_worker(1000), index.add_worker(1000)];
        (index, slots)
    }

    #[test]
    fn a_cached_prefix_draws_and_waiting_work_repels() {
        let (mut index, slots) = two_workers();
        index.apply(slots[1], 1, &KvEvent::Stored(keys(0..10)));
        let mut placement = Placement::new(Weights { missing: 1.0, ..Weights::PROMPTS });
        let placed = placement.place(Room(1), &prompt(&keys(0..12), 1200), &index, &slots).unwrap();
        assert_eq!(placed, Placed { worker: slots[1], blocks: 10 });
        assert_eq!(placement.waiting(slots[1]), 200);
        // Enough waiting work outweighs the cache.
        for room in 2..14 {
            let other = keys(100 * room..100 * room + 1);
            placement.place(Room(room), &prompt(&other, 100), &index, &slots[1..]);
        }
        let other = placement.place(Room(20), &prompt(&keys(0..12), 1200), &index, &slots).unwrap();
        assert_eq!(other.worker, slots[0]);
    }

    #[test]
    fn requests_with_the_same_new_prefix_meet_on_one_worker() {
        let (index, slots) = two_workers();
        for weights in [Weights::PROMPTS, Weights::ANSWERS] {
            let mut placement = Placement::new(weights);
            let first = placement.place(Room(1), &prompt(&keys(0..10), 1000), &index, &slots).unwrap();
            let second = placement.place(Room(2), &prompt(&keys(0..10), 1000), &index, &slots).unwrap();
            assert_eq!((first.blocks, second), (0, Placed { worker: first.worker, blocks: 10 }));
            // Another prompt goes elsewhere.
            let third = placement.place(Room(3), &prompt(&keys(50..60), 1000), &index, &slots).unwrap();
            assert_ne!(third.worker, first.worker);
        }
    }

    #[test]
    fn a_burst_with_one_prefix_stays_together_until_it_overloads_the_worker() {
        let (index, slots) = two_workers();
        let mut placement = Placement::new(Weights::ANSWERS);
        let workers: Vec<WorkerSlot> = (0..20)
            .map(|room| {
                placement.place(Room(room), &prompt(&keys(0..10), 1000), &index, &slots).unwrap().worker
            })
            .collect();
        let together = workers.iter().take_while(|worker| **worker == workers[0]).count();
        assert!(
            (3..10).contains(&together),
            "{together} of 20 on the first worker before the other was used"
        );
    }

    #[test]
    fn a_session_stays_where_it_was_unless_that_costs_more_time_than_it_saves() {
        let (index, slots) = two_workers();
        let mut placement = Placement::new(Weights::PROMPTS);
        let (blocks, other) = (keys(0..10), keys(90..91));
        let new = prompt(&blocks, 1000);
        let cheaper = |placement: &Placement| {
            let stay = placement.cost(slots[0], &new, 0, 0.0, true).tokens;
            stay < placement.cost(slots[1], &new, 0, 0.0, false).tokens
        };
        placement.place(Room(1), &prompt(&other, 1900), &index, &slots[..1]);
        assert!(cheaper(&placement), "1900 tokens wait, and missing ones count 2000 less here");
        placement.place(Room(2), &prompt(&[], 200), &index, &slots[..1]);
        assert!(!cheaper(&placement), "2100 wait");
    }

    #[test]
    fn what_was_done_still_counts_as_coming_until_it_is_heard_of() {
        let (index, slots) = two_workers();
        let mut placement = Placement::new(Weights::PROMPTS);
        let blocks = keys(0..10);
        let first = placement.place(Room(1), &prompt(&blocks, 1000), &index, &slots).unwrap().worker;
        placement.done(Room(1));
        assert_eq!(placement.waiting(first), 0);
        assert_eq!(placement.cost(first, &prompt(&blocks, 1000), 0, 0.0, false).blocks, 10);
        placement.end(Room(1));
        assert_eq!(placement.cost(first, &prompt(&blocks, 1000), 0, 0.0, false).blocks, 0);
    }

    #[test]
    fn an_ended_request_and_a_worker_that_left_leave_nothing_on_the_account() {
        let (index, slots) = two_workers();
        for leaves in [false, true] {
            let mut placement = Placement::new(Weights::PROMPTS);
            for room in 0..50 {
                let blocks = keys(0..room % 7);
                placement.place(Room(room), &prompt(&blocks, room % 7 * 100 + 5), &index, &slots);
            }
            if leaves {
                slots.iter().for_each(|slot| placement.remove_worker(*slot));
            }
            for room in 0..50 {
                placement.done(Room(room));
                placement.end(Room(room));
                placement.end(Room(room));
            }
            assert_eq!(placement.given(), 0);
            assert!(slots.iter().all(|slot| placement.waiting(*slot) == 0));
            assert!(placement.coming.iter().all(KeyMap::is_empty));
        }
    }

    #[test]
    fn without_workers_there_is_no_place() {
        let index = PrefixIndex::default();
        let mut placement = Placement::new(Weights::PROMPTS);
        assert_eq!(placement.place(Room(1), &prompt(&keys(0..1), 100), &index, &[]), None);
    }
}
