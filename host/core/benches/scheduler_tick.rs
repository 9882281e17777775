//! The time that the scheduler needs for a step: taking over a finished batch and deciding the next, beside a full
//! queue.
//!
//! `cargo bench -p host-core --bench scheduler_tick`
//!
//! The worker is aggregated, all its batch decodes, and requests in the queue lack pages. This is the worst case for a
//! tick, which searches the queue for a request that fits. Best and median of 2000 steps, in microseconds.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::time::{Duration, Instant};

use host_core::radix::Policy;
use host_core::request::Request;
use host_core::{Action, Config, Event, Role, Scheduler, Time};

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
    // Requests that run need 1000 + 3000 tokens each. One page is left over.
    let pages = running * (PROMPT + 3_000).div_ceil(16) + 1;
    let long = Duration::from_secs(1_000_000);
    let mut scheduler = Scheduler::new(Config {
        page_tokens: 16,
        max_tokens: 8_000,
        chunk_tokens: 1 << 20,
        radix_cache: cache.then_some(Policy::Lru),
        reserved_decode_tokens: 3_000,
        draft_tokens: 0,
        target_itl: Some(Duration::from_secs(1)),
        max_batch: running,
        max_running: running + 8,
        max_queued: queued + running,
        bootstrap_timeout: long,
        request_timeout: long,
        ..host_sim::config(Role::Aggregated, pages)
    });
    let mut now = Time::default();
    let mut actions = Vec::new();
    for room in 0..running + queued {
        let event = Event::Submit(request(u64::from(room)));
        scheduler.handle(now, event, &mut actions);
    }
    // The target for the time between tokens admits the requests little by little.
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
    let prompt: Vec<u32> = (0..PROMPT).map(|token| (token * 7 + room as u32) % 1_000).collect();
    host_sim::request(room, &prompt, 3_000)
}

/// Makes one decision, and takes over the results of its batch.
fn step(scheduler: &mut Scheduler, now: &mut Time, actions: &mut Vec<Action>) {
    scheduler.tick(*now, actions);
    let _due = scheduler.next_deadline();
    *now = now.after(Duration::from_millis(10));
    let batch = actions.drain(..).find_map(|action| match action {
        Action::Run(batch) => Some(batch),
        _ => None,
    });
    if let Some(batch) = batch {
        scheduler.handle(*now, Event::BatchDone(host_sim::outputs(&batch, |_| 3)), actions);
    }
}
