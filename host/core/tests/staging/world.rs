//! Prefill and decode workers of several ranks around real senders and rings, under a virtual clock and one seed.
//!
//! A block (one head of one layer of one page) is eight bytes that identify it. Rooms go through the steps of real schedulers. A
//! room is opened, sent in parts, verified and committed, or it is aborted, drained and forgotten, or a fence cuts it off.

mod deaths;
mod rooms;
mod wire;
mod workers;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use host_core::heads::{HeadLane, head_lanes};
use host_core::staging::message::{Answer, Ask};
use host_core::staging::{Key, PeerRank, Span, Target, Written};
use host_core::transfer::Tag;
use host_core::{Instance, PageId, Room, Time};
use host_sim::{Agenda, Random, scramble};

use rooms::{Side, Story};
use workers::{DecodeWorker, PrefillWorker};

pub const BLOCK: u32 = 8;
const LONGEST: Duration = Duration::from_secs(300);

/// Faults, and how often they occur.
#[derive(Clone, Copy, Default)]
pub struct Faults {
    /// Asks and answers that get lost.
    pub loss: f64,
    /// Asks and answers that come again, up to seconds later.
    pub repeats: f64,
    /// Rooms whose writes take seconds.
    pub slow: f64,
    /// Rooms that either side gives up, at any time.
    pub aborts: f64,
    /// Attempts that arrive damaged, so that decode asks for the next.
    pub damage: f64,
    /// Workers that die.
    pub deaths: u64,
    /// Writes that fail.
    pub errors: f64,
    /// Asks and answers that no worker sent.
    pub invented: u64,
}

#[derive(Default, Debug)]
pub struct Outcome {
    pub rooms: u64,
    pub completed: u64,
    pub staged: u64,
    pub repeats: u64,
}

/// A write under way.
#[derive(Clone)]
pub struct Flight {
    from: (usize, Instance, u8),
    to: (usize, Instance, u8),
    written: Written,
}

pub enum Pending {
    Ask {
        from: (usize, Instance, u8),
        to: (usize, Instance, u8),
        ask: Ask,
    },
    Answer {
        from: (usize, Instance, u8),
        to: (usize, Instance, u8),
        answer: Answer,
    },
    Land {
        flight: Flight,
    },
    Notice {
        flight: Flight,
    },
    Settle {
        flight: Flight,
        error: Option<String>,
    },
    SenderTurn {
        prefill: usize,
        instance: Instance,
        rank: usize,
    },
    RingTurn {
        decode: usize,
        instance: Instance,
        rank: usize,
    },
    Scattered {
        decode: usize,
        instance: Instance,
        rank: usize,
        scatter: host_core::staging::Scatter<Key>,
    },
    Begin(Room),
    Part {
        room: Room,
        attempt: u32,
        sequence: u32,
    },
    Attempt {
        room: Room,
        attempt: u32,
    },
    /// One side is told that the other has given up.
    Abort(Room),
    PrefillFailed(Room),
    Drained(Room),
    Die {
        side: Side,
        worker: usize,
    },
    Fence {
        side: Side,
        instance: Instance,
    },
    Invent,
}

pub struct World {
    pub seed: u64,
    pub random: Random,
    pub faults: Faults,
    pub heads: u16,
    pub layers: u16,
    pub prefill: Vec<PrefillWorker>,
    pub decode: Vec<DecodeWorker>,
    pub stories: BTreeMap<Room, Story>,
    agenda: Agenda<Pending>,
    pub tags: BTreeMap<Tag, (Room, u32, u32)>,
    pub last_tag: u64,
    pub last_instance: u64,
    pub cut: BTreeSet<(Instance, Instance, u64)>,
    /// Decode workers that prefill knows to be gone.
    pub lost: BTreeSet<Instance>,
    pub outcome: Outcome,
    /// Writes that were begun, each piece at most once.
    pub written: BTreeSet<(Instance, u8, Instance, u8, Key)>,
}

impl World {
    pub fn new(seed: u64, faults: Faults) -> Self {
        let mut random = Random::new(scramble(seed));
        let (heads, layers) = (random.within(1..7) as u16, random.within(1..5) as u16);
        let mut world = Self {
            seed,
            faults,
            heads,
            layers,
            prefill: Vec::new(),
            decode: Vec::new(),
            stories: BTreeMap::new(),
            agenda: Agenda::default(),
            tags: BTreeMap::new(),
            last_tag: 0,
            last_instance: 0,
            cut: BTreeSet::new(),
            lost: BTreeSet::new(),
            outcome: Outcome::default(),
            written: BTreeSet::new(),
            random,
        };
        for _ in 0..world.random.within(1..3) {
            let ranks = world.random.within(1..5) as usize;
            let bytes = world.random.within(1024..8192);
            let instance = world.new_instance();
            world.prefill.push(PrefillWorker::new(instance, ranks, bytes));
        }
        for _ in 0..world.random.within(1..4) {
            let ranks = world.random.within(1..5) as usize;
            let bytes = world.random.within(1024..8192);
            let instance = world.new_instance();
            world.decode.push(DecodeWorker::new(instance, ranks, bytes, layers));
        }
        for number in 0..world.random.within(2..9) {
            world.invent_room(number);
        }
        for _ in 0..faults.deaths {
            let side = if world.random.chance(0.5) { Side::Prefill } else { Side::Decode };
            let count = if side == Side::Prefill { world.prefill.len() } else { world.decode.len() };
            let worker = world.random.below(count as u64) as usize;
            let at = world.random.micros(0..800_000);
            world.after(at, Pending::Die { side, worker });
        }
        for _ in 0..faults.invented {
            let at = world.random.micros(0..2_000_000);
            world.after(at, Pending::Invent);
        }
        world
    }

    pub fn new_instance(&mut self) -> Instance {
        self.last_instance += 1;
        Instance(self.last_instance)
    }

    pub fn after(&mut self, wait: Duration, what: Pending) {
        self.agenda.after(wait, what);
    }

    pub fn lanes(&self, prefill: usize, decode: usize) -> Vec<HeadLane> {
        head_lanes(usize::from(self.heads), self.prefill[prefill].ranks(), self.decode[decode].ranks())
    }

    pub fn run(mut self) -> Outcome {
        let seed = self.seed;
        loop {
            let timer = self.prefill.iter().filter_map(PrefillWorker::next_deadline).min();
            let Some(next) = self.agenda.next().into_iter().chain(timer).min() else { break };
            assert!(next <= Time(LONGEST), "seed {seed}: {:?}", self.stuck());
            self.agenda.go_to(next);
            match self.agenda.take_due() {
                Some(what) => self.happen(what),
                None => self.tick_senders(),
            }
            self.audit();
        }
        for story in self.stories.values() {
            assert!(story.ended(), "seed {seed}: {:?}", self.stuck());
        }
        for worker in &self.prefill {
            worker.assert_idle(seed);
            self.outcome.repeats += worker.repeats();
        }
        for worker in &self.decode {
            worker.assert_idle(seed);
            self.outcome.staged += worker.staged();
        }
        self.outcome.rooms = self.stories.len() as u64;
        self.outcome
    }

    fn stuck(&self) -> Vec<String> {
        let open = self.stories.iter().filter(|(_, story)| !story.ended());
        open.map(|(room, story)| format!("{room:?} {story:?}")).collect()
    }

    fn happen(&mut self, what: Pending) {
        match what {
            Pending::Ask { from, to, ask } => self.hear_ask(from, to, &ask),
            Pending::Answer { from, to, answer } => self.hear_answer(from, to, &answer),
            Pending::Land { flight } => self.land(&flight),
            Pending::Notice { flight } => self.notice(&flight),
            Pending::Settle { flight, error } => self.settle(&flight, error),
            Pending::SenderTurn { prefill, instance, rank } => self.sender_turn(prefill, instance, rank),
            Pending::RingTurn { decode, instance, rank } => self.ring_turn(decode, instance, rank),
            Pending::Scattered { decode, instance, rank, scatter } => {
                self.scattered(decode, instance, rank, scatter);
            }
            Pending::Begin(room) => self.begin(room),
            Pending::Part { room, attempt, sequence } => self.send_part(room, attempt, sequence),
            Pending::Attempt { room, attempt } => self.begin_attempt(room, attempt),
            Pending::Abort(room) => self.hear_abort(room),
            Pending::PrefillFailed(room) => self.abort(room),
            Pending::Drained(room) => self.drained(room),
            Pending::Die { side, worker } => self.die(side, worker),
            Pending::Fence { side, instance } => self.fence(side, instance),
            Pending::Invent => self.invent(),
        }
    }
}

/// Cuts a lane's bytes of some pages and layers into pieces of at most `limit` bytes: by pages, then by layers, then by heads.
pub fn cut(pages: Range<u32>, layers: Range<u16>, heads: Range<u16>, limit: u64) -> Vec<Span> {
    let blocks = (limit / u64::from(BLOCK)).max(1) as u32;
    let (per_layer, layer_count) = (u32::from(heads.end - heads.start), u32::from(layers.end - layers.start));
    let per_page = per_layer * layer_count;
    let head_step = per_layer.min(blocks);
    let layer_step = (blocks / per_layer).clamp(1, layer_count);
    let page_step = (blocks / per_page).max(1);
    let steps = |range: Range<u32>, step: u32| {
        (range.start..range.end).step_by(step as usize).map(move |at| at..(at + step).min(range.end))
    };
    let mut pieces = Vec::new();
    for pages in steps(pages, page_step) {
        for layers in steps(u32::from(layers.start)..u32::from(layers.end), layer_step) {
            for heads in steps(u32::from(heads.start)..u32::from(heads.end), head_step) {
                let bytes = pages.len() as u32 * layers.len() as u32 * heads.len() as u32 * BLOCK;
                let short = |range: &Range<u32>| range.start as u16..range.end as u16;
                pieces.push(Span {
                    pages: pages.clone(),
                    layers: short(&layers),
                    heads: short(&heads),
                    bytes,
                });
            }
        }
    }
    pieces
}

pub fn block(room: Room, page: u32, layer: u16, head: u16) -> u64 {
    scramble(room.0 ^ scramble(u64::from(page) << 32 | u64::from(layer) << 16 | u64::from(head)))
}

/// The blocks of a span in their order within a slot.
pub fn blocks(span: &Span) -> impl Iterator<Item = (u32, u16, u16)> {
    let (layers, heads) = (span.layers.clone(), span.heads.clone());
    span.pages.clone().flat_map(move |page| {
        let layers = layers.clone();
        heads.clone().flat_map(move |head| layers.clone().map(move |layer| (page, layer, head)))
    })
}

pub fn target(to: (usize, Instance, u8), session: u64) -> Target {
    Target { peer: to.1, session, rank: to.2 }
}

pub fn rank_of(party: (usize, Instance, u8)) -> PeerRank {
    PeerRank { peer: party.1, rank: party.2 }
}

pub type Pages = Vec<PageId>;
