//! Other workers: which are there, which are gone, and which must be cut off.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use super::stage::Stage;
use super::{Action, Scheduler};
use crate::ids::{Instance, Room, Time};
use crate::message::{Body, Message};
use crate::request::{Failure, FailureCode};

/// Wait between two tries to prove a fence.
const FENCE_AGAIN: Duration = Duration::from_secs(1);
/// Peers remembered after they were lost.
const LOST_PEERS: usize = 1024;

/// The state of the connection to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    /// A handshake is under way.
    Connecting,
    /// Pages can be exchanged.
    Ready,
    /// Gone, and none of its writes can land here any more.
    Fenced,
    /// Gone, but its late writes might land.
    Unfenced,
}

#[derive(Debug)]
struct Peer {
    state: PeerState,
    /// Messages below this were given up by their sender.
    floor: u64,
    /// The connection in use.
    session: u64,
    /// When a write to the peer settled last, or was last known to wait behind writes to others.
    moved: Time,
    /// When a message of the peer, or a part of its pages, came last.
    heard: Time,
    /// Rooms that the peer aborted, by the abort's id: no earlier message may revive them. Kept until the floor
    /// passes the abort, when such a message would be dropped anyway.
    aborted: BTreeMap<u64, Room>,
    fence_again: Option<Time>,
    /// A connection whose end was reported before its beginning, and whether it is fenced.
    early_loss: Option<(u64, bool)>,
}

/// All peers.
#[derive(Debug, Default)]
pub(super) struct Peers {
    by_instance: BTreeMap<Instance, Peer>,
}

impl Peers {
    fn set(&mut self, peer: Instance, state: PeerState) {
        match self.by_instance.get_mut(&peer) {
            Some(known) => known.state = state,
            None => {
                self.forget_old();
                let fresh = Peer {
                    state,
                    floor: 0,
                    session: 0,
                    moved: Time::default(),
                    heard: Time::default(),
                    aborted: BTreeMap::new(),
                    fence_again: None,
                    early_loss: None,
                };
                self.by_instance.insert(peer, fresh);
            }
        }
    }

    fn forget_old(&mut self) {
        let fenced = |peer: &Peer| peer.state == PeerState::Fenced;
        if self.by_instance.len() >= LOST_PEERS
            && let Some(old) = self.by_instance.iter().find(|(_, peer)| fenced(peer)).map(|(id, _)| *id)
        {
            self.by_instance.remove(&old);
        }
    }

    pub(super) fn state(&self, peer: Instance) -> Option<&PeerState> {
        self.by_instance.get(&peer).map(|peer| &peer.state)
    }

    pub(super) fn connecting(&mut self, peer: Instance) {
        self.set(peer, PeerState::Connecting);
    }

    /// Whether a request for this peer needs a handshake first.
    pub(super) fn wants_connection(&self, peer: Instance) -> bool {
        matches!(self.state(peer), None | Some(PeerState::Fenced | PeerState::Unfenced))
    }

    /// Applies the sender's floor. Returns `false` when the sender has given the message up.
    fn current(&mut self, from: Instance, floor: u64, message: &Message) -> bool {
        let Some(peer) = self.by_instance.get_mut(&from) else { return false };
        peer.floor = peer.floor.max(floor);
        peer.aborted = peer.aborted.split_off(&peer.floor);
        let revives = matches!(message.body, Body::Reserve(_))
            && peer.aborted.iter().any(|(abort, room)| *room == message.room && *abort > message.id);
        message.answers.is_some() || (message.id >= peer.floor && !revives)
    }

    fn begin_session(&mut self, peer: Instance, floor: u64, session: u64) {
        if let Some(peer) = self.by_instance.get_mut(&peer) {
            peer.floor = peer.floor.max(floor);
            peer.session = session;
            peer.fence_again = None;
        }
    }

    fn remember_early_loss(&mut self, peer: Instance, session: u64, fenced: bool) {
        if self.state(peer).is_none() {
            self.set(peer, PeerState::Connecting);
        }
        if let Some(peer) = self.by_instance.get_mut(&peer) {
            peer.early_loss = Some((session, fenced));
        }
    }

    fn lost_early(&mut self, peer: Instance, session: u64) -> Option<bool> {
        let early = self.by_instance.get_mut(&peer)?.early_loss.take_if(|(lost, _)| *lost <= session)?;
        (early.0 == session).then_some(early.1)
    }

    /// Whether writes over this connection may still land here. An earlier connection was fenced when the next one
    /// began.
    pub(super) fn may_write(&self, peer: Instance, session: u64) -> bool {
        let gone = matches!(self.state(peer), None | Some(PeerState::Fenced));
        !gone && session == self.session(peer)
    }

    /// The connection that a room begun now belongs to.
    pub(super) fn session(&self, peer: Instance) -> u64 {
        self.by_instance.get(&peer).map_or(0, |peer| peer.session)
    }

    /// Takes note that a write to a peer has settled, or waits behind writes to others.
    pub(super) fn moved(&mut self, peer: Instance, now: Time) {
        if let Some(peer) = self.by_instance.get_mut(&peer) {
            peer.moved = now;
        }
    }

    /// When a write to a peer settled last, or was last known to wait behind writes to others.
    pub(super) fn last_moved(&self, peer: Instance) -> Time {
        self.by_instance.get(&peer).map_or_else(Time::default, |peer| peer.moved)
    }

    /// Takes note that a message of a peer came, or a part of its pages.
    pub(super) fn heard(&mut self, peer: Instance, now: Time) {
        if let Some(peer) = self.by_instance.get_mut(&peer) {
            peer.heard = now;
        }
    }

    /// When a message of a peer, or a part of its pages, came last.
    pub(super) fn last_heard(&self, peer: Instance) -> Time {
        self.by_instance.get(&peer).map_or_else(Time::default, |peer| peer.heard)
    }

    /// Whether this connection is in use.
    pub(super) fn is_current(&self, peer: Instance, session: u64) -> bool {
        self.state(peer) == Some(&PeerState::Ready) && session == self.session(peer)
    }

    pub(super) fn remember_abort(&mut self, from: Instance, id: u64, room: Room) {
        if let Some(peer) = self.by_instance.get_mut(&from)
            && id >= peer.floor
        {
            peer.aborted.insert(id, room);
        }
    }

    /// Number of peers that are cut off and whose fence is not proven yet. Their rooms' pages stay in quarantine.
    pub(super) fn unfenced(&self) -> usize {
        self.by_instance.values().filter(|peer| peer.state == PeerState::Unfenced).count()
    }

    pub(super) fn next_fence(&self) -> Option<Time> {
        self.by_instance.values().filter_map(|peer| peer.fence_again).min()
    }

    pub(super) fn fences_due(&mut self, now: Time) -> Vec<Instance> {
        let due =
            self.by_instance.iter_mut().filter(|(_, peer)| peer.fence_again.is_some_and(|at| at <= now));
        due.map(|(instance, peer)| {
            peer.fence_again = None;
            *instance
        })
        .collect()
    }
}

/// The failure message for clients when a peer is gone.
fn gone(peer: Instance) -> String {
    format!("worker {peer} is gone")
}

impl Scheduler {
    pub(super) fn message(
        &mut self,
        now: Time,
        from: Instance,
        floor: u64,
        message: Message,
        actions: &mut Vec<Action>,
    ) {
        if self.peers.state(from) != Some(&PeerState::Ready) || !self.peers.current(from, floor, &message) {
            self.stats.messages_stale += 1;
            return;
        }
        self.peers.heard(from, now);
        let Message { id, answers, room, attempt, body } = message;
        if let Some(question) = answers
            && !self.outbox.answered(from, question)
        {
            return;
        }
        match body {
            Body::Reserve(reserve) => self.reserve_asked(now, from, id, room, attempt, reserve, actions),
            Body::Commit => self.commit_asked(now, from, id, room, attempt, actions),
            Body::Abort => self.abort_asked(now, from, id, room, attempt, actions),
            Body::PrefillFailed { message, retryable } => {
                let seen = self.outbox.answer(id, room, attempt, Body::PrefillFailedSeen);
                self.send(from, seen, actions);
                self.prefill_gave_up(now, from, room, message, retryable, actions);
            }
            Body::Refused { message, retryable } => {
                self.prefill_gave_up(now, from, room, message, retryable, actions);
            }
            Body::Drained => self.drained(from, room, actions),
            Body::Reserved | Body::Committed | Body::PrefillFailedSeen => {}
        }
    }

    pub(super) fn peer_ready(
        &mut self,
        now: Time,
        peer: Instance,
        floor: u64,
        session: u64,
        actions: &mut Vec<Action>,
    ) {
        if session <= self.peers.session(peer) {
            return;
        }
        // A second handshake is a new session: the peer has forgotten everything about the old one.
        if self.peers.state(peer) == Some(&PeerState::Ready) {
            self.lose(now, peer, &gone(peer), actions);
        }
        self.peers.set(peer, PeerState::Ready);
        self.peers.begin_session(peer, floor, session);
        self.writer_gone(peer, actions);
        if let Some(fenced) = self.peers.lost_early(peer, session) {
            self.peer_lost(now, (peer, session), fenced, actions);
        }
    }

    pub(super) fn peer_refused(
        &mut self,
        now: Time,
        peer: Instance,
        message: &str,
        actions: &mut Vec<Action>,
    ) {
        for room in self.rooms_with(peer, Stage::is_queued) {
            self.fail(now, room, Failure::new(FailureCode::PeerRefused, message), actions);
        }
        if self.peers.state(peer) == Some(&PeerState::Connecting) {
            self.fence(peer, actions);
        }
    }

    pub(super) fn peer_lost(
        &mut self,
        now: Time,
        (peer, session): (Instance, u64),
        fenced: bool,
        actions: &mut Vec<Action>,
    ) {
        match session.cmp(&self.peers.session(peer)) {
            Ordering::Less => return,
            Ordering::Equal => {}
            Ordering::Greater => return self.peers.remember_early_loss(peer, session, fenced),
        }
        match self.peers.state(peer) {
            // The old connection's end, while the next is being made: its rooms ended before.
            Some(PeerState::Connecting) => {
                if fenced {
                    self.writer_gone(peer, actions);
                }
                return;
            }
            // Each of our ranks that was connected to the peer reports its loss. One fence is enough.
            Some(PeerState::Unfenced | PeerState::Fenced) if !fenced => return,
            _ => {}
        }
        if !fenced {
            return self.cut_off(now, peer, &gone(peer), actions);
        }
        self.lose(now, peer, &gone(peer), actions);
        self.peers.set(peer, PeerState::Fenced);
        self.writer_gone(peer, actions);
    }

    /// Ends everything that depends on a peer, with `why` as the reason for clients, and fences it.
    pub(super) fn cut_off(&mut self, now: Time, peer: Instance, why: &str, actions: &mut Vec<Action>) {
        self.lose(now, peer, why, actions);
        self.fence(peer, actions);
    }

    /// Fences a peer. Until its fence is proven, the peer counts as a possible writer.
    fn fence(&mut self, peer: Instance, actions: &mut Vec<Action>) {
        self.peers.set(peer, PeerState::Unfenced);
        actions.push(Action::Fence { peer, session: self.peers.session(peer) });
    }

    /// Ends everything that depends on a peer.
    fn lose(&mut self, now: Time, peer: Instance, why: &str, actions: &mut Vec<Action>) {
        self.outbox.forget_peer(peer);
        if let Some(known) = self.peers.by_instance.get_mut(&peer) {
            known.fence_again = None;
            // Not ready any more, so that the peer gets no messages about the rooms that end now.
            known.state = PeerState::Unfenced;
        }
        self.orphans.forget_peer(peer);
        // Requests that lack only a supplement from this peer can compute it.
        for room in self.rooms_with(peer, Stage::waits_for_supplement) {
            self.reclaim(now, room, actions);
        }
        // Transfers that have arrived completely need the peer no longer.
        let waiting = |stage: &Stage| !matches!(stage, Stage::Verifying(_));
        for room in self.rooms_with(peer, waiting) {
            let failure = Failure::new(FailureCode::PeerLost, why);
            self.fail(now, room, failure, actions);
        }
    }

    fn writer_gone(&mut self, peer: Instance, actions: &mut Vec<Action>) {
        let cleared = self.cache.writer_gone(peer, None);
        self.finish_clearing(cleared, actions);
        let reclaims = |job: &super::job::Job| matches!(job.stage(), Stage::Reclaiming(reclaiming) if reclaiming.writer == Some(peer));
        let rooms: Vec<Room> =
            self.jobs.iter().filter(|(_, job)| reclaims(job)).map(|(room, _)| *room).collect();
        for room in rooms {
            self.reclaimed(room, |reclaiming| reclaiming.writer = None, actions);
        }
    }

    /// Rooms that depend on a peer and are in a wanted stage.
    fn rooms_with(&self, peer: Instance, wanted: impl Fn(&Stage) -> bool) -> Vec<Room> {
        let depends = |job: &super::job::Job| match job.stage() {
            Stage::Transfer(incoming) | Stage::Verifying(incoming) => incoming.peer == peer,
            Stage::Queued(_)
                if job.request.prefill.as_ref().is_some_and(|prefill| prefill.instance == peer) =>
            {
                true
            }
            _ => job.outgoing.as_ref().is_some_and(|outgoing| outgoing.peer == peer),
        };
        let rooms = self.jobs.iter().filter(|(_, job)| wanted(job.stage()) && depends(job));
        rooms.map(|(room, _)| *room).collect()
    }

    pub(super) fn fence_failed(&mut self, now: Time, peer: Instance, session: u64) {
        if let Some(known) = self.peers.by_instance.get_mut(&peer)
            && known.state == PeerState::Unfenced
            && known.session == session
        {
            known.fence_again = Some(now.after(FENCE_AGAIN));
        }
    }
}
