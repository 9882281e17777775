//! Routers that follow workers' caches through a hostile network. Messages are lost, repeated and reordered, feeds
//! overflow, workers and routers restart, and routers join late. Once the faults end, every router's index holds exactly
//! what the trees hold.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

use std::collections::{BTreeMap, BTreeSet};

use host_core::pool::PagePool;
use host_core::radix::{
    CacheChanges, EventSink, Namespace, NamespaceKey, PageHash, Policy, RadixTree, TreeConfig, TreeEvent,
};
use host_core::routing::{
    Applied, BlockKey, EventLog, KvEvent, PrefixIndex, Replay, SnapshotPart, WorkerSlot,
};
use host_sim::Random;

const PAGES: u32 = 60;
const PAGE_TOKENS: usize = 2;
/// Events that a log keeps: few, so that routers are often further behind than the log reaches.
const REMEMBERED: usize = 40;
const IDENTITY: PageHash = PageHash([3; 32]);
const SEEDS: u64 = if cfg!(debug_assertions) { 300 } else { 5000 };

/// One instance of a worker.
struct Worker {
    tree: RadixTree,
    pool: PagePool,
    namespaces: Vec<Namespace>,
    changes: CacheChanges,
    log: EventLog,
    /// Whether changes were lost between the tree and the log, which then needs the whole cache.
    overflowed: bool,
}

impl Worker {
    fn new() -> Self {
        let mut tree = RadixTree::new(&TreeConfig {
            page_tokens: PAGE_TOKENS as u32,
            policy: Policy::Lru,
            identity: IDENTITY,
            max_namespaces: 4,
            seed: 1,
        });
        let namespaces = ["", "adapter"].map(|extra| {
            let key = NamespaceKey { extra_key: extra.into(), ..NamespaceKey::default() };
            tree.namespace(&key).unwrap()
        });
        Self {
            tree,
            pool: PagePool::new(PAGES),
            namespaces: namespaces.to_vec(),
            changes: CacheChanges::new(true),
            log: EventLog::new(PAGES, PAGE_TOKENS as u32, REMEMBERED),
            overflowed: false,
        }
    }

    /// Makes one random change to the cache, and records it in the log unless it is lost on the way.
    fn live(&mut self, random: &mut Random) {
        match random.below(20) {
            0 => {
                let flushed = self.tree.flush(&mut self.changes);
                self.pool.release_cached(flushed);
            }
            1..4 => {
                let evicted = self.tree.evict(random.below(10) as usize, &mut self.changes);
                self.pool.release_cached(evicted);
            }
            _ => self.insert(random),
        }
        let lost = random.chance(0.05);
        if let Some(changes) = self.changes.take() {
            match lost || self.overflowed {
                true => self.overflowed = true,
                false => changes.iter().for_each(|change| self.log.record(change)),
            }
        }
        if self.overflowed && random.chance(0.50) {
            self.tell_everything();
        }
    }

    fn tell_everything(&mut self) {
        let mut all = CacheChanges::new(true);
        self.tree.contents(&mut all);
        all.take().unwrap().iter().for_each(|change| self.log.record(change));
        self.overflowed = false;
    }

    fn insert(&mut self, random: &mut Random) {
        let namespace = self.namespaces[random.below(2) as usize];
        // Few different tokens, so that prompts share prefixes and diverge within nodes.
        let tokens: Vec<u32> = (0..random.below(24)).map(|_| random.below(2) as u32).collect();
        let lock = self.tree.lock(namespace, &tokens);
        let missing = tokens.len() / PAGE_TOKENS - lock.pages();
        let short = missing.saturating_sub(self.pool.counts().free);
        let evicted = self.tree.evict(short, &mut self.changes);
        self.pool.release_cached(evicted);
        let Some(pages) = self.pool.allocate(missing) else { return self.tree.unlock(lock) };
        let inserted = self.tree.insert(&mut self.pool, lock, &tokens, pages, 0, &mut self.changes);
        self.pool.release(inserted.duplicates);
        self.pool.release(inserted.rest);
        self.tree.unlock(inserted.lock);
    }

    /// The names of all pages in the tree, found without the log.
    fn truth(&self) -> BTreeSet<BlockKey> {
        let mut truth = Truth::default();
        self.tree.contents(&mut truth);
        truth.0.values().map(BlockKey::of).collect()
    }
}

#[derive(Default)]
struct Truth(BTreeMap<host_core::PageId, PageHash>);

impl EventSink for Truth {
    fn event(&mut self, _sequence: u64, event: TreeEvent<'_>) {
        let TreeEvent::Stored { seed, parent, pages, tokens, .. } = event else { return };
        let mut name = parent.map_or(seed, |parent| self.0[&parent]);
        for (page, tokens) in pages.iter().zip(tokens.chunks(PAGE_TOKENS)) {
            name = name.next(tokens);
            self.0.insert(*page, name);
        }
    }
}

#[derive(Clone, Debug)]
enum Message {
    Ask { after: u64 },
    Event { number: u64, event: KvEvent },
    Part(SnapshotPart),
}

#[derive(Default)]
struct Router {
    index: PrefixIndex,
    /// Workers' slots in the index, by the worker's instance.
    slots: BTreeMap<u64, WorkerSlot>,
    gaps: u64,
    snapshots: u64,
}

impl Router {
    fn hear(&mut self, life: u64, message: &Message) -> Option<Message> {
        let slot = *self.slots.get(&life)?;
        let applied = match message {
            Message::Event { number, event } => self.index.apply(slot, *number, event),
            Message::Part(part) => {
                self.snapshots += u64::from(part.last);
                self.index.take(slot, part)
            }
            Message::Ask { .. } => return None,
        };
        match applied {
            Applied::Gap => {
                self.gaps += 1;
                Some(Message::Ask { after: self.index.resume(slot)? })
            }
            Applied::TooMany => panic!("{life}: more blocks than pages"),
            Applied::Yes | Applied::Repeat | Applied::Unknown => None,
        }
    }
}

struct World {
    random: Random,
    workers: BTreeMap<u64, Worker>,
    routers: Vec<Router>,
    lives: u64,
    /// The last event number sent, by router and worker's instance. The worker sends the events after it.
    told: BTreeMap<(usize, u64), u64>,
    /// Router, instance of a worker, message.
    wire: Vec<(usize, u64, Message)>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            random: Random::new(seed),
            workers: BTreeMap::new(),
            routers: vec![Router::default(), Router::default()],
            lives: 0,
            told: BTreeMap::new(),
            wire: Vec::new(),
        };
        (0..3).for_each(|_| world.start_worker());
        world
    }

    fn start_worker(&mut self) {
        self.lives += 1;
        self.workers.insert(self.lives, Worker::new());
    }

    fn post(&mut self, router: usize, life: u64, message: Message) {
        if self.random.chance(0.20) {
            return;
        }
        let again = self.random.chance(0.15);
        self.wire.extend(std::iter::repeat_n((router, life, message), 1 + usize::from(again)));
    }

    /// The messages with which a worker answers a router that has applied the events up to `after`.
    fn answer(&mut self, router: usize, life: u64, after: u64) -> Vec<Message> {
        let Some(worker) = self.workers.get(&life) else { return Vec::new() };
        match worker.log.after(after) {
            Replay::Events(events) => {
                self.told.insert((router, life), after + events.len() as u64);
                (after + 1..).zip(events).map(|(number, event)| Message::Event { number, event }).collect()
            }
            Replay::Forgotten => {
                let snapshot = worker.log.snapshot();
                self.told.insert((router, life), snapshot.number);
                // Smaller parts than the live ones, so that there are several.
                let chunks: Vec<_> = snapshot.keys.chunks(7).map(<[BlockKey]>::to_vec).collect();
                let chunks = if chunks.is_empty() { vec![Vec::new()] } else { chunks };
                let parts = chunks.len() as u32;
                let part = |(part, keys)| SnapshotPart {
                    number: snapshot.number,
                    part,
                    last: part + 1 == parts,
                    keys,
                };
                (0..).zip(chunks).map(part).map(Message::Part).collect()
            }
        }
    }

    fn deliver(&mut self) {
        if self.wire.is_empty() {
            return;
        }
        let at = self.random.below(self.wire.len() as u64) as usize;
        let (router, life, message) = self.wire.swap_remove(at);
        if let Message::Ask { after } = message {
            for answer in self.answer(router, life, after) {
                self.post(router, life, answer);
            }
        } else if let Some(ask) = self.routers[router].hear(life, &message) {
            self.post(router, life, ask);
        }
    }

    fn step(&mut self) {
        let router = self.random.below(2) as usize;
        let lives: Vec<u64> = self.workers.keys().copied().collect();
        let life = lives[self.random.below(lives.len() as u64) as usize];
        match self.random.below(200) {
            0 => {
                self.workers.remove(&life);
                self.start_worker();
            }
            1 => self.routers[router] = Router::default(),
            2..8 => self.notice(router),
            8..30 => {
                let slot = self.routers[router].slots.get(&life).copied();
                let after = slot.and_then(|slot| self.routers[router].index.resume(slot));
                if let Some(after) = after {
                    self.post(router, life, Message::Ask { after });
                }
            }
            30..70 => {
                if let Some(after) = self.told.get(&(router, life)).copied() {
                    for message in self.answer(router, life, after) {
                        self.post(router, life, message);
                    }
                }
            }
            70..120 => {
                if let Some(worker) = self.workers.get_mut(&life) {
                    worker.live(&mut self.random);
                }
            }
            _ => self.deliver(),
        }
    }

    /// Tells a router which workers are there.
    fn notice(&mut self, router: usize) {
        let Router { index, slots, .. } = &mut self.routers[router];
        for (_, slot) in slots.extract_if(.., |life, _| !self.workers.contains_key(life)) {
            index.remove_worker(slot);
        }
        for life in self.workers.keys() {
            slots.entry(*life).or_insert_with(|| index.add_worker(u64::from(PAGES)));
        }
    }

    /// Lets all routers catch up with all workers, without faults.
    fn settle(&mut self) {
        for worker in self.workers.values_mut().filter(|worker| worker.overflowed) {
            worker.tell_everything();
        }
        for router in 0..self.routers.len() {
            self.notice(router);
            let slots = self.routers[router].slots.clone();
            for (life, slot) in slots {
                loop {
                    let after = self.routers[router].index.resume(slot).unwrap();
                    let answers = self.answer(router, life, after);
                    if answers.is_empty() {
                        break;
                    }
                    for answer in answers {
                        assert!(self.routers[router].hear(life, &answer).is_none(), "a gap on a good line");
                    }
                }
            }
        }
    }

    fn check(&mut self) {
        for router in &mut self.routers {
            let mut union = BTreeSet::new();
            for (life, worker) in &self.workers {
                worker.tree.audit();
                let truth = worker.truth();
                let slot = router.slots[life];
                assert_eq!(router.index.blocks(slot), truth.len() as u64, "worker {life}");
                for key in &truth {
                    let found = router.index.matches(&[*key])[usize::from(slot.0)];
                    assert_eq!(found, 1, "worker {life} has {key:?}");
                }
                union.extend(truth);
            }
            assert_eq!(router.index.len(), union.len(), "blocks that no worker has");
        }
    }
}

#[test]
fn once_it_is_quiet_every_index_is_the_union_of_the_trees() {
    let (mut gaps, mut snapshots) = (0, 0);
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let mut world = World::new(seed);
        for _ in 0..4 {
            (0..400).for_each(|_| world.step());
            world.settle();
            world.check();
        }
        gaps += world.routers.iter().map(|router| router.gaps).sum::<u64>();
        snapshots += world.routers.iter().map(|router| router.snapshots).sum::<u64>();
    }
    println!("{gaps} gaps, {snapshots} snapshots");
    assert!(gaps > SEEDS && snapshots > SEEDS, "the faults never struck");
}

#[test]
fn a_router_finds_a_prompt_by_hashing_it_itself() {
    let mut worker = Worker::new();
    let tokens = [1, 2, 3, 4, 5, 6];
    let lock = worker.tree.lock(worker.namespaces[1], &tokens);
    let pages = worker.pool.allocate(3).unwrap();
    let inserted = worker.tree.insert(&mut worker.pool, lock, &tokens, pages, 0, &mut worker.changes);
    worker.changes.take().unwrap().iter().for_each(|change| worker.log.record(change));
    let mut index = PrefixIndex::default();
    let slot = index.add_worker(u64::from(PAGES));
    let Replay::Events(events) = worker.log.after(0) else { panic!("it has just begun") };
    for (number, event) in (1..).zip(&events) {
        assert_eq!(index.apply(slot, number, event), Applied::Yes);
    }
    let key = NamespaceKey { extra_key: "adapter".into(), ..NamespaceKey::default() };
    let chain = |key: &NamespaceKey, tokens: &[u32]| {
        index.matches(&BlockKey::chain(&IDENTITY.namespace(key), tokens, PAGE_TOKENS))[0]
    };
    assert_eq!(chain(&key, &tokens), 3);
    assert_eq!(chain(&key, &[1, 2, 3, 4, 9, 9, 5, 6]), 2);
    assert_eq!(chain(&NamespaceKey::default(), &tokens), 0, "another namespace");
    worker.tree.unlock(inserted.lock);
}
