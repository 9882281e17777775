//! Times to name the pages of a prompt, and to take in a request with and without names.
//!
//! `cargo bench -p host-core --bench page_names`
//!
//! An idle aggregated worker has host memory and one storage tier. Figures are medians of 21 different prompts of each
//! length, in microseconds: naming all pages of a prompt, taking in a request with names, and taking in a request
//! without.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::time::{Duration, Instant};

use host_core::hierarchy::{HierarchyConfig, TierConfig};
use host_core::radix::{PageHash, Policy};
use host_core::request::Request;
use host_core::{Config, Event, Role, Scheduler, Time};

const PAGE: u32 = 16;
const PROMPTS: u32 = 21;

fn main() {
    println!("{:>8} {:>10} {:>10} {:>10}", "tokens", "naming", "named", "unnamed");
    for tokens in [1_024, 8_192, 32_768, 131_072] {
        let naming = median(|number| {
            let mut request = request(number, tokens);
            timed(|| request.name(&PageHash([0; 32]), PAGE))
        });
        let [named, unnamed] = [true, false].map(|named| {
            let mut scheduler = scheduler(tokens);
            median(|number| {
                let mut request = request(number, tokens);
                if named {
                    request.name(&PageHash([0; 32]), PAGE);
                }
                let mut actions = Vec::new();
                timed(|| scheduler.handle(Time::default(), Event::Submit(request), &mut actions))
            })
        });
        println!("{tokens:>8} {naming:>10.1} {named:>10.1} {unnamed:>10.1}");
    }
}

fn median(one: impl FnMut(u32) -> f64) -> f64 {
    let mut times: Vec<f64> = (0..PROMPTS).map(one).collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn timed(work: impl FnOnce()) -> f64 {
    let begin = Instant::now();
    work();
    begin.elapsed().as_secs_f64() * 1e6
}

fn scheduler(tokens: u32) -> Scheduler {
    let long = Duration::from_secs(1_000_000);
    let tier = TierConfig { writes: true, latency: Duration::from_millis(1), bytes_per_second: 1e9 };
    Scheduler::new(Config {
        page_tokens: PAGE,
        max_tokens: tokens + 8,
        chunk_tokens: 512,
        radix_cache: Some(Policy::Lru),
        hierarchy: Some(HierarchyConfig::new(tokens, 1 << 20, vec![tier])),
        reserved_decode_tokens: 8,
        draft_tokens: 0,
        max_queued: PROMPTS,
        bootstrap_timeout: long,
        request_timeout: long,
        ..host_sim::config(Role::Aggregated, tokens)
    })
}

fn request(number: u32, tokens: u32) -> Request {
    let prompt: Vec<u32> = (0..tokens).map(|token| (token * 7 + number) % 1_000).collect();
    host_sim::request(u64::from(number), &prompt, 8)
}
