//! What lies below the pool, from settings.

use host_core::hierarchy::{HierarchyConfig, PrefetchPolicy, TierConfig, WritePolicy};
use host_core::{Instance, KvLayout};

use super::settings::{RoleName, Settings, parse_bytes};
use super::{Refused, plugins};
use crate::worker::{Below, slot_bytes};

/// Bytes of host memory for each of the pool's when nothing is said.
const RATIO: u64 = 2;
/// What is assumed of a storage tier until it was measured: what a disk that is nothing special does.
const LATENCY: std::time::Duration = std::time::Duration::from_millis(1);
const BYTES_PER_SECOND: f64 = 500e6;

fn write_policy(settings: &Settings) -> Result<WritePolicy, Refused> {
    let Some(name) = settings.hicache_write_policy.as_deref() else { return Ok(WritePolicy::default()) };
    WritePolicy::from_name(name).ok_or_else(|| {
        Refused(format!(
            "--hicache-write-policy {name:?} is not a policy: use write_through, write_through_selective or write_back"
        ))
    })
}

fn prefetch_policy(settings: &Settings) -> Result<PrefetchPolicy, Refused> {
    let Some(name) = settings.hicache_prefetch_policy.as_deref() else {
        return Ok(PrefetchPolicy::default());
    };
    PrefetchPolicy::from_name(name).ok_or_else(|| {
        Refused(format!(
            "--hicache-prefetch-policy {name:?} is not a policy: use best_effort, timeout or wait_complete"
        ))
    })
}

/// Checks what can be checked without a model.
///
/// # Errors
/// When a policy or an amount is not one, or something is set for a cache that is not there.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    write_policy(settings)?;
    prefetch_policy(settings)?;
    settings.hicache_memory.as_deref().map(parse_bytes).transpose()?;
    let set = [
        ("--hicache-memory", settings.hicache_memory.is_some()),
        ("--hicache-write-policy", settings.hicache_write_policy.is_some()),
        ("--hicache-prefetch-policy", settings.hicache_prefetch_policy.is_some()),
    ];
    if let Some((flag, _)) = set.into_iter().find(|(_, set)| *set && !settings.hierarchical_cache) {
        return Err(Refused(format!("{flag} says nothing without --hierarchical-cache: add it")));
    }
    // Without a role, and in the children of such a process, one of the two workers may go without.
    let needed = match settings.role.filter(|_| !settings.supervised) {
        Some(RoleName::Decode) if !settings.decode_radix_cache => "--decode-radix-cache",
        Some(RoleName::Prefill | RoleName::Aggregated) if !settings.prefill_radix_cache => {
            "--prefill-radix-cache"
        }
        _ => return Ok(()),
    };
    // That there is no cache at all is a row of the compatibility table.
    match settings.hierarchical_cache && (settings.decode_radix_cache || settings.prefill_radix_cache) {
        true => Err(Refused(format!(
            "--hierarchical-cache says nothing on this worker without {needed}: add it, or leave both out"
        ))),
        false => Ok(()),
    }
}

/// L2 and L3 of a worker that keeps a radix cache.
///
/// # Errors
/// When host memory holds no page, or more of them than can be counted.
pub fn hierarchy(
    settings: &Settings,
    layouts: &[KvLayout],
    cached: bool,
) -> Result<Option<HierarchyConfig>, Refused> {
    if !settings.hierarchical_cache || !cached {
        return Ok(None);
    }
    // A page lies on all ranks, with the heads of each.
    let stored = settings.hicache_storage.is_some();
    let page_bytes: u64 = layouts.iter().map(|layout| slot_bytes(&layout.shape, stored) as u64).sum();
    let pool: u64 = layouts.iter().map(|layout| layout.bytes() as u64).sum();
    let given = settings.hicache_memory.as_deref().map(parse_bytes).transpose()?;
    let bytes = given.unwrap_or(RATIO * pool);
    let slots = bytes / page_bytes;
    if slots == 0 {
        return Err(Refused(format!(
            "--hicache-memory {bytes} holds no page: one page has {page_bytes} bytes"
        )));
    }
    let slots = u32::try_from(slots).map_err(|_too_many| {
        Refused(format!("{slots} pages of host memory are too many: lower --hicache-memory"))
    })?;
    let tier = TierConfig { writes: true, latency: LATENCY, bytes_per_second: BYTES_PER_SECOND };
    let tiers = settings.hicache_storage.iter().map(|_| tier.clone()).collect();
    Ok(Some(HierarchyConfig {
        write: write_policy(settings)?,
        prefetch: prefetch_policy(settings)?,
        ..HierarchyConfig::new(slots, page_bytes, tiers)
    }))
}

/// Opens the storage tier.
///
/// # Errors
/// When it is not there, does not fit, or does not open.
pub fn open(settings: &Settings, instance: Instance) -> anyhow::Result<Below> {
    let tiers: anyhow::Result<Vec<_>> = settings
        .hicache_storage
        .iter()
        .map(|name| Ok((name.clone(), plugins::open_tier(settings, name, instance)?)))
        .collect();
    Ok(Below { tiers: tiers? })
}
