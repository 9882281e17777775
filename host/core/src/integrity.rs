//! The gate between "arrived" and "may be used".
//!
//! A decode worker uses transferred pages only with a [`Verified`], and only [`verify`] makes one. It refuses a
//! transfer that is partial, late, foreign or damaged.

use crate::aux_row::{AUX_ROW_BYTES, AuxRow};
use crate::batch::Sampled;
use crate::ids::Room;

/// The data that the worker found in its own memory after the last notice.
#[derive(Clone, Debug, PartialEq)]
pub struct FoundData {
    /// The aux row's bytes.
    pub aux_row: [u8; AUX_ROW_BYTES],
    /// The sums of each lane from prefill's ranks to ours: as sent, and as found here. `None` when integrity is
    /// switched off.
    pub lanes: Option<Vec<LaneSum>>,
}

/// The heads that one of prefill's ranks sent to one of ours: digests of their blocks, mixed with their places and added
/// up over all parts of the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSum {
    /// Prefill's rank.
    pub source: u32,
    /// Our rank.
    pub target: u32,
    /// The sum that the arrived parts state.
    pub sent: u64,
    /// The sum computed from our memory.
    pub found: u64,
}

/// The transfer that decode expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The room.
    pub room: Room,
    /// The attempt within the room.
    pub attempt: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Pages of this attempt.
    pub pages: u32,
}

/// A transfer whose room, attempt, size and (unless switched off) bytes were checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    first: Sampled,
    cached_tokens: u32,
}

impl Verified {
    /// The token after the prompt.
    #[must_use]
    pub fn first(&self) -> &Sampled {
        &self.first
    }

    /// Prompt tokens that prefill did not have to compute.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }
}

/// Why arrived pages may not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mismatch {
    /// The row is damaged.
    #[error("the aux row is not intact")]
    Row,
    /// The row belongs to another room, attempt or prompt.
    #[error("the aux row belongs to {0}")]
    Foreign(String),
    /// The pages' bytes are not those that were sent.
    #[error(
        "the pages that prefill's rank {} sent to rank {} have digest {:016x} here and {:016x} there",
        .0.source, .0.target, .0.found, .0.sent
    )]
    Pages(LaneSum),
    /// No rank has digested the pages' bytes.
    #[error("no rank has digested the pages")]
    Unseen,
}

/// Checks an arrived transfer.
///
/// # Errors
/// When the row or the pages are not as expected. The pages must then be sent again.
pub fn verify(expected: Expected, found: &FoundData) -> Result<Verified, Mismatch> {
    let row = AuxRow::decode(&found.aux_row).map_err(|_damaged| Mismatch::Row)?;
    let said =
        Expected { room: row.room, attempt: row.attempt, prompt_tokens: row.prompt_tokens, pages: row.pages };
    if said != expected {
        return Err(Mismatch::Foreign(format!("{said:?}, expected {expected:?}")));
    }
    if let Some(lanes) = &found.lanes {
        if lanes.is_empty() {
            return Err(Mismatch::Unseen);
        }
        if let Some(lane) = lanes.iter().find(|lane| lane.sent != lane.found) {
            return Err(Mismatch::Pages(*lane));
        }
    }
    Ok(Verified { first: row.first, cached_tokens: row.cached_tokens })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> AuxRow {
        AuxRow {
            room: Room(5),
            attempt: 1,
            prompt_tokens: 30,
            cached_tokens: 0,
            pages: 2,
            first: Sampled { token: 4, logprob: None, top: Vec::new() },
        }
    }

    #[test]
    fn only_the_expected_row_with_the_right_sum_of_every_lane_passes() {
        let expected = Expected { room: Room(5), attempt: 1, prompt_tokens: 30, pages: 2 };
        let lane = |target, found| LaneSum { source: 0, target, sent: 99, found };
        let found = |row: AuxRow, lanes| FoundData { aux_row: row.encode(), lanes };
        let intact = || Some(vec![lane(0, 99), lane(1, 99)]);
        assert_eq!(verify(expected, &found(row(), intact())).unwrap().first().token, 4);
        assert!(verify(expected, &found(row(), None)).is_ok(), "integrity switched off");
        let damaged = Some(vec![lane(0, 99), lane(1, 98)]);
        assert_eq!(verify(expected, &found(row(), damaged)), Err(Mismatch::Pages(lane(1, 98))));
        assert_eq!(verify(expected, &found(row(), Some(Vec::new()))), Err(Mismatch::Unseen));
        for other in [
            AuxRow { room: Room(6), ..row() },
            AuxRow { attempt: 2, ..row() },
            AuxRow { prompt_tokens: 31, ..row() },
            AuxRow { pages: 1, ..row() },
        ] {
            assert!(matches!(verify(expected, &found(other, intact())), Err(Mismatch::Foreign(_))));
        }
        assert_eq!(
            verify(expected, &FoundData { aux_row: [0; AUX_ROW_BYTES], lanes: intact() }),
            Err(Mismatch::Row)
        );
    }
}
