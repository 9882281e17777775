//! The series of a worker's radix cache in `/metrics`.

use std::fmt::Error;

use host_core::scheduler::Stats;

use super::series::Series;

/// Writes all series, `page_bytes` being the size of a KV page.
pub(super) fn encode(stats: &Stats, page_bytes: u64, series: &mut Series<'_>) -> Result<(), Error> {
    let by_tier = [
        (
            "host_prefix_promised_tokens",
            "Prompt tokens found cached at admission, by tier",
            [stats.cached_tokens, stats.offload_tokens],
        ),
        (
            "host_prefix_delivered_tokens",
            "Prompt tokens found cached that a complete prompt was made of, by tier",
            [stats.delivered_tokens, stats.delivered_offload_tokens],
        ),
    ];
    for (name, help, [device, offload]) in by_tier {
        let values = [("device", device), ("offload", offload)];
        series.counter_by(name, help, values.map(|(tier, value)| ([("tier", tier)], value)))?;
    }
    let kinds =
        [("full", stats.full_transfers), ("delta", stats.delta_transfers), ("full_hit", stats.full_hits)];
    series.counter_by(
        "host_transfers",
        "Prompts received: whole, without what was cached, or with nothing but the first token",
        kinds.map(|(kind, count)| ([("kind", kind)], count)),
    )?;
    series.gauges([
        ("host_kv_pages_locked", "Cached pages that a request uses", stats.locked_pages),
        (
            "host_cache_locks",
            "Requests that keep a prefix in the radix cache, one without pages too",
            stats.prefix_locks,
        ),
        (
            "host_cache_namespaces",
            "Namespaces that hold cached pages, or that a request uses",
            stats.namespaces,
        ),
    ])?;
    series.counters([
        (
            "host_transfer_saved_bytes",
            "KV bytes of prompts that did not have to be received",
            stats.pages_saved * page_bytes,
        ),
        ("host_pages_evicted", "Cached pages given up for want of free ones", stats.evicted_pages),
        (
            "host_shared_transfers",
            "Requests that waited for the pages of another with the same beginning",
            stats.shared_transfers,
        ),
        ("host_pages_shared", "KV pages neither sent nor computed for that", stats.shared_pages),
    ])
}
