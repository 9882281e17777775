//! Everything that a seed draws: workers, clients, and faults.

use std::time::Duration;

use host_core::hierarchy::{HierarchyConfig, PrefetchPolicy, TierConfig, WritePolicy};
use host_core::layer_groups::LayerGroups;
use host_core::layout::KvOrder;
use host_core::pool::PoolLimits;
use host_core::radix::Policy;
use host_core::{Config, Role, Time};
use host_sim::{Faults, Kv, PAGE, Random, Sliding, layer_groups, mix};

/// Layers of a page.
const LAYERS: u32 = 4;
/// The number of token ids. It is small, so that prompts begin alike.
const VOCABULARY: u32 = 40;
/// Tokens of the longest request, answer included.
const LONGEST: usize = 64;
/// Pages that hold the longest request, and one more.
const LEAST_PAGES: u32 = (LONGEST / PAGE) as u32 + 1;
/// Requests come within this time.
const ARRIVE: Duration = Duration::from_secs(20);
/// The time after the last mishap from which on requests must be answered. It is longer than any timeout of workers and
/// router.
const HEALED: Duration = Duration::from_secs(900);
/// The number of requests of a scene is below this.
pub(super) const MOST_REQUESTS: u64 = 24;

/// A client's first request, and what may follow.
#[derive(Clone, Debug)]
pub(super) struct Arrival {
    pub at: Time,
    pub prompt: Vec<u32>,
    /// Tokens of its answer.
    pub count: u32,
    /// Turns that follow when it is answered.
    pub turns: u32,
    /// The time until the client leaves, if it does.
    pub leaves: Option<Duration>,
    /// Whether it must be answered, because it comes long after the last mishap.
    pub must: bool,
    /// The seed of the client's later turns.
    pub seed: u64,
}

/// A cluster, its faults and its requests.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub kv: Kv,
    pub workers: Vec<(Config, PoolLimits)>,
    pub faults: Faults,
    pub arrivals: Vec<Arrival>,
}

impl Scene {
    pub fn draw(seed: u64) -> Self {
        let mut random = Random::new(mix(seed, 1));
        let random = &mut random;
        let sliding = random.chance(0.25).then(|| Sliding {
            layers: 1 + random.below(6) as u32,
            window: [1, 2, 4, 5, 9, 12, 30][random.place(7)],
        });
        let kv = Kv { page_tokens: PAGE, layers: LAYERS, vocabulary: VOCABULARY, sliding, words: true };
        let mut workers = workers(&kv, random);
        let until = Time(ARRIVE + random.up_to(Duration::from_secs(60)));
        let mut own = Random::new(mix(seed, 2));
        let notice = if own.chance(0.2) { 0.2 * own.unit() } else { 0.0 };
        let late_draw = if own.chance(0.4) { 0.2 * own.unit() } else { 0.0 };
        let max_attempts = 1 + own.below(3) as u32;
        workers.iter_mut().for_each(|(config, _)| config.max_attempts = max_attempts);
        let faults = Faults { notice, late_draw, ..faults(random, until) };
        let mut arrivals: Vec<Arrival> = (0..4 + random.below(12)).map(|_| arrival(random)).collect();
        arrivals.sort_by_key(|arrival| arrival.at);
        // One request for each worker, so that each worker is needed at least once.
        for number in 0..workers.len() as u64 {
            let at = until.after(HEALED + Duration::from_secs(5) * number as u32);
            arrivals.push(Arrival { at, leaves: None, must: true, turns: 0, ..arrival(random) });
        }
        Self { kv, workers, faults, arrivals }
    }
}

fn arrival(random: &mut Random) -> Arrival {
    let length = 1 + random.place(36);
    // Half of the prompts begin like one of three base prompts.
    let mut alike = Random::new(random.below(3));
    let shared = if random.chance(0.5) { random.place(length + 1) } else { 0 };
    let token = |place: usize| {
        let random = if place < shared { &mut alike } else { &mut *random };
        random.below(u64::from(VOCABULARY)) as u32
    };
    let prompt: Vec<u32> = (0..length).map(token).collect();
    Arrival {
        at: Time(random.up_to(ARRIVE)),
        prompt,
        count: 1 + random.below(20) as u32,
        turns: random.below(3) as u32,
        leaves: random.chance(0.1).then(|| random.up_to(Duration::from_secs(3))),
        must: false,
        seed: random.word(),
    }
}

/// The next turn of a conversation, if it is short enough: everything that was said, and some more tokens.
pub(super) fn turn(said: &[u32], seed: u64) -> Option<(Vec<u32>, u32)> {
    let mut random = Random::new(seed);
    let (more, count) = (random.place(6), 1 + random.below(8) as u32);
    let tokens = (0..more).map(|_| random.below(u64::from(VOCABULARY)) as u32);
    let prompt: Vec<u32> = said.iter().copied().chain(tokens).collect();
    (prompt.len() + count as usize <= LONGEST).then_some((prompt, count))
}

/// One to three prefill and one to three decode workers, or one or two aggregated workers, or all of these. Three of four
/// clusters keep prefixes.
fn workers(kv: &Kv, random: &mut Random) -> Vec<(Config, PoolLimits)> {
    let mut roles = Vec::new();
    let kinds = random.below(8);
    if kinds > 0 {
        roles.extend(vec![Role::Prefill; 1 + random.place(3)]);
        roles.extend(vec![Role::Decode; 1 + random.place(3)]);
    }
    if kinds < 2 {
        roles.extend(vec![Role::Aggregated; 1 + random.place(2)]);
    }
    let cached = random.chance(0.75);
    let offload = cached && random.chance(0.5);
    let tight = random.chance(0.5);
    let groups = random.chance(0.4).then(|| 2 + random.below(3) as u32);
    let windows = kv.window().map_or(0, |shape| (shape.least_pages(LONGEST, PAGE) - LONGEST / PAGE) as u32);
    let mut worker = |role| {
        let pages = LEAST_PAGES + windows + random.below(if tight { 4 } else { 24 }) as u32;
        let order = KvOrder::PageLayerHeadKvTokenDim;
        let layer_groups = match groups {
            Some(groups) => layer_groups(order, LAYERS, PAGE as u32, groups),
            None => LayerGroups::off(LAYERS),
        };
        let config = Config {
            max_tokens: LONGEST as u32,
            vocabulary: VOCABULARY,
            chunk_tokens: 3 + random.below(12) as u32,
            radix_cache: cached.then_some(Policy::Lru),
            hierarchy: offload.then(|| tiers(pages, random)),
            cache_events: cached,
            reserved_decode_tokens: if tight { 2 } else { 1_000 },
            target_itl: random.chance(0.2).then_some(Duration::from_millis(12)),
            window: kv.window(),
            layer_groups,
            max_batch: 3,
            max_running: 5,
            max_queued: 3 + random.below(20) as u32,
            request_timeout: Duration::from_secs(300),
            transfer_patience: Duration::from_secs(60),
            peer_patience: Duration::from_secs(10 + random.below(10)),
            ..host_sim::config(role, pages)
        };
        (config, PoolLimits::shared(pages))
    };
    roles.into_iter().map(&mut worker).collect()
}

/// Host memory that is smaller or larger than the pool, and two tiers that take so few bytes at once that every batch has
/// to wait for its turn.
fn tiers(pages: u32, random: &mut Random) -> HierarchyConfig {
    let tier = |writes| TierConfig { writes, latency: Duration::from_millis(2), bytes_per_second: 1e6 };
    let writes = [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack]
        [random.place(3)];
    let prefetch =
        [PrefetchPolicy::WaitComplete, PrefetchPolicy::Timeout, PrefetchPolicy::BestEffort][random.place(3)];
    HierarchyConfig {
        write: writes,
        write_back_ahead: 4,
        prefetch,
        wait_base: Duration::from_millis(200),
        wait_per_1024_tokens: Duration::from_secs(1),
        longest_wait: Duration::from_secs(3),
        batch_pages: 3,
        read_bytes: 4_000,
        write_bytes: 4_000,
        copy_bytes: 5_000,
        questions: 2,
        queued_writes: 8,
        ..HierarchyConfig::new(pages * 7 % 48 + 4, 1_000, vec![tier(true), tier(random.chance(0.5))])
    }
}

/// Each kind of mishap occurs in two of five scenes, often enough to meet the others. One scene in twenty has none.
fn faults(random: &mut Random, until: Time) -> Faults {
    let none = random.chance(0.05);
    let mut rate = |most: f64| {
        let (there, share) = (random.chance(0.4), random.unit());
        if there && !none { most * share } else { 0.0 }
    };
    Faults {
        loss: rate(0.4),
        repeat: rate(0.3),
        flip: rate(0.1),
        death: rate(0.01),
        decode_death: rate(0.01),
        disconnect: rate(0.01),
        executor: rate(0.05),
        news: rate(0.3),
        flush: rate(0.01),
        tier: rate(0.2),
        missing: 0.0,
        copy: rate(0.1),
        partition: rate(0.01),
        freeze: rate(0.006),
        slow: rate(0.01),
        clock: rate(0.004),
        write: rate(0.05),
        stream: rate(0.01),
        wipe: rate(0.004),
        decode_executor: rate(0.03),
        notice: 0.0,
        staged: random.unit(),
        read_early: random.unit(),
        more_deaths: random.below(3) as u32,
        late_draw: 0.0,
        until: Some(until),
    }
}
