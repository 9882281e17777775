//! One worker whose other side is the test: it says what peers, transfer and executor do.

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::aux_row::AuxRow;
use host_core::hierarchy::TierAction;
use host_core::integrity::{Found, LaneSum};
use host_core::message::{Body, Message, Reserve};
use host_core::notice::Notice;
use host_core::pool::PoolLimits;
use host_core::radix::{CacheEvent, NamespaceKey, Policy};
use host_core::request::{Failure, PeerRef, Request};
use host_core::scheduler::{PageWrite, Stats};
use host_core::window::WindowShape;
use host_core::{
    Action, Batch, Config, Event, Instance, PageId, Role, Room, Sampled, Sampling, Scheduler, SequenceOutput,
    Time,
};

/// The worker on the other side.
pub const PEER: Instance = Instance(77);
/// Tokens in a page.
pub const PAGE: usize = 4;
/// Every token that is ever drawn.
pub const DRAWN: u32 = 9;

/// One worker, and what came out of it.
pub struct Leg {
    pub scheduler: Scheduler,
    role: Role,
    window: Option<WindowShape>,
    pub now: Time,
    last_message: u64,
    /// Rooms' prompts, for aux rows.
    prompts: BTreeMap<Room, Vec<u32>>,
    pub batch: Option<Batch>,
    /// The last reserve of each room, and its attempt.
    pub reserves: BTreeMap<Room, (u32, Reserve)>,
    /// All messages, repeats included.
    pub sent: Vec<Message>,
    /// Verifications asked for and not answered.
    pub verifying: BTreeMap<Room, (u32, Vec<PageId>)>,
    /// Writes that have not settled.
    pub writes: Vec<PageWrite>,
    /// Rooms that the transfer threads know, and the attempt.
    pub open: BTreeMap<Room, u32>,
    /// Whether the transfer threads close rooms at once.
    pub closes: bool,
    /// Rooms to be closed.
    pub closing: Vec<Room>,
    /// What was told of the cache, when it is.
    pub cache_events: Vec<CacheEvent>,
    /// What is to be done below the pool.
    pub below: Vec<TierAction>,
    /// Tokens that clients were given.
    pub emitted: BTreeMap<Room, usize>,
    pub finished: Vec<Room>,
    pub failed: BTreeMap<Room, Failure>,
}

/// A worker with pages of [`PAGE`] tokens and a cache.
pub fn config(role: Role, pages: u32) -> Config {
    Config {
        role,
        pages,
        page_tokens: PAGE as u32,
        // One more than has KV: the last token drawn.
        max_tokens: pages * PAGE as u32 + 1,
        vocabulary: 1000,
        chunk_tokens: 8,
        radix_cache: Some(Policy::Lru),
        hierarchy: None,
        cache_events: false,
        identity: host_core::radix::PageHash([0; 32]),
        reserved_decode_tokens: 1_000,
        target_itl: None,
        seed: 3,
        window: None,
        layer_groups: host_core::layer_groups::LayerGroups::off(1),
        max_batch: 64,
        max_running: 64,
        max_queued: 1000,
        max_attempts: 2,
        bootstrap_timeout: Duration::from_secs(10),
        request_timeout: Duration::from_secs(1000),
        peer_patience: Duration::from_secs(5),
    }
}

/// Tokens that are their own numbers.
pub fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

impl Leg {
    pub fn new(role: Role, pages: u32) -> Self {
        Self::with(config(role, pages))
    }

    /// Its peer is connected already, unless it needs none.
    pub fn with(config: Config) -> Self {
        let limits = PoolLimits::shared(config.pages);
        Self::with_limits(config, limits)
    }

    /// The same with a pool that its components divide.
    pub fn with_limits(config: Config, limits: PoolLimits) -> Self {
        let (role, window) = (config.role, config.window);
        let mut leg = Self {
            scheduler: Scheduler::with_pages(config, limits, None),
            role,
            window,
            now: Time::default(),
            last_message: 0,
            prompts: BTreeMap::new(),
            batch: None,
            reserves: BTreeMap::new(),
            sent: Vec::new(),
            verifying: BTreeMap::new(),
            writes: Vec::new(),
            open: BTreeMap::new(),
            closes: true,
            closing: Vec::new(),
            cache_events: Vec::new(),
            below: Vec::new(),
            emitted: BTreeMap::new(),
            finished: Vec::new(),
            failed: BTreeMap::new(),
        };
        if role != Role::Aggregated {
            leg.event(Event::PeerReady { peer: PEER, floor: 0, session: 1 });
        }
        leg
    }

    /// A request as [`submit`](Self::submit) makes it.
    pub fn request(&self, room: u64, prompt: &[u32], count: u32) -> Request {
        let prefill = PeerRef { instance: PEER, address: String::new() };
        Request {
            room: Room(room),
            prompt: prompt.to_vec(),
            max_new_tokens: count,
            stop_tokens: Vec::new(),
            ignore_stop: true,
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
            prefill: (self.role == Role::Decode).then_some(prefill),
            namespace: NamespaceKey::default(),
            no_cache: false,
            names: Vec::new(),
        }
    }

    pub fn submit(&mut self, room: u64, prompt: &[u32], count: u32) {
        self.send(self.request(room, prompt, count));
    }

    pub fn send(&mut self, request: Request) {
        self.prompts.insert(request.room, request.prompt.clone());
        self.event(Event::Submit(request));
    }

    /// One event and one decision.
    pub fn event(&mut self, event: Event) {
        self.events([event]);
    }

    /// Some events and one decision.
    pub fn events(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut actions = Vec::new();
        for event in events {
            self.scheduler.handle(self.now, event, &mut actions);
        }
        self.scheduler.tick(self.now, &mut actions);
        self.note(actions);
    }

    /// Lets time pass, and asks for a decision.
    pub fn wait(&mut self, time: Duration) {
        self.now = self.now.after(time);
        let mut actions = Vec::new();
        self.scheduler.tick(self.now, &mut actions);
        self.note(actions);
    }

    fn note(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Run(batch) => {
                    assert!(self.batch.replace(batch).is_none(), "two batches at once");
                }
                Action::Send { message, .. } => {
                    if let Body::Reserve(reserve) = &message.body {
                        self.reserves.insert(message.room, (message.attempt, reserve.clone()));
                    }
                    self.sent.push(message);
                }
                Action::Verify { room, attempt, pages, .. } => {
                    self.verifying.insert(room, (attempt, pages));
                }
                Action::Write(write) => self.writes.push(write),
                Action::Tier(action) => self.below.push(action),
                Action::OpenRoom(opening) => {
                    let before = self.open.insert(opening.room, opening.attempt);
                    assert!(before.is_none_or(|before| before < opening.attempt), "{opening:?}");
                }
                Action::CloseRoom { room } => {
                    assert!(self.open.contains_key(&room) && !self.closing.contains(&room), "{room:?}");
                    self.closing.push(room);
                }
                Action::ForgetRoom { room } => {
                    let closing = self.closing.contains(&room);
                    assert!(self.open.remove(&room).is_some() && !closing, "{room:?} is forgotten too early");
                }
                Action::Cache(events) => self.cache_events.extend(events),
                Action::Emit { room, .. } => *self.emitted.entry(room).or_default() += 1,
                Action::Finish { room, .. } => self.finished.push(room),
                Action::Fail { room, failure } => {
                    self.failed.insert(room, failure);
                }
                _ => {}
            }
        }
        self.scheduler.audit();
        if self.closes && !self.closing.is_empty() {
            self.close_rooms();
        }
    }

    /// Nothing is copied any more into the pages of rooms that were given up.
    pub fn close_rooms(&mut self) {
        for room in std::mem::take(&mut self.closing) {
            self.event(Event::RoomClosed { room });
        }
    }

    /// The peer says something.
    pub fn message(&mut self, room: u64, attempt: u32, body: Body) {
        self.last_message += 1;
        let message = Message { id: self.last_message, answers: None, room: Room(room), attempt, body };
        self.event(Event::Message { from: PEER, floor: 0, message });
    }

    /// The peer answers the last message of a room that `asked` names.
    pub fn answer(&mut self, room: u64, asked: impl Fn(&Body) -> bool, body: Body) {
        let question = self.sent.iter().rfind(|message| message.room == Room(room) && asked(&message.body));
        let (answers, attempt) = question.map(|message| (message.id, message.attempt)).unwrap();
        self.last_message += 1;
        let id = self.last_message;
        let message = Message { id, answers: Some(answers), room: Room(room), attempt, body };
        self.event(Event::Message { from: PEER, floor: 0, message });
    }

    /// The peer hears everything, so that nothing is repeated.
    pub fn answer_messages(&mut self) {
        for message in std::mem::take(&mut self.sent) {
            let body = match message.body {
                Body::Reserve(_) => Body::Reserved,
                Body::Commit => Body::Committed,
                Body::Abort => Body::Drained,
                Body::PrefillFailed { .. } => Body::PrefillFailedSeen,
                _ => continue,
            };
            self.last_message += 1;
            let (id, room, attempt) = (self.last_message, message.room, message.attempt);
            let answer = Message { id, answers: Some(message.id), room, attempt, body };
            self.event(Event::Message { from: PEER, floor: 0, message: answer });
        }
    }

    /// Prefill has nothing of an aborted room in flight.
    pub fn drained(&mut self, room: u64) {
        self.answer(room, |body| matches!(body, Body::Abort), Body::Drained);
    }

    /// Everything that decode asked for arrives, in one part.
    pub fn arrive(&mut self, room: u64) {
        let (attempt, pages) = self
            .reserves
            .get(&Room(room))
            .map(|(attempt, reserve)| (*attempt, reserve.pages.len() + reserve.window.len()))
            .unwrap();
        let notice = Notice { room: Room(room), attempt, sequence: 0, pages: pages as u32, last: true };
        self.event(Event::Arrived(notice));
    }

    /// The verification finds what it should, or a flipped byte.
    pub fn verified(&mut self, room: u64, intact: bool) {
        self.found(room, intact, DRAWN);
    }

    /// The verification finds an aux row with this first token.
    pub fn found(&mut self, room: u64, intact: bool, token: u32) {
        let (attempt, pages) = self.verifying.remove(&Room(room)).unwrap();
        let row = AuxRow {
            room: Room(room),
            attempt,
            prompt_tokens: self.prompts[&Room(room)].len() as u32,
            cached_tokens: 0,
            pages: pages.len() as u32,
            first: Sampled { token, logprob: None, top: Vec::new() },
        };
        let lanes = Some(vec![LaneSum { source: 0, target: 0, sent: 5, found: if intact { 5 } else { 6 } }]);
        let found = Box::new(Found { aux_row: row.encode(), lanes });
        self.event(Event::Verified { room: Room(room), attempt, found });
    }

    /// A transfer from its first page to the first token.
    pub fn deliver(&mut self, room: u64) {
        self.arrive(room);
        self.verified(room, true);
    }

    /// Computes the batch that is asked for, if one is.
    pub fn compute(&mut self) -> bool {
        let Some(batch) = self.batch.take() else { return false };
        let sampled = Sampled { token: DRAWN, logprob: None, top: Vec::new() };
        let outputs = batch.sequences.iter().map(|sequence| SequenceOutput {
            room: sequence.room,
            sampled: sequence.sample.map(|_| sampled.clone()),
        });
        self.event(Event::BatchDone(outputs.collect()));
        true
    }

    /// Computes until nothing is asked for.
    pub fn compute_all(&mut self) {
        while self.compute() {}
    }

    /// Decode tells a prefill leg where to write, all it asks for behind `prefix` tokens.
    pub fn reserve(&mut self, room: u64, prompt: &[u32], prefix: usize) {
        self.reserve_again(room, prompt, prefix, 1);
    }

    /// The same for a later attempt.
    pub fn reserve_again(&mut self, room: u64, prompt: &[u32], prefix: usize, attempt: u32) {
        let pages = prompt.len().div_ceil(PAGE) - prefix / PAGE;
        let reserve = Reserve {
            pages: (0..pages as u32).map(PageId).collect(),
            decode_prefix_len: prefix as u32,
            prompt_tokens: prompt.len() as u32,
            window: (0..self.tail(prompt)).map(|page| PageId(1_000 + page as u32)).collect(),
            aux_slot: 0,
            namespace: NamespaceKey::default().fingerprint(),
        };
        self.message(room, attempt, Body::Reserve(reserve));
    }

    /// Pages that the window at a prompt's end takes.
    pub fn tail(&self, prompt: &[u32]) -> usize {
        self.window.map_or(0, |shape| shape.tail(prompt.len(), PAGE).len() * shape.parts as usize)
    }

    /// What decode says when it asks for `pages` pages behind `prefix` tokens.
    pub fn span(&self, prompt: &[u32], prefix: u32, pages: u32) -> Reserve {
        Reserve {
            pages: (0..pages).map(PageId).collect(),
            decode_prefix_len: prefix,
            prompt_tokens: prompt.len() as u32,
            window: Vec::new(),
            aux_slot: 0,
            namespace: NamespaceKey::default().fingerprint(),
        }
    }

    /// All writes settle.
    pub fn settle(&mut self) {
        for write in std::mem::take(&mut self.writes) {
            self.event(Event::Written { tag: write.tag, error: None });
        }
    }

    pub fn stats(&self) -> Stats {
        self.scheduler.stats()
    }

    /// Everything is free or cached, and nobody keeps what is cached.
    pub fn at_rest(&self) {
        let stats = self.stats();
        assert_eq!((stats.pool.held, stats.pool.quarantined, stats.locked_pages), (0, 0, 0));
        assert_eq!((stats.queued, stats.active, stats.quarantined_rooms), (0, 0, 0));
        assert!(self.open.is_empty(), "rooms that nobody forgot: {:?}", self.open);
    }
}
