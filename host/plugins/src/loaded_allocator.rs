//! A loaded pool allocator as the plain trait.

use host_plugin_api::abi::{AllocatorObject, RSlice, RSliceMut};
use host_plugin_api::{Budget, Component, Grant, Growth, PoolAllocator, PoolPage};

use super::calls::{Call, Called};

/// A loaded allocator, called through the trait that plugins implement.
///
/// A count that comes back never exceeds the caller's slice. Whether the pages are the right ones is for the
/// caller to check: that costs a look at each.
pub struct LoadedAllocator {
    called: Called,
    object: AllocatorObject,
}

impl LoadedAllocator {
    /// Wraps what the root of the plugin of this name opened.
    #[must_use]
    pub fn new(plugin: &str, object: AllocatorObject) -> Self {
        Self { called: Called::plugin(plugin), object }
    }
}

impl PoolAllocator for LoadedAllocator {
    #[inline]
    fn budgets(&self, budgets: &mut [Budget]) -> i32 {
        let _note = self.called.enter(Call::Budgets);
        let room = budgets.len();
        self.called.counted(Call::Budgets, self.object.budgets(RSliceMut::from_mut_slice(budgets)), room)
    }
    #[inline]
    fn alloc(&self, component: Component, pages: &mut [PoolPage]) -> i32 {
        let _note = self.called.enter(Call::Alloc);
        self.object.alloc(component, RSliceMut::from_mut_slice(pages))
    }
    #[inline]
    fn free(&self, component: Component, pages: &[PoolPage]) -> i32 {
        let _note = self.called.enter(Call::Free);
        self.object.free(component, RSlice::from_slice(pages))
    }
    #[inline]
    fn need(&self, growths: &[Growth], tail: u32, pages: &mut [u32]) -> i32 {
        let _note = self.called.enter(Call::Need);
        let room = pages.len();
        self.called.counted(
            Call::Need,
            self.object.need(RSlice::from_slice(growths), tail, RSliceMut::from_mut_slice(pages)),
            room,
        )
    }
    #[inline]
    fn extend(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        let _note = self.called.enter(Call::Extend);
        let room = pages.len();
        let (grants, pages) = (RSliceMut::from_mut_slice(grants), RSliceMut::from_mut_slice(pages));
        self.called.counted(
            Call::Extend,
            self.object.extend(RSlice::from_slice(growths), grants, pages),
            room,
        )
    }
    #[inline]
    fn extend_tail(&self, growths: &[Growth], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        let _note = self.called.enter(Call::ExtendTail);
        let room = pages.len();
        let (grants, pages) = (RSliceMut::from_mut_slice(grants), RSliceMut::from_mut_slice(pages));
        self.called.counted(
            Call::ExtendTail,
            self.object.extend_tail(RSlice::from_slice(growths), grants, pages),
            room,
        )
    }
    #[inline]
    fn step(&self, held: &[u32], grants: &mut [Grant], pages: &mut [PoolPage]) -> i32 {
        let _note = self.called.enter(Call::Step);
        let room = pages.len();
        let (grants, pages) = (RSliceMut::from_mut_slice(grants), RSliceMut::from_mut_slice(pages));
        self.called.counted(Call::Step, self.object.step(RSlice::from_slice(held), grants, pages), room)
    }
    #[inline]
    fn first_live(&self, component: Component, tokens: u32) -> i32 {
        let _note = self.called.enter(Call::FirstLive);
        self.object.first_live(component, tokens)
    }
}
