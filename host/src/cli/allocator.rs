//! The allocator of a worker's pool, and the pool's division between layers, from settings.

use host_core::Instance;
use host_core::pool::{PageSource, PoolLimits};
use host_core::window::WindowShape;
use host_plugin_api::PoolOpening;
use host_worker::{AllocatorPages, Pages, components};

use super::settings::Settings;
use super::{Refused, plugins};

/// How a pool of `pages` pages is divided.
///
/// Without a ratio both components share all of it. With one, there is that much window for each token of the full part,
/// both rounded down to pages, and what is left over goes to the full part.
///
/// # Errors
/// When the ratio is none, or leaves less than a window and a page.
pub fn limits(
    settings: &Settings,
    pages: u32,
    page_tokens: u32,
    window: Option<WindowShape>,
) -> Result<PoolLimits, Refused> {
    let shared = PoolLimits::shared(pages);
    let Some(window) = window else { return Ok(shared) };
    let Some(ratio) = settings.swa_full_tokens_ratio else {
        // Whole pages of a window, as an allocator counts them.
        return Ok(PoolLimits { window: pages - pages % window.parts.max(1), ..shared });
    };
    let parts = f64::from(window.parts);
    let full = (f64::from(pages) / (1.0 + ratio * parts)).floor();
    let windows = (full * ratio).floor();
    // From 0 to `pages`, so that nothing is cut off.
    let windows = windows as u32;
    if u64::from(windows) * u64::from(page_tokens) <= u64::from(window.tokens) + u64::from(page_tokens) {
        return Err(Refused(format!(
            "--swa-full-tokens-ratio {ratio} leaves windows {windows} pages of {page_tokens} tokens in a pool of {pages}, \
             and one sequence needs more than its window of {} tokens and a page: raise it or the pool, or leave it out",
            window.tokens
        )));
    }
    let windows = windows * window.parts;
    Ok(PoolLimits { total: pages, full: pages - windows, window: windows })
}

/// Checks what can be checked without a model.
///
/// # Errors
/// When the ratio is none.
pub fn check(settings: &Settings) -> Result<(), Refused> {
    match settings.swa_full_tokens_ratio {
        Some(ratio) if !(ratio > 0.0 && ratio <= 1.0) => Err(Refused(format!(
            "--swa-full-tokens-ratio is {ratio}: it must be above 0 and at most 1, the window's share of each token"
        ))),
        _ => Ok(()),
    }
}

/// Opens the allocator, if one is used.
///
/// # Errors
/// When it is not there, does not fit, does not open, or has other pages than it was given.
pub fn open(
    settings: &Settings,
    instance: Instance,
    pages: u32,
    page_tokens: u32,
    window: Option<WindowShape>,
) -> anyhow::Result<Pages> {
    let limits = limits(settings, pages, page_tokens, window)?;
    let opening = PoolOpening {
        name: instance.to_string(),
        config: String::new(),
        page_tokens,
        components: components(&limits, window),
    };
    let source = match plugins::open_allocator(settings, opening, window.is_some())? {
        None => None,
        Some((name, allocator)) => {
            let opened = AllocatorPages::new(&name, allocator, &limits, window).map_err(Refused)?;
            tracing::info!(
                allocator = name,
                full = limits.full,
                window = limits.window,
                "a plugin hands out this worker's pages"
            );
            Some(Box::new(opened) as Box<dyn PageSource>)
        }
    };
    Ok(Pages { limits, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(ratio: f64, pages: u32, parts: u32) -> Result<PoolLimits, Refused> {
        let settings = Settings { swa_full_tokens_ratio: Some(ratio), ..Settings::default() };
        check(&settings)?;
        limits(&settings, pages, 64, Some(WindowShape { tokens: 128, parts, layers: 1 }))
    }

    #[test]
    fn a_ratio_divides_the_pool_and_what_is_left_over_is_the_full_parts() {
        // 1000 / (1 + 0.5 * 3) = 400 full pages, 200 windows of 3.
        assert_eq!(divided(0.5, 1000, 3).unwrap(), PoolLimits { total: 1000, full: 400, window: 600 });
        // 1001 / 1.2 = 834.2; 834 * 0.2 = 166.8.
        assert_eq!(divided(0.2, 1001, 1).unwrap(), PoolLimits { total: 1001, full: 835, window: 166 });
        assert_eq!(divided(1.0, 1000, 5).unwrap(), PoolLimits { total: 1000, full: 170, window: 830 });
    }

    #[test]
    fn without_a_ratio_or_without_windows_all_is_shared() {
        let window = Some(WindowShape { tokens: 128, parts: 3, layers: 5 });
        let all = PoolLimits { total: 7, full: 7, window: 6 };
        assert_eq!(limits(&Settings::default(), 7, 64, window).unwrap(), all, "two windows of three pages");
        let set = Settings { swa_full_tokens_ratio: Some(0.5), ..Settings::default() };
        assert_eq!(limits(&set, 7, 64, None).unwrap(), PoolLimits::shared(7));
    }

    #[test]
    fn a_ratio_that_holds_no_window_is_refused_with_the_way_out() {
        for ratio in [0.0, -1.0, 1.5, f64::NAN, f64::INFINITY] {
            let said = divided(ratio, 1000, 3).unwrap_err().to_string();
            assert!(said.contains("above 0 and at most 1"), "{said}");
        }
        // 3 pages are 192 tokens, a window and a page as many.
        let said = divided(0.01, 309, 1).unwrap_err().to_string();
        assert!(said.contains("leaves windows 3 pages of 64 tokens in a pool of 309"), "{said}");
        assert!(divided(0.01, 404, 1).is_ok());
    }
}
