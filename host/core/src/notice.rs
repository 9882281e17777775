//! The words that travel with each write of a room, behind its data.

use crate::ids::Room;

/// Bytes of an encoded notice.
pub const NOTICE_BYTES: usize = 24;

/// "Part `sequence` of this attempt is in your memory."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    /// The room.
    pub room: Room,
    /// The try within the room.
    pub attempt: u32,
    /// Counts the parts from 0.
    pub sequence: u32,
    /// Pages that this part completes: those whose last layers it carries.
    pub pages: u32,
    /// Whether this part has the highest sequence number, and the aux row with it.
    pub last: bool,
}

impl Notice {
    /// The notice's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; NOTICE_BYTES] {
        let mut bytes = [0; NOTICE_BYTES];
        bytes[0..8].copy_from_slice(&self.room.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.attempt.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.pages.to_le_bytes());
        bytes[20] = u8::from(self.last);
        bytes
    }

    /// Reads a notice; `None` when the bytes are not one.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; NOTICE_BYTES] = bytes.try_into().ok()?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Some(Self {
            room: Room(u64::from(word(0)) | u64::from(word(4)) << 32),
            attempt: word(8),
            sequence: word(12),
            pages: word(16),
            last: match bytes[20] {
                0 => false,
                1 => true,
                _ => return None,
            },
        })
    }
}
