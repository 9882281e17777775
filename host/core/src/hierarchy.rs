//! The offload tiers: host memory (L2) and storage (L3).
//!
//! # Where a page is
//!
//! | | what | named by | known to |
//! | --- | --- | --- | --- |
//! | L1 | a page of the pool | [`PageId`] | the [radix tree](crate::radix) |
//! | L2 | a slot of the host pool | [`HostSlot`] | [`HostPool`], by the page's name |
//! | L3 | an object in a storage tier | [`PageHash`] | the tier, when asked |
//!
//! A page's name is its hash in the chain of its tokens, so the offload tiers need no tree: a page may be in any of L1,
//! L2 and L3 or in several, and a prefix may be spread over them. Only L1 has the radix tree. A request gets the
//! longest unbroken run of pages behind its prefix in L1 that L2 and L3 have.
//!
//! Window parts are pages of the pool under [names](PageHash::window_part) of their own (`windows.rs`).
//!
//! Like pages, slots exist on every rank under the same number, each rank's slot holding its KV heads. The core speaks of whole
//! pages. The worker stores one object per page and KV head (key: SHA-256 of name and head), laid out layer, K/V, token,
//! dimension. Workers of any number of ranks and any layout of their pools find each other's objects. Replicated heads are
//! stored once. An object is large enough to pay for a call (with 16 tokens, 640 KiB for Llama-70B and 112 KiB for Qwen3-0.6B).
//!
//! # Ways
//!
//! ```text
//!        save                       write
//!  L1 ─────────► L2 slot (filling) ───────► L3      after insertion, after hits, or before eviction
//!     ◄─────────         ▲          ───────►
//!        load            └───────────read────      while a request waits, or while decode is sent the rest
//! ```
//!
//! Storage reads and writes slots only, so a tier that hangs can hold up slots and nothing else. Pages of the pool are
//! touched only by copies of our own ranks, which end like batches do.
//!
//! # The interface
//!
//! [`TierAction`]s go out, [`TierEvent`]s come back, each pair under a [`TierTag`] that is never used again.
//!
//! | action | is to be answered by |
//! | --- | --- |
//! | [`Copy`](TierAction::Copy) | [`Ended`](TierEvent::Ended) for every page once, when no rank touches page or slot for it any more |
//! | [`Query`](TierAction::Query) | [`Answered`](TierEvent::Answered). An answer that comes too late does no harm |
//! | [`Read`](TierAction::Read), [`Write`](TierAction::Write) | [`Ended`](TierEvent::Ended) for every page once, when the tier touches the slot no more |
//! | [`Cancel`](TierAction::Cancel) | nothing: its pages still end |
//!
//! Pages of one batch may end in any order and in several events. With several ranks a page has ended when it has ended
//! on all of them, and is [`Done`](PageEnd::Done) only if all of them say so. The worker splits a batch that is larger
//! than a plugin takes.
//!
//! # No request fails because of a tier
//!
//! A request goes on as if the offload tiers were empty if they have nothing for it, or if its restore fails, brings
//! too few pages, hangs, or would take longer than doing without. Prefill and aggregated workers then compute the
//! pages, and decode asks prefill ([`crate::scheduler`]). The limit follows from the times of earlier reads, copies,
//! computing and transfers ([`HierarchyConfig`] has the values assumed at first), or from a given [`CostModel`]. A tier
//! that misses deadlines rests, for longer each time, and is not asked meanwhile.

mod audit;
mod config;
mod cost_model;
mod exchange;
mod fetch;
mod host_pool;
mod linear_fit;
mod loads;
mod patience;
mod questions;
mod reads;
mod restores;
mod saves;
mod stats;
mod window_items;
mod windows;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub use config::{CostModel, HierarchyConfig, PrefetchPolicy, TierConfig, WritePolicy};
pub use exchange::{Direction, PageEnd, TierAction, TierEvent, TierTag};
pub use host_pool::{FoundSlot, HostCounts, HostPool, HostSlot};
pub use stats::{HierarchyStats, TierStats};

use crate::ids::{PageId, Room, Time};
use crate::pool::QuarantinedPages;
use crate::radix::{PageHash, PrefixLock};
use cost_model::Trial;
use fetch::Fetch;
pub(crate) use fetch::Wanted;
use linear_fit::LinearFit;
pub(crate) use restores::Progress;
pub(crate) use windows::End;

/// Keeps the pages of a save from being used for something else.
#[derive(Debug)]
pub(crate) enum Keep {
    /// The pages are cached, and locked.
    Lock(PrefixLock),
    /// The pages were evicted, and become free when the copy has ended.
    Evicted(QuarantinedPages),
}

/// A batch of copies, reads or writes that is under way.
#[derive(Debug)]
struct Op {
    work: Work,
    /// Slots by place in the batch. `None` once ended.
    slots: Vec<Option<HostSlot>>,
    left: usize,
    since: Time,
    /// When the batch is given up. `None` for copies, and once it was given up.
    until: Option<Time>,
    /// Bytes of this batch, and for loads and reads also of those that were under way when it began.
    carried: u64,
}

#[derive(Debug)]
enum Work {
    Save { keep: Option<Keep> },
    Load { room: Room, first: Vec<usize> },
    Read { tier: usize },
    Write { tier: usize },
}

/// One storage tier.
#[derive(Debug)]
struct Tier {
    config: TierConfig,
    /// Seconds of a read, by the bytes that had to be carried until it ended.
    reading: LinearFit,
    /// Seconds until a question is answered.
    answering: LinearFit,
    /// Questions for the next tick: request and item.
    questions: Vec<(Room, usize)>,
    /// Questions under way.
    queries: BTreeMap<TierTag, questions::Query>,
    /// Slots to be read into.
    to_read: VecDeque<(PageHash, HostSlot)>,
    reading_bytes: u64,
    /// Pinned slots to be written.
    to_write: VecDeque<(PageHash, HostSlot)>,
    writing_bytes: u64,
    /// Deadlines missed since the tier last completed something.
    strikes: u32,
    rests_until: Option<Time>,
    stats: TierStats,
}

/// A save that waits for its turn.
#[derive(Debug)]
pub(crate) struct Queued {
    pub keep: Keep,
    pages: Vec<(PageId, HostSlot)>,
}

/// L2 and L3 of one worker: what is there, which requests wait for it, and what is under way.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    config: HierarchyConfig,
    page_tokens: usize,
    host: HostPool,
    tiers: Vec<Tier>,
    last_tag: u64,
    ops: BTreeMap<TierTag, Op>,
    fetches: BTreeMap<Room, Fetch>,
    /// Times at which a fetch is looked at even if nothing happens before.
    deadlines: BTreeSet<(Time, Room)>,
    /// The pages that wait for a slot to be filled: the request, and which of its pages it is.
    waiters: BTreeMap<HostSlot, Vec<(Room, usize)>>,
    /// Restores with slots that are ready and not being loaded.
    loadable: VecDeque<Room>,
    /// Pages of all restores that are not loaded.
    unloaded: usize,
    /// Requests whose restores have changed.
    changed: BTreeSet<Room>,
    saves: VecDeque<Queued>,
    released: Vec<Keep>,
    loading_bytes: u64,
    saving_bytes: u64,
    copying: LinearFit,
    read_trial: Trial,
    load_trial: Trial,
    /// Most tokens of prompts in a step.
    step_tokens: usize,
    /// Seconds of a step, by tokens of prompts.
    computing: LinearFit,
    /// Tokens of prompts that admitted requests still have to compute.
    backlog: usize,
    /// Place, in order of arrival, of the latest request that was admitted.
    passed: u64,
    /// Seconds of a transfer from asking to arrival, by pages.
    transferring: LinearFit,
    stats: HierarchyStats,
}

/// A deadline is `PATIENCE` times the expected time, plus `GRACE`.
const PATIENCE: f64 = 4.0;
const GRACE: Duration = Duration::from_millis(50);

impl Hierarchy {
    /// `step_tokens`: most tokens of prompts in a step, above 0.
    pub(crate) fn new(config: HierarchyConfig, page_tokens: u32, step_tokens: u32) -> Self {
        config.check();
        let page = config.page_bytes as f64;
        let sizes = [page, page * f64::from(config.batch_pages)];
        let given = |time: fn(&CostModel) -> Duration, units: f64| {
            let seconds = config.costs.as_ref().map(|costs| time(costs).as_secs_f64());
            seconds
                .map_or_else(LinearFit::default, |seconds| LinearFit::given(Duration::ZERO, seconds / units))
        };
        let tiers = config.tiers.iter().map(|tier| Tier {
            config: tier.clone(),
            reading: match config.costs {
                Some(costs) => LinearFit::given(costs.read, costs.read_page.as_secs_f64() / page),
                None => LinearFit::assumed(tier.latency, 1.0 / tier.bytes_per_second, sizes),
            },
            answering: match config.costs {
                Some(costs) => LinearFit::given(costs.read, 0.0),
                None => LinearFit::assumed(tier.latency, 0.0, [1.0, 1.0]),
            },
            questions: Vec::new(),
            queries: BTreeMap::new(),
            to_read: VecDeque::new(),
            reading_bytes: 0,
            to_write: VecDeque::new(),
            writing_bytes: 0,
            strikes: 0,
            rests_until: None,
            stats: TierStats::default(),
        });
        Self {
            tiers: tiers.collect(),
            host: HostPool::new(config.host_slots),
            page_tokens: page_tokens as usize,
            step_tokens: step_tokens as usize,
            last_tag: 0,
            ops: BTreeMap::new(),
            fetches: BTreeMap::new(),
            deadlines: BTreeSet::new(),
            waiters: BTreeMap::new(),
            loadable: VecDeque::new(),
            unloaded: 0,
            changed: BTreeSet::new(),
            saves: VecDeque::new(),
            released: Vec::new(),
            loading_bytes: 0,
            saving_bytes: 0,
            copying: given(|costs| costs.copy_page, page),
            read_trial: Trial::new(config.costs.is_none()),
            load_trial: Trial::new(config.costs.is_none()),
            computing: given(|costs| costs.compute_token, 1.0),
            backlog: 0,
            passed: 0,
            transferring: given(|costs| costs.send_page, 1.0),
            stats: HierarchyStats::default(),
            config,
        }
    }

    pub(crate) fn config(&self) -> &HierarchyConfig {
        &self.config
    }

    /// Handles an event. Returns the load that ended with it, if one did.
    pub(crate) fn handle(&mut self, now: Time, event: TierEvent) -> Option<TierTag> {
        match event {
            TierEvent::Answered { tag, found } => {
                self.answered(now, tag, &found);
                None
            }
            TierEvent::Ended { tag, pages } => self.ended(now, tag, &pages),
        }
    }

    fn ended(&mut self, now: Time, tag: TierTag, pages: &[(u32, PageEnd)]) -> Option<TierTag> {
        let Some(mut op) = self.ops.remove(&tag) else { unreachable!("{tag:?} ended, and never was") };
        // When a page fails, a request that waits for several goes on with those that are there, so successful pages
        // come first. The order is reversed so that the front of a prefix is evicted last.
        let mut pages: Vec<&(u32, PageEnd)> = pages.iter().rev().collect();
        pages.sort_by_key(|(_, end)| *end != PageEnd::Done);
        for (place, end) in pages {
            let Some(slot) = op.slots.get_mut(*place as usize).and_then(Option::take) else {
                unreachable!("page {place} of {tag:?} ended twice")
            };
            op.left -= 1;
            match &op.work {
                Work::Save { .. } => self.page_saved(slot, *end),
                Work::Load { room, first } => self.page_loaded(*room, first[*place as usize], slot, *end),
                Work::Read { tier } => self.page_read(*tier, slot, *end),
                Work::Write { tier } => self.page_written(*tier, slot, *end),
            }
        }
        if op.left > 0 {
            self.ops.insert(tag, op);
            return None;
        }
        let bytes = self.bytes(op.slots.len());
        let took = now.since(op.since);
        let seconds = took.as_secs_f64();
        match op.work {
            Work::Save { keep } => {
                self.stats.save_times.add(took);
                self.saving_bytes -= bytes;
                self.released.extend(keep);
            }
            Work::Load { room, .. } => {
                self.stats.load_times.add(took);
                self.loading_bytes -= bytes;
                if self.copying.expected_more(op.carried as f64, seconds) {
                    self.load_trial.is_due_from(now);
                }
                self.copying.learn_clamped(op.carried as f64, seconds);
                self.changed.insert(room);
                return Some(tag);
            }
            Work::Read { tier } => self.batch_read(now, tier, &op, bytes),
            Work::Write { tier } => {
                self.tiers[tier].stats.write_times.add(took);
                self.tiers[tier].writing_bytes -= bytes;
            }
        }
        None
    }

    /// Gives up work that takes too long.
    pub(crate) fn expire(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        self.expire_ops(now, actions);
        self.expire_questions(now);
        self.expire_fetches(now);
    }

    /// Begins as much work as the limits allow.
    pub(crate) fn start(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        self.ask(now, actions);
        self.start_reads(now, actions);
        self.start_loads(now, actions);
        self.start_saves(now, actions);
        self.start_writes(now, actions);
    }

    /// When [`expire`](Self::expire) or [`start`](Self::start) is next needed if no event comes before.
    pub(crate) fn next_deadline(&self) -> Option<Time> {
        let ops = self.ops.values().filter_map(|op| op.until);
        let fetches = self.deadlines.first().map(|(at, _)| *at);
        let tiers = self.tiers.iter().flat_map(|tier| {
            let rest = tier.rests_until.filter(|_| !tier.to_write.is_empty());
            tier.queries.values().filter_map(|query| query.until).chain(rest)
        });
        ops.chain(fetches).chain(tiers).min()
    }

    /// Requests whose restores have changed since the last call.
    pub(crate) fn take_changed(&mut self) -> BTreeSet<Room> {
        std::mem::take(&mut self.changed)
    }

    /// Takes the locks and pages that ended saves kept.
    pub(crate) fn take_released(&mut self) -> Vec<Keep> {
        std::mem::take(&mut self.released)
    }

    /// Learns how long a step with so many tokens of prompts took.
    pub(crate) fn computed(&mut self, tokens: usize, time: Duration) {
        self.computing.learn(tokens as f64, time.as_secs_f64());
    }

    /// Learns how long so many pages took from the request for them to their arrival.
    pub(crate) fn transferred(&mut self, pages: usize, time: Duration) {
        self.transferring.learn(pages as f64, time.as_secs_f64());
    }

    /// Forgets all pages in host memory. Storage keeps its own. Reads and copies under way go on for the requests that wait
    /// for them.
    pub(crate) fn clear(&mut self) {
        for slot in self.host.clear() {
            self.tell_waiters(slot, false);
        }
        for tier in 0..self.tiers.len() {
            for (_, slot) in std::mem::take(&mut self.tiers[tier].to_write) {
                self.host.unpin(slot);
            }
            self.fail_queued_reads(tier);
        }
        for queued in std::mem::take(&mut self.saves) {
            self.drop_save(queued);
        }
    }

    /// Whether nothing is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.ops.is_empty() && self.saves.is_empty() && self.tiers.iter().all(|tier| tier.to_write.is_empty())
    }

    fn bytes(&self, pages: usize) -> u64 {
        self.config.page_bytes * pages as u64
    }

    fn next_tag(&mut self) -> TierTag {
        self.last_tag += 1;
        TierTag(self.last_tag)
    }

    /// Tells the waiting requests that a slot is filled (`good`), or will not be.
    fn tell_waiters(&mut self, slot: HostSlot, good: bool) {
        for (room, page) in self.waiters.remove(&slot).unwrap_or_default() {
            self.filled(room, page, slot, good);
        }
    }
}
