//! The workers: senders and rings with their memory.

use std::collections::BTreeMap;

use host_core::staging::{Geometry, Key, Ring, RingAction, Scatter, Sender, SenderAction};
use host_core::{Instance, PageId, Room, Time};

use super::{BLOCK, Pending, World, block, blocks};

pub struct SenderRank {
    pub sender: Sender,
    pub memory: Vec<u8>,
    turn: bool,
}

pub struct PrefillWorker {
    pub instance: Instance,
    pub bytes: u64,
    pub senders: Vec<SenderRank>,
}

impl PrefillWorker {
    pub fn new(instance: Instance, ranks: usize, bytes: u64) -> Self {
        let rank = || SenderRank { sender: Sender::new(bytes), memory: vec![0; bytes as usize], turn: false };
        Self { instance, bytes, senders: (0..ranks).map(|_| rank()).collect() }
    }

    pub fn ranks(&self) -> usize {
        self.senders.len()
    }

    pub fn next_deadline(&self) -> Option<Time> {
        self.senders.iter().filter_map(|rank| rank.sender.next_deadline()).min()
    }

    pub fn repeats(&self) -> u64 {
        self.senders.iter().map(|rank| rank.sender.stats().repeats).sum()
    }

    pub fn assert_idle(&self, seed: u64) {
        for rank in &self.senders {
            assert!(rank.sender.idle(), "seed {seed}: {:?}", rank.sender);
            assert_eq!(rank.sender.credits(), 0, "seed {seed}");
        }
    }
}

pub struct RingRank {
    pub ring: Ring<Key>,
    pub memory: Vec<u8>,
    pub pool: BTreeMap<(PageId, u16, u16), u64>,
    turn: bool,
}

pub struct DecodeWorker {
    pub instance: Instance,
    pub bytes: u64,
    pub rings: Vec<RingRank>,
    /// The room that owns each page.
    pub owners: BTreeMap<PageId, Room>,
}

impl DecodeWorker {
    pub fn new(instance: Instance, ranks: usize, bytes: u64, layers: u16) -> Self {
        let geometry = Geometry { layers, block_bytes: BLOCK };
        let rank = || RingRank {
            ring: Ring::new(bytes, geometry),
            memory: vec![0; bytes as usize],
            pool: BTreeMap::new(),
            turn: false,
        };
        let rings = (0..ranks).map(|_| rank()).collect();
        Self { instance, bytes, rings, owners: BTreeMap::new() }
    }

    pub fn ranks(&self) -> usize {
        self.rings.len()
    }

    pub fn staged(&self) -> u64 {
        self.rings.iter().map(|rank| rank.ring.stats().bytes).sum()
    }

    /// Pages for a room: the lowest that are free, so that pages change hands often.
    pub fn take_pages(&mut self, room: Room, count: u32) -> Vec<PageId> {
        let free = (0..).map(PageId).filter(|page| !self.owners.contains_key(page));
        let pages: Vec<PageId> = free.take(count as usize).collect();
        self.owners.extend(pages.iter().map(|page| (*page, room)));
        pages
    }

    pub fn assert_idle(&self, seed: u64) {
        assert!(self.owners.is_empty(), "seed {seed}: pages still have owners");
        for rank in &self.rings {
            let stats = rank.ring.stats();
            let (rooms, used, waiting) = (rank.ring.rooms(), stats.bytes_in_use, stats.waiting);
            assert_eq!((rooms, used, waiting), (0, 0, 0), "seed {seed}");
            assert!(!rank.ring.has_work(), "seed {seed}");
        }
    }
}

impl World {
    pub fn sender_acts(&mut self, prefill: usize, rank: usize, actions: Vec<SenderAction>) {
        let instance = self.prefill[prefill].instance;
        let from = (prefill, instance, rank as u8);
        for action in actions {
            match action {
                SenderAction::Say { to, ask } => {
                    let Some(decode) = self.decode_of(to.peer) else { continue };
                    let to = (decode, to.peer, to.rank);
                    self.say(Pending::Ask { from, to, ask: ask.clone() }, || Pending::Ask {
                        from,
                        to,
                        ask: ask.clone(),
                    });
                }
                SenderAction::Write(written) => self.fly(from, written),
                SenderAction::CancelWrite(id) => self.cancel_flight(from, id),
                SenderAction::Ended { tag, fault, .. } => self.lane_ended(tag, fault),
            }
        }
        if !self.prefill[prefill].senders[rank].turn {
            self.prefill[prefill].senders[rank].turn = true;
            let wait = self.random.micros(1..300);
            self.after(wait, Pending::SenderTurn { prefill, instance, rank });
        }
    }

    pub fn sender_turn(&mut self, prefill: usize, instance: Instance, rank: usize) {
        if self.prefill[prefill].instance != instance {
            return;
        }
        let at = &mut self.prefill[prefill].senders[rank];
        at.turn = false;
        let mut actions = Vec::new();
        let Some(gather) = at.sender.next_gather(self.agenda.now(), &mut actions) else {
            assert!(actions.is_empty());
            return;
        };
        let room = self.tags[&gather.tag].0;
        let end = gather.offset as usize + gather.span.bytes as usize;
        let memory = &mut at.memory[gather.offset as usize..end];
        for (bytes, (page, layer, head)) in memory.chunks_exact_mut(BLOCK as usize).zip(blocks(&gather.span))
        {
            bytes.copy_from_slice(&block(room, page, layer, head).to_le_bytes());
        }
        at.sender.gathered(gather.id, &mut actions);
        self.sender_acts(prefill, rank, actions);
    }

    pub fn tick_senders(&mut self) {
        for prefill in 0..self.prefill.len() {
            for rank in 0..self.prefill[prefill].ranks() {
                let mut actions = Vec::new();
                self.prefill[prefill].senders[rank].sender.tick(self.agenda.now(), &mut actions);
                if !actions.is_empty() {
                    self.sender_acts(prefill, rank, actions);
                }
            }
        }
    }

    pub fn ring_acts(&mut self, decode: usize, rank: usize, actions: Vec<RingAction>) {
        let instance = self.decode[decode].instance;
        let from = (decode, instance, rank as u8);
        for action in actions {
            match action {
                RingAction::Say { to, answer } => {
                    let Some(prefill) = self.prefill_of(to.peer) else { continue };
                    let to = (prefill, to.peer, to.rank);
                    self.say(Pending::Answer { from, to, answer }, || Pending::Answer { from, to, answer });
                }
                RingAction::Closed(room) => self.ring_closed(room, rank),
            }
        }
        if self.decode[decode].rings[rank].ring.has_work() && !self.decode[decode].rings[rank].turn {
            self.decode[decode].rings[rank].turn = true;
            let wait = self.random.micros(1..300);
            self.after(wait, Pending::RingTurn { decode, instance, rank });
        }
    }

    pub fn ring_turn(&mut self, decode: usize, instance: Instance, rank: usize) {
        if self.decode[decode].instance != instance {
            return;
        }
        self.decode[decode].rings[rank].turn = false;
        if let Some(scatter) = self.decode[decode].rings[rank].ring.next_scatter() {
            let wait = self.random.micros(0..2000);
            self.after(wait, Pending::Scattered { decode, instance, rank, scatter });
        }
        self.ring_acts(decode, rank, Vec::new());
    }

    pub fn scattered(&mut self, decode: usize, instance: Instance, rank: usize, scatter: Scatter<Key>) {
        let worker = &mut self.decode[decode];
        if worker.instance != instance {
            return;
        }
        for page in &scatter.pages {
            let owner = worker.owners.get(page);
            assert_eq!(owner, Some(&scatter.room), "seed {}: copied into another's page", self.seed);
        }
        let at = &mut worker.rings[rank];
        let end = scatter.offset as usize + scatter.span.bytes as usize;
        let memory = &at.memory[scatter.offset as usize..end];
        for (bytes, (page, layer, head)) in memory.chunks_exact(BLOCK as usize).zip(blocks(&scatter.span)) {
            let page = scatter.pages[(page - scatter.span.pages.start) as usize];
            at.pool.insert((page, layer, head), u64::from_le_bytes(bytes.try_into().unwrap()));
        }
        let mut actions = Vec::new();
        let wanted = at.ring.scattered(scatter.id, &mut actions);
        self.ring_acts(decode, rank, actions);
        if wanted {
            self.received(scatter.room, rank, scatter.notice, &scatter.span);
        }
    }

    pub fn prefill_of(&self, instance: Instance) -> Option<usize> {
        self.prefill.iter().position(|worker| worker.instance == instance)
    }

    pub fn decode_of(&self, instance: Instance) -> Option<usize> {
        self.decode.iter().position(|worker| worker.instance == instance)
    }

    /// Checks what must hold after every event.
    pub fn audit(&self) {
        for worker in &self.decode {
            for rank in &worker.rings {
                let mut slots: Vec<_> = rank.ring.slots().map(|(_, _, _, range)| range).collect();
                slots.sort_by_key(|range| range.start);
                assert!(slots.windows(2).all(|pair| pair[0].end <= pair[1].start), "seed {}", self.seed);
                let used: u64 = slots.iter().map(|range| range.end - range.start).sum();
                assert_eq!(used, rank.ring.stats().bytes_in_use, "seed {}", self.seed);
                assert!(used <= worker.bytes, "seed {}", self.seed);
            }
        }
        for worker in &self.prefill {
            for rank in &worker.senders {
                assert!(rank.sender.stats().bytes_in_use <= worker.bytes, "seed {}", self.seed);
                let most = 64 * self.decode.iter().map(|worker| worker.rings.len()).sum::<usize>() * 4;
                assert!(rank.sender.credits() <= most, "seed {}", self.seed);
            }
        }
    }
}
