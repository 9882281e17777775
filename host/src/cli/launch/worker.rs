//! Plans one worker: the pool of each rank, the longest request that it can hold, and the groups of layers in which it sends pages.

use host_core::heads::rank_heads;
use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::KvOrder;
use host_core::pool::{PoolPlan, sharing};
use host_core::{KvLayout, KvShape};
use host_executor::ModelShape;

use super::{Plan, Refused, refused, share};
use crate::cli::settings::Settings;

/// Plans a worker of `ranks` ranks.
///
/// # Errors
/// When its pool holds no useful request, or not the length that the operator set.
pub(super) fn plan(settings: &Settings, shape: &ModelShape, ranks: usize) -> Result<Plan, Refused> {
    let order = settings.kv_layout.map_or(KvOrder::PageHeadLayerKvTokenDim, Into::into);
    let page = |heads| KvShape {
        pages: 1,
        heads,
        layers: shape.page_layers(),
        page_tokens: settings.page_size() as usize,
        head_dim: shape.head_dim,
        value_dim: shape.head_dim,
        dtype: shape.kv_dtype,
    };
    let heads: Vec<usize> = (0..ranks).map(|rank| rank_heads(shape.kv_heads, ranks, rank).len()).collect();
    let page_bytes = page(heads.iter().sum()).page_bytes() as u64;
    let pages = pages(settings, page_bytes)?;
    let pool_tokens = positions(settings, shape, pages);
    if settings.pool_pages.is_none() {
        is_of_use(settings, shape, pages, page_bytes, pool_tokens)?;
    }
    let max_tokens = max_tokens(settings, shape, pages, pool_tokens)?;
    let pool = |heads: &usize| KvLayout::new(KvShape { pages: pages as usize, ..page(*heads) }, order);
    let layouts: Vec<KvLayout> = heads.iter().map(pool).collect();
    let layer_groups = layer_groups(settings, shape, &layouts[0])?;
    Ok(Plan { shape: shape.clone(), layouts, pool_tokens, max_tokens, layer_groups })
}

/// Tokens of the shortest useful request: a question in a chat template, and an answer.
const LEAST_TOKENS: u32 = 256;
/// Limit of the pages that an error message proposes to add. A window and its parts take less.
const MOST_MISSING: u32 = 1 << 16;

/// Number of pages of the pool. `page_bytes` is the size of a page on all ranks together.
fn pages(settings: &Settings, page_bytes: u64) -> Result<u32, Refused> {
    if let Some(pages) = settings.pool_pages {
        return Ok(pages);
    }
    let pages = pool_bytes(settings) / page_bytes;
    u32::try_from(pages).map_err(|_too_many| {
        refused(format!(
            "a pool of {pages} pages is too large: choose a larger --page-size or less --kv-memory"
        ))
    })
}

/// Size in bytes of a pool whose number of pages is not set.
fn pool_bytes(settings: &Settings) -> u64 {
    settings.kv_memory.map_or_else(|| share::pool_bytes(settings), |given| given.0)
}

/// Checks that a pool of `pages` pages holds a useful request. A sequence of `positions` positions fits into it.
fn is_of_use(
    settings: &Settings,
    shape: &ModelShape,
    pages: u32,
    page_bytes: u64,
    positions: u64,
) -> Result<(), Refused> {
    let least = settings.max_model_len.unwrap_or(LEAST_TOKENS).min(LEAST_TOKENS);
    let least = u64::from(least).min(shape.max_positions as u64);
    if positions >= least {
        return Ok(());
    }
    let holds = |pages: &u32| self::positions(settings, shape, *pages) >= least;
    let enough = (pages..pages.saturating_add(MOST_MISSING)).find(holds);
    let enough = enough.map_or_else(
        || "give more".to_owned(),
        |pages| format!("give at least {} bytes", u64::from(pages) * page_bytes),
    );
    Err(refused(format!(
        "{} holds {positions} tokens, too few for one request of {least}: {enough}, or say --max-model-len; one page of {} \
         tokens has {page_bytes} bytes",
        match settings.kv_memory {
            Some(given) => format!("--kv-memory {given}"),
            None => {
                let bytes = share::pool_bytes(settings);
                format!("a KV pool of {bytes} bytes, this machine's share (--kv-memory),")
            }
        },
        settings.page_size()
    )))
}

/// Number of tokens of one sequence that fill a pool of `pages` pages.
fn positions(settings: &Settings, shape: &ModelShape, pages: u32) -> u64 {
    let page_tokens = settings.page_size();
    let groups = shape.groups();
    // No allocator is open yet, so all layers share the pool.
    let plan = PoolPlan::new(pages, page_tokens, &groups, &sharing(pages, &groups));
    plan.map_or(0, |plan| plan.most_positions(page_tokens))
}

/// Longest prompt and answer together, in tokens: the value of `--max-model-len`, or as much as model and pool allow.
pub(super) fn max_tokens(
    settings: &Settings,
    shape: &ModelShape,
    pages: u32,
    positions: u64,
) -> Result<u32, Refused> {
    let page_tokens = settings.page_size();
    let possible = (shape.max_positions as u64).min(positions);
    if possible == 0 {
        return Err(refused(format!(
            "a pool of {pages} pages of {page_tokens} tokens cannot hold one token: the model's sliding layers, or its states, \
             take {} pages beside each page; choose a larger pool",
            shape.window_parts()
        )));
    }
    match settings.max_model_len {
        Some(wanted) if u64::from(wanted) > possible => Err(refused(format!(
            "--max-model-len {wanted} is more than the model ({}) or the KV pool ({positions} tokens) can hold",
            shape.max_positions
        ))),
        Some(wanted) => Ok(wanted),
        None => Ok(u32::try_from(possible).unwrap_or(u32::MAX)),
    }
}

/// The groups of layers in which pages are sent.
fn layer_groups(settings: &Settings, shape: &ModelShape, layout: &KvLayout) -> Result<LayerGroups, Refused> {
    let rule = match (shape.beside_layers(), settings.layer_groups.unwrap_or_default()) {
        (0, wish) => LayerGroups::new(wish, layout),
        // The executor counts all layers of the model, and these pages lack some.
        (_, Wish::Auto | Wish::Off) => LayerGroups::new(Wish::Off, layout),
        (_, Wish::Groups(groups)) => Err(format!(
            "{groups} layer groups of a model with sliding layers or states, whose pages are sent whole: use auto or off"
        )),
    };
    rule.map_err(|error| refused(format!("--layer-groups: {error}")))
}
