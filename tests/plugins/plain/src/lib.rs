//! A pool allocator with one free list.
//!
//! To make it yours: `Pool` decides which page is handed out next, and `open` declares a component for each group of layers.
//! Every call is on the hot path: allocate in `open` all memory that you keep.

use std::sync::{Mutex, MutexGuard, PoisonError};

use host_plugin_api::allocator::{TOO_FEW_PAGES, sharing};
use host_plugin_api::{
    Component, ComponentId, Error, ErrorCode, PoolAllocator, PoolOpening, PoolPage, Result,
};

const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;

/// An allocator with one free list.
pub struct PlainAllocator {
    pool: Mutex<Pool>,
}

struct Pool {
    components: Vec<Account>,
    /// Allocated once for all pages, because no call may allocate.
    free: Vec<PoolPage>,
    /// For each page, the index of the component that owns it.
    owners: Vec<Option<u8>>,
}

/// A component and its account of pool pages.
struct Account {
    of: Component,
    /// Pool pages that make one page of the component.
    parts: usize,
    /// Pool pages that the component may still take.
    left: usize,
}

/// Opens an instance. `opening.config` is the user's `[plugin.NAME]` table as TOML. This allocator has no keys. To add some,
/// declare each in plugin.toml, which lets the host check them, and read the text with the crate `toml`.
///
/// # Errors
/// `INVALID_ARGUMENT` for layers that this allocator does not declare.
pub fn open(opening: &PoolOpening) -> Result<PlainAllocator> {
    // All components may fill the pool. Change `pages` of one to give it less. To serve fewer kinds of layers, refuse the others
    // here, and leave their names out of the capabilities in plugin.toml.
    let declared = sharing(&opening.groups, opening.pages).ok_or_else(|| {
        let text = format!("{:?} have layers of a kind that is not known", opening.groups);
        Error::new(ErrorCode::INVALID_ARGUMENT, text)
    })?;
    let account = |(of, parts): (Component, usize)| Account { of, parts, left: of.pages as usize * parts };
    let parts = opening.groups.iter().map(|group| group.parts as usize);
    let pool = Pool {
        components: declared.into_iter().zip(parts).map(account).collect(),
        // Low pages are handed out first.
        free: (0..opening.pages).rev().map(PoolPage).collect(),
        owners: vec![None; opening.pages as usize],
    };
    Ok(PlainAllocator { pool: Mutex::new(pool) })
}

// The plugin's entry: writes plugin.toml into the file and exports the factory.
host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    allocator: open,
}

impl Pool {
    /// The index of a component in `components`, as `owners` has it.
    fn find(&self, component: ComponentId) -> Option<u8> {
        let place = self.components.iter().position(|account| account.of.id == component)?;
        u8::try_from(place).ok()
    }
}

impl PlainAllocator {
    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PoolAllocator for PlainAllocator {
    fn components(&self, components: &mut [Component]) -> i32 {
        let pool = self.pool();
        let Some(room) = components.get_mut(..pool.components.len()) else { return INVALID };
        for (to, account) in room.iter_mut().zip(&pool.components) {
            *to = account.of;
        }
        pool.components.len() as i32
    }

    fn alloc(&self, component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        let mut pool = self.pool();
        let Some(owner) = pool.find(component) else { return INVALID };
        let Account { parts, left, .. } = pool.components[owner as usize];
        if pages.len() % parts != 0 {
            return INVALID;
        }
        if pages.len() > left || pages.len() > pool.free.len() {
            return TOO_FEW_PAGES;
        }
        for page in &mut *pages {
            let Some(taken) = pool.free.pop() else { return ErrorCode::INTERNAL.0 };
            pool.owners[taken.0 as usize] = Some(owner);
            *page = taken;
        }
        pool.components[owner as usize].left -= pages.len();
        0
    }

    fn free(&self, component: ComponentId, pages: &[PoolPage]) -> i32 {
        let mut pool = self.pool();
        let Some(owner) = pool.find(component) else { return INVALID };
        // Owners are cleared page by page, which finds a page named twice. A page of another component restores them.
        for (at, page) in pages.iter().enumerate() {
            match pool.owners.get_mut(page.0 as usize) {
                Some(of) if *of == Some(owner) => *of = None,
                _ => {
                    for earlier in &pages[..at] {
                        pool.owners[earlier.0 as usize] = Some(owner);
                    }
                    return INVALID;
                }
            }
        }
        pool.free.extend_from_slice(pages);
        pool.components[owner as usize].left += pages.len();
        0
    }
}
