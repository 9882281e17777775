//! Carries out what [`host_core::staging`] decides for a rank's pieces that go through staging memory.
//!
//! A worker sends or receives, so its staging memory is gather buffers or a ring, never both. Asks and answers are
//! submissions without writes. Copies are made on this thread, a few pieces in a turn, so that messages and completions
//! never wait for long.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use host_core::notice::{KIND, KIND_PIECE, LaneNotice, PieceNotice};
use host_core::scheduler::{PageWrite, RoomOpening};
use host_core::staging::message::{KIND_ANSWER, KIND_ASK, Message};
use host_core::staging::{
    Arrival, Gather, Geometry, Key, Opening, PeerRank, Ring, RingAction, Scatter, Sender, SenderAction, Span,
    StagedLane, Target,
};
use host_core::transfer::{self, KvSlice, Tag};
use host_core::{Instance, PageId, Room};
use host_executor::memory::PageCopier;
use host_plugin_api::transfer::{PeerId, RegionId, Write};

use super::shares::Share;
use super::{Report, Thread};
use crate::clock::Clock;
use crate::link::{Link, Rank};

/// Pieces copied in each direction before the thread looks at everything else again: a few milliseconds.
const COPIES: usize = 2;

/// A write that has staged pieces.
struct StagedPart {
    write: Arc<PageWrite>,
    /// The notices of the lanes that have not ended, by target rank.
    lanes: BTreeMap<u8, LaneNotice>,
}

/// The staging of one rank: its sender, its ring, and its copies between the pool and staging memory.
pub(super) struct RankStaging {
    clock: Clock,
    copier: PageCopier,
    sender: Sender,
    ring: Ring<LaneNotice>,
    parts: HashMap<Tag, StagedPart>,
}

impl RankStaging {
    pub(super) fn new(own: &Rank, clock: Clock, copier: PageCopier) -> Self {
        let shape = own.kv.layout().shape;
        let geometry = Geometry {
            layers: u16::try_from(shape.layers).unwrap_or(u16::MAX),
            block_bytes: u32::try_from(shape.block_bytes()).unwrap_or(u32::MAX),
        };
        let bytes = own.staging_bytes();
        let (sender, ring) = (Sender::new(bytes), Ring::new(bytes, geometry));
        Self { clock, copier, sender, ring, parts: HashMap::new() }
    }

    /// The time until an ask is to be repeated.
    pub(super) fn patience(&self) -> Option<Duration> {
        self.sender.next_deadline().map(|at| at.since(self.clock.now()))
    }
}

impl Thread {
    /// Begins the staged shares of a write.
    pub(super) fn stage(&mut self, write: &Arc<PageWrite>, link: &Link, shares: &[Share]) {
        let now = self.staging.clock.now();
        let mut actions = Vec::new();
        for share in shares.iter().filter(|share| !share.staged.is_empty()) {
            let notice = share.notice(write, self.start.rank, share.fragments(self.sending.max_writes()));
            let target = Target { peer: write.to, session: write.session, rank: notice.target };
            let part = self.staging.parts.entry(write.tag);
            let part = part.or_insert_with(|| StagedPart { write: write.clone(), lanes: BTreeMap::new() });
            part.lanes.insert(target.rank, notice);
            let lane = StagedLane {
                tag: write.tag,
                room: write.notice.room,
                attempt: write.notice.attempt,
                sequence: write.notice.sequence,
                target,
                target_bytes: link.ranks.get(share.target).map_or(0, |rank| rank.staging_bytes),
                pieces: share.staged.clone(),
            };
            if let Err(error) = self.staging.sender.add(now, lane, &mut actions) {
                self.staged_lane_ended(write.tag, target.rank, Some(error.to_string()));
            }
        }
        self.sender_acts(actions);
    }

    fn staged_lane_ended(&mut self, tag: Tag, target: u8, error: Option<String>) {
        if let Some(part) = self.staging.parts.get_mut(&tag) {
            part.lanes.remove(&target);
            if part.lanes.is_empty() {
                self.staging.parts.remove(&tag);
            }
        }
        let settled = self.sending.lane_ended(tag, error);
        self.settled(settled.into_iter().collect());
    }

    pub(super) fn cancel_staged(&mut self, tag: Tag) {
        let mut actions = Vec::new();
        self.staging.sender.cancel(self.staging.clock.now(), tag, &mut actions);
        self.sender_acts(actions);
    }

    pub(super) fn staging_lost(&mut self, peer: Instance, session: u64) {
        let mut actions = Vec::new();
        self.staging.sender.peer_lost(self.staging.clock.now(), peer, session, &mut actions);
        self.sender_acts(actions);
    }

    /// The link with a target's session, if it is still in use, and the plugin's handle.
    fn reach(&self, target: &Target) -> Option<(Arc<Link>, PeerId)> {
        let link = self.start.links.get(target.peer).filter(|link| link.session == target.session)?;
        let peer = link.connection(self.start.rank, usize::from(target.rank))?;
        Some((link, peer))
    }

    fn sender_acts(&mut self, actions: Vec<SenderAction>) {
        let mut lost = None;
        for action in actions {
            match action {
                SenderAction::Say { to, ask } => match self.reach(&to) {
                    Some((_, peer)) => self.sending.say(peer, Message::Ask(ask).encode()),
                    // The link is gone, so this ask can never be sent.
                    None => lost = Some(to),
                },
                SenderAction::Write(written) => match self.piece(&written) {
                    Some((peer, notice, write)) => {
                        let over = (written.target.peer, written.target.session);
                        self.sending.piece(written.id, peer, over, notice.encode(), write);
                    }
                    None => self.sending.piece_failed(written.id, "the connection is gone".into()),
                },
                SenderAction::CancelWrite(id) => self.sending.cancel_piece(id),
                SenderAction::Ended { tag, target, fault } => {
                    self.staged_lane_ended(tag, target.rank, fault.map(|fault| fault.to_string()));
                }
            }
        }
        if let Some(target) = lost {
            self.staging_lost(target.peer, target.session);
        }
    }

    fn piece(&self, written: &host_core::staging::Written) -> Option<(PeerId, PieceNotice, Write)> {
        let (link, peer) = self.reach(&written.target)?;
        let theirs = link.ranks.get(usize::from(written.target.rank))?;
        let notice = self.staging.parts.get(&written.tag)?.lanes.get(&written.target.rank)?;
        let lane = LaneNotice { fragment: u32::from(written.key.piece), ..*notice };
        let write = Write {
            source_region: self.own().staging.as_ref()?.region,
            target_region: RegionId(theirs.staging_region),
            source_offset: written.source_offset,
            target_offset: written.target_offset,
            length: written.length,
            target_generation: theirs.staging_generation,
        };
        Some((peer, PieceNotice { lane, generation: written.generation }, write))
    }

    fn ring_acts(&mut self, actions: Vec<RingAction>) {
        for action in actions {
            match action {
                RingAction::Say { to, answer } => {
                    let link = self.start.links.get(to.peer);
                    let peer = link.and_then(|link| link.connection(self.start.rank, usize::from(to.rank)));
                    if let Some(peer) = peer {
                        self.sending.say(peer, Message::Answer(answer).encode());
                    }
                }
                RingAction::Closed(room) => self.report(Report::Closed { rank: self.start.rank, room }),
            }
        }
    }

    pub(super) fn open_room(&mut self, opening: &RoomOpening) {
        let link = self.start.links.get(opening.peer).filter(|link| link.session == opening.session);
        let lanes = link.iter().flat_map(|link| &link.lanes).filter(|lane| lane.target == self.start.rank);
        let lanes = lanes.filter_map(|lane| {
            let heads = u16::try_from(lane.heads.start).ok()?..u16::try_from(lane.heads.end).ok()?;
            Some((u8::try_from(lane.source).ok()?, heads))
        });
        let lanes = lanes.collect();
        let RoomOpening { room, attempt, peer, ref pages, .. } = *opening;
        let opening = Opening { room, attempt, peer, pages: pages.clone(), lanes };
        let mut actions = Vec::new();
        self.staging.ring.open(opening, &mut actions);
        self.ring_acts(actions);
    }

    pub(super) fn close_room(&mut self, room: Room) {
        let mut actions = Vec::new();
        self.staging.ring.close(room, &mut actions);
        self.ring_acts(actions);
    }

    pub(super) fn forget_room(&mut self, room: Room) {
        let mut actions = Vec::new();
        self.staging.ring.forget(room, &mut actions);
        self.ring_acts(actions);
    }

    /// Handles a message about staging from a rank of a peer. Returns false if the message is about something else.
    pub(super) fn heard(&mut self, (peer, rank): (Instance, usize), payload: &[u8]) -> bool {
        let Ok(rank) = u8::try_from(rank) else { return false };
        let from = PeerRank { peer, rank };
        match payload.get(KIND) {
            Some(&KIND_PIECE) => match PieceNotice::decode(payload) {
                Some(piece) => self.piece_arrived(from, &piece),
                None => false,
            },
            Some(&(KIND_ASK | KIND_ANSWER)) => match Message::decode(payload) {
                Some(Message::Ask(ask)) => {
                    let mut actions = Vec::new();
                    self.staging.ring.request_slot(from, &ask, &mut actions);
                    self.ring_acts(actions);
                    true
                }
                Some(Message::Answer(answer)) => {
                    let mut actions = Vec::new();
                    self.staging.sender.heard(self.staging.clock.now(), from, &answer, &mut actions);
                    self.sender_acts(actions);
                    true
                }
                None => false,
            },
            _ => false,
        }
    }

    fn piece_arrived(&mut self, from: PeerRank, piece: &PieceNotice) -> bool {
        let lane = piece.lane;
        let Ok(number) = u16::try_from(lane.fragment) else { return false };
        if lane.source != from.rank || usize::from(lane.target) != self.start.rank {
            return false;
        }
        let notice = lane.notice;
        let key =
            Key { room: notice.room, attempt: notice.attempt, sequence: notice.sequence, piece: number };
        let arrival = self.staging.ring.arrived(from, key, piece.generation, lane);
        if arrival == Arrival::Unknown {
            tracing::debug!(?key, peer = %from.peer, "a piece arrived for no open room");
        }
        true
    }

    /// Handles pieces that have settled, repeats asks without an answer, and copies some pieces. Returns whether there
    /// was anything to do.
    pub(super) fn turn_staging(&mut self) -> bool {
        let now = self.staging.clock.now();
        let mut actions = Vec::new();
        let settled = self.sending.settled_pieces();
        let mut busy = !settled.is_empty();
        for (id, error) in settled {
            self.staging.sender.settled(now, id, error, &mut actions);
        }
        self.staging.sender.tick(now, &mut actions);
        busy |= !actions.is_empty();
        self.sender_acts(actions);
        for _ in 0..COPIES {
            let scatter = self.staging.ring.next_scatter();
            let mut actions = Vec::new();
            let gather = self.staging.sender.next_gather(now, &mut actions);
            busy |= scatter.is_some() || gather.is_some();
            // Asks for later pieces are sent before anything is copied.
            self.sender_acts(actions);
            self.sending_hand_over();
            if let Some(gather) = gather {
                self.gather(&gather);
            }
            if let Some(scatter) = scatter {
                self.scatter(&scatter);
            }
        }
        self.own().set_staging_stats((self.staging.sender.stats(), self.staging.ring.stats()));
        busy
    }

    fn gather(&mut self, gather: &Gather) {
        let mut actions = Vec::new();
        if let Err(error) = self.copy_out(gather) {
            tracing::error!(error, "a piece could not be gathered");
            self.staging.sender.cancel(self.staging.clock.now(), gather.tag, &mut actions);
        }
        self.staging.sender.gathered(gather.id, &mut actions);
        self.sender_acts(actions);
    }

    fn copy_out(&self, gather: &Gather) -> Result<(), String> {
        let own = self.own();
        let staging = own.staging.as_ref().ok_or("there is no staging memory")?;
        let part = self.staging.parts.get(&gather.tag).ok_or("its write is not known")?;
        let first = part.write.first_page;
        let within = |page: u32| page.checked_sub(first).map(|page| page as usize);
        let pages = within(gather.span.pages.start).zip(within(gather.span.pages.end));
        let pages =
            pages.and_then(|(start, end)| part.write.source.get(start..end)).ok_or("no such pages")?;
        let (lane, layers) = dense(own, &gather.span);
        let lane = transfer::Lane { source: own.share(), target: lane, heads: heads(&gather.span) };
        let copy = transfer::copy_lane(&lane, pages, &numbers(pages.len()), layers)
            .map_err(|error| error.to_string())?;
        let slot = slot(gather.offset, &gather.span).ok_or("no such slot")?;
        // SAFETY: a slot belongs to its piece alone, and pages that are sent are not written any more. The scheduler's
        // page accounting ensures both.
        unsafe { self.staging.copier.copy_out(&copy, &staging.memory, slot) }
            .map_err(|error| error.to_string())
    }

    fn scatter(&mut self, scatter: &Scatter<LaneNotice>) {
        let mut actions = Vec::new();
        let copied = self.copy_in(scatter);
        let wanted = self.staging.ring.scattered(scatter.id, &mut actions);
        match (copied, scatter.from) {
            (Ok(()), PeerRank { peer, .. }) if wanted => {
                self.report(Report::Landed { rank: self.start.rank, peer, notice: scatter.notice });
            }
            (Ok(()), _) => {}
            (Err(error), _) => tracing::error!(error, room = %scatter.room, "a piece could not be scattered"),
        }
        self.ring_acts(actions);
    }

    fn copy_in(&self, scatter: &Scatter<LaneNotice>) -> Result<(), String> {
        let own = self.own();
        let staging = own.staging.as_ref().ok_or("there is no staging memory")?;
        let (lane, layers) = dense(own, &scatter.span);
        let lane = transfer::Lane { source: lane, target: own.share(), heads: heads(&scatter.span) };
        let copy = transfer::copy_lane(&lane, &numbers(scatter.pages.len()), &scatter.pages, layers)
            .map_err(|error| error.to_string())?;
        let slot = slot(scatter.offset, &scatter.span).ok_or("no such slot")?;
        // SAFETY: a slot belongs to its piece alone, and pages that are received are not read before they are verified.
        // The scheduler's page accounting ensures both.
        unsafe { self.staging.copier.copy_in(&copy, &staging.memory, slot) }
            .map_err(|error| error.to_string())
    }
}

fn heads(span: &Span) -> Range<usize> {
    usize::from(span.heads.start)..usize::from(span.heads.end)
}

/// The slot of a span, as a part of the staging memory.
fn slot(offset: u64, span: &Span) -> Option<Range<usize>> {
    let start = usize::try_from(offset).ok()?;
    Some(start..start.checked_add(span.bytes as usize)?)
}

/// The layout of a span in a slot, and its layers.
fn dense(own: &Rank, span: &Span) -> (KvSlice, Range<usize>) {
    let layers = usize::from(span.layers.start)..usize::from(span.layers.end);
    let share = KvSlice::dense(own.kv.layout().shape, span.pages.len(), heads(span), layers.clone());
    (share, layers)
}

/// The pages of a slot.
fn numbers(count: usize) -> Vec<PageId> {
    (0..count).filter_map(|page| u32::try_from(page).ok()).map(PageId).collect()
}
