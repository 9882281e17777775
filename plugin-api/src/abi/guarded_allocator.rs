//! The allocator role behind the net.

use abi_stable::sabi_trait::prelude::TD_Opaque;
use abi_stable::std_types::{RSlice, RSliceMut, RStr};

use super::guard::{Guard, caught};
use super::{AbiResult, AllocatorObject, AllocatorRole, AllocatorRole_TO};
use crate::allocator::{
    Budget, Component, ComponentPool, Grant, Growth, PoolAllocator, PoolOpening, PoolPage,
};
use crate::error::Result;

impl<T: PoolAllocator> AllocatorRole for Guard<T> {
    fn budgets(&self, mut budgets: RSliceMut<'_, Budget>) -> i32 {
        self.hot(|a| a.budgets(budgets.as_mut_slice()))
    }
    fn alloc(&self, component: Component, mut pages: RSliceMut<'_, PoolPage>) -> i32 {
        self.hot(|a| a.alloc(component, pages.as_mut_slice()))
    }
    fn free(&self, component: Component, pages: RSlice<'_, PoolPage>) -> i32 {
        self.hot(|a| a.free(component, pages.as_slice()))
    }
    fn need(&self, growths: RSlice<'_, Growth>, tail: u32, mut pages: RSliceMut<'_, u32>) -> i32 {
        self.hot(|a| a.need(growths.as_slice(), tail, pages.as_mut_slice()))
    }
    fn extend(
        &self,
        growths: RSlice<'_, Growth>,
        mut grants: RSliceMut<'_, Grant>,
        mut pages: RSliceMut<'_, PoolPage>,
    ) -> i32 {
        self.hot(|a| a.extend(growths.as_slice(), grants.as_mut_slice(), pages.as_mut_slice()))
    }
    fn extend_tail(
        &self,
        growths: RSlice<'_, Growth>,
        mut grants: RSliceMut<'_, Grant>,
        mut pages: RSliceMut<'_, PoolPage>,
    ) -> i32 {
        self.hot(|a| a.extend_tail(growths.as_slice(), grants.as_mut_slice(), pages.as_mut_slice()))
    }
    fn step(
        &self,
        held: RSlice<'_, u32>,
        mut grants: RSliceMut<'_, Grant>,
        mut pages: RSliceMut<'_, PoolPage>,
    ) -> i32 {
        self.hot(|a| a.step(held.as_slice(), grants.as_mut_slice(), pages.as_mut_slice()))
    }
    fn first_live(&self, component: Component, tokens: u32) -> i32 {
        self.hot(|a| a.first_live(component, tokens))
    }
}

/// Runs a plugin's factory behind the net and wraps what it made. Called by [`export_plugin!`](crate::export_plugin).
pub fn open_guarded_allocator<T: PoolAllocator>(
    open: impl FnOnce(&PoolOpening) -> Result<T>,
    name: RStr<'_>,
    config: RStr<'_>,
    page_tokens: u32,
    components: RSlice<'_, ComponentPool>,
) -> AbiResult<AllocatorObject> {
    let opening = PoolOpening {
        name: name.into(),
        config: config.into(),
        page_tokens,
        components: components.as_slice().to_vec(),
    };
    caught(|| open(&opening)).map(|pool| AllocatorRole_TO::from_value(Guard::new(pool), TD_Opaque))
}
