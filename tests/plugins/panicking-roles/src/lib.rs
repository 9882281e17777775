//! A fake for tests: a storage tier in memory and an allocator with one free list, which panic in the method that their
//! configuration names.

use host_plugin_api::{
    Component, ComponentId, Key, Memory, Opening, PoolAllocator, PoolOpening, PoolPage, RegionId, Result,
    Scanned, StorageTier, Tag, TierCompletion, TierLimits, TierPage, TierUsage,
};
use host_plugin_memory::MemoryTier;
use host_plugin_plain::PlainAllocator;

/// A tier or an allocator that panics in one of its methods.
pub struct Panicking<T> {
    inner: T,
    config: String,
}

impl<T> Panicking<T> {
    fn at(&self, method: &str) -> &T {
        assert!(!self.config.contains(&format!("\"{method}\"")), "told to panic in {method}");
        &self.inner
    }
}

/// Opens a tier.
///
/// # Errors
/// Never.
pub fn open_store(opening: &Opening) -> Result<Panicking<MemoryTier>> {
    Ok(Panicking { inner: host_plugin_memory::open(opening)?, config: opening.config.clone() })
}

/// Opens an allocator.
///
/// # Errors
/// Those of the allocator that it is built from.
pub fn open_pool(opening: &PoolOpening) -> Result<Panicking<PlainAllocator>> {
    Ok(Panicking { inner: host_plugin_plain::open(opening)?, config: opening.config.clone() })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open_store,
    allocator: open_pool,
}

macro_rules! forward {
    ($role:literal: $($name:ident($($argument:ident: $of:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self, $($argument: $of),*) -> $out {
            self.at(concat!($role, ".", stringify!($name))).$name($($argument),*)
        })*
    };
}

impl StorageTier for Panicking<MemoryTier> {
    forward! { "tier":
        limits() -> TierLimits;
        register(memory: &Memory) -> Result<RegionId>;
        deregister(region: RegionId) -> Result<()>;
        exists(tag: Tag, keys: &[Key]) -> i32;
        get(tag: Tag, pages: &[TierPage]) -> i32;
        put(tag: Tag, pages: &[TierPage]) -> i32;
        delete(tag: Tag, keys: &[Key]) -> i32;
        poll(completions: &mut [TierCompletion]) -> i32;
        cancel(tag: Tag) -> i32;
        settled(tag: Tag) -> i32;
        scan(cursor: u64, keys: &mut [Key]) -> Result<Scanned>;
        usage() -> Result<TierUsage>;
        event_fd() -> i32;
        shutdown(deadline_ms: u64) -> Result<()>;
    }
}

impl PoolAllocator for Panicking<PlainAllocator> {
    forward! { "allocator":
        components(components: &mut [Component]) -> i32;
        alloc(component: ComponentId, pages: &mut [PoolPage]) -> i32;
        free(component: ComponentId, pages: &[PoolPage]) -> i32;
    }
}
