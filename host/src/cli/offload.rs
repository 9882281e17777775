//! The offload tiers of a worker, host memory and storage, from settings.

mod limits;

use host_core::hierarchy::{HierarchyConfig, PrefetchPolicy, TierConfig, WritePolicy};
use host_core::{Instance, KvLayout};
use host_worker::{OffloadTiers, slot_bytes};

use super::launch::share;
use super::settings::{RoleName, Settings};
use super::{Refused, plugins};

/// Costs of a storage tier before they are measured: those of an ordinary disk.
const LATENCY: std::time::Duration = std::time::Duration::from_millis(1);
const BYTES_PER_SECOND: f64 = 500e6;

/// Checks settings of the offload tiers that need no model.
///
/// # Errors
/// When a setting is for a cache that is off.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    let set = [
        ("[hicache]", settings.hicache.is_some()),
        ("--hicache-memory", settings.hicache_memory.is_some()),
        ("--hicache-write-policy", settings.hicache_write_policy.is_some()),
        ("--hicache-prefetch-policy", settings.hicache_prefetch_policy.is_some()),
    ];
    let stores = settings.stores();
    let twice = stores.iter().enumerate().find(|(place, name)| stores[..*place].contains(name));
    if let Some((_, name)) = twice {
        return Err(Refused(format!("--hicache-storage names {name:?} twice: each is one tier")));
    }
    if let Some((flag, _)) = set.into_iter().find(|(_, set)| *set && !settings.hierarchical_cache()) {
        return Err(Refused(format!("{flag} says nothing without --hierarchical-cache: add it")));
    }
    // Without a role, and in children of such a process, one of the two workers may have no radix cache.
    let needed = match settings.role.filter(|_| !settings.supervised) {
        Some(RoleName::Decode) if !settings.decode_radix_cache() => "--decode-radix-cache",
        Some(RoleName::Prefill | RoleName::Aggregated) if !settings.prefill_radix_cache() => {
            "--prefill-radix-cache"
        }
        _ => return Ok(()),
    };
    // A row of the compatibility table refuses a configuration without any cache.
    match settings.hierarchical_cache() && (settings.decode_radix_cache() || settings.prefill_radix_cache()) {
        true => Err(Refused(format!(
            "--hierarchical-cache says nothing on this worker without {needed}: add it, or leave both out"
        ))),
        false => Ok(()),
    }
}

/// The offload tiers of a worker that keeps a radix cache.
///
/// `alignment` is that of the opened tiers. It is unknown before they are open, and a slot may become larger than planned.
///
/// # Errors
/// When host memory holds no page, or more pages than can be counted.
pub fn hierarchy(
    settings: &Settings,
    layouts: &[KvLayout],
    cached: bool,
    alignment: Option<usize>,
) -> Result<Option<HierarchyConfig>, Refused> {
    if !settings.hierarchical_cache() || !cached {
        return Ok(None);
    }
    // Each rank has the part of a page for its heads. This is the sum over the ranks.
    let alignment = (!settings.stores().is_empty()).then(|| alignment.unwrap_or(1));
    let page_bytes: u64 = layouts.iter().map(|layout| slot_bytes(&layout.shape, alignment) as u64).sum();
    let pool: u64 = layouts.iter().map(|layout| layout.bytes() as u64).sum();
    let given = settings.hicache_memory.map(|given| given.0);
    let bytes = given.unwrap_or_else(|| share::host_bytes(settings, pool));
    let slots = bytes / page_bytes;
    if slots == 0 {
        return Err(Refused(match given {
            Some(bytes) => format!("--hicache-memory {bytes} holds no page: one page has {page_bytes} bytes"),
            None => format!(
                "no memory is left for pages beside a KV pool of {pool} bytes: lower --kv-memory, give --hicache-memory, or \
                 --no-hierarchical-cache"
            ),
        }));
    }
    let slots = u32::try_from(slots).map_err(|_too_many| {
        Refused(format!("{slots} pages of host memory are too many: lower --hicache-memory"))
    })?;
    let tier = TierConfig { writes: true, latency: LATENCY, bytes_per_second: BYTES_PER_SECOND };
    let tiers = settings.stores().iter().map(|_| tier.clone()).collect();
    let limits = settings.hicache.clone().unwrap_or_default();
    let config = limits::apply(&limits, HierarchyConfig::new(slots, page_bytes, tiers))?;
    let write = settings.hicache_write_policy.map(WritePolicy::from).unwrap_or_default();
    let prefetch = settings.hicache_prefetch_policy.map(PrefetchPolicy::from).unwrap_or_default();
    Ok(Some(HierarchyConfig { write, prefetch, ..config }))
}

/// Opens the storage tiers of a worker that keeps a radix cache. `None` for a worker without offload tiers.
///
/// # Errors
/// When a tier is not found, does not fit, or does not open.
pub fn open(settings: &Settings, instance: Instance, cached: bool) -> anyhow::Result<Option<OffloadTiers>> {
    if !settings.hierarchical_cache() || !cached {
        return Ok(None);
    }
    let tiers: anyhow::Result<Vec<_>> = settings
        .stores()
        .iter()
        .map(|name| Ok((name.clone(), plugins::open_tier(settings, name, instance)?)))
        .collect();
    Ok(Some(OffloadTiers { tiers: tiers? }))
}

#[cfg(test)]
mod tests {
    use host_core::layout::KvOrder;
    use host_core::{Dtype, KvShape};

    use super::*;
    use crate::cli::settings::Bytes;

    #[test]
    fn slots_are_sized_as_the_opened_tiers_have_them_laid_out() {
        let settings = Settings {
            hierarchical_cache: Some(true),
            hicache_memory: Some(Bytes(1 << 20)),
            hicache_storage: Some(vec!["any".into()]),
            ..Settings::default()
        };
        let shape = KvShape {
            pages: 4,
            heads: 2,
            layers: 1,
            page_tokens: 2,
            head_dim: 4,
            value_dim: 4,
            dtype: Dtype::Bf16,
        };
        let layout = KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim);
        let of = |alignment| hierarchy(&settings, &[layout], true, alignment).unwrap().unwrap();
        let (planned, opened) = (of(None), of(Some(4096)));
        assert!(planned.page_bytes < 4096, "{planned:?}");
        assert_eq!((opened.page_bytes, opened.host_slots), (2 * 4096, 128));
    }
}
