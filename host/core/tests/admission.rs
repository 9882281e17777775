//! Who gets pages when there are not enough for all.

use std::collections::BTreeSet;
use std::time::Duration;

use host_core::radix::NamespaceKey;
use host_core::request::Request;
use host_core::{Action, Config, Event, Role, Room, Sampled, Sampling, Scheduler, SequenceOutput, Time};

/// A worker without a transfer, with pages of one token, that computes every batch at once.
struct Worker {
    scheduler: Scheduler,
    now: Time,
    finished: BTreeSet<Room>,
}

impl Worker {
    fn new(pages: u32) -> Self {
        let config = Config {
            role: Role::Aggregated,
            pages,
            page_tokens: 1,
            max_tokens: pages,
            vocabulary: 10,
            chunk_tokens: 4,
            radix_cache: None,
            hierarchy: None,
            cache_events: false,
            identity: host_core::radix::PageHash([0; 32]),
            reserved_decode_tokens: 1_000,
            target_itl: None,
            seed: 0,
            window: None,
            layer_groups: host_core::layer_groups::LayerGroups::off(1),
            max_batch: 64,
            max_running: 64,
            max_queued: 10_000,
            max_attempts: 1,
            bootstrap_timeout: Duration::from_secs(1_000_000),
            request_timeout: Duration::from_secs(1_000_000),
            peer_patience: Duration::from_secs(1_000_000),
        };
        Self { scheduler: Scheduler::new(config), now: Time::default(), finished: BTreeSet::new() }
    }

    /// Submits a request that holds `pages` pages for `steps` steps after its prompt.
    fn submit(&mut self, room: u64, pages: u32, steps: u32) {
        let request = Request {
            room: Room(room),
            prompt: vec![1; (pages + 1 - steps) as usize],
            max_new_tokens: steps,
            stop_tokens: Vec::new(),
            ignore_stop: true,
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
            prefill: None,
            namespace: NamespaceKey::default(),
            no_cache: false,
            names: Vec::new(),
        };
        self.scheduler.handle(self.now, Event::Submit(request), &mut Vec::new());
    }

    /// One turn: decide, and compute what was decided.
    fn step(&mut self) {
        self.now = self.now.after(Duration::from_millis(1));
        let mut actions = Vec::new();
        self.scheduler.tick(self.now, &mut actions);
        for action in std::mem::take(&mut actions) {
            if let Action::Run(batch) = action {
                let sampled = Sampled { token: 3, logprob: None, top: Vec::new() };
                let outputs = batch.sequences.iter().map(|sequence| SequenceOutput {
                    room: sequence.room,
                    sampled: sequence.sample.map(|_| sampled.clone()),
                });
                self.scheduler.handle(self.now, Event::BatchDone(outputs.collect()), &mut actions);
            }
        }
        for action in actions {
            if let Action::Finish { room, .. } = action {
                self.finished.insert(room);
            }
        }
        self.scheduler.audit();
    }
}

#[test]
fn a_small_request_does_not_wait_behind_one_that_lacks_pages() {
    let mut worker = Worker::new(10);
    worker.submit(1, 6, 6);
    worker.step();
    worker.submit(2, 8, 2);
    worker.submit(3, 2, 1);
    worker.step();
    worker.step();
    assert!(worker.finished.contains(&Room(3)), "the small one was held up");
    assert!(!worker.finished.contains(&Room(1)));
}

#[test]
fn a_tick_does_not_look_through_the_whole_queue_for_one_that_fits() {
    for (large, fits) in [(63, true), (64, false)] {
        let mut worker = Worker::new(10);
        worker.submit(1, 6, 6);
        worker.step();
        for room in 0..large {
            worker.submit(100 + room, 8, 2);
        }
        worker.submit(2, 2, 1);
        worker.step();
        worker.step();
        assert_eq!(worker.finished.contains(&Room(2)), fits, "behind {large} that lack pages");
    }
}

#[test]
fn an_endless_stream_of_small_requests_starves_nobody() {
    let mut worker = Worker::new(10);
    // Lifetimes differ and more wait than fit, so that 8 pages are never free by chance.
    for room in 10..20 {
        worker.submit(room, 3, 1 + room as u32 % 3);
        worker.step();
    }
    worker.submit(1, 8, 1);
    let mut small = 20;
    for step in 0..200 {
        for _ in 0..3 {
            worker.submit(small, 3, 1 + small as u32 % 3);
            small += 1;
        }
        worker.step();
        if worker.finished.contains(&Room(1)) {
            let overtook = worker.finished.iter().filter(|room| room.0 >= 20).count();
            println!("admitted in step {step}, after {overtook} later ones");
            assert!(overtook > 0, "nothing was let past: the line stood still from the start");
            assert!(overtook <= 32 + 5, "{overtook} later requests came first");
            return;
        }
    }
    panic!("the large request was starved by {} small ones", worker.finished.len());
}
