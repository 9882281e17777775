//! A pool allocator in C.
//!
//! It says which pages; how many a sequence needs is computed here, from the components.

use std::ffi::c_void;

use host_plugin_api::abi::{AllocatorObject, AllocatorRole, RSlice, RSliceMut, allocator_object};
use host_plugin_api::allocator::{first_live_page, lacking};
use host_plugin_api::{
    Budget, Component, ComponentPool, ErrorCode, Grant, Growth, PoolOpening, PoolPage, Result, c,
};

use super::{Instance, needed};

const INVALID: i32 = ErrorCode::INVALID_ARGUMENT.0;

/// An instance and its functions.
struct CAllocator {
    instance: Instance,
    budgets: unsafe extern "C" fn(*mut c_void, *mut Budget, usize) -> i32,
    take: unsafe extern "C" fn(*mut c_void, u32, *mut u32, usize) -> i32,
    give: unsafe extern "C" fn(*mut c_void, u32, *const u32, usize) -> i32,
    page_tokens: u32,
    components: Vec<ComponentPool>,
}

/// An allocator has no threads to stop.
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
/// When the table lacks a function, and what the plugin says.
pub(super) fn open(
    table: &c::AllocatorTable,
    settings: c::Opening,
    opening: &PoolOpening,
) -> Result<AllocatorObject> {
    let role = "allocator";
    let (make, close) = (needed(role, "open", table.open)?, needed(role, "close", table.close)?);
    let budgets = needed(role, "budgets", table.budgets)?;
    let (take, give) = (needed(role, "take", table.take)?, needed(role, "give", table.give)?);
    let crossing = c::PoolOpening {
        size: size_of::<c::PoolOpening>() as u64,
        opening: settings,
        page_tokens: opening.page_tokens,
        components_count: opening.components.len() as u32,
        components: opening.components.as_ptr(),
    };
    let instance =
        // SAFETY: all that the function is given is valid until it returns.
        Instance::open(close, no_shutdown, |at, error| unsafe { make(&raw const crossing, at, error) })?;
    let (page_tokens, components) = (opening.page_tokens, opening.components.clone());
    Ok(allocator_object(CAllocator { instance, budgets, take, give, page_tokens, components }))
}

impl CAllocator {
    fn lacking(&self, growth: Growth, of: &ComponentPool, tail: bool) -> Option<Grant> {
        lacking(growth, of.window, self.page_tokens, tail)
    }

    fn take(&self, component: u32, pages: &mut [PoolPage]) -> i32 {
        if pages.is_empty() {
            return 0;
        }
        // SAFETY: the instance is open, and the pages are `u32` in place.
        unsafe { (self.take)(self.instance.at, component, pages.as_mut_ptr().cast(), pages.len()) }
    }

    fn give(&self, component: u32, pages: &[PoolPage]) -> i32 {
        // SAFETY: as above.
        unsafe { (self.give)(self.instance.at, component, pages.as_ptr().cast(), pages.len()) }
    }

    /// Takes the pages that all these growths lack, or none.
    fn grow(
        &self,
        growths: impl Iterator<Item = Growth>,
        tail: bool,
        grants: &mut [Grant],
        pages: &mut [PoolPage],
    ) -> i32 {
        let (mut granted, mut entries) = (0, 0_usize);
        for growth in growths {
            for of in &self.components {
                let (Some(grant), Some(place)) = (self.lacking(growth, of, tail), grants.get_mut(granted))
                else {
                    return INVALID;
                };
                *place = grant;
                granted += 1;
                entries = entries.saturating_add(entries_of(grant, of));
            }
        }
        if entries > pages.len() {
            return INVALID;
        }
        let mut taken = 0;
        for (at, grant) in grants[..granted].iter().enumerate() {
            let of = &self.components[at % self.components.len()];
            let until = taken + entries_of(*grant, of);
            let answer = self.take(of.component.0, &mut pages[taken..until]);
            if answer != 0 {
                // A count is no answer of `take`; it has taken the pages, if it says so.
                let granted = if answer > 0 { at + 1 } else { at };
                self.give_back(&grants[..granted], pages);
                return answer.min(ErrorCode::INTERNAL.0);
            }
            taken = until;
        }
        i32::try_from(taken).unwrap_or(INVALID)
    }

    /// Gives back what these grants took.
    fn give_back(&self, grants: &[Grant], pages: &[PoolPage]) {
        let mut given = 0;
        for (at, grant) in grants.iter().enumerate() {
            let of = &self.components[at % self.components.len()];
            let until = given + entries_of(*grant, of);
            if until > given {
                self.give(of.component.0, &pages[given..until]);
            }
            given = until;
        }
    }
}

/// Entries of the caller's pages that a grant takes.
fn entries_of(grant: Grant, of: &ComponentPool) -> usize {
    (grant.pages as usize).saturating_mul(of.parts().unwrap_or(1) as usize)
}

impl AllocatorRole for CAllocator {
    fn budgets(&self, mut budgets: RSliceMut<'_, Budget>) -> i32 {
        // SAFETY: the instance is open, and the room is the slice's.
        unsafe { (self.budgets)(self.instance.at, budgets.as_mut_ptr(), budgets.len()) }
    }
    fn alloc(&self, component: Component, mut pages: RSliceMut<'_, PoolPage>) -> i32 {
        // SAFETY: as above.
        unsafe { (self.take)(self.instance.at, component.0, pages.as_mut_ptr().cast(), pages.len()) }
    }
    fn free(&self, component: Component, pages: RSlice<'_, PoolPage>) -> i32 {
        self.give(component.0, pages.as_slice())
    }
    fn need(&self, growths: RSlice<'_, Growth>, tail: u32, mut pages: RSliceMut<'_, u32>) -> i32 {
        let Some(counts) = pages.as_mut_slice().get_mut(..self.components.len()) else { return INVALID };
        for (count, of) in counts.iter_mut().zip(&self.components) {
            *count = 0;
            for growth in growths.as_slice() {
                let Some(grant) = self.lacking(*growth, of, tail == 1) else { return INVALID };
                *count = count.saturating_add(grant.pages);
            }
        }
        counts.len() as i32
    }
    fn extend(
        &self,
        growths: RSlice<'_, Growth>,
        mut grants: RSliceMut<'_, Grant>,
        mut pages: RSliceMut<'_, PoolPage>,
    ) -> i32 {
        self.grow(growths.as_slice().iter().copied(), false, grants.as_mut_slice(), pages.as_mut_slice())
    }
    fn extend_tail(
        &self,
        growths: RSlice<'_, Growth>,
        mut grants: RSliceMut<'_, Grant>,
        mut pages: RSliceMut<'_, PoolPage>,
    ) -> i32 {
        self.grow(growths.as_slice().iter().copied(), true, grants.as_mut_slice(), pages.as_mut_slice())
    }
    fn step(
        &self,
        held: RSlice<'_, u32>,
        mut grants: RSliceMut<'_, Grant>,
        mut pages: RSliceMut<'_, PoolPage>,
    ) -> i32 {
        let by_one = held.as_slice().iter().map(|&held| Growth { held, target: held.saturating_add(1) });
        self.grow(by_one, false, grants.as_mut_slice(), pages.as_mut_slice())
    }
    fn first_live(&self, component: Component, tokens: u32) -> i32 {
        match self.components.iter().find(|of| of.component == component) {
            Some(of) => {
                i32::try_from(first_live_page(tokens, of.window, self.page_tokens)).unwrap_or(i32::MAX)
            }
            None => INVALID,
        }
    }
}
