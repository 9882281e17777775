//! The allocator role with its panics caught.

use abi_stable::sabi_trait::prelude::TD_Opaque;
use abi_stable::std_types::{RSlice, RSliceMut, RStr};

use super::guard::{Guard, caught};
use super::{AbiResult, AllocatorObject, AllocatorRole, AllocatorRole_TO};
use crate::allocator::{Component, ComponentId, LayerGroup, PoolAllocator, PoolOpening, PoolPage};
use crate::error::Result;

impl<T: PoolAllocator> AllocatorRole for Guard<T> {
    fn components(&self, mut components: RSliceMut<'_, Component>) -> i32 {
        self.hot(|a| a.components(components.as_mut_slice()))
    }
    fn alloc(&self, component: ComponentId, mut pages: RSliceMut<'_, PoolPage>) -> i32 {
        self.hot(|a| a.alloc(component, pages.as_mut_slice()))
    }
    fn free(&self, component: ComponentId, pages: RSlice<'_, PoolPage>) -> i32 {
        self.hot(|a| a.free(component, pages.as_slice()))
    }
}

/// Runs a plugin's factory, catches its panics and wraps its allocator. Called by
/// [`export_plugin!`](crate::export_plugin).
pub fn open_guarded_allocator<T: PoolAllocator>(
    open: impl FnOnce(&PoolOpening) -> Result<T>,
    name: RStr<'_>,
    config: RStr<'_>,
    page_tokens: u32,
    pages: u32,
    groups: RSlice<'_, LayerGroup>,
) -> AbiResult<AllocatorObject> {
    let groups = groups.as_slice().to_vec();
    let opening = PoolOpening { name: name.into(), config: config.into(), page_tokens, pages, groups };
    caught(|| open(&opening)).map(|pool| AllocatorRole_TO::from_value(Guard::new(pool), TD_Opaque))
}
