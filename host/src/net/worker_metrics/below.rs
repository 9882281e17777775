//! What happens below the pool.

use std::fmt::Error;

use host_core::hierarchy::{HierarchyStats, TierStats};
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Writes the metrics of host memory and of each storage tier.
pub(super) fn encode(
    stats: &HierarchyStats,
    tiers: &[(String, TierStats)],
    encoder: &mut DescriptorEncoder<'_>,
) -> Result<(), Error> {
    let host = stats.host;
    let slots = [
        ("free", host.free),
        ("filling", host.filling),
        ("ready", host.ready),
        ("quarantined", host.abandoned + host.spoilt),
    ];
    let mut family = encoder.encode_descriptor(
        "host_hicache_slots",
        "Pages of host memory, by what they hold",
        None,
        MetricType::Gauge,
    )?;
    for (state, count) in slots {
        let count = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
        count.encode(family.encode_family(&[("state", state)])?)?;
    }
    let pinned = ConstGauge::new(i64::try_from(stats.host_pinned).unwrap_or(i64::MAX));
    let help = "Pages of host memory that a request or a write uses";
    pinned.encode(encoder.encode_descriptor(
        "host_hicache_slots_pinned",
        help,
        None,
        pinned.metric_type(),
    )?)?;
    let mut family = encoder.encode_descriptor(
        "host_hicache_promised_pages",
        "Pages that requests were promised from below the pool",
        None,
        MetricType::Counter,
    )?;
    for (tier, count) in [("host", stats.promised_host), ("storage", stats.promised_storage)] {
        ConstCounter::new(count).encode(family.encode_family(&[("tier", tier)])?)?;
    }
    let counters = [
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
    ];
    for (name, help, value) in counters {
        let counter = ConstCounter::new(value);
        counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
    }
    encode_tiers(tiers, encoder)
}

fn encode_tiers(tiers: &[(String, TierStats)], encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
    let mut family = encoder.encode_descriptor(
        "host_storage_pages",
        "Pages that a storage tier was asked to do something with, by how that ended",
        None,
        MetricType::Counter,
    )?;
    for (tier, stats) in tiers {
        for (end, count) in [
            ("asked", stats.asked),
            ("found", stats.found),
            ("read", stats.read),
            ("read_failed", stats.read_failed),
            ("damaged", stats.damaged),
            ("written", stats.written),
            ("write_refused", stats.write_refused),
            ("write_failed", stats.write_failed),
            ("write_dropped", stats.write_dropped),
        ] {
            ConstCounter::new(count)
                .encode(family.encode_family(&[("tier", tier.as_str()), ("end", end)])?)?;
        }
    }
    let mut family = encoder.encode_descriptor(
        "host_storage_deadlines_missed",
        "Batches of a storage tier that took longer than is waited for",
        None,
        MetricType::Counter,
    )?;
    for (tier, stats) in tiers {
        ConstCounter::new(stats.deadlines_missed)
            .encode(family.encode_family(&[("tier", tier.as_str())])?)?;
    }
    let mut family = encoder.encode_descriptor(
        "host_storage_queue_pages",
        "Pages that wait for a storage tier or are under way there",
        None,
        MetricType::Gauge,
    )?;
    for (tier, stats) in tiers {
        for (way, count) in [("read", stats.reads_under_way), ("write", stats.writes_under_way)] {
            let count = ConstGauge::new(i64::try_from(count).unwrap_or(i64::MAX));
            count.encode(family.encode_family(&[("tier", tier.as_str()), ("way", way)])?)?;
        }
    }
    let mut family = encoder.encode_descriptor(
        "host_storage_read_seconds",
        "Time of a batch of reads from a storage tier",
        None,
        MetricType::Histogram,
    )?;
    for (tier, stats) in tiers {
        let buckets: Vec<(f64, u64)> = stats.read_times.buckets().collect();
        let (sum, count) = (stats.read_times.sum().as_secs_f64(), stats.read_times.count());
        let labels = [("tier", tier.as_str())];
        let mut metric = family.encode_family(&labels)?;
        metric.encode_histogram::<prometheus_client::encoding::NoLabelSet>(sum, count, &buckets, None)?;
    }
    Ok(())
}
