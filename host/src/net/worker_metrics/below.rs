//! What happens below the pool.

use std::fmt::Error;

use host_core::hierarchy::{HierarchyStats, TierStats};

use super::series::Series;

/// Writes the metrics of host memory and of each storage tier.
pub(super) fn encode(
    stats: &HierarchyStats,
    tiers: &[(String, TierStats)],
    series: &mut Series<'_>,
) -> Result<(), Error> {
    let host = stats.host;
    let slots = [
        ("free", host.free),
        ("filling", host.filling),
        ("ready", host.ready),
        ("quarantined", host.abandoned + host.spoilt),
    ];
    series.gauge_by(
        "host_hicache_slots",
        "Pages of host memory, by what they hold",
        slots.map(|(state, slots)| ([("state", state)], slots)),
    )?;
    series.gauges([(
        "host_hicache_slots_pinned",
        "Pages of host memory that a request or a write uses",
        stats.host_pinned,
    )])?;
    let promised = [("host", stats.promised_host), ("storage", stats.promised_storage)];
    series.counter_by(
        "host_hicache_promised_pages",
        "Pages that requests were promised from below the pool",
        promised.map(|(tier, pages)| ([("tier", tier)], pages)),
    )?;
    series.counters([
        (
            "host_hicache_promised_window_pages",
            "Pages of window parts among those that requests were promised",
            stats.promised_windows,
        ),
        ("host_hicache_loaded_pages", "Pages copied from host memory for a request", stats.loaded),
        ("host_hicache_saved_pages", "Pages copied to host memory", stats.saved),
        ("host_hicache_unsaved_pages", "Pages not copied to host memory, for want of room", stats.not_saved),
        (
            "host_hicache_dropped_pages",
            "Pages to be copied to host memory that were needed at once",
            stats.dropped,
        ),
        ("host_hicache_evicted_pages", "Pages that made way for others in host memory", stats.host_evicted),
        ("host_hicache_not_restored_pages", "Pages promised and not restored", stats.not_restored),
        (
            "host_hicache_restores_failed",
            "Requests of which something promised was not restored",
            stats.restores_failed,
        ),
        (
            "host_hicache_renegotiated",
            "Requests for which prefill sent what was not restored",
            stats.renegotiated,
        ),
        (
            "host_hicache_renegotiated_pages",
            "Pages that prefill was asked for because they were not restored",
            stats.renegotiated_pages,
        ),
        (
            "host_hicache_computed_instead",
            "Requests that computed what was not restored, prefill being gone",
            stats.computed_instead,
        ),
        (
            "host_hicache_skipped_pages",
            "Pages that were there and would have taken longer than doing without",
            stats.skipped_by_cost,
        ),
    ])?;
    of_tiers(tiers, series)
}

fn of_tiers(tiers: &[(String, TierStats)], series: &mut Series<'_>) -> Result<(), Error> {
    let ends = tiers.iter().flat_map(|(tier, stats)| {
        [
            ("asked", stats.asked),
            ("found", stats.found),
            ("read", stats.read),
            ("read_failed", stats.read_failed),
            ("damaged", stats.damaged),
            ("written", stats.written),
            ("write_refused", stats.write_refused),
            ("write_failed", stats.write_failed),
            ("write_dropped", stats.write_dropped),
        ]
        .map(|(end, pages)| ([("tier", tier.as_str()), ("end", end)], pages))
    });
    series.counter_by(
        "host_storage_pages",
        "Pages that a storage tier was asked to do something with, by how that ended",
        ends,
    )?;
    series.counter_by(
        "host_storage_deadlines_missed",
        "Batches of a storage tier that took longer than is waited for",
        tiers.iter().map(|(tier, stats)| ([("tier", tier.as_str())], stats.deadlines_missed)),
    )?;
    let ways = tiers.iter().flat_map(|(tier, stats)| {
        [("read", stats.reads_under_way), ("write", stats.writes_under_way)]
            .map(|(way, pages)| ([("tier", tier.as_str()), ("way", way)], pages))
    });
    series.gauge_by(
        "host_storage_queue_pages",
        "Pages that wait for a storage tier or are under way there",
        ways,
    )?;
    series.histogram_by(
        "host_storage_read_seconds",
        "Time of a batch of reads from a storage tier",
        tiers.iter().map(|(tier, stats)| ([("tier", tier.as_str())], &stats.read_times)),
    )
}
