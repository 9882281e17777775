//! The allocator of a worker's pool, from settings.

use host_core::Instance;
use host_core::pool::{LayerGroup, PageSource};
use host_plugin_api::PoolOpening;
use host_worker::{AllocatorPages, Pages, groups};

use super::settings::Settings;
use super::{Refused, plugins};

/// Checks settings of the allocator that need no model.
///
/// # Errors
/// When the ratio is out of its bounds.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    match settings.swa_full_tokens_ratio {
        Some(ratio) if !(ratio > 0.0 && ratio <= 1.0) => Err(Refused(format!(
            "--swa-full-tokens-ratio is {ratio}: it must be above 0 and at most 1, the window's share of each token"
        ))),
        _ => Ok(()),
    }
}

/// Opens the allocator, if one is used, for a pool of `pages` pages and a model with these groups of layers.
///
/// # Errors
/// When the allocator is not found, does not fit, does not open, or declares components that cannot be served.
pub fn open(
    settings: &Settings,
    instance: Instance,
    pages: u32,
    page_tokens: u32,
    layers: &[LayerGroup],
) -> anyhow::Result<Pages> {
    let opening = PoolOpening {
        name: instance.to_string(),
        config: String::new(),
        page_tokens,
        pages,
        groups: groups(layers),
    };
    let Some((name, allocator)) = plugins::open_allocator(settings, opening, layers.len() > 1)? else {
        return Ok(Pages::own(pages, page_tokens, layers).map_err(Refused)?);
    };
    let (source, plan) =
        AllocatorPages::open(&name, allocator, pages, page_tokens, layers).map_err(Refused)?;
    tracing::info!(
        allocator = name,
        full = plan.limits.full,
        window = plan.limits.window,
        "a plugin hands out this worker's pages"
    );
    Ok(Pages { plan, source: Some(Box::new(source) as Box<dyn PageSource>) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_above_0_and_at_most_1() {
        let of = |ratio| check(&Settings { swa_full_tokens_ratio: Some(ratio), ..Settings::default() });
        for ratio in [0.0, -1.0, 1.5, f64::NAN, f64::INFINITY] {
            let said = of(ratio).unwrap_err().to_string();
            assert!(said.contains("above 0 and at most 1"), "{said}");
        }
        assert!(of(0.5).is_ok() && of(1.0).is_ok() && check(&Settings::default()).is_ok());
    }
}
