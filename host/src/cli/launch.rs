//! From settings to the parts of a worker: everything is checked here, before anything starts.

mod needs;
mod ranks;

use std::time::Duration;

use anyhow::Context;
use host_core::heads::rank_heads;
use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::KvOrder;
use host_core::radix::Policy;
use host_core::{Config, Dtype, Instance, KvLayout, KvShape, Role};

use super::settings::{ExecutorName, RoleName, Settings, parse_bytes};
use super::{Refused, below, staging};
use crate::executor::cpu;
use crate::executor::group::Seat;
use crate::executor::synthetic::{Cost, Synthetic, SyntheticShape};
use crate::executor::{Executor, ExecutorError, KvMemory, ModelShape};
use crate::net::identity;
use crate::net::proto::KvIdentity;
use crate::net::random::random_u64;
use crate::net::registry::Policy as RouterPolicy;
use crate::text::TextModel;
use crate::worker::{Parts, RankParts};
use needs::Needs;

/// Memory for a KV pool when nothing is said.
const KV_MEMORY: &str = "256MiB";

/// Shortest target for the time between tokens: below it a step is scheduling more than computing.
const SHORTEST_TARGET_MS: f64 = 0.1;
/// Longest target for the time between tokens.
const LONGEST_TARGET_MS: f64 = 60_000.0;
/// Most threads that a worker computes on.
const MOST_THREADS: usize = 1024;
/// Most prompt tokens in one step: more than any context.
const MOST_CHUNK_TOKENS: u32 = 1 << 24;
/// Most sequences in one step.
const MOST_BATCH: u32 = 1 << 14;
/// Most requests with pages; each has a row of memory beside the pool, which is taken at the start.
const MOST_RUNNING: u32 = 1 << 15;
/// Most requests that wait; each holds its prompt.
const MOST_QUEUED: u32 = 1 << 20;
/// Most tokens in a page.
const MOST_PAGE_TOKENS: u32 = 1 << 16;
/// Prompt tokens in one step when nothing is said.
const CHUNK_TOKENS: u32 = 512;
/// Sequences in one step when nothing is said.
const BATCH: u32 = 64;
/// Longest step that may be modelled: a worker that is to stop waits for it.
const LONGEST_STEP: Duration = Duration::from_secs(60);

/// A worker that was checked and not started.
#[derive(Debug)]
pub struct Plan {
    /// The model, as far as it is known without its weights.
    pub shape: ModelShape,
    /// The pool of each rank.
    pub layouts: Vec<KvLayout>,
    /// Longest prompt + answer.
    pub max_tokens: u32,
    /// In how many groups of layers pages are sent.
    pub layer_groups: LayerGroups,
}

fn refused(message: impl Into<String>) -> Refused {
    Refused(message.into())
}

/// Checks that every number is within its bounds.
///
/// # Errors
/// With the bounds, when one is not.
pub fn check_numbers(settings: &Settings) -> Result<(), Refused> {
    for (flag, value, most) in [
        ("--chunk-tokens", settings.chunk_tokens, MOST_CHUNK_TOKENS),
        ("--max-batch", settings.max_batch, MOST_BATCH),
        ("--max-running", settings.max_running, MOST_RUNNING),
        ("--max-queued", settings.max_queued, MOST_QUEUED),
        ("--page-size", settings.page_size, MOST_PAGE_TOKENS),
        ("--pool-pages", settings.pool_pages, u32::MAX),
        ("--max-model-len", settings.max_model_len, u32::MAX),
        ("--reserved-decode-tokens", settings.reserved_decode_tokens, u32::MAX),
        ("--default-max-tokens", settings.default_max_tokens, u32::MAX),
    ] {
        if value.is_some_and(|value| value == 0 || value > most) {
            let value = value.unwrap_or_default();
            return Err(refused(format!("{flag} is {value}: it must be 1 to {most}")));
        }
    }
    if let Some(target) = settings.target_itl_ms
        && !(SHORTEST_TARGET_MS..=LONGEST_TARGET_MS).contains(&target)
    {
        return Err(refused(format!(
            "--target-itl-ms is {target}: it must be {SHORTEST_TARGET_MS} to {LONGEST_TARGET_MS}"
        )));
    }
    if settings.threads.is_some_and(|threads| threads == 0 || threads > MOST_THREADS) {
        return Err(refused(format!(
            "--threads must be 1 to {MOST_THREADS}: more than there are cores gain nothing"
        )));
    }
    Ok(())
}

/// Checks the model and sizes the pool, without loading weights or taking memory. Without a role, this is done for all
/// workers of this machine, and the first is returned.
///
/// # Errors
/// When the settings cannot work, with what would.
pub fn plan(settings: &Settings) -> Result<Plan, Refused> {
    radix_cache(settings, Role::Decode)?;
    below::check(settings)?;
    router_policy(settings)?;
    let staging = staging::staging(settings)?;
    check_numbers(settings)?;
    let shape = shape(settings)?;
    let roles = settings.role.map_or(vec![RoleName::Prefill, RoleName::Decode], |role| vec![role]);
    let mut needs = Needs::default();
    let mut plans = Vec::new();
    for (role, ranks) in roles.into_iter().zip(ranks::of_workers(settings)?) {
        let plan = plan_worker(settings, &shape, ranks)?;
        let packs = matches!(role, RoleName::Prefill | RoleName::Decode).then_some(&staging);
        if let Some(staging) = packs {
            staging::check_ranks(staging, &plan.layouts, plan.max_tokens)?;
        }
        let cached =
            radix_cache(settings, if role == RoleName::Decode { Role::Decode } else { Role::Prefill })?;
        let below = below::hierarchy(settings, &plan.layouts, cached.is_some())?;
        needs.add(&plan.layouts, below.as_ref(), packs);
        plans.push(plan);
    }
    needs.check(settings)?;
    plans.into_iter().next().ok_or_else(|| refused("no worker to plan"))
}

/// Checks what a router makes no use of itself: it would be as wrong for its workers.
///
/// # Errors
/// When a value is not one.
pub fn check_router(settings: &Settings) -> Result<(), Refused> {
    radix_cache(settings, Role::Decode)?;
    below::check(settings)?;
    staging::staging(settings)?;
    ranks::check_bounds(settings)?;
    check_numbers(settings)
}

/// One worker of `ranks` ranks.
fn plan_worker(settings: &Settings, shape: &ModelShape, ranks: usize) -> Result<Plan, Refused> {
    let page_tokens = settings.page_size.unwrap_or(16) as usize;
    let order: KvOrder = match &settings.kv_layout {
        Some(text) => text.parse().map_err(refused)?,
        None => KvOrder::PageHeadLayerKvTokenDim,
    };
    let page = |heads| KvShape {
        pages: 1,
        heads,
        layers: shape.layers,
        page_tokens,
        head_dim: shape.head_dim,
        value_dim: shape.head_dim,
        dtype: shape.kv_dtype,
    };
    let heads: Vec<usize> = (0..ranks).map(|rank| rank_heads(shape.kv_heads, ranks, rank).len()).collect();
    let page_bytes = page(heads.iter().sum()).page_bytes() as u64;
    let pages = match settings.pool_pages {
        Some(pages) => u64::from(pages),
        None => {
            let memory = settings.kv_memory.as_deref().unwrap_or(KV_MEMORY);
            let pages = parse_bytes(memory)? / page_bytes;
            if pages == 0 {
                return Err(refused(format!(
                    "--kv-memory {memory} holds no page: one page of {page_tokens} tokens has {page_bytes} bytes"
                )));
            }
            pages
        }
    };
    let pages = u32::try_from(pages).map_err(|_too_many| {
        refused(format!(
            "a pool of {pages} pages is too large: choose a larger --page-size or less --kv-memory"
        ))
    })?;
    let possible = (shape.max_positions as u64).min(u64::from(pages) * page_tokens as u64);
    let max_tokens = match settings.max_model_len {
        Some(wanted) if u64::from(wanted) > possible => {
            return Err(refused(format!(
                "--max-model-len {wanted} is more than the model ({}) or the KV pool ({} tokens) can hold",
                shape.max_positions,
                u64::from(pages) * page_tokens as u64
            )));
        }
        Some(wanted) => wanted,
        None => u32::try_from(possible).unwrap_or(u32::MAX),
    };
    let pool = |heads: &usize| KvLayout::new(KvShape { pages: pages as usize, ..page(*heads) }, order);
    let layouts: Vec<KvLayout> = heads.iter().map(pool).collect();
    let layer_groups = layer_groups(settings, &layouts[0])?;
    Ok(Plan { shape: shape.clone(), layouts, max_tokens, layer_groups })
}

fn layer_groups(settings: &Settings, layout: &KvLayout) -> Result<LayerGroups, Refused> {
    let wish = settings.layer_groups.as_deref().map_or(Ok(Wish::default()), str::parse);
    wish.and_then(|wish| LayerGroups::new(wish, layout))
        .map_err(|error| refused(format!("--layer-groups: {error}")))
}

fn shape(settings: &Settings) -> Result<ModelShape, Refused> {
    let mut shape = match settings.executor() {
        ExecutorName::Synthetic => {
            let executor = synthetic(settings, Seat::alone()).map_err(|error| refused(error.to_string()))?;
            executor.shape().clone()
        }
        ExecutorName::Cpu => {
            let directory = settings.model.as_deref().ok_or_else(|| {
                refused("no model: give a Hugging Face directory with --model, or use --executor synthetic")
            })?;
            cpu::read_shape(directory)
                .map_err(|error| refused(format!("the model cannot be served: {error}")))?
        }
    };
    if let Some(text) = &settings.kv_dtype {
        shape.kv_dtype = text.parse().map_err(refused)?;
    }
    Ok(shape)
}

fn synthetic(settings: &Settings, seat: Seat) -> Result<Synthetic, ExecutorError> {
    let given = settings.synthetic.unwrap_or_default();
    let standard = SyntheticShape::default();
    let kv_dtype = settings.kv_dtype.as_deref().and_then(|text| text.parse::<Dtype>().ok());
    let shape = SyntheticShape {
        layers: given.layers.unwrap_or(standard.layers),
        kv_heads: given.kv_heads.unwrap_or(standard.kv_heads),
        head_dim: given.head_dim.unwrap_or(standard.head_dim),
        vocabulary: given.vocabulary.unwrap_or(standard.vocabulary),
        max_positions: given.max_positions.unwrap_or(standard.max_positions),
        kv_dtype: kv_dtype.unwrap_or(standard.kv_dtype),
    };
    let cost = Cost {
        step: Duration::from_micros(given.step_us),
        prefill_token: Duration::from_micros(given.prefill_token_us),
        sequence: Duration::from_micros(given.sequence_us),
    };
    let chunk = settings.chunk_tokens.unwrap_or(CHUNK_TOKENS);
    let batch = settings.max_batch.unwrap_or(BATCH);
    if cost.step_of(chunk as usize, batch as usize) > LONGEST_STEP {
        return Err(ExecutorError::Failed(format!(
            "[synthetic] a step of {chunk} prompt tokens and {batch} sequences would take more than {} s: lower step-us ({}), \
             prefill-token-us ({}) or sequence-us ({})",
            LONGEST_STEP.as_secs(),
            given.step_us,
            given.prefill_token_us,
            given.sequence_us
        )));
    }
    Synthetic::for_rank(shape, cost, seat)
}

/// The model's text side, for a router.
///
/// # Errors
/// When the tokenizer cannot be used.
pub fn text_model(settings: &Settings) -> Result<TextModel, Refused> {
    let with_tokenizer = settings.model.as_deref().filter(|directory| {
        settings.executor() == ExecutorName::Cpu || directory.join("tokenizer.json").exists()
    });
    match with_tokenizer {
        Some(directory) => TextModel::load(directory)
            .map_err(|error| refused(format!("the model's tokenizer cannot be used: {error}"))),
        None if settings.executor() == ExecutorName::Synthetic => {
            let shape = shape(settings)?;
            Ok(TextModel::bytes(u32::try_from(shape.vocabulary).unwrap_or(u32::MAX)))
        }
        None => Err(refused("no model: give a Hugging Face directory with --model")),
    }
}

/// A name for a worker that was given none.
#[must_use]
pub fn worker_name(settings: &Settings, role: RoleName) -> String {
    settings.name.clone().unwrap_or_else(|| format!("{}-{}", role.as_str(), std::process::id()))
}

/// How a router chooses workers.
///
/// # Errors
/// When the name is not a policy's.
pub fn router_policy(settings: &Settings) -> Result<RouterPolicy, Refused> {
    let Some(name) = settings.router_policy.as_deref() else { return Ok(RouterPolicy::default()) };
    name.parse().map_err(|error: String| refused(format!("--router-policy: {error}")))
}

/// What a worker of this role evicts first, if it keeps a radix cache.
fn radix_cache(settings: &Settings, role: Role) -> Result<Option<Policy>, Refused> {
    let policy = match settings.radix_eviction.as_deref() {
        None => Policy::Lru,
        Some(name) => Policy::from_name(name).ok_or_else(|| {
            refused(format!("--radix-eviction {name:?} is not a policy: use lru, lfu, slru or priority"))
        })?,
    };
    let wanted = match role {
        Role::Decode => settings.decode_radix_cache,
        Role::Prefill | Role::Aggregated => settings.prefill_radix_cache,
    };
    Ok(wanted.then_some(policy))
}

/// Loads the model and takes the memory.
///
/// # Errors
/// When either cannot be had, or the transfer plugin does not open.
pub fn parts(settings: &Settings, role: RoleName) -> anyhow::Result<Parts> {
    let Plan { shape, layouts, max_tokens, layer_groups } = plan(settings)?;
    let ranks = layouts.len();
    let page = layouts[0].shape;
    let core_role = match role {
        RoleName::Prefill => Role::Prefill,
        RoleName::Decode => Role::Decode,
        RoleName::Aggregated => Role::Aggregated,
        RoleName::Router => anyhow::bail!("a router computes nothing"),
    };
    let instance = Instance(random_u64().context("no random name for this worker")?);
    let transfer = match role {
        RoleName::Aggregated => None,
        _ => Some(super::plugins::open_transfer(settings, instance, ranks)?),
    };
    let executors = ranks::executors(settings, ranks)?;
    let max_batch = settings.max_batch.unwrap_or(BATCH);
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let identity = KvIdentity {
        model: settings.model_name(),
        weights: shape.weights.clone(),
        executor: shape.math.clone(),
        dtype: page.dtype.to_string(),
        layout: layouts[0].order.to_string(),
        page_tokens: count(page.page_tokens),
        layers: count(shape.layers),
        kv_heads: count(shape.kv_heads),
        head_dim: count(shape.head_dim),
        ranks: count(ranks),
    };
    let config = Config {
        role: core_role,
        pages: count(page.pages),
        page_tokens: count(page.page_tokens),
        max_tokens,
        vocabulary: count(shape.vocabulary),
        chunk_tokens: settings.chunk_tokens.unwrap_or(CHUNK_TOKENS),
        radix_cache: radix_cache(settings, core_role)?,
        hierarchy: below::hierarchy(settings, &layouts, radix_cache(settings, core_role)?.is_some())?,
        cache_events: radix_cache(settings, core_role)?.is_some(),
        identity: identity::digest(&identity),
        reserved_decode_tokens: settings.reserved_decode_tokens.unwrap_or(512),
        target_itl: settings.target_itl_ms.map(|millis| Duration::from_secs_f64(millis / 1e3)),
        seed: random_u64().context("no random seed for the radix cache")?,
        layer_groups,
        max_batch,
        max_running: settings.max_running.unwrap_or(max_batch.saturating_mul(2)),
        max_queued: settings.max_queued.unwrap_or(1024),
        max_attempts: 3,
        bootstrap_timeout: Duration::from_secs(30),
        request_timeout: Duration::from_secs(600),
        peer_patience: Duration::from_secs(10),
    };
    let below = match config.hierarchy {
        Some(_) => Some(below::open(settings, instance)?),
        None => None,
    };
    let (name, backends) = transfer.unzip();
    let mut backends = backends.unwrap_or_default().into_iter();
    let mut parts = Vec::new();
    for (rank, (executor, layout)) in executors.into_iter().zip(layouts).enumerate() {
        let first_head = rank_heads(shape.kv_heads, ranks, rank).start;
        let kv = KvMemory::for_heads(layout, first_head)
            .with_context(|| format!("no memory for a KV pool of {} bytes", layout.bytes()))?;
        parts.push(RankParts { executor, kv, transfer: backends.next() });
    }
    Ok(Parts {
        name: worker_name(settings, role),
        config,
        identity,
        transfer: name,
        ranks: parts,
        instance,
        below,
        page_integrity: !settings.no_page_integrity,
        staging: staging::staging(settings)?,
    })
}
