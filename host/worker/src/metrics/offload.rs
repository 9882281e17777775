//! The series of a worker's offload tiers in `/metrics`.

use std::fmt::Error;

use host_core::hierarchy::{HierarchyStats, TierStats};
use host_core::histogram::Histogram;

use super::series::Series;
use crate::Handle;

/// Selects durations of a tier.
type Times = fn(&TierStats) -> &Histogram;

/// Writes the metrics of host memory and of each storage tier.
pub(super) fn encode(worker: &Handle, stats: &HierarchyStats, series: &mut Series<'_>) -> Result<(), Error> {
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
    series.gauges([
        (
            "host_hicache_slots_pinned",
            "Pages of host memory that a request or a write uses",
            stats.host_pinned,
        ),
        (
            "host_hicache_writing_back_pages",
            "Pages of the KV pool that are free as soon as they are copied",
            stats.writing_back,
        ),
    ])?;
    copies(worker, stats, series)?;
    let promised = [("host", stats.promised_host), ("storage", stats.promised_storage)];
    series.counter_by(
        "host_hicache_promised_pages",
        "Pages that requests were promised from offload tiers",
        promised.map(|(tier, pages)| ([("tier", tier)], pages)),
    )?;
    let restored =
        [("host", stats.loaded - stats.loaded_from_storage), ("storage", stats.loaded_from_storage)];
    series.counter_by(
        "host_hicache_restored_pages",
        "Pages that requests were promised from offload tiers and got",
        restored.map(|(tier, pages)| ([("tier", tier)], pages)),
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
    of_tiers(&worker.tiers(), &worker.stored_bytes(), series)
}

/// Writes the series of copies between the pools and host memory.
fn copies(worker: &Handle, stats: &HierarchyStats, series: &mut Series<'_>) -> Result<(), Error> {
    let (loaded, saved) = worker.copied_bytes();
    series.counter_by(
        "host_hicache_copied_bytes",
        "KV bytes copied between the KV pools and host memory",
        [("load", loaded), ("save", saved)].map(|(way, bytes)| ([("way", way)], bytes)),
    )?;
    series.gauge_by(
        "host_hicache_queue_pages",
        "Pages that wait for being copied between the KV pools and host memory, or for what they are copied from",
        [("load", stats.loads_under_way), ("save", stats.saves_under_way)]
            .map(|(way, pages)| ([("way", way)], pages)),
    )?;
    series.histogram_by(
        "host_hicache_copy_seconds",
        "Time of a batch of copies between the KV pools and host memory",
        [("load", &stats.load_times), ("save", &stats.save_times)]
            .map(|(way, times)| ([("way", way)], times)),
    )
}

fn of_tiers(
    tiers: &[(String, TierStats)],
    bytes: &[(&str, (u64, u64))],
    series: &mut Series<'_>,
) -> Result<(), Error> {
    let ends = tiers.iter().flat_map(|(tier, stats)| {
        [
            ("asked", stats.queried),
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
    let bytes = bytes.iter().flat_map(|(tier, (read, written))| {
        [("read", *read), ("write", *written)].map(|(way, bytes)| ([("tier", *tier), ("way", way)], bytes))
    });
    series.counter_by("host_storage_bytes", "Bytes that a storage tier found, and that it took", bytes)?;
    series.counter_by(
        "host_storage_deadlines_missed",
        "Batches of a storage tier that took longer than is waited for",
        tiers.iter().map(|(tier, stats)| ([("tier", tier.as_str())], stats.deadlines_missed)),
    )?;
    let ways = tiers.iter().flat_map(|(tier, stats)| {
        [
            ("ask", stats.questions_under_way),
            ("read", stats.reads_under_way),
            ("write", stats.writes_under_way),
        ]
        .map(|(way, pages)| ([("tier", tier.as_str()), ("way", way)], pages))
    });
    series.gauge_by(
        "host_storage_queue_pages",
        "Pages that wait for a storage tier or are under way there",
        ways,
    )?;
    series.gauge_by(
        "host_storage_resting",
        "1 while a storage tier that missed deadlines is left alone",
        tiers.iter().map(|(tier, stats)| ([("tier", tier.as_str())], i64::from(stats.resting))),
    )?;
    let times: [(&str, &str, Times); 3] = [
        ("host_storage_answer_seconds", "Time of an answer to a batch of questions", |stats| {
            &stats.answer_times
        }),
        ("host_storage_read_seconds", "Time of a batch of reads from a storage tier", |stats| {
            &stats.read_times
        }),
        ("host_storage_write_seconds", "Time of a batch of writes to a storage tier", |stats| {
            &stats.write_times
        }),
    ];
    for (name, help, of) in times {
        let times = tiers.iter().map(|(tier, stats)| ([("tier", tier.as_str())], of(stats)));
        series.histogram_by(name, help, times)?;
    }
    Ok(())
}
