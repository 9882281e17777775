//! One worker: the pool of each rank, the longest request that it can hold, and how its layers are sent.

use host_core::heads::rank_heads;
use host_core::layer_groups::{LayerGroups, Wish};
use host_core::layout::KvOrder;
use host_core::pool::PoolLimits;
use host_core::{KvLayout, KvShape};

use super::{Plan, Refused, refused, share};
use crate::cli::allocator;
use crate::cli::settings::{Settings, parse_bytes};
use crate::executor::ModelShape;

/// Plans a worker of `ranks` ranks.
///
/// # Errors
/// When its pool can hold nothing, or not what it was told to hold.
pub(super) fn plan(settings: &Settings, shape: &ModelShape, ranks: usize) -> Result<Plan, Refused> {
    let order: KvOrder = match &settings.kv_layout {
        Some(text) => text.parse().map_err(refused)?,
        None => KvOrder::PageHeadLayerKvTokenDim,
    };
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
    let pages = pages(settings, page(heads.iter().sum()).page_bytes() as u64, shape.max_positions)?;
    let max_tokens = max_tokens(settings, shape, pages)?;
    let pool = |heads: &usize| KvLayout::new(KvShape { pages: pages as usize, ..page(*heads) }, order);
    let layouts: Vec<KvLayout> = heads.iter().map(pool).collect();
    let layer_groups = layer_groups(settings, shape, &layouts[0])?;
    Ok(Plan { shape: shape.clone(), layouts, max_tokens, layer_groups })
}

/// Tokens of a request that is of use to a client: a question in a chat template, and an answer.
const LEAST_TOKENS: u32 = 256;

/// Pages of the pool, of which each has so many bytes on all ranks together, for a model of so many positions.
fn pages(settings: &Settings, page_bytes: u64, positions: usize) -> Result<u32, Refused> {
    if let Some(pages) = settings.pool_pages {
        return Ok(pages);
    }
    let bytes = match &settings.kv_memory {
        Some(text) => parse_bytes(text)?,
        None => share::pool_bytes(settings),
    };
    let pages = bytes / page_bytes;
    let tokens = pages.saturating_mul(settings.page_size().into());
    let least = settings.max_model_len.unwrap_or(LEAST_TOKENS).min(LEAST_TOKENS);
    if tokens < u64::from(least).min(positions as u64) {
        let needed = u64::from(least).div_ceil(settings.page_size().into()).saturating_mul(page_bytes);
        return Err(refused(format!(
            "{} holds {tokens} tokens, too few for one request of {least}: give at least {needed} bytes, or say \
             --max-model-len; one page of {} tokens has {page_bytes} bytes",
            match &settings.kv_memory {
                Some(text) => format!("--kv-memory {text}"),
                None => format!("a KV pool of {bytes} bytes, this machine's share (--kv-memory),"),
            },
            settings.page_size()
        )));
    }
    u32::try_from(pages).map_err(|_too_many| {
        refused(format!(
            "a pool of {pages} pages is too large: choose a larger --page-size or less --kv-memory"
        ))
    })
}

/// Tokens of the longest prompt + answer: as many as were asked for, or as model and pool allow.
fn max_tokens(settings: &Settings, shape: &ModelShape, pages: u32) -> Result<u32, Refused> {
    let page_tokens = settings.page_size();
    let limits = allocator::limits(settings, pages, page_tokens, shape.window())?;
    let positions = most_positions(shape, limits, page_tokens as usize);
    let possible = (shape.max_positions as u64).min(positions);
    if possible == 0 {
        return Err(refused(format!(
            "a pool of {pages} pages of {page_tokens} tokens cannot hold one token: the model's sliding layers take {} \
             pages beside each page; choose a larger pool",
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

/// Positions of the longest sequence that fits a pool.
fn most_positions(shape: &ModelShape, limits: PoolLimits, page_tokens: usize) -> u64 {
    let full = u64::from(limits.full) * page_tokens as u64;
    shape
        .window()
        .map_or(full, |window| full.min(window.most_positions(limits.total as usize, page_tokens) as u64))
}

/// In how many groups of layers pages are sent.
fn layer_groups(settings: &Settings, shape: &ModelShape, layout: &KvLayout) -> Result<LayerGroups, Refused> {
    let wish = settings.layer_groups.as_deref().map_or(Ok(Wish::default()), str::parse);
    let rule = wish.and_then(|wish| match (shape.sliding, wish) {
        (None, wish) => LayerGroups::new(wish, layout),
        // News of layers is counted over the model, whose sliding layers are not in these pages.
        (Some(_), Wish::Auto | Wish::Off) => LayerGroups::new(Wish::Off, layout),
        (Some(_), Wish::Groups(groups)) => Err(format!(
            "{groups} layer groups of a model with sliding layers, whose pages are sent whole: use auto or off"
        )),
    });
    rule.map_err(|error| refused(format!("--layer-groups: {error}")))
}
