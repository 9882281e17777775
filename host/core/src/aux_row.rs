//! The aux row: data about a request that prefill writes once, together with its last pages.
//!
//! A fixed number of bytes per room in a region of its own. It carries what decode needs to go on (the first token) and
//! which transfer the pages belong to (room, attempt, size). Sums that travel with the parts ([`crate::notice`])
//! protect the contents of the pages. A checksum reveals a torn row, and room and attempt reveal a stale or foreign
//! one, before anything in it is used.

use crate::batch::{MAX_TOP_LOGPROBS, Sampled};
use crate::ids::Room;

/// Bytes of one row.
pub const AUX_ROW_BYTES: usize = 256;

const MAGIC: u32 = 0x3158_5541;
const TOP: usize = 64;
const CHECKSUM: usize = AUX_ROW_BYTES - 8;
const _: () = assert!(TOP + MAX_TOP_LOGPROBS as usize * 8 <= CHECKSUM);

/// The contents of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct AuxRow {
    /// The room that the pages belong to.
    pub room: Room,
    /// The attempt within the room.
    pub attempt: u32,
    /// Tokens of the prompt whose KV the pages hold.
    pub prompt_tokens: u32,
    /// Prompt tokens that prefill found in its own cache.
    pub cached_tokens: u32,
    /// Pages sent in this attempt.
    pub pages: u32,
    /// The token after the prompt.
    pub first: Sampled,
}

/// Why a row was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuxRowError {
    /// The bytes are no row, or a row that was not written completely.
    #[error("the aux row is not intact")]
    Damaged,
}

impl AuxRow {
    /// The row's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; AUX_ROW_BYTES] {
        let mut row = [0; AUX_ROW_BYTES];
        let mut put = |at: usize, bytes: &[u8]| row[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_le_bytes());
        put(4, &self.attempt.to_le_bytes());
        put(8, &self.room.0.to_le_bytes());
        put(16, &self.prompt_tokens.to_le_bytes());
        put(20, &self.cached_tokens.to_le_bytes());
        put(24, &self.pages.to_le_bytes());
        put(28, &self.first.token.to_le_bytes());
        put(40, &self.first.logprob.unwrap_or(0.0).to_le_bytes());
        let top = &self.first.top[..self.first.top.len().min(MAX_TOP_LOGPROBS as usize)];
        put(44, &[u8::from(self.first.logprob.is_some()), top.len() as u8]);
        for (index, (token, logprob)) in top.iter().enumerate() {
            put(TOP + index * 8, &token.to_le_bytes());
            put(TOP + index * 8 + 4, &logprob.to_le_bytes());
        }
        let sum = checksum(&row[..CHECKSUM]);
        row[CHECKSUM..].copy_from_slice(&sum.to_le_bytes());
        row
    }

    /// Reads a row.
    ///
    /// # Errors
    /// When the bytes are not a whole row.
    pub fn decode(row: &[u8; AUX_ROW_BYTES]) -> Result<Self, AuxRowError> {
        let word = |at: usize| u32::from_le_bytes([row[at], row[at + 1], row[at + 2], row[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let top = row[45];
        if word(0) != MAGIC || checksum(&row[..CHECKSUM]) != long(CHECKSUM) || top > MAX_TOP_LOGPROBS {
            return Err(AuxRowError::Damaged);
        }
        Ok(Self {
            attempt: word(4),
            room: Room(long(8)),
            prompt_tokens: word(16),
            cached_tokens: word(20),
            pages: word(24),
            first: Sampled {
                token: word(28),
                logprob: (row[44] == 1).then(|| f32::from_bits(word(40))),
                top: (0..usize::from(top))
                    .map(|index| (word(TOP + index * 8), f32::from_bits(word(TOP + index * 8 + 4))))
                    .collect(),
            },
        })
    }
}

/// FNV-1a, 64 bits: enough to tell a whole row from a damaged one.
fn checksum(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> AuxRow {
        AuxRow {
            room: Room(0x1234_5678_9abc_def0),
            attempt: 3,
            prompt_tokens: 77,
            cached_tokens: 16,
            pages: 5,
            first: Sampled {
                token: 9,
                logprob: Some(-0.5),
                top: (0..20).map(|i| (i, -(i as f32))).collect(),
            },
        }
    }

    #[test]
    fn a_row_comes_back_as_it_was() {
        assert_eq!(AuxRow::decode(&row().encode()), Ok(row()));
        let bare = AuxRow { first: Sampled { token: 1, logprob: None, top: Vec::new() }, ..row() };
        assert_eq!(AuxRow::decode(&bare.encode()), Ok(bare));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = row().encode();
        for bit in 0..AUX_ROW_BYTES * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(AuxRow::decode(&damaged), Err(AuxRowError::Damaged), "bit {bit}");
        }
        assert_eq!(AuxRow::decode(&[0; AUX_ROW_BYTES]), Err(AuxRowError::Damaged));
    }
}
