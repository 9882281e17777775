//! Preemption: which request's pages are taken when answers outgrow the pool, and how the request goes on.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use host_core::message::Body;
use host_core::radix::Policy;
use host_core::{Config, Event, Role, Room};
use host_sim::{Leg, PEER as PREFILL};

fn config(role: Role, pages: u32, cache: bool) -> Config {
    Config {
        page_tokens: 2,
        max_tokens: 1_000,
        radix_cache: cache.then_some(Policy::Lru),
        reserved_decode_tokens: 1,
        peer_patience: Duration::from_secs(100),
        ..host_sim::config(role, pages)
    }
}

/// A worker whose n-th token of every answer is n.
struct Worker(Leg);

impl Deref for Worker {
    type Target = Leg;
    fn deref(&self) -> &Leg {
        &self.0
    }
}

impl DerefMut for Worker {
    fn deref_mut(&mut self) -> &mut Leg {
        &mut self.0
    }
}

impl Worker {
    fn new(config: Config) -> Self {
        let mut leg = Leg::unconnected(config);
        leg.draw = |sequence, prompt| (sequence.end() - prompt) as u32;
        Self(leg)
    }

    fn submit(&mut self, room: u64, prompt: usize, answer: u32) {
        self.enqueue(room, &vec![room as u32 % 100; prompt], answer);
    }

    /// Decides, and then computes what was decided. Returns which rooms were in the batch with how many tokens.
    fn step(&mut self) -> Vec<(u64, usize)> {
        let batch = self.0.step();
        let sequences = batch.iter().flat_map(|batch| &batch.sequences);
        sequences.map(|sequence| (sequence.room.0, sequence.tokens.len())).collect()
    }

    /// Steps until a request is preempted. Returns the requests that were computed in that step.
    fn until_preemption(&mut self) -> Vec<u64> {
        let before = self.stats().retractions;
        for _ in 0..100 {
            let batch = self.step();
            if self.stats().retractions > before {
                return batch.into_iter().map(|(room, _)| room).collect();
            }
        }
        panic!("no request was preempted");
    }

    /// Runs to the end and checks that every answer is what it would be alone: no token twice, none lost.
    fn finish(&mut self, answers: &[(u64, u32)]) {
        for _ in 0..1_000 {
            if self.finished.len() == answers.len() {
                break;
            }
            self.step();
        }
        assert_eq!(self.finished.len(), answers.len(), "not all ended: {:?}", self.scheduler);
        for (room, count) in answers {
            assert_eq!(self.emitted[&Room(*room)], (0..*count).collect::<Vec<_>>(), "room {room}");
            assert_eq!(self.begun.iter().filter(|begun| begun.0 == *room).count(), 1, "room {room} began");
        }
        let pool = self.stats().pool;
        assert_eq!((pool.held, pool.quarantined), (0, 0));
    }
}

#[test]
fn more_requests_run_than_whole_answers_would_fit() {
    let mut worker = Worker::new(config(Role::Aggregated, 40, false));
    for room in 0..8 {
        worker.submit(room, 4, 60);
    }
    worker.step();
    // Whole answers take 32 of the 40 pages each.
    assert_eq!(worker.stats().active, 8);
    worker.finish(&[0, 1, 2, 3, 4, 5, 6, 7].map(|room| (room, 60)));
    assert!(worker.stats().retractions > 0);
}

#[test]
fn headroom_is_kept_for_those_that_run_and_only_as_much_as_they_can_use() {
    let reserved = Config { reserved_decode_tokens: 8, ..config(Role::Aggregated, 20, false) };
    let mut worker = Worker::new(reserved);
    for room in 0..4 {
        worker.submit(room, 4, 20);
    }
    worker.submit(9, 4, 1);
    worker.step();
    // Each long request needs 2 pages for its prompt and 4 as headroom, so three fit. The short one needs no headroom
    // and fits too.
    assert_eq!((worker.stats().active, worker.stats().queued), (4, 1));
}

#[test]
fn the_shortest_answer_goes_first_and_the_longest_prompt_among_equals() {
    let mut worker = Worker::new(config(Role::Aggregated, 16, false));
    worker.submit(1, 2, 20);
    for _ in 0..3 {
        worker.step();
    }
    // Both prompts fit one step, so their answers are equally long.
    worker.submit(2, 3, 20);
    worker.submit(3, 5, 20);
    assert_eq!(worker.until_preemption(), [1, 2], "the longer prompt of the two younger ones went");
    worker.finish(&[(1, 20), (2, 20), (3, 20)]);
}

#[test]
fn the_last_one_that_runs_is_never_preempted() {
    let mut worker = Worker::new(config(Role::Aggregated, 10, false));
    worker.submit(1, 4, 17);
    worker.submit(2, 4, 17);
    worker.until_preemption();
    for _ in 0..100 {
        assert!(!worker.step().is_empty() || worker.finished.len() == 2, "no request ran");
    }
    worker.finish(&[(1, 17), (2, 17)]);
}

#[test]
fn what_a_preempted_request_had_is_found_again_if_its_pages_were_not_taken() {
    let run = |cache| {
        let mut worker = Worker::new(config(Role::Aggregated, 14, cache));
        worker.submit(1, 8, 12);
        worker.submit(2, 8, 9);
        worker.until_preemption();
        worker.hear(Event::Cancel(Room(1)));
        worker.finish(&[(2, 9)]);
        let stats = worker.stats();
        assert_eq!(stats.retractions, 1);
        (stats.restored_tokens, stats.recomputed_tokens)
    };
    let (restored, recomputed) = run(true);
    assert!(restored >= 10 && recomputed < 2, "{restored} restored, {recomputed} computed again");
    let (nothing, everything) = run(false);
    assert_eq!((nothing, everything), (0, restored + recomputed));
}

#[test]
fn a_preempted_request_that_does_not_fit_blocks_no_other_and_is_next() {
    let mut worker = Worker::new(Config { max_queued: 10_000, ..config(Role::Aggregated, 20, false) });
    worker.submit(2, 6, 30);
    for _ in 0..4 {
        worker.step();
    }
    worker.submit(1, 20, 18);
    assert_eq!(worker.until_preemption(), [2]);
    // Request 1 lacks pages while request 2 runs. Small requests do not wait for request 1, and there are enough of
    // them to take every page that becomes free.
    let mut small = 100;
    for step in 0..200 {
        for _ in 0..12 {
            worker.submit(small, 1, 4);
            small += 1;
        }
        worker.step();
        if worker.emitted.get(&Room(1)).is_some_and(|tokens| tokens.len() == 18) {
            let overtook = worker.finished.iter().filter(|room| room.0 >= 100).count();
            assert!(overtook > 0, "the line stood still");
            assert!(step < 40, "it was not next when 2 ended: done in step {step} after {overtook} others");
            assert_eq!(worker.emitted[&Room(1)], (0..18).collect::<Vec<_>>());
            return;
        }
    }
    panic!("the preempted request was starved by {} others", worker.finished.len());
}

#[test]
fn a_preempted_request_goes_before_those_that_have_not_begun() {
    let mut worker = Worker::new(config(Role::Aggregated, 14, false));
    worker.submit(1, 8, 12);
    worker.submit(2, 8, 12);
    worker.submit(3, 20, 2);
    let left = worker.until_preemption();
    let gone = if left == [1] { 2 } else { 1 };
    worker.finish(&[(1, 12), (2, 12), (3, 2)]);
    assert_eq!(worker.finished, [left[0], gone, 3].map(Room));
}

/// A decode worker with requests whose pages have arrived: (room, prompt, answer).
fn decode_worker(pages: u32, requests: &[(u64, usize, u32)]) -> Worker {
    let mut worker = Worker::new(config(Role::Decode, pages, false));
    for (room, prompt, answer) in requests {
        worker.submit(*room, *prompt, *answer);
    }
    worker.hear(Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
    worker.step();
    for (room, _, _) in requests {
        let arrived = worker.arrival(*room);
        worker.hear(arrived);
        let verified = worker.verification(*room, true, 0);
        worker.hear(verified);
    }
    worker
}

#[test]
fn a_preempted_request_needs_its_prefill_worker_no_more() {
    let mut worker = decode_worker(14, &[(1, 8, 12), (2, 8, 12)]);
    let left = worker.until_preemption();
    let gone = if left == [1] { 2 } else { 1 };
    // Neither a late message about the room nor the loss of the worker that sent its pages changes anything.
    let body = Body::PrefillFailed { message: "late".into(), retryable: true };
    let late = worker.said(gone, 1, body);
    worker.hear(late);
    worker.hear(Event::PeerLost { peer: PREFILL, session: 1, fenced: false });
    worker.now = worker.now.after(Duration::from_secs(60));
    worker.finish(&[(1, 12), (2, 12)]);
    assert!(worker.failed.is_empty(), "{:?}", worker.failed);
    assert!(worker.stats().recomputed_tokens > 0);
}

#[test]
fn pages_of_a_transfer_under_way_are_not_taken() {
    let mut worker = decode_worker(14, &[(1, 8, 12)]);
    worker.submit(2, 16, 1);
    for _ in 0..20 {
        worker.step();
    }
    // The transfer of request 2 never ends. Request 1 waits for a page, because prefill may still write request 2's
    // pages.
    assert_eq!((worker.stats().retractions, worker.finished.len()), (0, 0));
    worker.hear(Event::PeerLost { peer: PREFILL, session: 1, fenced: true });
    worker.failed.clear();
    worker.finish(&[(1, 12)]);
}

#[test]
fn recomputing_takes_small_steps_beside_those_that_decode() {
    let mut worker = decode_worker(34, &[(1, 24, 20), (2, 8, 40), (3, 16, 12)]);
    worker.until_preemption();
    let mut beside = 0;
    for _ in 0..200 {
        let batch = worker.step();
        let again: usize = batch.iter().filter(|(_, tokens)| *tokens > 1).map(|(_, tokens)| *tokens).sum();
        let decoding = batch.iter().filter(|(_, tokens)| *tokens == 1).count();
        if decoding > 0 && again > 0 {
            beside += 1;
            assert!(again <= 2, "{again} tokens were computed again in a step with {decoding} that decode");
        }
    }
    assert!(beside > 0, "nothing was computed again beside others");
    worker.finish(&[(1, 20), (2, 40), (3, 12)]);
}

#[test]
fn a_cancelled_preempted_request_leaves_nothing_behind() {
    let mut worker = Worker::new(config(Role::Aggregated, 14, true));
    worker.submit(1, 8, 12);
    worker.submit(2, 8, 12);
    let left = worker.until_preemption();
    let gone = if left == [1] { 2 } else { 1 };
    worker.hear(Event::Cancel(Room(gone)));
    assert_eq!(worker.failed.keys().collect::<Vec<_>>(), [&Room(gone)]);
    worker.finish(&[(left[0], 12)]);
    assert_eq!((worker.stats().queued, worker.stats().active, worker.stats().locked_pages), (0, 0, 0));
}
