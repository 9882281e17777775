//! What a step costs the scheduler: taking a finished batch over and deciding the next one, beside a full queue.
//!
//! `cargo bench -p host-core --bench scheduler_tick`
//!
//! An aggregated worker, all its batch decoding, and a queue of requests that lack pages: the worst a tick can find, for
//! it looks for one that fits. Best and median of 2000 steps, in microseconds.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::time::{Duration, Instant};

use host_core::radix::{NamespaceKey, PageHash, Policy};
use host_core::request::Request;
use host_core::{
    Action, Batch, Config, Event, Role, Room, Sampled, Sampling, Scheduler, SequenceOutput, Time,
};

const STEPS: usize = 2_000;
const PROMPT: u32 = 1_000;

fn main() {
    println!("{:>8} {:>8} {:>6} {:>10} {:>10}", "running", "queued", "cache", "best us", "median us");
    for cache in [false, true] {
        for (running, queued) in [(1, 0), (64, 0), (64, 1_000), (64, 10_000), (256, 0), (256, 10_000)] {
            let (best, median) = measure(running, queued, cache);
            println!("{running:>8} {queued:>8} {cache:>6} {best:>10.1} {median:>10.1}");
        }
    }
}

fn measure(running: u32, queued: u32, cache: bool) -> (f64, f64) {
    // Those that run need 1000 + 3000 tokens each; one page is left over.
    let pages = running * (PROMPT + 3_000).div_ceil(16) + 1;
    let long = Duration::from_secs(1_000_000);
    let mut scheduler = Scheduler::new(Config {
        role: Role::Aggregated,
        pages,
        page_tokens: 16,
        max_tokens: 8_000,
        vocabulary: 1_000,
        chunk_tokens: 1 << 20,
        radix_cache: cache.then_some(Policy::Lru),
        hierarchy: None,
        cache_events: false,
        identity: PageHash([0; 32]),
        reserved_decode_tokens: 3_000,
        target_itl: Some(Duration::from_secs(1)),
        seed: 1,
        window: None,
        layer_groups: host_core::layer_groups::LayerGroups::off(1),
        max_batch: running,
        max_running: running + 8,
        max_queued: queued + running,
        max_attempts: 1,
        bootstrap_timeout: long,
        request_timeout: long,
        peer_patience: long,
    });
    let mut now = Time::default();
    let mut actions = Vec::new();
    for room in 0..running + queued {
        let event = Event::Submit(request(u64::from(room)));
        scheduler.handle(now, event, &mut actions);
    }
    // The pace lets them in little by little.
    for _ in 0..200 {
        step(&mut scheduler, &mut now, &mut actions);
    }
    assert_eq!(scheduler.stats().active, running as usize, "all run that fit");
    let mut times: Vec<f64> = (0..STEPS)
        .map(|_| {
            let begin = Instant::now();
            step(&mut scheduler, &mut now, &mut actions);
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[0], times[STEPS / 2])
}

fn request(room: u64) -> Request {
    Request {
        room: Room(room),
        prompt: (0..PROMPT).map(|token| (token * 7 + room as u32) % 1_000).collect(),
        max_new_tokens: 3_000,
        stop_tokens: Vec::new(),
        ignore_stop: true,
        sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
        namespace: NamespaceKey::default(),
        no_cache: false,
        names: Vec::new(),
        prefill: None,
    }
}

/// One decision, the batch that it leads to, and taking it over.
fn step(scheduler: &mut Scheduler, now: &mut Time, actions: &mut Vec<Action>) {
    scheduler.tick(*now, actions);
    let _due = scheduler.next_deadline();
    *now = now.after(Duration::from_millis(10));
    let batch = actions.drain(..).find_map(|action| match action {
        Action::Run(batch) => Some(batch),
        _ => None,
    });
    if let Some(batch) = batch {
        scheduler.handle(*now, Event::BatchDone(outputs(&batch)), actions);
    }
}

fn outputs(batch: &Batch) -> Vec<SequenceOutput> {
    let sampled = Sampled { token: 3, logprob: None, top: Vec::new() };
    let outputs = batch.sequences.iter().map(|sequence| SequenceOutput {
        room: sequence.room,
        sampled: sequence.sample.map(|_| sampled.clone()),
    });
    outputs.collect()
}
