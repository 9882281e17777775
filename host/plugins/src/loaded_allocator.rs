//! A loaded pool allocator as the plain trait.

use host_plugin_api::abi::{AllocatorObject, RSlice, RSliceMut};
use host_plugin_api::{Component, ComponentId, PoolAllocator, PoolPage};

use super::calls::{Call, Called};

/// A loaded allocator, called through the trait that plugins implement.
///
/// A returned count never exceeds the caller's slice. The caller checks whether the pages are the right ones, which means a look at
/// each.
pub struct LoadedAllocator {
    called: Called,
    object: AllocatorObject,
}

impl LoadedAllocator {
    /// Wraps an object that the root of the plugin of this name opened.
    #[must_use]
    pub fn new(plugin: &str, object: AllocatorObject) -> Self {
        Self { called: Called::plugin(plugin), object }
    }
}

impl PoolAllocator for LoadedAllocator {
    fn components(&self, components: &mut [Component]) -> i32 {
        let _note = self.called.enter(Call::Components);
        let room = components.len();
        let answer = self.object.components(RSliceMut::from_mut_slice(components));
        self.called.counted(Call::Components, answer, room)
    }
    #[inline]
    fn alloc(&self, component: ComponentId, pages: &mut [PoolPage]) -> i32 {
        let _note = self.called.enter(Call::Alloc);
        self.object.alloc(component, RSliceMut::from_mut_slice(pages))
    }
    #[inline]
    fn free(&self, component: ComponentId, pages: &[PoolPage]) -> i32 {
        let _note = self.called.enter(Call::Free);
        self.object.free(component, RSlice::from_slice(pages))
    }
}
