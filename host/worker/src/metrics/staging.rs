//! The series of pieces of KV that go through staging memory.

use std::fmt::Error;

use host_core::staging::{RingStats, SenderStats};

use super::series::Series;

/// Writes all series. `ranks` has the counters of each rank as sender and as receiver.
pub(super) fn encode(ranks: &[(SenderStats, RingStats)], series: &mut Series<'_>) -> Result<(), Error> {
    let sent = |of: fn(&SenderStats) -> u64| ranks.iter().map(|(sender, _)| of(sender)).sum::<u64>();
    let received = |of: fn(&RingStats) -> u64| ranks.iter().map(|(_, ring)| of(ring)).sum::<u64>();
    series.counters([
        (
            "host_staged_received_bytes",
            "Bytes of KV copied out of staging memory",
            received(|ring| ring.bytes),
        ),
        ("host_staged_received_pieces", "Pieces that they came in", received(|ring| ring.pieces)),
        (
            "host_staging_repeats",
            "Questions for a slot repeated for want of an answer",
            sent(|sender| sender.repeats),
        ),
        ("host_staging_refused", "Questions for a slot that were refused", received(|ring| ring.refused)),
    ])?;
    series.gauges([
        (
            "host_staging_waiting",
            "Pieces that wait for a slot, on the side that asks or the side that is asked",
            sent(|sender| sender.waiting) + received(|ring| ring.waiting),
        ),
        (
            "host_staging_bytes_in_use",
            "Bytes of staging memory that hold a piece or are kept for one",
            sent(|sender| sender.bytes_in_use) + received(|ring| ring.bytes_in_use),
        ),
    ])
}
