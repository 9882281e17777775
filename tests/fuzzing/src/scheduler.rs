//! Fuzzes one scheduler, whose peer sends anything at any time.

use std::time::Duration;

use host_core::aux_row::AuxRow;
use host_core::integrity::{FoundData, LaneSum};
use host_core::message::{Body, Message, Reserve};
use host_core::notice::Notice;
use host_core::request::Request;
use host_core::{Event, PageId, Role, Room, Sampled};
use host_sim::{Leg, PEER};

use crate::reader::Decisions;

/// Most events of one input.
const MOST: usize = 200;
const PAGES: u32 = 12;

/// Runs one scheduler. An input has a role and events: requests of a client, and actions of a peer, of its transfers and of its
/// connection. The scheduler's books are audited after each event. True when some request was answered.
///
/// # Panics
/// When the scheduler panics, or its books are wrong.
#[must_use]
pub fn scheduler(bytes: &[u8]) -> bool {
    let mut decisions = Decisions(bytes);
    let role = if decisions.below(2) == 0 { Role::Decode } else { Role::Prefill };
    let mut world =
        World { leg: Leg::with(host_sim::config(role, PAGES)), room: 0, session: 1, message: 1 << 20 };
    for _ in 0..MOST {
        let Some(what) = decisions.byte() else { break };
        world.happens(what, &mut decisions);
    }
    !world.leg.finished.is_empty()
}

struct World {
    leg: Leg,
    /// The last room.
    room: u64,
    /// The last connection.
    session: u64,
    /// Id of the last new message of the peer.
    message: u64,
}

impl World {
    fn happens(&mut self, what: u8, decisions: &mut Decisions<'_>) {
        match what % 16 {
            0 => {
                self.room += 1;
                let prompt: Vec<u32> = (0..1 + u32::from(decisions.below(20))).collect();
                let request = self.leg.request(self.room, &prompt, 1 + u32::from(decisions.below(6)));
                let (client, priority) = (u64::from(decisions.below(3)), i32::from(decisions.below(3)) - 1);
                // The upper half of the byte asks for log probabilities of the prompt.
                let scores = (what >= 128).then_some(2);
                self.leg.send(Request { client, priority, scores, ..request });
            }
            1 => {
                let room = self.some_room(decisions);
                self.leg.event(Event::Cancel(room));
            }
            2..=5 => {
                let event = self.said(decisions);
                self.leg.event(event);
            }
            6 => {
                let notice = Notice {
                    room: self.some_room(decisions),
                    attempt: decisions.number(),
                    sequence: decisions.number(),
                    pages: decisions.number(),
                    last: decisions.below(2) == 0,
                };
                self.leg.event(Event::Arrived(notice));
            }
            7 => {
                let room = self.some_room(decisions);
                if self.leg.reserves.contains_key(&room) {
                    self.leg.arrive(room.0);
                }
            }
            8 => self.verified(decisions),
            // The upper half of the byte selects a variant, since `what % 16` ignores it.
            9 if what >= 128 => drop(self.leg.compute_late(|room| room.0.is_multiple_of(2))),
            9 => {
                self.leg.compute();
            }
            10 => {
                let milliseconds = [1, 1_000, 31_000, 1_000_000][usize::from(decisions.below(4))];
                self.leg.wait(Duration::from_millis(milliseconds));
            }
            11 => self.leg.settle(),
            12 => {
                let session = self.some_session(decisions);
                let fenced = decisions.below(2) == 0;
                self.leg.event(Event::PeerLost { peer: PEER, session, fenced });
            }
            13 => {
                self.session += 1;
                let floor = u64::from(decisions.number());
                self.leg.event(Event::PeerReady { peer: PEER, floor, session: self.session });
            }
            14 => {
                let session = self.some_session(decisions);
                self.leg.event(Event::FenceFailed { peer: PEER, session });
            }
            _ => self.leg.answer_messages(),
        }
    }

    fn some_room(&self, decisions: &mut Decisions<'_>) -> Room {
        let back = u64::from(decisions.below(4));
        Room(self.room.saturating_sub(back))
    }

    /// The last session, or one of the two before it.
    fn some_session(&self, decisions: &mut Decisions<'_>) -> u64 {
        self.session.saturating_sub(u64::from(decisions.below(3))).max(1)
    }

    /// Any message of the peer.
    fn said(&mut self, decisions: &mut Decisions<'_>) -> Event {
        let room = self.some_room(decisions);
        let attempt = u32::from(decisions.below(4));
        let text = || "no".to_owned();
        let body = match decisions.below(9) {
            0 => Body::Reserve(Reserve {
                pages: (0..decisions.below(8)).map(|_| PageId(decisions.number())).collect(),
                window: (0..decisions.below(3)).map(|_| PageId(decisions.number())).collect(),
                decode_prefix_len: decisions.number(),
                prompt_tokens: decisions.number(),
                aux_slot: decisions.number(),
                namespace: host_core::radix::NamespaceKey::default().fingerprint()
                    ^ u64::from(decisions.below(2)),
            }),
            1 => Body::Reserved,
            2 => Body::Refused { message: text(), retryable: decisions.below(2) == 0 },
            3 => Body::Commit,
            4 => Body::Committed,
            5 => Body::Abort,
            6 => Body::Drained,
            7 => Body::PrefillFailed { message: text(), retryable: decisions.below(2) == 0 },
            _ => Body::PrefillFailedSeen,
        };
        let answers = match decisions.below(3) {
            0 => None,
            1 => Some(u64::from(decisions.number())),
            _ => self.leg.sent.last().map(|message| message.id),
        };
        // Some ids are repeated or old.
        let id = match decisions.below(4) {
            0 => u64::from(decisions.number()),
            _ => {
                self.message += 1;
                self.message
            }
        };
        let floor = if decisions.below(8) == 0 { u64::from(decisions.number()) } else { 0 };
        Event::Message { from: PEER, floor, message: Message { id, answers, room, attempt, body } }
    }

    /// A verification ends. Its bytes are arbitrary, since a peer wrote them.
    fn verified(&mut self, decisions: &mut Decisions<'_>) {
        let Some(room) = self.leg.verifying.keys().next().copied() else { return };
        if decisions.below(2) == 0 {
            self.leg.verified(room.0, decisions.below(2) == 0);
            return;
        }
        let Some((attempt, _)) = self.leg.verifying.remove(&room) else { return };
        let mut row = AuxRow {
            room: Room(room.0 + u64::from(decisions.below(2))),
            attempt: attempt + u32::from(decisions.below(2)),
            prompt_tokens: decisions.number(),
            cached_tokens: decisions.number(),
            pages: decisions.number(),
            first: Sampled { token: decisions.number(), logprob: None, top: Vec::new() },
        }
        .encode();
        row[usize::from(decisions.byte().unwrap_or(0))] ^= decisions.below(2);
        let sum = |decisions: &mut Decisions<'_>| LaneSum {
            source: 0,
            target: 0,
            sent: 5,
            found: 5 + u64::from(decisions.below(2)),
        };
        let lanes = (decisions.below(4) > 0).then(|| vec![sum(decisions)]);
        let found = Box::new(FoundData { aux_row: row, lanes });
        self.leg.event(Event::Verified { room, attempt, found });
    }
}
