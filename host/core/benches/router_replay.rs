//! Replays a request trace over several workers' caches, index only: how much of the prompts does each routing policy
//! find cached?
//!
//! `cargo bench -p host-core --bench router_replay -- TRACE.jsonl [WORKERS] [TOKENS PER WORKER] [SPEEDUP] [TOKENS PER SECOND]`
//!
//! The trace is Mooncake's format: one JSON object per line with `timestamp` (ms), `input_length` and `hash_ids` (one
//! per 512 tokens, equal ids mean equal prefixes). Each worker computes prompts one after the other at a fixed speed.
//! It keeps an LRU cache of blocks and evicts ends of sequences first, as the radix tree does. A block counts as cached
//! once the prompt that brings it has been computed. The router learns of it by the same events that a live worker
//! sends.

#![allow(clippy::expect_used, reason = "a benchmark stops at a trace that it cannot read")]
#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock itself")]

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use host_core::Room;
use host_core::routing::{Applied, BlockKey, KvEvent, Placement, PrefixIndex, Prompt, Weights, WorkerSlot};

const BLOCK: u64 = 512;

struct Request {
    at: f64,
    tokens: u64,
    blocks: Vec<BlockKey>,
}

fn read(path: &str, speedup: f64) -> Vec<Request> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mix = |id: u64| BlockKey((id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    text.lines()
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).expect("one JSON object per line");
            let number = |key: &str| line[key].as_u64().unwrap_or_else(|| panic!("no {key} in {line}"));
            let ids = line["hash_ids"].as_array().expect("hash_ids is a list");
            Request {
                at: number("timestamp") as f64 / 1000.0 / speedup,
                tokens: number("input_length"),
                blocks: ids.iter().filter_map(serde_json::Value::as_u64).map(mix).collect(),
            }
        })
        .collect()
}

/// Whole blocks of a prompt. The last block is left out if the prompt ends within it.
fn whole(request: &Request) -> &[BlockKey] {
    &request.blocks[..request.blocks.len().min((request.tokens / BLOCK) as usize)]
}

/// The share of prompt tokens that a cache of unlimited size, shared by all workers and without delay, would find.
fn oracle(trace: &[Request]) -> f64 {
    let mut seen: BTreeSet<BlockKey> = BTreeSet::new();
    let mut found = 0;
    for request in trace {
        found += whole(request).iter().take_while(|key| seen.contains(key)).count() as u64 * BLOCK;
        seen.extend(whole(request).iter().copied());
    }
    found as f64 / trace.iter().map(|request| request.tokens).sum::<u64>() as f64
}

/// One worker: a queue, a speed, a cache.
struct Worker {
    slot: WorkerSlot,
    queue: VecDeque<usize>,
    /// The request being computed, and when it is done.
    computing: Option<(usize, f64)>,
    /// Blocks by last use, in both directions.
    used: HashMap<BlockKey, u64>,
    by_use: BTreeMap<u64, BlockKey>,
    events: u64,
}

impl Worker {
    fn touch(&mut self, key: BlockKey, clock: &mut u64) -> bool {
        *clock += 1;
        let before = self.used.insert(key, *clock);
        if let Some(before) = before {
            self.by_use.remove(&before);
        }
        self.by_use.insert(*clock, key);
        before.is_none()
    }
}

#[derive(Clone, Copy, Debug)]
enum Policy {
    RoundRobin,
    LeastLoaded,
    Prefix(f64),
}

struct Outcome {
    reuse: f64,
    mean: f64,
    p99: f64,
    /// Tokens computed by the busiest worker, against the mean.
    imbalance: f64,
}

fn replay(trace: &[Request], policy: Policy, workers: usize, capacity: u64, speed: f64) -> Outcome {
    let mut index = PrefixIndex::default();
    let missing = if let Policy::Prefix(missing) = policy { missing } else { 1.0 };
    let mut placement = Placement::new(Weights { missing, ..Weights::PROMPTS });
    let mut pool: Vec<Worker> = (0..workers)
        .map(|_| Worker {
            slot: index.add_worker(capacity / BLOCK),
            queue: VecDeque::new(),
            computing: None,
            used: HashMap::new(),
            by_use: BTreeMap::new(),
            events: 0,
        })
        .collect();
    let slots: Vec<WorkerSlot> = pool.iter().map(|worker| worker.slot).collect();
    let (mut clock, mut reused, mut computed) = (0, 0, vec![0_u64; workers]);
    let mut waits = Vec::with_capacity(trace.len());
    let mut next = 0;
    loop {
        let done = pool.iter().enumerate().filter_map(|(w, worker)| Some((worker.computing?.1, w)));
        let done = done.min_by(|a, b| a.0.total_cmp(&b.0));
        let arrives = trace.get(next).map(|request| request.at);
        let now = match (done, arrives) {
            (None, None) => break,
            (Some((at, w)), arrives) if arrives.is_none_or(|arrives| at <= arrives) => {
                finish(&mut pool[w], trace, (&mut index, &mut placement), capacity, &mut clock, &mut waits);
                at
            }
            (_, Some(at)) => {
                let request = &trace[next];
                let room = Room(next as u64);
                let w = match policy {
                    Policy::RoundRobin => next % workers,
                    Policy::LeastLoaded | Policy::Prefix(_) => {
                        let blocks = if matches!(policy, Policy::Prefix(_)) { whole(request) } else { &[] };
                        let prompt = Prompt { blocks, tokens: request.tokens, block_tokens: BLOCK };
                        let place = placement.place(room, &prompt, &index, &slots);
                        place.map_or(0, |placed| usize::from(placed.worker.0))
                    }
                };
                pool[w].queue.push_back(next);
                next += 1;
                at
            }
            (Some(_), None) => unreachable!("the guard above takes every completion without an arrival"),
        };
        for (w, worker) in pool.iter_mut().enumerate() {
            if worker.computing.is_none()
                && let Some(request) = worker.queue.pop_front()
            {
                let blocks = whole(&trace[request]);
                let cached = blocks.iter().take_while(|key| worker.used.contains_key(key)).count();
                // A request locks the blocks that it reads, so they count as used now.
                for key in blocks[..cached].iter().rev() {
                    worker.touch(*key, &mut clock);
                }
                let found = cached as u64 * BLOCK;
                let missing = trace[request].tokens - found;
                reused += found;
                computed[w] += missing;
                worker.computing = Some((request, now + missing as f64 / speed));
            }
        }
    }
    waits.sort_by(f64::total_cmp);
    let total: u64 = trace.iter().map(|request| request.tokens).sum();
    let mean_computed = computed.iter().sum::<u64>() as f64 / workers as f64;
    Outcome {
        reuse: reused as f64 / total as f64,
        mean: waits.iter().sum::<f64>() / waits.len() as f64,
        p99: waits[waits.len() * 99 / 100],
        imbalance: computed.iter().copied().max().unwrap_or(0) as f64 / mean_computed,
    }
}

/// Ends a worker's request: caches its blocks, evicts the oldest, and reports both to the router.
fn finish(
    worker: &mut Worker,
    trace: &[Request],
    (index, placement): (&mut PrefixIndex, &mut Placement),
    capacity: u64,
    clock: &mut u64,
    waits: &mut Vec<f64>,
) {
    let Some((request, at)) = worker.computing.take() else { return };
    waits.push(at - trace[request].at);
    placement.end(Room(request as u64));
    // Ends of sequences are evicted first, as in the radix tree, so they count as used before the blocks that lead to
    // them.
    let mut stored: Vec<BlockKey> =
        whole(&trace[request]).iter().rev().copied().filter(|key| worker.touch(*key, clock)).collect();
    stored.reverse();
    let mut removed = Vec::new();
    while worker.used.len() as u64 * BLOCK > capacity {
        let Some((_, oldest)) = worker.by_use.pop_first() else { break };
        worker.used.remove(&oldest);
        removed.push(oldest);
    }
    // A real pool evicts before it stores.
    stored.retain(|key| worker.used.contains_key(key));
    for event in [KvEvent::Removed(removed), KvEvent::Stored(stored)] {
        worker.events += 1;
        assert_eq!(index.apply(worker.slot, worker.events, &event), Applied::Yes);
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let Some(path) = arguments.first() else {
        println!("router_replay: give a trace (JSON lines with timestamp, input_length and hash_ids)");
        return;
    };
    let number = |at: usize, default: f64| {
        arguments
            .get(at)
            .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{text} is no number")))
    };
    let (workers, capacity) = (number(1, 8.0) as usize, number(2, 65_536.0 * 64.0) as u64);
    let (speedup, speed) = (number(3, 2.0), number(4, 45_000.0));
    let trace = read(path, speedup);
    println!(
        "{} requests over {workers} workers of {capacity} tokens, {speedup}x the trace's pace, {speed} tokens/s each",
        trace.len()
    );
    println!("oracle (unlimited, shared, without delay): {:.1} % reuse", oracle(&trace) * 100.0);
    println!("{:<16} {:>7} {:>10} {:>10} {:>10}", "policy", "reuse", "mean", "p99", "imbalance");
    let policies = [
        ("round-robin", Policy::RoundRobin),
        ("least-loaded", Policy::LeastLoaded),
        ("prefix, 1", Policy::Prefix(1.0)),
        ("prefix, 1.5", Policy::Prefix(1.5)),
        ("prefix, 2", Policy::Prefix(2.0)),
        ("prefix, 3", Policy::Prefix(3.0)),
        ("prefix, 4", Policy::Prefix(4.0)),
        ("prefix, 8", Policy::Prefix(8.0)),
        ("prefix, 16", Policy::Prefix(16.0)),
    ];
    for (name, policy) in policies {
        let started = std::time::Instant::now();
        let outcome = replay(&trace, policy, workers, capacity, speed);
        println!(
            "{name:<16} {:>5.1} % {:>7.0} ms {:>7.0} ms {:>10.2}   ({:.0} requests/s of routing and caching)",
            outcome.reuse * 100.0,
            outcome.mean * 1e3,
            outcome.p99 * 1e3,
            outcome.imbalance,
            trace.len() as f64 / started.elapsed().as_secs_f64()
        );
    }
}
