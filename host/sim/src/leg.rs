//! One worker whose other side is the test: the test says what peers, transfer, executor and tiers do, event by event.

mod peer;
mod tiers;

use std::collections::BTreeMap;
use std::time::Duration;

use host_core::hierarchy::TierAction;
use host_core::message::{Body, Message, Reserve};
use host_core::pool::PoolLimits;
use host_core::radix::CacheEvent;
use host_core::request::{Failure, Request};
use host_core::scheduler::{PageWrite, Stats};
use host_core::{
    Action, Batch, Config, Event, Instance, PageId, Role, Room, Scheduler, Sequence, SequenceOutput, Time,
    Undrawn,
};

use crate::fixture::{self, outputs};

/// The peer: the worker on the other side.
pub const PEER: Instance = Instance(77);
/// The token that every sequence draws, unless [`Leg::draw`] says otherwise.
pub const DRAWN: u32 = 9;

/// One worker, and its outputs.
///
/// Every event goes through [`after`](Self::after) or [`hear`](Self::hear), which audit the worker.
#[derive(Debug)]
pub struct Leg {
    /// The worker.
    pub scheduler: Scheduler,
    config: Config,
    /// The time, which passes only when the test lets it.
    pub now: Time,
    last_message: u64,
    /// Rooms' prompts, for aux rows.
    prompts: BTreeMap<Room, Vec<u32>>,
    /// The token that a sequence draws, given the length of its prompt.
    pub draw: fn(&Sequence, usize) -> u32,
    /// The batch that is to be computed.
    pub batch: Option<Batch>,
    /// The last reserve of each room, and its attempt.
    pub reserves: BTreeMap<Room, (u32, Reserve)>,
    /// All messages, repeats included.
    pub sent: Vec<Message>,
    /// Verifications that the worker requested and that are not answered: attempt and pages.
    pub verifying: BTreeMap<Room, (u32, Vec<PageId>)>,
    /// Writes that have not settled.
    pub writes: Vec<PageWrite>,
    /// Rooms that the transfer threads know, with the attempt.
    pub open: BTreeMap<Room, u32>,
    /// Whether the transfer threads close rooms at once.
    pub closes: bool,
    /// Rooms to be closed.
    pub closing: Vec<Room>,
    /// Changes of the cache, where the configuration asks for them.
    pub cache_events: Vec<CacheEvent>,
    /// Actions to be done in offload tiers.
    pub tier_actions: Vec<TierAction>,
    /// Rooms whose prompts have complete KV, in this order.
    pub begun: Vec<Room>,
    /// Tokens that clients received.
    pub emitted: BTreeMap<Room, Vec<u32>>,
    /// Tokens of prompts whose log probabilities clients received, with their positions.
    pub scored: BTreeMap<Room, Vec<(u32, u32)>>,
    /// Requests that were answered, in this order.
    pub finished: Vec<Room>,
    /// Requests that failed.
    pub failed: BTreeMap<Room, Failure>,
    /// Transfers that were given up because they made no progress.
    pub stalled: Vec<Room>,
    /// Peers that the worker fenced.
    pub fences: Vec<Instance>,
}

impl Leg {
    /// A worker that is connected to [`PEER`], unless it needs no peer, with one pool for all its pages.
    #[must_use]
    pub fn with(config: Config) -> Self {
        let limits = PoolLimits::shared(config.pages);
        Self::with_limits(config, limits)
    }

    /// Like [`with`](Self::with), with a pool whose components have limits of their own.
    #[must_use]
    pub fn with_limits(config: Config, limits: PoolLimits) -> Self {
        let alone = config.role == Role::Aggregated;
        let mut leg = Self::opened(config, limits);
        if !alone {
            leg.event(Event::PeerReady { peer: PEER, floor: 0, session: 1 });
        }
        leg
    }

    /// A worker without a connection to a peer.
    #[must_use]
    pub fn unconnected(config: Config) -> Self {
        let limits = PoolLimits::shared(config.pages);
        Self::opened(config, limits)
    }

    fn opened(config: Config, limits: PoolLimits) -> Self {
        Self {
            scheduler: Scheduler::with_pages(config.clone(), limits, None),
            config,
            now: Time::default(),
            last_message: 0,
            prompts: BTreeMap::new(),
            draw: |_, _| DRAWN,
            batch: None,
            reserves: BTreeMap::new(),
            sent: Vec::new(),
            verifying: BTreeMap::new(),
            writes: Vec::new(),
            open: BTreeMap::new(),
            closes: true,
            closing: Vec::new(),
            cache_events: Vec::new(),
            tier_actions: Vec::new(),
            begun: Vec::new(),
            emitted: BTreeMap::new(),
            scored: BTreeMap::new(),
            finished: Vec::new(),
            failed: BTreeMap::new(),
            stalled: Vec::new(),
            fences: Vec::new(),
        }
    }

    /// A request as [`submit`](Self::submit) makes it: of a decode worker, with [`PEER`] as its prefill worker.
    #[must_use]
    pub fn request(&self, room: u64, prompt: &[u32], count: u32) -> Request {
        let prefill = if self.config.role == Role::Decode { fixture::peer(PEER) } else { None };
        Request { prefill, ..fixture::request(room, prompt, count) }
    }

    /// Submits a request, and lets the worker decide.
    pub fn submit(&mut self, room: u64, prompt: &[u32], count: u32) {
        self.send(self.request(room, prompt, count));
    }

    /// Submits a request that the test has made, and lets the worker decide.
    pub fn send(&mut self, request: Request) {
        self.event(Event::Submit(request));
    }

    /// Submits a request, without a decision.
    pub fn enqueue(&mut self, room: u64, prompt: &[u32], count: u32) {
        self.hear(Event::Submit(self.request(room, prompt, count)));
    }

    /// Handles one event and makes one decision.
    pub fn event(&mut self, event: Event) {
        self.events([event]);
    }

    /// Handles some events and makes one decision.
    pub fn events(&mut self, events: impl IntoIterator<Item = Event>) {
        let mut actions = Vec::new();
        for event in events {
            self.take(event, &mut actions);
        }
        self.scheduler.tick(self.now, &mut actions);
        self.note(actions);
    }

    /// Handles one event and makes one decision. Returns what is to be done.
    pub fn after(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.take(event, &mut actions);
        self.scheduler.tick(self.now, &mut actions);
        self.note(actions.clone());
        actions
    }

    /// Handles one event, without a decision.
    pub fn hear(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.take(event, &mut actions);
        self.note(actions);
    }

    fn take(&mut self, event: Event, actions: &mut Vec<Action>) {
        if let Event::Submit(request) = &event {
            self.prompts.insert(request.room, request.prompt.clone());
        }
        if let Event::RoomClosed { room } = &event {
            self.closing.retain(|other| other != room);
        }
        self.scheduler.handle(self.now, event, actions);
    }

    /// Lets time pass and makes a decision.
    pub fn wait(&mut self, time: Duration) {
        self.now = self.now.after(time);
        self.events([]);
    }

    /// Lets a millisecond pass, makes one decision, and computes its batch without another decision.
    pub fn step(&mut self) -> Option<Batch> {
        self.wait(Duration::from_millis(1));
        let batch = self.batch.take()?;
        let outputs = self.outputs(&batch);
        self.hear(Event::BatchDone(outputs));
        Some(batch)
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
                Action::Tier(action) => self.tier_actions.push(action),
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
                Action::PromptReady { room, .. } => self.begun.push(room),
                Action::EmitScores { room, first, tokens } => {
                    let scored = self.scored.entry(room).or_default();
                    scored.extend((first..).zip(tokens.iter().map(|token| token.token)));
                }
                Action::Emit { room, token } => self.emitted.entry(room).or_default().push(token.token),
                Action::Finish { room, .. } => self.finished.push(room),
                Action::Fail { room, failure } => {
                    assert!(self.failed.insert(room, failure).is_none(), "{room:?} fails twice");
                }
                Action::Stalled { room, .. } => self.stalled.push(room),
                Action::Fence { peer, .. } => self.fences.push(peer),
                Action::Connect { .. } | Action::CancelWrite(_) => {}
            }
        }
        self.scheduler.audit();
        if self.closes && !self.closing.is_empty() {
            self.close_rooms();
        }
    }

    /// Reports that no thread copies any more into the pages of rooms that were given up.
    pub fn close_rooms(&mut self) {
        for room in std::mem::take(&mut self.closing) {
            self.event(Event::RoomClosed { room });
        }
    }

    /// The results of a batch.
    #[must_use]
    pub fn outputs(&self, batch: &Batch) -> Vec<SequenceOutput> {
        outputs(batch, |sequence| (self.draw)(sequence, self.prompts.get(&sequence.room).map_or(0, Vec::len)))
    }

    /// Computes the pending batch, if there is one, and makes a decision.
    pub fn compute(&mut self) -> bool {
        let Some(batch) = self.batch.take() else { return false };
        let outputs = self.outputs(&batch);
        self.event(Event::BatchDone(outputs));
        true
    }

    /// Computes the pending batch, if there is one, with draws that are too late in some rooms. Then makes a decision.
    pub fn compute_late(&mut self, late: impl Fn(Room) -> bool) -> Option<Batch> {
        let batch = self.batch.take()?;
        let mut outputs = self.outputs(&batch);
        let drawn = outputs.iter_mut().filter(|output| !output.sampled.is_empty());
        for output in drawn.filter(|output| late(output.room)) {
            (output.sampled, output.undrawn) = (Vec::new(), Some(Undrawn::Late));
        }
        self.event(Event::BatchDone(outputs));
        Some(batch)
    }

    /// Computes until no batch is pending.
    pub fn compute_all(&mut self) {
        while self.compute() {}
    }

    /// The worker's counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.scheduler.stats()
    }

    /// Checks that every page is free or cached, and that no request locks a cached page.
    ///
    /// # Panics
    /// When a page or a request is left over.
    pub fn at_rest(&self) {
        let stats = self.stats();
        assert_eq!((stats.pool.held, stats.pool.quarantined, stats.locked_pages), (0, 0, 0));
        assert_eq!((stats.queued, stats.active, stats.quarantined_rooms), (0, 0, 0));
        assert!(self.open.is_empty(), "rooms that were not forgotten: {:?}", self.open);
    }
}
