//! Makes a worker's parts: loads weights, takes memory, opens plugins.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use host_core::heads::rank_heads;
use host_core::{Config, Instance, Role};
use host_executor::Executor;
use host_plugin_api::transfer::TransferBackend;
use host_wire::identity;
use host_wire::proto::KvIdentity;
use host_wire::random::random_u64;
use host_worker::{OffloadTiers, Parts, RankParts};

use super::{Plan, grammars, plan, radix_cache, ranks, worker};
use crate::cli::settings::{RoleName, Settings};
use crate::cli::{allocator, offload, plugins, staging};

/// Loads the model, takes the memory, opens the plugins.
///
/// # Errors
/// When the model cannot be loaded, the memory cannot be taken, or a plugin does not open.
pub fn parts(settings: &Settings, role: RoleName) -> anyhow::Result<Parts> {
    let plan = plan(settings)?;
    let ranks = plan.layouts.len();
    let core_role = match role {
        RoleName::Prefill => Role::Prefill,
        RoleName::Decode => Role::Decode,
        RoleName::Aggregated => Role::Aggregated,
        RoleName::Router => anyhow::bail!("a router computes nothing"),
    };
    let instance = Instance(random_u64().context("no random name for this worker")?);
    let opened = match role {
        RoleName::Aggregated => None,
        _ => Some(plugins::open_transfer(settings, instance, ranks)?),
    };
    // A worker without transfers counts as settled: nothing is ever in flight.
    let settles = opened.as_ref().is_none_or(|opened| opened.settles);
    let vram = opened.as_ref().is_some_and(|opened| opened.vram);
    let (transfer, backends) = opened.map(|opened| (opened.name, opened.backends)).unzip();
    let tiers = offload::open(settings, instance, radix_cache(settings, core_role).is_some())?;
    if let Some(tiers) = &tiers {
        // Checks this before weights are loaded, which takes long.
        tiers.fit(&plan.layouts[0].shape)?;
    }
    let executors = ranks::executors(settings, ranks)?;
    let identity = identity_of(settings, &plan);
    let config = config(settings, core_role, &plan, tiers.as_ref(), &identity)?;
    let pages = allocator::open(settings, instance, config.pages, config.page_tokens, &plan.shape.groups())?;
    // An allocator may allow a sequence less than the whole pool.
    let positions = pages.plan.most_positions(config.page_tokens);
    let max_tokens = worker::max_tokens(settings, &plan.shape, config.pages, positions)?;
    let config = Config { settles, window: pages.plan.window, max_tokens, ..config };
    let grammars = grammars::grammars(settings, &config, &plan.shape)?;
    Ok(Parts {
        name: worker_name(settings, role),
        config,
        identity,
        pages,
        transfer,
        vram,
        ranks: with_pools(&plan, executors, backends.unwrap_or_default())?,
        instance,
        offload: tiers,
        page_integrity: !settings.no_page_integrity,
        grammars,
        staging: staging::staging(settings)?,
    })
}

/// The properties that two workers must share for one to use the other's KV.
pub(super) fn identity_of(settings: &Settings, plan: &Plan) -> KvIdentity {
    let Plan { shape, layouts, .. } = plan;
    let page = layouts[0].shape;
    KvIdentity {
        model: settings.model_name(),
        weights: shape.weights.clone(),
        executor: shape.math.clone(),
        dtype: page.dtype.to_string(),
        layout: layouts[0].order.to_string(),
        page_tokens: count(page.page_tokens),
        layers: count(shape.layers),
        kv_heads: count(shape.kv_heads),
        head_dim: count(shape.head_dim),
        ranks: count(layouts.len()),
        // Layers with a state have no window, so theirs is 0.
        sliding_layers: count(shape.beside_layers()),
        window: count(shape.sliding.map_or(0, |sliding| sliding.window)),
    }
}

/// Limits and policies of the worker's scheduler.
fn config(
    settings: &Settings,
    role: Role,
    plan: &Plan,
    tiers: Option<&OffloadTiers>,
    identity: &KvIdentity,
) -> anyhow::Result<Config> {
    let Plan { shape, layouts, pool_tokens: _, max_tokens, layer_groups } = plan;
    let page = layouts[0].shape;
    let radix_cache = radix_cache(settings, role);
    let cached = radix_cache.is_some();
    let alignment = tiers.and_then(OffloadTiers::alignment).map(usize::try_from).transpose()?;
    Ok(Config {
        role,
        pages: count(page.pages),
        page_tokens: count(page.page_tokens),
        max_tokens: *max_tokens,
        vocabulary: count(shape.vocabulary),
        chunk_tokens: settings.chunk_tokens(&shape.math),
        radix_cache,
        hierarchy: offload::hierarchy(settings, layouts, cached, alignment)?,
        cache_events: cached,
        identity: identity::digest(identity),
        reserved_decode_tokens: settings.reserved_decode_tokens(),
        draft_tokens: settings.draft_tokens(),
        target_itl: settings.target_itl_ms.map(|millis| Duration::from_secs_f64(millis / 1e3)),
        share_transfers: true,
        seed: random_u64().context("no random seed for the radix cache")?,
        // The caller sets both from the opened plugins.
        settles: true,
        window: shape.window(),
        layer_groups: *layer_groups,
        max_batch: settings.max_batch(),
        max_running: settings.max_running(),
        max_queued: settings.max_queued(),
        max_attempts: 3,
        bootstrap_timeout: Duration::from_secs(30),
        request_timeout: settings.request_timeout(),
        transfer_patience: settings.transfer_timeout(),
        peer_patience: Duration::from_secs(10),
    })
}

/// Makes the ranks. Each gets the pool for its heads, and an instance of the transfer plugin if there is one.
fn with_pools(
    plan: &Plan,
    executors: Vec<Box<dyn Executor>>,
    backends: Vec<Arc<dyn TransferBackend>>,
) -> anyhow::Result<Vec<RankParts>> {
    let ranks = plan.layouts.len();
    let mut backends = backends.into_iter();
    let mut parts = Vec::new();
    for (rank, (executor, layout)) in executors.into_iter().zip(&plan.layouts).enumerate() {
        let first_head = rank_heads(plan.shape.kv_heads, ranks, rank).start;
        let kv = executor.pool(*layout, first_head)?;
        parts.push(RankParts { executor, kv, transfer: backends.next() });
    }
    Ok(parts)
}

/// The worker's name, or a default.
fn worker_name(settings: &Settings, role: RoleName) -> String {
    settings.name.clone().unwrap_or_else(|| format!("{}-{}", role.as_str(), std::process::id()))
}

/// Converts a size of a model or a pool. All of them are far below the limit.
fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}
