//! The storage role with its panics caught.

use abi_stable::sabi_trait::prelude::TD_Opaque;
use abi_stable::std_types::{RSlice, RSliceMut, RStr};

use super::guard::{Guard, caught};
use super::{AbiResult, TierObject, TierRole, TierRole_TO};
use crate::error::Result;
use crate::tier::{Key, Scanned, StorageTier, TierCompletion, TierLimits, TierPage, TierUsage};
use crate::transfer::{Memory, Opening, RegionId, Tag};

impl<T: StorageTier> TierRole for Guard<T> {
    fn limits(&self) -> TierLimits {
        let nothing =
            TierLimits { max_pages: 0, max_batches: 0, max_value: 0, alignment: 1, reserved: [0; 4] };
        self.run(|t| t.limits()).unwrap_or(nothing)
    }
    fn register(&self, memory: &Memory) -> AbiResult<RegionId> {
        self.cold(|t| t.register(memory))
    }
    fn deregister(&self, region: RegionId) -> AbiResult<()> {
        self.cold(|t| t.deregister(region))
    }
    fn exists(&self, tag: Tag, keys: RSlice<'_, Key>) -> i32 {
        self.hot(|t| t.exists(tag, keys.as_slice()))
    }
    fn get(&self, tag: Tag, pages: RSlice<'_, TierPage>) -> i32 {
        self.hot(|t| t.get(tag, pages.as_slice()))
    }
    fn put(&self, tag: Tag, pages: RSlice<'_, TierPage>) -> i32 {
        self.hot(|t| t.put(tag, pages.as_slice()))
    }
    fn delete(&self, tag: Tag, keys: RSlice<'_, Key>) -> i32 {
        self.hot(|t| t.delete(tag, keys.as_slice()))
    }
    fn poll(&self, mut completions: RSliceMut<'_, TierCompletion>) -> i32 {
        self.hot(|t| t.poll(completions.as_mut_slice()))
    }
    fn cancel(&self, tag: Tag) -> i32 {
        self.hot(|t| t.cancel(tag))
    }
    fn settled(&self, tag: Tag) -> i32 {
        self.hot(|t| t.settled(tag))
    }
    fn scan(&self, cursor: u64, mut keys: RSliceMut<'_, Key>) -> AbiResult<Scanned> {
        self.cold(|t| t.scan(cursor, keys.as_mut_slice()))
    }
    fn usage(&self) -> AbiResult<TierUsage> {
        self.cold(|t| t.usage())
    }
    fn event_fd(&self) -> i32 {
        self.run(|t| t.event_fd()).unwrap_or(-1)
    }
    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()> {
        self.cold(|t| t.shutdown(deadline_ms))
    }
}

/// Runs a plugin's factory, catches its panics and wraps its tier. Called by [`export_plugin!`](crate::export_plugin).
pub fn open_guarded_tier<T: StorageTier>(
    open: impl FnOnce(&Opening) -> Result<T>,
    name: RStr<'_>,
    config: RStr<'_>,
) -> AbiResult<TierObject> {
    let opening = Opening { name: name.into(), config: config.into() };
    caught(|| open(&opening)).map(|tier| TierRole_TO::from_value(Guard::new(tier), TD_Opaque))
}
