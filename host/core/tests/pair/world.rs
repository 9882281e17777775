//! The world around two schedulers, under a virtual clock and one seed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use host_core::aux_row::{AUX_ROW_BYTES, AuxRow};
use host_core::integrity::Found;
use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::message::Message;
use host_core::radix::{NamespaceKey, Policy};
use host_core::request::{PeerRef, Request};
use host_core::scheduler::PageWrite;
use host_core::{Action, Batch, Config, Event, Instance, PageId, Role, Room, Sampling, Scheduler, Time};

pub use super::memory::answer_to;
use super::memory::{LAYERS, Memory, PAGE_TOKENS, VOCABULARY, mix};

const DECODE: Instance = Instance(1_000_000);

/// How likely each mishap is: per message, per write, per request, per step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub loss: f64,
    pub repeat: f64,
    pub abort: f64,
    pub flip: f64,
    pub death: f64,
    pub disconnect: f64,
    /// Per batch of the prefill worker: it fails, some of its layers computed.
    pub executor: f64,
    /// Not a mishap: prefill sends pages in groups of layers.
    pub layers: bool,
    /// Not a mishap: answers are long, and little is kept ready for them, so that requests lose their pages again.
    pub pressure: bool,
    /// Not a mishap: a target for the time between tokens lets few decode at once.
    pub paced: bool,
    /// Not a mishap: both workers keep their pages for requests that begin alike.
    pub cache: bool,
    /// Not one either: somebody empties both caches.
    pub flush: f64,
    /// Nor this: half of the requests have the same prompt.
    pub alike: bool,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub finished: u64,
    pub failed: u64,
    pub quarantined: u64,
    pub deaths: u64,
    pub disconnects: u64,
    pub fences_failed: u64,
    pub integrity_failures: u64,
    pub messages_repeated: u64,
    pub messages_stale: u64,
    pub cached_tokens: u64,
    pub evicted_pages: u64,
    pub layer_parts_sent: u64,
    pub batches_failed: u64,
    pub shared_transfers: u64,
    pub flushed_in_use: u64,
    pub retractions: u64,
    pub restored_tokens: u64,
    pub recomputed_tokens: u64,
}

impl Outcome {
    pub fn add(&mut self, other: Outcome) {
        self.finished += other.finished;
        self.failed += other.failed;
        self.quarantined += other.quarantined;
        self.deaths += other.deaths;
        self.disconnects += other.disconnects;
        self.fences_failed += other.fences_failed;
        self.integrity_failures += other.integrity_failures;
        self.messages_repeated += other.messages_repeated;
        self.messages_stale += other.messages_stale;
        self.cached_tokens += other.cached_tokens;
        self.evicted_pages += other.evicted_pages;
        self.layer_parts_sent += other.layer_parts_sent;
        self.batches_failed += other.batches_failed;
        self.shared_transfers += other.shared_transfers;
        self.flushed_in_use += other.flushed_in_use;
        self.retractions += other.retractions;
        self.restored_tokens += other.restored_tokens;
        self.recomputed_tokens += other.recomputed_tokens;
    }
}

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

/// The rule that cuts every chunk into so many groups of layers.
fn groups(count: u32) -> LayerGroups {
    let shape = KvShape {
        pages: 1,
        heads: 1,
        layers: LAYERS as usize,
        page_tokens: PAGE_TOKENS,
        head_dim: 1,
        dtype: Dtype::F32,
    };
    let layout = KvLayout::new(shape, KvOrder::PageLayerHeadKvTokenDim);
    LayerGroups::new(Wish::Groups(count), &layout).unwrap_or_else(|error| panic!("{error}"))
}

/// The words that a write carries, page by page.
fn carried(memory: &Memory, write: &PageWrite) -> Vec<Vec<u64>> {
    let pages = write.source.iter();
    pages.map(|page| memory.words(*page, write.layers.start, write.layers.end).to_vec()).collect()
}

/// One worker process: its scheduler and its memory.
struct Worker {
    instance: Instance,
    scheduler: Scheduler,
    memory: Memory,
    aux: Vec<[u8; AUX_ROW_BYTES]>,
    batch: Option<(Time, Batch)>,
    /// Layers of the batch that are computed.
    layers: u32,
    sent_digests: BTreeMap<(Room, u32), Vec<u64>>,
}

impl Worker {
    fn new(instance: Instance, role: Role, pages: u32, faults: Faults, layer_groups: LayerGroups) -> Self {
        let config = Config {
            role,
            pages,
            page_tokens: PAGE_TOKENS as u32,
            max_tokens: 64,
            vocabulary: VOCABULARY,
            chunk_tokens: 7,
            radix_cache: faults.cache.then_some(Policy::Lru),
            cache_events: false,
            identity: host_core::radix::PageHash([0; 32]),
            reserved_decode_tokens: if faults.pressure { 2 } else { 1_000 },
            target_itl: faults.paced.then_some(Duration::from_millis(12)),
            seed: 5,
            layer_groups,
            max_batch: 3,
            max_running: 5,
            max_queued: 100,
            max_attempts: 3,
            bootstrap_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(600),
            peer_patience: Duration::from_secs(20),
        };
        Self {
            instance,
            scheduler: Scheduler::new(config),
            memory: Memory::new(pages),
            aux: vec![[0; AUX_ROW_BYTES]; 5],
            batch: None,
            layers: 0,
            sent_digests: BTreeMap::new(),
        }
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
    Submit {
        to: Instance,
        request: Request,
    },
}

/// A write on its way.
struct Landing {
    write: PageWrite,
    from: Instance,
    /// Of the pages that it completes.
    digests: Vec<u64>,
    /// What it carries, where that was read when the write was begun. Else it is read when it lands.
    words: Option<Vec<Vec<u64>>>,
}

struct Client {
    request: Request,
    tokens: Vec<u32>,
    /// Whether the decode (or aggregated) leg ended, and how.
    ended: Option<bool>,
}

pub struct World {
    random: Random,
    faults: Faults,
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
    /// Each page and layer that was sent, by prefill worker, room and attempt.
    sent: BTreeMap<(Instance, Room, u32), BTreeSet<(PageId, u32)>>,
    layer_groups: LayerGroups,
    outcome: Outcome,
    trace: Vec<String>,
}

impl World {
    pub fn new(seed: u64, faults: Faults) -> Self {
        let mut random = Random(seed);
        let pages = |random: &mut Random| 17 + random.below(if faults.pressure { 4 } else { 20 }) as u32;
        let (prefill_pages, decode_pages) = (pages(&mut random), pages(&mut random));
        let layer_groups = match faults.layers {
            true => groups(2 + (seed % 4) as u32),
            false => LayerGroups::off(LAYERS),
        };
        let mut world = Self {
            prefill: Worker::new(Instance(1), Role::Prefill, prefill_pages, faults, layer_groups),
            decode: Worker::new(DECODE, Role::Decode, decode_pages, faults, layer_groups),
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
            layer_groups,
            outcome: Outcome::default(),
            trace: Vec::new(),
        };
        for _ in 0..8 {
            let at = world.random.below(if faults.pressure || faults.alike { 300 } else { 3_000 });
            world.add_request(at);
        }
        world
    }

    pub fn aggregated(seed: u64, faults: Faults) -> Self {
        let mut world = Self::new(seed, faults);
        world.aggregated = true;
        world.decode = Worker::new(DECODE, Role::Aggregated, 20, faults, world.layer_groups);
        world
    }

    fn add_request(&mut self, at_ms: u64) {
        let room = Room(self.random.next());
        let (length, longest) = if self.faults.pressure { (20, 44) } else { (40, 12) };
        let length = 1 + self.random.below(length) as usize;
        let request = Request {
            room,
            prompt: self.prompt(length),
            max_new_tokens: 1 + self.random.below(longest) as u32,
            stop_tokens: Vec::new(),
            ignore_stop: false,
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
            prefill: Some(PeerRef { instance: self.prefill.instance, address: String::new() }),
            namespace: self.namespace(),
            no_cache: self.random.chance(0.1),
        };
        let later = |random: &mut Random| Duration::from_millis(at_ms + random.below(300));
        if self.random.chance(self.faults.abort) {
            let at = Duration::from_millis(at_ms + self.random.below(1_500));
            self.schedule(at, Pending::Cancel(room));
        }
        for to in [self.prefill.instance, DECODE] {
            let at = later(&mut self.random);
            self.schedule(at, Pending::Submit { to, request: request.clone() });
        }
        self.clients.insert(room, Client { request, tokens: Vec::new(), ended: None });
    }

    /// A third of the requests are another tenant's.
    fn namespace(&mut self) -> NamespaceKey {
        let salt = if self.random.chance(0.33) { "tenant" } else { "" };
        NamespaceKey { salt: salt.into(), ..NamespaceKey::default() }
    }

    /// Half of the prompts begin like one of three others.
    fn prompt(&mut self, length: usize) -> Vec<u32> {
        if self.faults.alike && self.random.chance(0.5) {
            return (0..23).collect();
        }
        let mut own = Random(self.random.next());
        let base = self.random.below(6);
        let shared = if base < 3 { self.random.below(length as u64 + 1) as usize } else { 0 };
        let mut alike = Random(base);
        let alike = (0..shared).map(|_| alike.below(u64::from(VOCABULARY)) as u32).collect::<Vec<u32>>();
        let rest = (shared..length).map(|_| own.below(u64::from(VOCABULARY)) as u32);
        alike.into_iter().chain(rest).collect()
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
            || !self.prefill.scheduler.is_idle()
            || !self.decode.scheduler.is_idle();
        if !busy {
            return false;
        }
        if self.random.chance(self.faults.death) && self.outcome.deaths == 0 {
            self.kill_prefill();
        }
        if self.random.chance(self.faults.disconnect) {
            self.drop_connection();
        }
        if self.random.chance(self.faults.flush) {
            let flushed = [&mut self.prefill, &mut self.decode].map(|worker| worker.scheduler.flush_cache());
            self.outcome.flushed_in_use +=
                flushed.iter().flatten().map(|flushed| flushed.in_use as u64).sum::<u64>();
        }
        let deadlines = [self.prefill.scheduler.next_deadline(), self.decode.scheduler.next_deadline()];
        let batches = [&self.prefill.batch, &self.decode.batch].map(|batch| batch.as_ref().map(|b| b.0));
        let first = self.pending.keys().next().map(|key| key.0);
        let next = deadlines.into_iter().chain(batches).chain([first]).flatten().min();
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
            Pending::Land(landing) => self.land(&landing),
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
            Pending::Handshake { prefill, floor } => {
                if self.prefill.instance != prefill {
                    let message = "connection refused".to_owned();
                    return self.handle(DECODE, Event::PeerRefused { peer: prefill, message });
                }
                self.last_session += 1;
                let session = self.last_session;
                self.prefill_link = Some(session);
                // What the old session still decides between the new connection and the news of it must not go out
                // over the new one.
                self.tick(true);
                self.handle(prefill, Event::PeerReady { peer: DECODE, floor, session });
                let after = self.soon(50);
                self.schedule(after, Pending::Connected { prefill });
            }
            Pending::Connected { prefill } => {
                if self.prefill.instance != prefill {
                    let message = "connection refused".to_owned();
                    return self.handle(DECODE, Event::PeerRefused { peer: prefill, message });
                }
                self.last_session += 1;
                let session = self.last_session;
                self.decode_link = Some(session);
                let after = self.soon(20);
                let event = Event::PeerReady { peer: prefill, floor: 0, session };
                self.schedule(after, Pending::Settle { at: DECODE, event });
            }
            Pending::Fence { at, peer, session } => {
                let event = if self.fence_fails > 0 {
                    self.fence_fails -= 1;
                    self.outcome.fences_failed += 1;
                    Event::FenceFailed { peer, session }
                } else {
                    let ours = if at == DECODE { self.decode_link } else { self.prefill_link };
                    if ours == Some(session) {
                        self.cut();
                    }
                    Event::PeerLost { peer, session, fenced: true }
                };
                // The news takes its time; a new connection may be there first.
                let after = self.soon(200);
                self.schedule(after, Pending::Settle { at, event });
            }
        }
    }

    /// Ends the connection in both directions: writes in flight land nowhere and settle with an error. Each side that
    /// did not ask for it hears of it.
    fn cut(&mut self) {
        let prefill = self.prefill.instance;
        let ends = [(DECODE, prefill, self.decode_link.take()), (prefill, DECODE, self.prefill_link.take())];
        for (at, peer, session) in ends {
            if let Some(session) = session {
                let after = self.soon(50);
                let event = Event::PeerLost { peer, session, fenced: true };
                self.schedule(after, Pending::Settle { at, event });
            }
        }
    }

    fn kill_prefill(&mut self) {
        self.outcome.deaths += 1;
        let dead = self.prefill.instance;
        let pages = self.prefill.scheduler.stats().pool;
        let total = (pages.free + pages.held + pages.cached + pages.quarantined) as u32;
        let (instance, groups) = (Instance(dead.0 + 1), self.layer_groups);
        self.prefill = Worker::new(instance, Role::Prefill, total, self.faults, groups);
        // A dead process writes no more; the backend tells us so.
        self.prefill_link = None;
        if let Some(session) = self.decode_link.take() {
            let after = self.soon(50);
            let event = Event::PeerLost { peer: dead, session, fenced: true };
            self.schedule(after, Pending::Settle { at: DECODE, event });
        }
        // The router sees the prefill legs break and gives the decode legs up.
        let rooms: Vec<Room> =
            self.clients.iter().filter(|(_, c)| c.ended.is_none()).map(|(r, _)| *r).collect();
        for room in rooms {
            let after = self.soon(100);
            self.schedule(after, Pending::Cancel(room));
        }
        for _ in 0..3 {
            let at = 200 + self.random.below(1_000);
            self.add_request(at);
        }
    }

    /// One side sees the connection break; late writes may still land until the fence is proven.
    fn drop_connection(&mut self) {
        let prefill = self.prefill.instance;
        let at_decode = self.random.chance(0.7);
        let (at, peer, session) = match at_decode {
            true => (DECODE, prefill, self.decode_link),
            false => (prefill, DECODE, self.prefill_link),
        };
        let Some(session) = session else { return };
        self.outcome.disconnects += 1;
        self.fence_fails = self.random.below(3);
        self.handle(at, Event::PeerLost { peer, session, fenced: false });
    }

    /// Reads what a write carries, now or when it lands, and digests the pages that it completes.
    fn begin(&mut self, write: PageWrite, from: Instance) -> Landing {
        let sent = self.sent.entry((from, write.notice.room, write.notice.attempt)).or_default();
        for (page, layer) in write.target.iter().flat_map(|page| write.layers.clone().map(|l| (*page, l))) {
            assert!(sent.insert((page, layer)), "layer {layer} of {page:?} is sent twice: {write:?}");
        }
        if let Some((row, _, _)) = &write.aux {
            assert_eq!(sent.len(), (row.pages * LAYERS) as usize, "not all layers of all pages were sent");
        }
        let completes = write.layers.end == LAYERS;
        assert_eq!(write.notice.pages as usize, if completes { write.source.len() } else { 0 });
        assert!(!write.source.is_empty() || write.notice.last, "an empty part that is not the last");
        let memory = &self.prefill.memory;
        let complete = write.source.iter().filter(|_| completes);
        let digests = complete.map(|page| memory.digest(*page)).collect();
        let words = self.random.chance(0.5).then(|| carried(memory, &write));
        Landing { write, from, digests, words }
    }

    fn land(&mut self, landing: &Landing) {
        let Landing { write, from, digests, words } = landing;
        let from = *from;
        let cut = self.prefill.instance != from || self.prefill_link != Some(write.session);
        let error = cut.then(|| "the connection is gone".to_owned());
        self.handle(from, Event::Written { tag: write.tag, error });
        if cut || self.prefill.instance != from {
            return;
        }
        for (room, pages) in self.decode.scheduler.holdings() {
            let foreign = room != write.notice.room && write.target.iter().any(|page| pages.contains(page));
            assert!(!foreign, "a write for {:?} landed on pages of {room:?}", write.notice.room);
        }
        let words = words.clone().unwrap_or_else(|| carried(&self.prefill.memory, write));
        for (target, words) in write.target.iter().zip(&words) {
            self.decode.memory.put(*target, write.layers.start, words);
        }
        if self.random.chance(self.faults.flip)
            && let Some(target) = write.target.first()
        {
            let bit = self.random.below(64);
            self.decode.memory.flip(*target, write.layers.start, bit);
        }
        let key = (write.notice.room, write.notice.attempt);
        let sent = self.prefill.sent_digests.entry(key).or_default();
        let place = sent.len().max(write.notice.sequence as usize + 1);
        sent.resize(place, 0);
        sent[write.notice.sequence as usize] = digests.iter().copied().fold(0, mix);
        if let Some((row, _, slot)) = &write.aux {
            // Parts land in order here, so the digests of all of them are known with the last.
            let row = AuxRow { digest: sent.iter().copied().fold(0, mix), ..row.clone() };
            self.decode.aux[*slot as usize] = row.encode();
            let parts = sent.len();
            self.decode.sent_digests.insert(key, vec![parts as u64]);
        }
        let after = self.soon(20);
        let event = Event::Arrived(write.notice);
        // The parts' page counts are what the digest below is cut by.
        let counts =
            self.decode.sent_digests.entry((write.notice.room, write.notice.attempt | 1 << 31)).or_default();
        counts.resize(counts.len().max(write.notice.sequence as usize + 1), 0);
        counts[write.notice.sequence as usize] = u64::from(write.notice.pages);
        self.schedule(after, Pending::Settle { at: DECODE, event });
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
                    // One room's parts land in order: the fake backend digests them as they land.
                    let earliest = self.last_landing(at, write.notice.room);
                    let after = earliest.since(self.now) + self.soon(400);
                    let landing = self.begin(write, at);
                    self.schedule(after, Pending::Land(Box::new(landing)));
                }
                Action::CancelWrite(_) => {}
                Action::Verify { room, attempt, pages, aux_slot } => {
                    let counts =
                        self.decode.sent_digests.get(&(room, attempt | 1 << 31)).cloned().unwrap_or_default();
                    let mut rest = pages.as_slice();
                    let digest = counts.iter().fold(0, |whole, count| {
                        let (part, after) = rest.split_at(*count as usize);
                        rest = after;
                        mix(whole, part.iter().map(|page| self.decode.memory.digest(*page)).fold(0, mix))
                    });
                    let found = Found { aux_row: self.decode.aux[aux_slot as usize], digest: Some(digest) };
                    let after = self.soon(30);
                    let event = Event::Verified { room, attempt, found: Box::new(found) };
                    self.schedule(after, Pending::Settle { at, event });
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
                Action::PromptReady { .. } | Action::Cache(_) => {}
            }
        }
    }

    fn last_landing(&self, from: Instance, room: Room) -> Time {
        let lands = self.pending.iter().filter_map(|((at, _), what)| match what {
            Pending::Land(landing) if landing.from == from && landing.write.notice.room == room => Some(*at),
            _ => None,
        });
        lands.max().unwrap_or(self.now)
    }

    fn post(&mut self, from: Instance, to: Instance, floor: u64, message: &Message) {
        let copies = if self.random.chance(self.faults.loss) {
            0
        } else if self.random.chance(self.faults.repeat) {
            2
        } else {
            1
        };
        for _ in 0..copies {
            let most = if self.random.chance(self.faults.repeat) { 5_000 } else { 50 };
            let after = self.soon(most);
            self.schedule(after, Pending::Deliver { to, from, floor, message: message.clone() });
        }
    }

    fn end(&mut self, room: Room, finished: bool) {
        let Some(client) = self.clients.get_mut(&room) else { return };
        if client.ended.is_some() {
            return;
        }
        client.ended = Some(finished);
        if finished {
            let expected = answer_to(&client.request.prompt, client.request.max_new_tokens as usize);
            assert_eq!(client.tokens, expected, "wrong answer in {room:?}");
        }
    }

    fn check_rest(&self) {
        for worker in [&self.prefill, &self.decode] {
            let stats = worker.scheduler.stats();
            assert_eq!(
                (stats.pool.held, stats.pool.quarantined),
                (0, 0),
                "{:?} leaks pages",
                worker.instance
            );
            assert_eq!((stats.queued, stats.active, stats.unanswered, stats.locked_pages), (0, 0, 0, 0));
        }
        for (room, client) in &self.clients {
            assert!(client.ended.is_some(), "{room:?} never ended");
        }
    }

    pub fn outcome(&self) -> Outcome {
        let stats = [self.prefill.scheduler.stats(), self.decode.scheduler.stats()];
        let count = |ended| self.clients.values().filter(|client| client.ended == Some(ended)).count() as u64;
        Outcome {
            finished: count(true),
            failed: count(false),
            integrity_failures: stats[1].integrity_failures,
            messages_repeated: stats.iter().map(|s| s.messages_repeated).sum(),
            messages_stale: stats.iter().map(|s| s.messages_stale).sum(),
            cached_tokens: stats.iter().map(|s| s.cached_tokens).sum(),
            evicted_pages: stats.iter().map(|s| s.evicted_pages).sum(),
            layer_parts_sent: stats.iter().map(|s| s.layer_parts_sent).sum(),
            shared_transfers: stats.iter().map(|s| s.shared_transfers).sum(),
            retractions: stats[1].retractions,
            restored_tokens: stats[1].restored_tokens,
            recomputed_tokens: stats[1].recomputed_tokens,
            ..self.outcome
        }
    }

    pub fn trace(&self) -> Vec<String> {
        self.trace.clone()
    }
}
