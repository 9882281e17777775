//! The world around two schedulers, under a virtual clock and one seed.

mod clients;
mod faults;
mod network;
mod rooms;
mod storage;
mod transfer;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use host_core::layer_groups::LayerGroups;
use host_core::message::Message;
use host_core::request::Request;
use host_core::{Action, Event, Instance, Role, Room, Time};

pub use super::memory::answer_to;
use super::memory::{LAYERS, mix};
use super::sliding::Sliding;
use clients::Client;
pub use faults::{Faults, Outcome};
use rooms::{Arrival, OpenRoom};
use storage::{Batch as TierBatch, Storage};
use transfer::Landing;
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

/// Something under way that happens at its time.
enum Pending {
    Deliver {
        to: Instance,
        from: Instance,
        floor: u64,
        message: Message,
    },
    Land(Box<Landing>),
    /// Decode copies what arrived into its pages.
    Copy(Box<Arrival>),
    /// Decode looks whether a room that it gave up is still copied.
    Close(Room),
    /// A worker has computed so many layers of a batch.
    Layers {
        at: Instance,
        batch: u64,
        layers: u32,
    },
    Settle {
        at: Instance,
        event: Event,
    },
    /// Prefill hears the handshake.
    Handshake {
        prefill: Instance,
        floor: u64,
    },
    /// Decode hears the answer.
    Connected {
        prefill: Instance,
    },
    Fence {
        at: Instance,
        peer: Instance,
        session: u64,
    },
    Cancel(Room),
    /// A query, a copy, a read or a write goes on, or ends.
    Below {
        at: Instance,
        batch: TierBatch,
    },
    Submit {
        to: Instance,
        request: Request,
    },
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

    fn happen(&mut self, what: Pending) {
        match what {
            Pending::Submit { to, request } => {
                let gone = self.clients.get(&request.room).is_none_or(|client| client.ended.is_some());
                let not_here = self.aggregated && to != DECODE;
                if !gone && !not_here {
                    let prefill =
                        (to == DECODE && !self.aggregated).then(|| request.prefill.clone()).flatten();
                    self.handle(to, Event::Submit(Request { prefill, ..request }));
                }
            }
            Pending::Cancel(room) => {
                if let Some(client) = self.clients.get_mut(&room)
                    && client.ended.is_none()
                {
                    client.ended = Some(false);
                    self.handle(self.prefill.instance, Event::Cancel(room));
                    self.handle(DECODE, Event::Cancel(room));
                }
            }
            Pending::Deliver { to, from, floor, message } => {
                self.handle(to, Event::Message { from, floor, message });
            }
            Pending::Land(landing) => self.land(*landing),
            Pending::Copy(arrival) => self.copy(&arrival),
            Pending::Close(room) => self.closed(room),
            Pending::Layers { at, batch, layers } => {
                let Some(worker) = self.worker(at) else { return };
                if let Some((_, current)) = worker.batch.as_ref().filter(|(_, current)| current.id == batch) {
                    worker.memory.compute(current, worker.layers, layers);
                    worker.layers = worker.layers.max(layers);
                }
                // The news may get lost, or come when the batch is over.
                if !self.random.chance(0.2) {
                    self.handle(at, Event::LayersDone { batch, layers });
                }
            }
            Pending::Settle { at, event } => self.handle(at, event),
            Pending::Handshake { prefill, floor } => self.shake_hands(prefill, floor),
            Pending::Connected { prefill } => self.connected(prefill),
            Pending::Below { at, batch } => self.below(at, batch),
            Pending::Fence { at, peer, session } => self.fence(at, peer, session),
        }
    }

    fn act(&mut self, at: Instance, actions: Vec<Action>) {
        for action in actions {
            self.trace.push(format!("{:?} {at:?} {action:?}", self.now));
            match action {
                Action::Run(batch) => {
                    let takes = self.soon(20);
                    let due = self.now.after(takes);
                    let group = batch.layer_group;
                    for layers in (1..=LAYERS).filter(|layers| group > 0 && layers.is_multiple_of(group)) {
                        // Every now and then later than the batch itself.
                        let after = takes * layers * (4 + self.random.below(6) as u32) / (6 * LAYERS);
                        self.schedule(after, Pending::Layers { at, batch: batch.id, layers });
                    }
                    if let Some(worker) = self.worker(at) {
                        assert!(worker.batch.is_none(), "two batches at once");
                        worker.batch = Some((due, batch));
                        worker.layers = 0;
                    }
                }
                Action::Send { to, floor, message } => self.post(at, to, floor, &message),
                Action::Connect { peer, floor } => {
                    // What is left of an earlier connection is fenced before the peer is called.
                    self.cut();
                    let after = self.soon(50);
                    self.schedule(after, Pending::Handshake { prefill: peer.instance, floor });
                }
                Action::Fence { peer, session } => {
                    let after = self.soon(100);
                    self.schedule(after, Pending::Fence { at, peer, session });
                }
                Action::Write(write) => {
                    let after = self.soon(400);
                    let landing = self.begin(write, at);
                    self.schedule(after, Pending::Land(Box::new(landing)));
                }
                Action::CancelWrite(_) => {}
                Action::OpenRoom(opening) => self.open(&opening),
                Action::CloseRoom { room } => self.close(room),
                Action::ForgetRoom { room } => self.forget(room),
                Action::Verify { room, attempt, pages, aux_slot } => {
                    self.verify(at, (room, attempt), &pages, aux_slot);
                }
                Action::Emit { room, token } => {
                    if let Some(client) = self.clients.get_mut(&room) {
                        client.tokens.push(token.token);
                    }
                }
                Action::Finish { room, .. } => {
                    if at == DECODE {
                        self.end(room, true);
                    }
                }
                Action::Fail { room, .. } => {
                    self.end(room, false);
                    // The router gives the other leg up.
                    let other = if at == DECODE { self.prefill.instance } else { DECODE };
                    let after = self.soon(20);
                    self.schedule(after, Pending::Settle { at: other, event: Event::Cancel(room) });
                }
                Action::Cache(events) => {
                    let Some(worker) = self.worker(at) else { continue };
                    events.iter().for_each(|event| worker.log.record(event));
                }
                Action::Tier(action) => self.begin_below(at, action),
                Action::PromptReady { .. } => {}
            }
        }
    }

    pub fn trace(&self) -> Vec<String> {
        self.trace.clone()
    }
}
