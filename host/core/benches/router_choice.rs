//! The time that the router needs to choose a worker, with a full index.
//!
//! `cargo bench -p host-core --bench router_choice -- [WORKERS] [PAGES PER WORKER] [PROMPT TOKENS]`
//!
//! Every worker holds its own conversations of 64 pages, all of them behind one shared prefix. Prompts are
//! conversations of one worker with a new end. The figures are the median and the 99th percentile of 20,000 choices.
//! Hashing is measured apart, because the router does it without its lock.

#![allow(clippy::disallowed_methods, reason = "a benchmark reads the clock itself")]
#![allow(clippy::expect_used, reason = "a benchmark stops at arguments that it cannot read")]

use std::hint::black_box;
use std::time::Instant;

use host_core::Room;
use host_core::radix::PageHash;
use host_core::routing::{
    BlockKey, EVENT_KEYS, KvEvent, Placement, PrefixIndex, Prompt, Weights, WorkerSlot,
};
use host_sim::Random;

const PAGE: usize = 16;
const CHOICES: usize = 20_000;

fn report(what: &str, mut nanos: Vec<u128>) {
    nanos.sort_unstable();
    let at = |share: usize| nanos[nanos.len() * share / 100] as f64 / 1e3;
    println!("{what:<44} p50 {:>8.1} µs   p99 {:>8.1} µs", at(50), at(99));
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, u128) {
    let start = Instant::now();
    let result = black_box(work());
    (result, start.elapsed().as_nanos())
}

fn main() {
    let arguments: Vec<usize> = std::env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .map(|argument| argument.parse().expect("a number"))
        .collect();
    let number = |at: usize, default| arguments.get(at).copied().unwrap_or(default);
    let (workers, pages, tokens) = (number(0, 8), number(1, 100_000), number(2, 12_000));
    let blocks = tokens / PAGE;
    let mut random = Random::new(1);
    let mut index = PrefixIndex::default();
    let slots: Vec<WorkerSlot> = (0..workers).map(|_| index.add_worker(pages as u64)).collect();
    let shared: Vec<BlockKey> = (0..64).map(|_| BlockKey(random.word())).collect();
    let mut conversations: Vec<Vec<BlockKey>> = Vec::new();
    let mut applied = Vec::new();
    for slot in &slots {
        let mut event = 0;
        let mut tell = |index: &mut PrefixIndex, keys: &[BlockKey]| {
            for keys in keys.chunks(EVENT_KEYS) {
                event += 1;
                let stored = KvEvent::Stored(keys.to_vec());
                let (_, nanos) = timed(|| index.apply(*slot, event, &stored));
                applied.push(nanos / keys.len() as u128);
            }
        };
        tell(&mut index, &shared);
        let mut held = shared.len();
        while held + blocks <= pages {
            let own: Vec<BlockKey> =
                (shared.len()..blocks * 3 / 4).map(|_| BlockKey(random.word())).collect();
            tell(&mut index, &own);
            held += own.len();
            conversations.push([shared.as_slice(), &own].concat());
        }
    }
    println!(
        "{workers} workers, {pages} pages each, {} in the index, prompts of {tokens} tokens ({blocks} pages)",
        index.len()
    );
    report("applying an event, per page", applied);

    let seed = PageHash([7; 32]);
    let prompt: Vec<u32> = (0..tokens as u32).collect();
    let hashing = (0..500).map(|_| timed(|| BlockKey::chain(&seed, &prompt, PAGE)).1).collect();
    report("hashing a prompt", hashing);

    let prompts: Vec<Vec<BlockKey>> = (0..CHOICES)
        .map(|_| {
            let mut prompt = conversations[random.place(conversations.len())].clone();
            prompt.resize_with(blocks, || BlockKey(random.word()));
            prompt
        })
        .collect();
    let mut found = 0;
    let looking = prompts.iter().map(|prompt| {
        let (matches, nanos) = timed(|| index.matches(prompt));
        found += matches.iter().max().copied().unwrap_or(0);
        nanos
    });
    report("looking it up in all caches", looking.collect());
    println!("    {:.0} of {blocks} pages found", f64::from(found) / CHOICES as f64);

    let mut placement = Placement::new(Weights::PROMPTS);
    let choosing = prompts.iter().enumerate().map(|(at, blocks)| {
        let room = Room(at as u64);
        let (_, nanos) = timed(|| {
            let prompt = Prompt { blocks, tokens: tokens as u64, block_tokens: PAGE as u64 };
            placement.place(room, &prompt, &index, &slots)
        });
        // 200 requests are under way at any time.
        placement.end(Room((at as u64).wrapping_sub(200)));
        nanos
    });
    report("looking up, choosing, writing to the account", choosing.collect());

    let (_, nanos) = timed(|| index.remove_worker(slots[0]));
    println!("{:<44} {:>12.1} ms", "forgetting a worker", nanos as f64 / 1e6);
}
