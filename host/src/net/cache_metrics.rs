//! What a worker's `/metrics` says about its radix cache.

use host_core::scheduler::Stats;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Where cached pages lie; other tiers will come beside it.
const TIER: &str = "device";

/// Writes all series, `page_bytes` being the size of a KV page.
pub(super) fn encode(
    encoder: &mut DescriptorEncoder<'_>,
    stats: &Stats,
    page_bytes: u64,
) -> Result<(), std::fmt::Error> {
    let by_tier = [
        (
            "host_prefix_promised_tokens",
            "Prompt tokens found cached at admission, by tier",
            stats.cached_tokens,
        ),
        (
            "host_prefix_delivered_tokens",
            "Prompt tokens found cached that a complete prompt was made of, by tier",
            stats.delivered_tokens,
        ),
    ];
    for (name, help, value) in by_tier {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(family.encode_family(&[("tier", TIER)])?)?;
    }
    let help = "Prompts received: whole, without what was cached, or with nothing but the first token";
    let mut family = encoder.encode_descriptor("host_transfers", help, None, MetricType::Counter)?;
    for (kind, count) in
        [("full", stats.full_transfers), ("delta", stats.delta_transfers), ("full_hit", stats.full_hits)]
    {
        ConstCounter::new(count).encode(family.encode_family(&[("kind", kind)])?)?;
    }
    let gauges = [
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
    ];
    for (name, help, value) in gauges {
        let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
        gauge.encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)?;
    }
    let counters = [
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
    ];
    for (name, help, value) in counters {
        let counter = ConstCounter::new(value);
        counter.encode(encoder.encode_descriptor(name, help, None, MetricType::Counter)?)?;
    }
    Ok(())
}
