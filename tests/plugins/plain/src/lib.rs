//! A pool allocator with one free list per component.
//!
//! To make it yours: `Pool` decides which page is handed out next, and the rest is arithmetic that
//! `host_plugin_api::allocator` does. Every call is hot: whatever you keep is allocated in `open`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use host_plugin_api::allocator::{TOO_FEW_PAGES, first_live_page, lacking};
use host_plugin_api::{
    Budget, Component, ComponentPool, Error, ErrorCode, Grant, Growth, PoolAllocator, PoolOpening, PoolPage,
    Result,
};

const MAX_COMPONENTS: usize = 16;
const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;

/// See the crate.
pub struct PlainAllocator {
    page_tokens: u32,
    pools: Mutex<Vec<Pool>>,
}

struct Pool {
    of: ComponentPool,
    /// Allocated once for all pages, because no call may allocate.
    free: Vec<PoolPage>,
    taken: Vec<bool>,
}

/// Opens an instance. `opening.config` is the user's `[plugin.NAME]` table as TOML; this allocator has no keys. To add
/// some, declare each in plugin.toml, which lets the host check them, and read the text with the crate `toml`.
///
/// # Errors
/// `INVALID_ARGUMENT` for pools that cannot be.
pub fn open(opening: &PoolOpening) -> Result<PlainAllocator> {
    let invalid = |text: String| Error::new(ErrorCode::INVALID_ARGUMENT, text);
    if opening.page_tokens == 0 {
        return Err(invalid("a page must hold at least one token".to_owned()));
    }
    let count = opening.components.len();
    if count == 0 || count > MAX_COMPONENTS {
        return Err(invalid(format!("{count} components, 1 to {MAX_COMPONENTS} are allowed")));
    }
    let mut pools: Vec<Pool> = Vec::with_capacity(count);
    for of in &opening.components {
        if pools.iter().any(|pool| pool.of.component == of.component) {
            return Err(invalid(format!("component {} is there twice", of.component.0)));
        }
        // Low pages first.
        let free = (0..of.pages).rev().map(PoolPage).collect();
        pools.push(Pool { of: *of, free, taken: vec![false; of.pages as usize] });
    }
    Ok(PlainAllocator { page_tokens: opening.page_tokens, pools: Mutex::new(pools) })
}

// The plugin's entry: writes plugin.toml into the file and exports the factory.
host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    allocator: open,
}

impl Pool {
    fn take(&mut self) -> Option<PoolPage> {
        let page = self.free.pop()?;
        self.taken[page.0 as usize] = true;
        Some(page)
    }
}

impl PlainAllocator {
    fn pools(&self) -> MutexGuard<'_, Vec<Pool>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What all growths lack of one component, or `None` when one of them shrinks.
    fn lacking(&self, pool: &Pool, growths: impl Iterator<Item = Growth>, tail: bool) -> Option<usize> {
        let mut pages = 0;
        for growth in growths {
            pages += lacking(growth, pool.of.window, self.page_tokens, tail)?.pages as usize;
        }
        Some(pages)
    }

    fn grow<I: Iterator<Item = Growth> + Clone>(
        &self,
        growths: I,
        tail: bool,
        grants: &mut [Grant],
        pages: &mut [PoolPage],
    ) -> i32 {
        let mut pools = self.pools();
        // First counted and compared with everything, then taken: a request that does not fit changes nothing.
        let mut total = 0;
        let mut enough = true;
        for pool in pools.iter() {
            let Some(lack) = self.lacking(pool, growths.clone(), tail) else { return INVALID };
            enough &= lack <= pool.free.len();
            total += lack;
        }
        if grants.len() < growths.clone().count() * pools.len() || pages.len() < total {
            return INVALID;
        }
        if !enough {
            return TOO_FEW_PAGES;
        }
        let (mut grants, mut pages) = (grants.iter_mut(), pages.iter_mut());
        for growth in growths {
            for pool in pools.iter_mut() {
                let lack = lacking(growth, pool.of.window, self.page_tokens, tail);
                let (Some(lack), Some(grant)) = (lack, grants.next()) else { return ErrorCode::INTERNAL.0 };
                *grant = lack;
                for page in pages.by_ref().take(lack.pages as usize) {
                    let Some(taken) = pool.take() else { return ErrorCode::INTERNAL.0 };
                    *page = taken;
                }
            }
        }
        total as i32
    }
}

impl PoolAllocator for PlainAllocator {
    fn budgets(&self, budgets: &mut [Budget]) -> i32 {
        let pools = self.pools();
        if budgets.len() < pools.len() {
            return INVALID;
        }
        for (budget, pool) in budgets.iter_mut().zip(pools.iter()) {
            let free = pool.free.len() as u32;
            *budget = Budget { component: pool.of.component, total: pool.of.pages, free, reserved: 0 };
        }
        pools.len() as i32
    }
    fn alloc(&self, component: Component, pages: &mut [PoolPage]) -> i32 {
        let mut pools = self.pools();
        let Some(pool) = pools.iter_mut().find(|pool| pool.of.component == component) else { return INVALID };
        if pool.free.len() < pages.len() {
            return TOO_FEW_PAGES;
        }
        for page in pages {
            let Some(taken) = pool.take() else { return ErrorCode::INTERNAL.0 };
            *page = taken;
        }
        0
    }
    fn free(&self, component: Component, pages: &[PoolPage]) -> i32 {
        let mut pools = self.pools();
        let Some(pool) = pools.iter_mut().find(|pool| pool.of.component == component) else { return INVALID };
        // Marked one by one, which finds a page named twice; taken back when one of them was not taken.
        for (at, page) in pages.iter().enumerate() {
            match pool.taken.get_mut(page.0 as usize) {
                Some(taken) if *taken => *taken = false,
                _ => {
                    for earlier in &pages[..at] {
                        pool.taken[earlier.0 as usize] = true;
                    }
                    return INVALID;
                }
            }
        }
        pool.free.extend_from_slice(pages);
        0
    }
    fn need(&self, growths: &[Growth], tail: u32, pages: &mut [u32]) -> i32 {
        let pools = self.pools();
        if pages.len() < pools.len() {
            return INVALID;
        }
        for (count, pool) in pages.iter_mut().zip(pools.iter()) {
            match self.lacking(pool, growths.iter().copied(), tail == 1) {
                Some(lack) => *count = lack as u32,
                None => return INVALID,
            }
        }
        pools.len() as i32
    }
    fn extend(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        self.grow(growths.iter().copied(), false, grants, pages)
    }
    fn extend_tail(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        self.grow(growths.iter().copied(), true, grants, pages)
    }
    fn step(&self, held: &[u32], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        let by_one = |held: &u32| Growth { held: *held, target: held.saturating_add(1) };
        self.grow(held.iter().map(by_one), false, grants, pages)
    }
    fn first_live(&self, component: Component, tokens: u32) -> i32 {
        let pools = self.pools();
        let pool = pools.iter().find(|pool| pool.of.component == component);
        pool.map_or(INVALID, |pool| first_live_page(tokens, pool.of.window, self.page_tokens) as i32)
    }
}
