//! The world around two schedulers, under a virtual clock and one seed.

mod actions;
mod clients;
mod faults;
mod network;
mod pending;
mod rooms;
mod storage;
mod transfer;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use host_core::layer_groups::LayerGroups;
use host_core::{Event, Instance, Role, Room, Time};

pub use super::memory::answer_to;
use super::memory::{LAYERS, mix};
use super::sliding::Sliding;
use clients::Client;
pub use faults::{Faults, Outcome};
use pending::Pending;
use rooms::OpenRoom;
use storage::Storage;
use worker::{Worker, groups};

const DECODE: Instance = Instance(1_000_000);

struct Random(u64);

impl Random {
    /// SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0, 0)
    }
    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
    fn chance(&mut self, probability: f64) -> bool {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 <= probability && probability > 0.0
    }
}

pub struct World {
    random: Random,
    faults: Faults,
    sliding: Option<Sliding>,
    now: Time,
    prefill: Worker,
    decode: Worker,
    aggregated: bool,
    pending: BTreeMap<(Time, u64), Pending>,
    order: u64,
    clients: BTreeMap<Room, Client>,
    /// Prefill's connection to decode, by its own count: a write lands only over the one it was given for.
    prefill_link: Option<u64>,
    /// Decode's connection to prefill, by its own count. Cutting it cuts prefill's.
    decode_link: Option<u64>,
    last_session: u64,
    fence_fails: u64,
    /// Each page, by its place in the attempt, and layer that was sent, by prefill worker, room and attempt.
    sent: BTreeMap<(Instance, Room, u32), BTreeSet<(u32, u32)>>,
    /// Decode's rooms that are open.
    rooms: BTreeMap<Room, OpenRoom>,
    /// Attempts that another has taken the place of.
    superseded: BTreeSet<(Room, u32)>,
    layer_groups: LayerGroups,
    /// What all workers write to and read from.
    storage: Storage,
    outcome: Outcome,
    trace: Vec<String>,
}

impl World {
    pub fn new(seed: u64, faults: Faults) -> Self {
        let mut random = Random(seed);
        let sliding =
            faults.window.then(|| if faults.forks { Sliding::few(seed) } else { Sliding::some(seed) });
        // What the longest request needs for its window.
        let window = sliding.map_or(0, Sliding::most_pages);
        let pages = |random: &mut Random| {
            window
                + 17
                + random.below(if faults.pressure {
                    4
                } else if faults.forks {
                    60
                } else {
                    20
                }) as u32
        };
        let (prefill_pages, decode_pages) = (pages(&mut random), pages(&mut random));
        let layer_groups = match faults.layers {
            true => groups(2 + (seed % 4) as u32),
            false => LayerGroups::off(LAYERS),
        };
        let mut world = Self {
            sliding,
            prefill: Worker::new(Instance(1), Role::Prefill, prefill_pages, faults, layer_groups, sliding),
            decode: Worker::new(DECODE, Role::Decode, decode_pages, faults, layer_groups, sliding),
            random,
            faults,
            now: Time::default(),
            aggregated: false,
            pending: BTreeMap::new(),
            order: 0,
            clients: BTreeMap::new(),
            prefill_link: None,
            decode_link: None,
            last_session: 0,
            fence_fails: 0,
            sent: BTreeMap::new(),
            rooms: BTreeMap::new(),
            superseded: BTreeSet::new(),
            layer_groups,
            storage: Storage::default(),
            outcome: Outcome::default(),
            trace: Vec::new(),
        };
        for _ in 0..if faults.forks { 24 } else { 8 } {
            let most = if faults.pressure || faults.alike { 300 } else { 3_000 };
            let at = world.random.below(if faults.forks { 12_000 } else { most });
            world.add_request(at);
        }
        world
    }

    pub fn aggregated(seed: u64, faults: Faults) -> Self {
        let mut world = Self::new(seed, faults);
        world.aggregated = true;
        let pages = if faults.below { 18 + (seed % 4) as u32 } else { 20 };
        let (groups, sliding) = (world.layer_groups, world.sliding);
        let pages = pages + sliding.map_or(0, Sliding::most_pages);
        world.decode = Worker::new(DECODE, Role::Aggregated, pages, faults, groups, sliding);
        world
    }

    fn schedule(&mut self, after: Duration, what: Pending) {
        self.order += 1;
        self.pending.insert((self.now.after(after), self.order), what);
    }

    fn soon(&mut self, most_ms: u64) -> Duration {
        Duration::from_micros(self.random.below(most_ms * 1000))
    }

    /// Runs until nothing is left to do.
    pub fn run(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 200_000, "the world does not come to rest: {:?}", self.decode.scheduler);
        }
        self.check_rest();
    }

    fn step(&mut self) -> bool {
        let busy = !self.pending.is_empty()
            || self.prefill.batch.is_some()
            || self.decode.batch.is_some()
            || !self.prefill.scheduler.is_settled()
            || !self.decode.scheduler.is_settled();
        if !busy {
            return false;
        }
        if self.random.chance(self.faults.death) && self.outcome.deaths == 0 {
            self.kill_prefill();
        }
        if self.random.chance(self.faults.disconnect) {
            self.drop_connection();
        }
        let flush = self.random.chance(self.faults.flush);
        if flush {
            let flushed = [&mut self.prefill, &mut self.decode].map(|worker| worker.scheduler.flush_cache());
            self.outcome.flushed_in_use +=
                flushed.iter().flatten().map(|flushed| flushed.in_use as u64).sum::<u64>();
        }
        let deadlines = [self.prefill.scheduler.next_deadline(), self.decode.scheduler.next_deadline()];
        let batches = [&self.prefill.batch, &self.decode.batch].map(|batch| batch.as_ref().map(|b| b.0));
        let first = self.pending.keys().next().map(|key| key.0);
        let next = deadlines.into_iter().chain(batches).chain([first]).flatten().min();
        // A flush may have ended all that there was to wait for; that it was one is still to be told.
        let next = next.or(flush.then_some(self.now));
        let Some(next) = next else { panic!("nothing will ever happen: {:?}", self.decode.scheduler) };
        self.now = self.now.max(next);
        self.finish_batches();
        while let Some(entry) = self.pending.first_entry() {
            if entry.key().0 > self.now {
                break;
            }
            let what = entry.remove();
            self.happen(what);
        }
        self.tick(true);
        self.tick(false);
        for worker in [&self.prefill, &self.decode] {
            worker.scheduler.audit();
            let next = worker.scheduler.next_deadline();
            assert!(next.is_none_or(|next| next > self.now), "what is due was not done: a worker would spin");
        }
        self.outcome.quarantined += self.decode.scheduler.stats().pool.quarantined as u64;
        true
    }

    fn worker(&mut self, at: Instance) -> Option<&mut Worker> {
        [&mut self.prefill, &mut self.decode].into_iter().find(|worker| worker.instance == at)
    }

    fn handle(&mut self, at: Instance, event: Event) {
        let now = self.now;
        self.trace.push(format!("{now:?} {at:?} {event:?}"));
        let mut actions = Vec::new();
        if let Some(worker) = self.worker(at) {
            worker.scheduler.handle(now, event, &mut actions);
        }
        self.act(at, actions);
    }

    fn tick(&mut self, prefill: bool) {
        let now = self.now;
        let worker = if prefill { &mut self.prefill } else { &mut self.decode };
        let mut actions = Vec::new();
        worker.scheduler.tick(now, &mut actions);
        let at = worker.instance;
        self.act(at, actions);
    }

    fn finish_batches(&mut self) {
        for at in [self.prefill.instance, DECODE] {
            let now = self.now;
            let Some(worker) = self.worker(at) else { continue };
            if worker.batch.as_ref().is_some_and(|(due, _)| *due <= now)
                && let Some((_, batch)) = worker.batch.take()
            {
                if at != DECODE && self.random.chance(self.faults.executor) {
                    self.outcome.batches_failed += 1;
                    self.handle(at, Event::BatchFailed("the model fell over".into()));
                    continue;
                }
                let Some(worker) = self.worker(at) else { continue };
                worker.memory.compute(&batch, worker.layers, LAYERS);
                let outputs = worker.memory.outputs(&batch);
                self.handle(at, Event::BatchDone(outputs));
            }
        }
    }

    pub fn trace(&self) -> Vec<String> {
        self.trace.clone()
    }
}
