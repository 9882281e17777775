//! Messages between the transfer threads of two workers, as the payload of the transfer backend's notifications.
//!
//! A message travels with a write of a room, and arrives after the write's data.
//!
//! All are [`MESSAGE_BYTES`] long, little-endian, and have their kind at [`KIND`]:
//!
//! | Kind | | Bytes |
//! | --- | --- | --- |
//! | 1 | [`LaneNotice`] | notice 0..24, fragment 24..28, fragments 28..32, sum 32..40, kind 40, alone 41, source 42, target 43 |
//! | 2 | [`PieceNotice`] | as a [`LaneNotice`], and the slot's generation 44..48 |
//! | 3, 4 | questions and answers about slots | [`staging::message`](crate::staging::message) |
//!
//! All other bytes are 0, and the receiver ignores them.

use crate::ids::Room;

/// Bytes of every message.
pub const MESSAGE_BYTES: usize = 48;
/// Offset of a message's kind.
pub const KIND: usize = 40;
/// Kind of a [`LaneNotice`].
pub const KIND_LANE: u8 = 1;
/// Kind of a [`PieceNotice`].
pub const KIND_PIECE: u8 = 2;

/// Most ranks of a worker: a rank is one byte on the wire.
pub const MAX_RANKS: usize = 256;

/// Bytes of an encoded notice.
const NOTICE_BYTES: usize = 24;

/// "Part `sequence` of this attempt is in your memory."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The room.
    pub room: Room,
    /// The attempt within the room.
    pub attempt: u32,
    /// Counts the parts from 0.
    pub sequence: u32,
    /// Pages that this part completes: those whose last layers it carries.
    pub pages: u32,
    /// Whether this part has the highest sequence number, and the aux row with it.
    pub last: bool,
}

/// "This fragment of a lane's bytes of a part is in your memory."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneNotice {
    /// The part.
    pub notice: Notice,
    /// Counts the fragments of the lane in this part from 0.
    pub fragment: u32,
    /// Number of fragments of the lane in this part, at least one.
    pub fragments: u32,
    /// Sum over the lane's pages of the part, or 0 when integrity is switched off.
    pub sum: u64,
    /// Whether the part has no pages. Then only rank 0 sends anything: the aux row, to rank 0.
    pub alone: bool,
    /// The sender's rank.
    pub source: u8,
    /// The receiver's rank.
    pub target: u8,
}

/// "This fragment is in a slot of your staging memory."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceNotice {
    /// The piece, a staged fragment with the same number.
    pub lane: LaneNotice,
    /// Generation of the slot, as it was granted.
    pub generation: u32,
}

impl Notice {
    fn encode(&self) -> [u8; NOTICE_BYTES] {
        let mut bytes = [0; NOTICE_BYTES];
        bytes[0..8].copy_from_slice(&self.room.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pages.to_le_bytes());
        bytes[20] = u8::from(self.last);
        bytes
    }

    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        Some(Self {
            room: Room(long(bytes, 0)),
            attempt: word(bytes, 8),
            sequence: word(bytes, 12),
            pages: word(bytes, 16),
            last: flag(bytes[20])?,
        })
    }
}

impl LaneNotice {
    /// The message.
    #[must_use]
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..NOTICE_BYTES].copy_from_slice(&self.notice.encode());
        bytes[24..28].copy_from_slice(&self.fragment.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.fragments.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.sum.to_le_bytes());
        bytes[KIND] = KIND_LANE;
        bytes[41] = u8::from(self.alone);
        (bytes[42], bytes[43]) = (self.source, self.target);
        bytes
    }

    /// Reads a message. `None` when it is of another kind, or has impossible values.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
        let (fragment, fragments) = (word(bytes, 24), word(bytes, 28));
        if bytes[KIND] != KIND_LANE || fragment >= fragments {
            return None;
        }
        Some(Self {
            notice: Notice::decode(bytes)?,
            fragment,
            fragments,
            sum: long(bytes, 32),
            alone: flag(bytes[41])?,
            source: bytes[42],
            target: bytes[43],
        })
    }
}

impl PieceNotice {
    /// The message.
    #[must_use]
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = self.lane.encode();
        bytes[KIND] = KIND_PIECE;
        bytes[44..].copy_from_slice(&self.generation.to_le_bytes());
        bytes
    }

    /// Reads a message. `None` when it is of another kind, or has impossible values.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let mut bytes: [u8; MESSAGE_BYTES] = bytes.try_into().ok()?;
        if bytes[KIND] != KIND_PIECE {
            return None;
        }
        bytes[KIND] = KIND_LANE;
        Some(Self { lane: LaneNotice::decode(&bytes)?, generation: word(&bytes, 44) })
    }
}

fn word(bytes: &[u8; MESSAGE_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn long(bytes: &[u8; MESSAGE_BYTES], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

fn flag(byte: u8) -> Option<bool> {
    match byte {
        0 => Some(false),
        1 => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane() -> LaneNotice {
        LaneNotice {
            notice: Notice {
                room: Room(0x0123_4567_89ab_cdef),
                attempt: 0x1020_3040,
                sequence: 0x5060_7080,
                pages: 0x0a0b_0c0d,
                last: true,
            },
            fragment: 0x1112_1314,
            fragments: 0x1516_1718,
            sum: 0xfeed_beef_dead_cafe,
            alone: false,
            source: 0x21,
            target: 0x23,
        }
    }

    #[test]
    fn a_message_comes_back_as_it_was() {
        let quiet = Notice { last: false, ..lane().notice };
        for lane in [lane(), LaneNotice { alone: true, notice: quiet, ..lane() }] {
            assert_eq!(LaneNotice::decode(&lane.encode()), Some(lane));
        }
    }

    #[test]
    fn every_byte_that_means_something_changes_the_message() {
        let bytes = lane().encode();
        let idle = |at: &usize| matches!(at, 21..24 | 44..48);
        for at in (0..MESSAGE_BYTES).filter(|at| !idle(at)) {
            let mut other = bytes;
            other[at] ^= 1;
            assert_ne!(LaneNotice::decode(&other), Some(lane()), "byte {at}");
        }
    }

    #[test]
    fn a_piece_is_told_from_a_fragment_and_names_its_slot() {
        let piece = PieceNotice { lane: lane(), generation: 0x3132_3334 };
        assert_eq!(PieceNotice::decode(&piece.encode()), Some(piece));
        assert_eq!(LaneNotice::decode(&piece.encode()), None);
        assert_eq!(PieceNotice::decode(&lane().encode()), None);
        assert_eq!(PieceNotice::decode(&piece.encode()[..47]), None);
    }

    #[test]
    fn what_is_no_message_is_not_read() {
        let bytes = lane().encode();
        assert_eq!(LaneNotice::decode(&bytes[..47]), None);
        assert_eq!(LaneNotice::decode(&[0; MESSAGE_BYTES]), None, "of no kind");
        for (at, value) in [(20, 2), (41, 7), (KIND, 9), (27, 0x16)] {
            let mut wrong = bytes;
            wrong[at] = value;
            assert_eq!(LaneNotice::decode(&wrong), None, "byte {at}");
        }
        assert_eq!(LaneNotice::decode(&LaneNotice { fragment: 3, fragments: 3, ..lane() }.encode()), None);
    }
}
