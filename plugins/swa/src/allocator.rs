//! The allocator role, on top of the books.

use host_plugin_api::allocator::{TOO_FEW_PAGES, sharing};
use host_plugin_api::{
    Component, ComponentId, Error, ErrorCode, LayerGroup, LayerKind, PoolAllocator, PoolOpening, PoolPage,
    Result,
};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::books::Books;

const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;

/// `[plugin.swa]`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    /// See `plugin.toml`.
    full_tokens_ratio: Option<f64>,
}

/// See the crate.
pub struct SwaAllocator {
    /// Held for as long as a call computes. Nothing inside waits.
    books: Mutex<Books>,
}

/// Opens an instance.
///
/// # Errors
/// `INVALID_ARGUMENT` for layers that are neither full nor have a window, `CONFIG` for a ratio that leaves too little.
pub fn open(opening: &PoolOpening) -> Result<SwaAllocator> {
    let wrong = |text: String| Error::new(ErrorCode::CONFIG, text);
    let config: Config = toml::from_str(&opening.config).map_err(|error| wrong(error.to_string()))?;
    let components = sharing(&opening.groups, opening.pages).filter(|_| served(&opening.groups));
    let mut components = components.ok_or_else(|| {
        let text = format!("{:?} are not layers that attend to all tokens or to a window", opening.groups);
        Error::new(ErrorCode::INVALID_ARGUMENT, text)
    })?;
    if let Some(ratio) = config.full_tokens_ratio {
        divide(opening, ratio, &mut components).map_err(wrong)?;
    }
    let parts = opening.groups.iter().map(|group| group.parts);
    Ok(SwaAllocator { books: Mutex::new(Books::open(opening.pages, components.into_iter().zip(parts))) })
}

/// Whether all layers are of a kind that this allocator declares.
fn served(groups: &[LayerGroup]) -> bool {
    let served = |group: &LayerGroup| matches!(group.kind, LayerKind::FULL | LayerKind::WINDOW);
    groups.iter().all(|group| served(group) && group.parts > 0)
}

/// Gives layers with a window fixed budgets: `ratio` tokens of window for each token of the full layers, both rounded down
/// to pages. What is left over goes to the full layers.
///
/// # Errors
/// When the ratio is not valid, or leaves no more than a window and a page.
fn divide(
    opening: &PoolOpening,
    ratio: f64,
    components: &mut [Component],
) -> std::result::Result<(), String> {
    if !(ratio > 0.0 && ratio <= 1.0) {
        return Err(format!("full_tokens_ratio is {ratio}: it must be above 0 and at most 1"));
    }
    let groups = &opening.groups;
    let windows = || groups.iter().filter(|group| group.kind == LayerKind::WINDOW);
    let parts: f64 = windows().map(|group| f64::from(group.parts)).sum();
    let full = (f64::from(opening.pages) / (1.0 + ratio * parts)).floor();
    // The value is from 0 to the pages of the pool, so that the cast cuts nothing off.
    let window = (full * ratio).floor() as u32;
    let longest = windows().map(|group| group.window).max().unwrap_or(0);
    let (tokens, least) = (
        u64::from(window) * u64::from(opening.page_tokens),
        u64::from(longest) + u64::from(opening.page_tokens),
    );
    if longest > 0 && tokens <= least {
        return Err(format!(
            "full_tokens_ratio {ratio} leaves windows {window} pages of {} tokens in a pool of {}, and one sequence needs more \
             than its window of {longest} tokens and a page: raise the ratio or the pool, or leave it out",
            opening.page_tokens, opening.pages
        ));
    }
    let taken: u32 = windows().map(|group| group.parts * window).sum();
    for (component, group) in components.iter_mut().zip(groups) {
        component.pages = match group.kind {
            LayerKind::WINDOW => window,
            _ => (opening.pages - taken) / group.parts,
        };
    }
    Ok(())
}

impl PoolAllocator for SwaAllocator {
    fn components(&self, components: &mut [Component]) -> i32 {
        let books = self.books.lock();
        let declared = books.components();
        let count = declared.len();
        let Some(room) = components.get_mut(..count) else { return INVALID };
        room.iter_mut().zip(declared).for_each(|(to, component)| *to = component);
        // As many components as groups, of which there are few.
        count as i32
    }

    fn alloc(&self, component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        let mut books = self.books.lock();
        let Some(account) = books.find(component) else { return INVALID };
        if !pages.len().is_multiple_of(books.parts(account) as usize) {
            return INVALID;
        }
        if !books.fit(account, pages.len()) {
            return TOO_FEW_PAGES;
        }
        for page in pages {
            let Some(taken) = books.take(account) else { return ErrorCode::INTERNAL.0 };
            *page = taken;
        }
        0
    }

    fn free(&self, component: ComponentId, pages: &[PoolPage]) -> i32 {
        let mut books = self.books.lock();
        let Some(account) = books.find(component) else { return INVALID };
        if books.give(account, pages) { 0 } else { INVALID }
    }
}
