mod gpu;
mod lost;
mod panicked;
mod staged;
mod told;
mod unproven;
mod wire;

use host_core::Event;
use host_core::aux_row::AuxRow;
use host_core::heads::rank_heads;
use host_core::integrity::FoundData;
use host_core::layout::{Dtype, KvLayout, KvOrder, KvShape};
use host_core::notice::Notice;
use host_core::rank_barrier::RankBarrier;
use host_core::transfer::StagingMode;
use host_core::{Instance, Sampled};
use host_executor::KvMemory;
use host_wire::proto::{KvIdentity, WorkerInfo};
use tokio::sync::watch;

use super::*;
use crate::gpu_pools;
use crate::link::{Opening, rank_name};
use wire::{Node, Wire};

const HEADS: usize = 8;
const LAYERS: usize = 3;
const TOKENS: usize = 4;
const ROOM: Room = Room(77);
const PREFILL: Instance = Instance(0xa);
const DECODE: Instance = Instance(0xb);
const ORDERS: [KvOrder; 2] = [KvOrder::PageHeadLayerKvTokenDim, KvOrder::LayerKvPageTokenHeadDim];

/// Where a worker's pools lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Host,
    /// In a GPU's memory, which the plugin does not reach.
    Gpu,
    /// In a GPU's memory, which the plugin reaches.
    ReachedGpu,
}

/// The ranks of one worker, their transfer threads, and the inputs of the scheduler thread.
struct Side {
    instance: Instance,
    role: &'static str,
    order: KvOrder,
    pages: u32,
    links: Arc<Links>,
    nodes: Vec<Arc<Node>>,
    pools: Vec<KvMemory>,
    inboxes: Vec<Inbox>,
    barrier: RankBarrier,
    inputs: mpsc::Receiver<Input>,
}

impl Side {
    fn new(wire: &Arc<Wire>, role: &'static str, ranks: usize, order: KvOrder, pages: u32) -> Self {
        Self::staging(wire, role, ranks, order, pages, StagingMode::Never, 0)
    }

    /// A side with so much staging memory for each rank.
    fn staging(
        wire: &Arc<Wire>,
        role: &'static str,
        ranks: usize,
        order: KvOrder,
        pages: u32,
        mode: StagingMode,
        staging_bytes: usize,
    ) -> Self {
        Self::with_pools(wire, role, (ranks, order, pages), (mode, staging_bytes), Place::Host)
    }

    fn with_pools(
        wire: &Arc<Wire>,
        role: &'static str,
        (ranks, order, pages): (usize, KvOrder, u32),
        (mode, staging_bytes): (StagingMode, usize),
        place: Place,
    ) -> Self {
        let policy = StagingPolicy { mode, ..StagingPolicy::default() };
        let instance = if role == "prefill" { PREFILL } else { DECODE };
        let mut nodes = Vec::new();
        let mut pools = Vec::new();
        for rank in 0..ranks {
            let heads = rank_heads(HEADS, ranks, rank);
            let shape = KvShape {
                pages: pages as usize,
                heads: heads.len(),
                layers: LAYERS,
                page_tokens: TOKENS,
                head_dim: 2,
                value_dim: 2,
                dtype: Dtype::F32,
            };
            let layout = KvLayout::new(shape, order);
            pools.push(match place {
                Place::Host => KvMemory::for_heads(layout, heads.start).unwrap(),
                Place::Gpu | Place::ReachedGpu => {
                    KvMemory::on_device(layout, heads.start, &gpu_pools::device()).unwrap()
                }
            });
            nodes.push(wire.node(&rank_name(instance, rank)));
        }
        // SAFETY: the tests touch the pools only while no transfer is under way.
        let shared = pools.iter().map(|kv| unsafe { kv.share() });
        let plugin = if wire.script.is_some() { "acme" } else { "wire" };
        let memories = shared.zip(nodes.iter().map(|node| wire.backend(node))).collect();
        let (plugin, kv_heads) = (Some(plugin.into()), HEADS);
        let vram = place == Place::ReachedGpu;
        let opening = Opening { plugin, vram, kv_heads, aux_rows: 4, staging_bytes };
        let links = Arc::new(Links::open(opening, memories).unwrap());
        let (sender, inputs) = mpsc::channel(4096);
        let (died, _) = watch::channel(None);
        let inbox = |rank| {
            let alive = Alive { thread: "transfer", stopping: Arc::default(), died: died.clone() };
            let (links, inputs) = (links.clone(), sender.clone());
            let copier = Arc::new(Copier::new(1).unwrap());
            let settles = wire.settles;
            start(Start { alive, rank, links, inputs, page_integrity: true, settles, policy, copier })
                .unwrap()
                .0
        };
        let inboxes = (0..ranks).map(inbox).collect();
        let barrier = RankBarrier::new(ranks);
        Self { instance, role, order, pages, links, nodes, pools, inboxes, barrier, inputs }
    }

    fn info(&self) -> WorkerInfo {
        let identity = KvIdentity {
            layout: self.order.to_string(),
            ranks: self.pools.len() as u32,
            kv_heads: HEADS as u32,
            ..KvIdentity::default()
        };
        WorkerInfo {
            instance: self.instance.0,
            name: self.role.into(),
            role: self.role.into(),
            identity: Some(identity),
            pages: self.pages,
            transfer: self.links.endpoints().unwrap(),
            ..WorkerInfo::default()
        }
    }

    fn ask(&self, command: &Command) {
        self.inboxes.iter().for_each(|inbox| inbox.push(command.clone()));
    }

    /// The next event that the ranks agree on.
    fn event(&mut self) -> Event {
        loop {
            match self.inputs.blocking_recv().unwrap() {
                Input::Event(event) => return event,
                Input::Transfer(report) => {
                    if let Some(event) = self.barrier.take(report).unwrap() {
                        return event;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Fills pages with bytes that depend on page, head of the model, layer, side and token alone.
    fn fill(&mut self) {
        for kv in &mut self.pools {
            let (first, pages) = (kv.heads().start, self.pages);
            gpu_pools::change(kv, |kv| {
                for (page, head, layer, side, token) in rows(pages, kv.heads().len()) {
                    let byte = byte(page, first + head, layer, side, token);
                    kv.write_row(PageId(page), head, layer, side, token).fill(byte);
                }
            });
        }
    }

    fn open(&mut self, attempt: u32, pages: &[u32]) {
        let link = self.links.get(PREFILL).unwrap();
        let pages = pages.iter().map(|page| PageId(*page)).collect();
        let opening =
            RoomOpening { room: ROOM, attempt, peer: PREFILL, session: link.session, pages, parts: 50 };
        self.barrier.open(&opening, link.lanes.clone());
        self.ask(&Command::OpenRoom(Arc::new(opening)));
    }

    fn verify(&mut self, attempt: u32, pages: &[u32]) -> FoundData {
        let lanes = self.barrier.verify(ROOM);
        let pages = pages.iter().map(|page| PageId(*page)).collect();
        self.ask(&Command::Verify(Arc::new(Verification { room: ROOM, attempt, pages, aux_slot: 1, lanes })));
        match self.event() {
            Event::Verified { found, .. } => *found,
            other => panic!("{other:?}"),
        }
    }

    fn write(&mut self, write: PageWrite) {
        self.barrier.write(write.tag);
        self.ask(&Command::Write(Arc::new(write)));
    }

    /// The events that the scheduler gets until each rank's thread has polled the plugin again.
    fn told(&mut self, write: &PageWrite) -> Vec<Event> {
        let mut events = Vec::new();
        // A write to a worker that is not connected is answered at once. The thread polls the plugin between two such writes.
        for mark in [1_001, 1_002].map(Tag) {
            self.write(PageWrite { tag: mark, to: Instance(99), ..write.clone() });
            loop {
                match self.event() {
                    Event::Written { tag, .. } if tag == mark => break,
                    event => events.push(event),
                }
            }
        }
        events
    }
}

fn rows(pages: u32, heads: usize) -> impl Iterator<Item = (u32, usize, usize, usize, usize)> {
    let inner = heads * LAYERS * 2 * TOKENS;
    (0..pages).flat_map(move |page| {
        (0..inner).map(move |i| {
            (page, i / (LAYERS * 2 * TOKENS), i / (2 * TOKENS) % LAYERS, i / TOKENS % 2, i % TOKENS)
        })
    })
}

fn byte(page: u32, head: usize, layer: usize, side: usize, token: usize) -> u8 {
    (1 + page as usize * 37 + head * 29 + layer * 13 + side * 7 + token) as u8
}

fn row() -> AuxRow {
    let first = Sampled { token: 3, logprob: None, top: Vec::new() };
    AuxRow { room: ROOM, attempt: 1, prompt_tokens: 17, cached_tokens: 0, pages: 5, first }
}

/// A prefill and a decode worker that are connected, and the wire that carries their bytes.
fn pair(from: (usize, KvOrder), to: (usize, KvOrder)) -> (Side, Side, Arc<Wire>) {
    pair_over(Wire::new(), from, to)
}

fn pair_over(wire: Arc<Wire>, from: (usize, KvOrder), to: (usize, KvOrder)) -> (Side, Side, Arc<Wire>) {
    let mut prefill = Side::new(&wire, "prefill", from.0, from.1, 7);
    let decode = Side::new(&wire, "decode", to.0, to.1, 9);
    prefill.fill();
    decode.links.connect(&prefill.info()).unwrap();
    prefill.links.connect(&decode.info()).unwrap();
    (prefill, decode, wire)
}

const SENT: [u32; 5] = [1, 2, 5, 0, 6];
const EXPECTED: [u32; 5] = [4, 5, 0, 8, 2];

/// The parts of a transfer: three pages in two groups of layers, then the other two with the aux row.
fn parts(session: u64) -> Vec<PageWrite> {
    let part = |sequence, pages: std::ops::Range<usize>, layers: std::ops::Range<u32>| {
        let last = sequence == 2;
        let completes = if layers.end as usize == LAYERS { pages.len() as u32 } else { 0 };
        PageWrite {
            tag: Tag(u64::from(sequence) + 1),
            to: DECODE,
            session,
            notice: Notice { room: ROOM, attempt: 1, sequence, pages: completes, last },
            source: SENT[pages.clone()].iter().map(|page| PageId(*page)).collect(),
            target: EXPECTED[pages.clone()].iter().map(|page| PageId(*page)).collect(),
            first_page: pages.start as u32,
            layers,
            aux: last.then(|| (row(), 2, 1)),
        }
    };
    vec![part(0, 0..3, 0..2), part(1, 0..3, 2..3), part(2, 3..5, 0..3)]
}

/// Sends everything, and returns when all has settled and arrived.
fn transfer(prefill: &mut Side, decode: &mut Side) {
    decode.open(1, &EXPECTED);
    let session = prefill.links.get(DECODE).unwrap().session;
    let parts = parts(session);
    let count = parts.len();
    for part in parts {
        prefill.write(part);
    }
    for _ in 0..count {
        let event = prefill.event();
        assert!(matches!(event, Event::Written { error: None, .. }), "{event:?}");
        assert!(matches!(decode.event(), Event::Arrived(_)));
    }
}

#[test]
fn every_rank_gets_its_heads_from_the_ranks_that_hold_them_whatever_the_layouts() {
    for ranks in [(1, 1), (4, 2), (2, 4), (4, 1), (1, 4), (3, 2), (16, 3), (3, 16)] {
        for orders in ORDERS.iter().flat_map(|from| ORDERS.map(|to| (*from, to))) {
            let (mut prefill, mut decode, _wire) = pair((ranks.0, orders.0), (ranks.1, orders.1));
            transfer(&mut prefill, &mut decode);
            let found = decode.verify(1, &EXPECTED);
            let lanes = found.lanes.unwrap();
            assert!(
                lanes.iter().all(|lane| lane.sent == lane.found && lane.sent != 0),
                "{ranks:?} {lanes:?}"
            );
            assert_eq!(AuxRow::decode(&found.aux_row), Ok(row()));
            for kv in &decode.pools {
                let first = kv.heads().start;
                for (page, head, layer, side, token) in rows(9, kv.heads().len()) {
                    let sent = EXPECTED.iter().position(|other| *other == page);
                    let wanted = sent.map_or(0, |at| byte(SENT[at], first + head, layer, side, token));
                    let row = kv.read_row(PageId(page), head, layer, side, token);
                    assert!(row.iter().all(|byte| *byte == wanted), "{ranks:?} {orders:?}: page {page}");
                }
            }
        }
    }
}

#[test]
fn a_byte_that_changes_on_any_lane_shows_as_that_lane() {
    for ranks in [(4, 2), (2, 4), (3, 2)] {
        let lanes = host_core::heads::head_lanes(HEADS, ranks.0, ranks.1);
        for lane in lanes {
            let (mut prefill, mut decode, _wire) = pair((ranks.0, ORDERS[0]), (ranks.1, ORDERS[1]));
            transfer(&mut prefill, &mut decode);
            let kv = &mut decode.pools[lane.target];
            let head = lane.heads.start - kv.heads().start;
            kv.write_row(PageId(EXPECTED[3]), head, 1, 1, 2)[3] ^= 4;
            let found = decode.verify(1, &EXPECTED).lanes.unwrap();
            let damaged = found.iter().filter(|lane| lane.sent != lane.found);
            let damaged: Vec<_> = damaged.map(|lane| (lane.source as usize, lane.target as usize)).collect();
            assert_eq!(damaged, [(lane.source, lane.target)]);
        }
    }
}

#[test]
fn the_aux_row_alone_goes_from_rank_0_to_rank_0_and_every_lane_is_intact() {
    let (mut prefill, mut decode, _wire) = pair((4, ORDERS[0]), (3, ORDERS[0]));
    decode.open(1, &[]);
    let session = prefill.links.get(DECODE).unwrap().session;
    let mut last = parts(session).pop().unwrap();
    (last.notice.sequence, last.notice.pages) = (0, 0);
    (last.source, last.target) = (Vec::new(), Vec::new());
    prefill.write(last.clone());
    assert!(matches!(prefill.event(), Event::Written { error: None, .. }));
    assert_eq!(decode.event(), Event::Arrived(last.notice));
    let found = decode.verify(1, &[]);
    assert!(found.lanes.unwrap().iter().all(|lane| (lane.sent, lane.found) == (0, 0)));
    assert_eq!(AuxRow::decode(&found.aux_row), Ok(row()));
}

#[test]
fn one_rank_whose_writes_fail_fails_the_write_when_all_have_settled() {
    let (mut prefill, mut decode, wire) = pair((4, ORDERS[0]), (2, ORDERS[0]));
    decode.open(1, &EXPECTED);
    wire.hold(true);
    wire.fail(&rank_name(PREFILL, 2));
    let session = prefill.links.get(DECODE).unwrap().session;
    let write = parts(session).swap_remove(2);
    prefill.write(write.clone());
    assert_eq!(prefill.told(&write), [], "settled before the plugin said so");
    wire.hold(false);
    let Event::Written { error, .. } = prefill.event() else { panic!("not written") };
    assert!(error.unwrap().contains("PEER_LOST"));
}

#[test]
fn a_write_over_a_connection_that_was_replaced_goes_nowhere() {
    let (mut prefill, mut decode, _wire) = pair((2, ORDERS[0]), (1, ORDERS[0]));
    let session = prefill.links.get(DECODE).unwrap().session;
    prefill.links.connect(&decode.info()).unwrap();
    decode.open(1, &EXPECTED);
    prefill.write(parts(session).swap_remove(0));
    let lost = Event::PeerLost { peer: DECODE, session, fenced: true };
    let mut written = None;
    while written.is_none() {
        match prefill.event() {
            Event::Written { error, .. } => written = error,
            event => assert_eq!(event, lost),
        }
    }
    assert!(written.unwrap().contains("was replaced"));
    // A later write over the connection in use is all that arrives.
    let session = prefill.links.get(DECODE).unwrap().session;
    let later = parts(session).swap_remove(1);
    prefill.write(later.clone());
    assert_eq!(decode.event(), Event::Arrived(later.notice));
    assert_eq!(decode.told(&later), []);
}

#[test]
fn a_room_is_closed_when_every_rank_says_so() {
    let (_prefill, mut decode, _wire) = pair((1, ORDERS[0]), (4, ORDERS[0]));
    decode.open(1, &EXPECTED);
    decode.barrier.close(ROOM);
    decode.ask(&Command::CloseRoom(ROOM));
    assert_eq!(decode.event(), Event::RoomClosed { room: ROOM });
}

#[test]
fn a_link_is_fenced_only_when_every_pair_of_ranks_is() {
    let (prefill, decode, wire) = pair((4, ORDERS[0]), (2, ORDERS[0]));
    let session = decode.links.get(PREFILL).unwrap().session;
    wire.fences_fail(&rank_name(DECODE, 1), 3);
    assert!(decode.links.fence(PREFILL, session).is_err());
    let link = decode.links.get(PREFILL).unwrap();
    assert_eq!(link.connection(0, 0), None, "proven");
    assert!(link.connection(1, 2).is_some() && link.connection(1, 3).is_some());
    assert!(decode.links.connect(&prefill.info()).is_err(), "an earlier connection may still write");
    wire.fences_fail(&rank_name(DECODE, 1), 0);
    decode.links.fence(PREFILL, session).unwrap();
    assert!(decode.links.get(PREFILL).is_none());
    decode.links.connect(&prefill.info()).unwrap();
}

#[test]
fn a_peer_whose_ranks_are_not_all_there_is_refused() {
    let wire = Wire::new();
    let prefill = Side::new(&wire, "prefill", 4, ORDERS[0], 7);
    let decode = Side::new(&wire, "decode", 2, ORDERS[0], 7);
    type Change = (&'static str, fn(&mut WorkerInfo));
    let changes: [Change; 6] = [
        ("4 ranks, but offers endpoints for the ranks [0, 1, 3]", |info| {
            info.transfer.remove(2);
        }),
        ("for the ranks [0, 1, 2, 2]", |info| info.transfer[3].rank = 2),
        ("no transfer plugin in common", |info| info.transfer.clear()),
        ("pool of rank 1 has 5 bytes", |info| info.transfer[1].kv_bytes = 5),
        ("is a aggregated worker", |info| info.role = "aggregated".into()),
        ("unknown KV layout", |info| info.identity.as_mut().unwrap().layout = "x".into()),
    ];
    for (sentence, change) in changes {
        let mut info = prefill.info();
        change(&mut info);
        let refused = decode.links.connect(&info).unwrap_err();
        assert!(refused.contains(sentence), "{refused}");
    }
    assert!(decode.links.connect(&prefill.info()).is_ok());
}
