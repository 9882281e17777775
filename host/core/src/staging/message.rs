//! Messages between a sender and a ring, as the payload of notifications. See [`notice`](crate::notice).

use super::{Key, Span};
use crate::ids::Room;
use crate::notice::{KIND, MESSAGE_BYTES};

/// Kind of an [`Ask`].
pub const KIND_ASK: u8 = 3;
/// Kind of an [`Answer`].
pub const KIND_ANSWER: u8 = 4;

/// "I have this piece. Where may I write it?"
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// The piece.
    pub key: Key,
    /// How often the piece was asked for before. Answers repeat this number, so that the sender can measure how long
    /// they took.
    pub repeat: u8,
    /// The contents of the piece.
    pub span: Span,
}

/// The ring's answer to an [`Ask`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The piece.
    pub key: Key,
    /// The `repeat` of the ask.
    pub repeat: u8,
    /// The answer.
    pub verdict: Verdict,
}

/// The verdict of an [`Answer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Write the piece here, once.
    Grant {
        /// Bytes from the start of the target's staging region.
        offset: u64,
        /// Number of the grant, for the notice behind the data.
        generation: u32,
    },
    /// There is no gap for the piece yet. A grant follows by itself. Ask again now and then, in case the grant is lost.
    Wait,
    /// The piece is here already, or its attempt was replaced by another: it need not be sent.
    Done,
    /// There will be no slot for the piece.
    Refused(Refusal),
}

/// Why a ring refuses a piece for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The room is unknown, closed, another peer's, or at an earlier attempt.
    #[error("the other worker has given up the room")]
    Gone,
    /// The span is not what both sides agreed on: pages, layers, heads, or the bytes of a block.
    #[error("the other worker expects other pages, layers, heads or bytes: start both with the same model")]
    Malformed,
    /// The piece is longer than the ring hands out at once.
    #[error("a piece is longer than the other worker's staging memory allows: raise its --staging-bytes")]
    TooLong,
    /// More was asked for in the room than it holds.
    #[error("more pieces than the room has room for were asked for")]
    TooMany,
}

/// An [`Ask`] or an [`Answer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// To a ring.
    Ask(Ask),
    /// To a sender.
    Answer(Answer),
}

struct Bytes([u8; MESSAGE_BYTES]);

impl Bytes {
    fn put<const N: usize>(&mut self, at: usize, bytes: [u8; N]) {
        self.0[at..at + N].copy_from_slice(&bytes);
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        std::array::from_fn(|index| self.0[at + index])
    }

    fn put_key(&mut self, key: &Key) {
        self.put(0, key.room.0.to_le_bytes());
        self.put(8, key.attempt.to_le_bytes());
        self.put(12, key.sequence.to_le_bytes());
        self.put(16, key.piece.to_le_bytes());
    }

    fn key(&self) -> Key {
        Key {
            room: Room(u64::from_le_bytes(self.get(0))),
            attempt: u32::from_le_bytes(self.get(8)),
            sequence: u32::from_le_bytes(self.get(12)),
            piece: u16::from_le_bytes(self.get(16)),
        }
    }
}

/// Offset of an answer's verdict.
const VERDICT_AT: usize = 18;
/// Offset of the count of repeats.
const REPEAT_AT: usize = 41;

impl Message {
    /// The message's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = Bytes([0; MESSAGE_BYTES]);
        match self {
            Message::Ask(Ask { key, repeat, span }) => {
                bytes.put(KIND, [KIND_ASK, *repeat]);
                bytes.put_key(key);
                bytes.put(18, span.layers.start.to_le_bytes());
                bytes.put(20, span.layers.end.to_le_bytes());
                bytes.put(22, span.heads.start.to_le_bytes());
                bytes.put(24, span.heads.end.to_le_bytes());
                bytes.put(26, span.pages.start.to_le_bytes());
                bytes.put(30, span.pages.end.to_le_bytes());
                bytes.put(34, span.bytes.to_le_bytes());
            }
            Message::Answer(Answer { key, repeat, verdict }) => {
                bytes.put(KIND, [KIND_ANSWER, *repeat]);
                bytes.put_key(key);
                let code = match verdict {
                    Verdict::Grant { offset, generation } => {
                        bytes.put(20, offset.to_le_bytes());
                        bytes.put(28, generation.to_le_bytes());
                        0
                    }
                    Verdict::Wait => 1,
                    Verdict::Done => 2,
                    Verdict::Refused(Refusal::Gone) => 3,
                    Verdict::Refused(Refusal::Malformed) => 4,
                    Verdict::Refused(Refusal::TooLong) => 5,
                    Verdict::Refused(Refusal::TooMany) => 6,
                };
                bytes.put(VERDICT_AT, [code]);
            }
        }
        bytes.0
    }

    /// Reads a message. `None` when the bytes are not one.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = Bytes(bytes.try_into().ok()?);
        let (key, [repeat]) = (bytes.key(), bytes.get(REPEAT_AT));
        let [kind] = bytes.get(KIND);
        match kind {
            KIND_ASK => {
                let word = |at| u16::from_le_bytes(bytes.get(at));
                let long = |at| u32::from_le_bytes(bytes.get(at));
                let span = Span {
                    layers: word(18)..word(20),
                    heads: word(22)..word(24),
                    pages: long(26)..long(30),
                    bytes: long(34),
                };
                Some(Message::Ask(Ask { key, repeat, span }))
            }
            KIND_ANSWER => {
                let [code] = bytes.get(VERDICT_AT);
                let verdict = match code {
                    0 => Verdict::Grant {
                        offset: u64::from_le_bytes(bytes.get(20)),
                        generation: u32::from_le_bytes(bytes.get(28)),
                    },
                    1 => Verdict::Wait,
                    2 => Verdict::Done,
                    3 => Verdict::Refused(Refusal::Gone),
                    4 => Verdict::Refused(Refusal::Malformed),
                    5 => Verdict::Refused(Refusal::TooLong),
                    6 => Verdict::Refused(Refusal::TooMany),
                    _ => return None,
                };
                Some(Message::Answer(Answer { key, repeat, verdict }))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_survives_its_bytes() {
        let key = Key { room: Room(u64::MAX - 1), attempt: 3, sequence: u32::MAX, piece: 65_534 };
        let span = Span { pages: 7..1 << 31, layers: 2..300, heads: 0..65_535, bytes: 4 << 20 };
        let mut messages = vec![Message::Ask(Ask { key, repeat: 255, span })];
        for verdict in [
            Verdict::Grant { offset: 1 << 40, generation: u32::MAX },
            Verdict::Wait,
            Verdict::Done,
            Verdict::Refused(Refusal::Gone),
            Verdict::Refused(Refusal::Malformed),
            Verdict::Refused(Refusal::TooLong),
            Verdict::Refused(Refusal::TooMany),
        ] {
            messages.push(Message::Answer(Answer { key, repeat: 1, verdict }));
        }
        for message in messages {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn other_bytes_are_no_message() {
        assert_eq!(Message::decode(&[0; MESSAGE_BYTES]), None, "kind 0 is a notice");
        assert_eq!(Message::decode(&[KIND_ASK; MESSAGE_BYTES - 1]), None);
        let mut answer = [0; MESSAGE_BYTES];
        (answer[KIND], answer[VERDICT_AT]) = (KIND_ANSWER, 7);
        assert_eq!(Message::decode(&answer), None);
    }
}
