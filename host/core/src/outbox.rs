//! Messages that are repeated until they are answered.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::ids::{Instance, Room, Time};
use crate::message::{Body, Message};

/// First wait before a message is repeated. The wait doubles each time.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Longest wait between repeats.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
struct Unanswered {
    to: Instance,
    message: Message,
    first_sent: Time,
    due: Time,
    wait: Duration,
}

/// All unanswered messages of a worker, by id.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    last_id: u64,
    unanswered: BTreeMap<u64, Unanswered>,
}

impl Outbox {
    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// A message to send now and to repeat until answered.
    pub(crate) fn request(
        &mut self,
        now: Time,
        to: Instance,
        room: Room,
        attempt: u32,
        body: Body,
    ) -> Message {
        let message = Message { id: self.next_id(), answers: None, room, attempt, body };
        let due = now.after(FIRST_WAIT);
        let unanswered = Unanswered { to, message: message.clone(), first_sent: now, due, wait: FIRST_WAIT };
        self.unanswered.insert(message.id, unanswered);
        message
    }

    /// An answer, sent once: the peer repeats its question if the answer is lost.
    pub(crate) fn answer(&mut self, question: u64, room: Room, attempt: u32, body: Body) -> Message {
        Message { id: self.next_id(), answers: Some(question), room, attempt, body }
    }

    /// Takes note of an answer. Returns `false` when no question waited for it (a repeat, or the room was given up).
    pub(crate) fn answered(&mut self, from: Instance, question: u64) -> bool {
        match self.unanswered.get(&question) {
            Some(entry) if entry.to == from => self.unanswered.remove(&question).is_some(),
            _ => false,
        }
    }

    /// Stops repeating everything about a room.
    pub(crate) fn forget_room(&mut self, room: Room) {
        self.unanswered.retain(|_, entry| entry.message.room != room);
    }

    /// Stops repeating everything to a peer.
    pub(crate) fn forget_peer(&mut self, peer: Instance) {
        self.unanswered.retain(|_, entry| entry.to != peer);
    }

    /// The lowest id still repeated to a peer: everything below is answered or given up.
    pub(crate) fn floor(&self, peer: Instance) -> u64 {
        self.unanswered
            .values()
            .find(|entry| entry.to == peer)
            .map_or(self.last_id + 1, |entry| entry.message.id)
    }

    /// An id above every message so far: messages below it do not belong to a connection that begins now.
    pub(crate) fn next_floor(&self) -> u64 {
        self.last_id + 1
    }

    /// Messages whose repeat is due. Each is due again later.
    pub(crate) fn due(&mut self, now: Time) -> Vec<(Instance, Message)> {
        let mut repeats = Vec::new();
        for entry in self.unanswered.values_mut().filter(|entry| entry.due <= now) {
            entry.wait = (entry.wait * 2).min(LONGEST_WAIT);
            entry.due = now.after(entry.wait);
            repeats.push((entry.to, entry.message.clone()));
        }
        repeats
    }

    /// Peers that have left a message unanswered since before `now - patience`.
    ///
    /// A peer answers an abort only when nothing is in flight. So an unanswered abort counts only if nothing else was `heard`
    /// from the peer either, for as long as a write may take plus the patience.
    pub(crate) fn silent_peers(
        &self,
        now: Time,
        patience: Duration,
        write: Duration,
        heard: impl Fn(Instance) -> Time,
    ) -> Vec<Instance> {
        let is_silent = |entry: &&Unanswered| match entry.message.body {
            Body::Abort => now.since(entry.first_sent.max(heard(entry.to))) >= write.saturating_add(patience),
            _ => now.since(entry.first_sent) >= patience,
        };
        let mut peers: Vec<Instance> =
            self.unanswered.values().filter(is_silent).map(|entry| entry.to).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// When the next repeat is due.
    pub(crate) fn next_due(&self) -> Option<Time> {
        self.unanswered.values().map(|entry| entry.due).min()
    }

    /// Messages waiting for an answer.
    pub(crate) fn len(&self) -> usize {
        self.unanswered.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Instance = Instance(7);

    #[test]
    fn a_message_is_repeated_under_its_id_until_answered() {
        let mut outbox = Outbox::default();
        let start = Time::default();
        let message = outbox.request(start, PEER, Room(1), 1, Body::Commit);
        assert!(outbox.due(start).is_empty(), "not due at once");
        let later = start.after(FIRST_WAIT);
        assert_eq!(outbox.due(later), vec![(PEER, message.clone())]);
        assert!(outbox.due(later).is_empty(), "backs off");
        assert!(!outbox.answered(Instance(8), message.id), "another peer's answer does not count");
        assert!(outbox.answered(PEER, message.id));
        assert!(!outbox.answered(PEER, message.id), "answering twice is harmless");
        assert!(outbox.due(start.after(Duration::from_secs(60))).is_empty());
    }

    #[test]
    fn the_floor_rises_past_answered_and_forgotten_messages() {
        let mut outbox = Outbox::default();
        let first = outbox.request(Time::default(), PEER, Room(1), 1, Body::Commit);
        let second = outbox.request(Time::default(), PEER, Room(2), 1, Body::Abort);
        assert_eq!(outbox.floor(PEER), first.id);
        outbox.forget_room(Room(1));
        assert_eq!(outbox.floor(PEER), second.id);
        assert!(outbox.answered(PEER, second.id));
        assert!(outbox.floor(PEER) > second.id);
    }
}
