//! A pool allocator in C.

use std::ffi::c_void;

use host_plugin_api::abi::{AllocatorObject, AllocatorRole, RSlice, RSliceMut, allocator_object};
use host_plugin_api::{Component, ComponentId, PoolOpening, PoolPage, Result, c};

use super::{Instance, needed};

/// An instance of the allocator role and its functions.
struct CAllocator {
    instance: Instance,
    components: unsafe extern "C" fn(*mut c_void, *mut Component, usize) -> i32,
    take: unsafe extern "C" fn(*mut c_void, u32, *mut u32, usize) -> i32,
    give: unsafe extern "C" fn(*mut c_void, u32, *const u32, usize) -> i32,
}

/// Stands for `shutdown`: an allocator has no threads to stop.
unsafe extern "C" fn no_shutdown(
    _instance: *mut c_void,
    _deadline_ms: u64,
    _error: *mut c::ErrorText,
) -> i32 {
    0
}

/// Opens an instance.
///
/// # Errors
/// When the table lacks a function, or the plugin's own error.
pub(super) fn open(
    table: &c::AllocatorTable,
    settings: c::Opening,
    opening: &PoolOpening,
) -> Result<AllocatorObject> {
    let role = "allocator";
    let (make, close) = (needed(role, "open", table.open)?, needed(role, "close", table.close)?);
    let components = needed(role, "components", table.components)?;
    let (take, give) = (needed(role, "take", table.take)?, needed(role, "give", table.give)?);
    let crossing = c::PoolOpening {
        size: size_of::<c::PoolOpening>() as u64,
        opening: settings,
        page_tokens: opening.page_tokens,
        pages: opening.pages,
        groups: opening.groups.as_ptr(),
        groups_count: opening.groups.len() as u64,
    };
    let instance =
        // SAFETY: all arguments are valid until the function returns.
        Instance::open(close, no_shutdown, |at, error| unsafe { make(&raw const crossing, at, error) })?;
    Ok(allocator_object(CAllocator { instance, components, take, give }))
}

impl AllocatorRole for CAllocator {
    fn components(&self, mut components: RSliceMut<'_, Component>) -> i32 {
        // SAFETY: the instance is open, and the plugin may write to the whole slice.
        unsafe { (self.components)(self.instance.at, components.as_mut_ptr(), components.len()) }
    }
    fn alloc(&self, component: ComponentId, mut pages: RSliceMut<'_, PoolPage>) -> i32 {
        // SAFETY: as above, and a `PoolPage` has the layout of a `u32`.
        unsafe { (self.take)(self.instance.at, component.0, pages.as_mut_ptr().cast(), pages.len()) }
    }
    fn free(&self, component: ComponentId, pages: RSlice<'_, PoolPage>) -> i32 {
        // SAFETY: as above.
        unsafe { (self.give)(self.instance.at, component.0, pages.as_ptr().cast(), pages.len()) }
    }
}
