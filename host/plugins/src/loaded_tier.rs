//! A loaded storage tier as the plain trait.

use std::sync::Arc;

use host_plugin_api::abi::{RSlice, RSliceMut, TierObject};
use host_plugin_api::{
    Error, ErrorCode, Key, Memory, RegionId, Result, Scanned, StorageTier, Tag, TierCompletion, TierLimits,
    TierPage, TierUsage, WAKES,
};

use super::calls::{Call, Called};
use super::services::{Services, Waker};

/// A loaded storage tier, called through the trait that plugins implement.
///
/// Answers are checked as far as memory safety depends on them: a returned count never exceeds the caller's slice.
pub struct LoadedTier {
    called: Called,
    object: TierObject,
    /// Replaces the descriptor if the plugin wakes the host itself (`WAKES`).
    waker: Option<Arc<Waker>>,
}

impl LoadedTier {
    /// Wraps an object that the root of the plugin of this name opened.
    ///
    /// # Errors
    /// When the system has no descriptor for the plugin's wake-ups.
    pub fn new(plugin: &str, object: TierObject, services: &Services) -> std::io::Result<Self> {
        let waker = (object.event_fd() == WAKES).then(|| services.waker()).transpose()?;
        Ok(Self { called: Called::plugin(plugin), object, waker })
    }
}

impl StorageTier for LoadedTier {
    fn limits(&self) -> TierLimits {
        let _note = self.called.enter(Call::Limits);
        self.object.limits()
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        let _note = self.called.enter(Call::Register);
        self.object.register(memory).into_result().map_err(Error::from)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        let _note = self.called.enter(Call::Deregister);
        self.object.deregister(region).into_result().map_err(Error::from)
    }
    #[inline]
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32 {
        let _note = self.called.enter(Call::Exists);
        self.object.exists(tag, RSlice::from_slice(keys))
    }
    #[inline]
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        let _note = self.called.enter(Call::Get);
        self.object.get(tag, RSlice::from_slice(pages))
    }
    #[inline]
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32 {
        let _note = self.called.enter(Call::Put);
        self.object.put(tag, RSlice::from_slice(pages))
    }
    #[inline]
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32 {
        let _note = self.called.enter(Call::Delete);
        self.object.delete(tag, RSlice::from_slice(keys))
    }
    #[inline]
    fn poll(&self, completions: &mut [TierCompletion]) -> i32 {
        let _note = self.called.enter(Call::Poll);
        let room = completions.len();
        if let Some(waker) = &self.waker {
            waker.clear();
        }
        self.called.counted(Call::Poll, self.object.poll(RSliceMut::from_mut_slice(completions)), room)
    }
    fn cancel(&self, tag: Tag) -> i32 {
        let _note = self.called.enter(Call::Cancel);
        self.object.cancel(tag)
    }
    #[inline]
    fn settled(&self, tag: Tag) -> i32 {
        let _note = self.called.enter(Call::Settled);
        self.object.settled(tag)
    }
    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned> {
        let _note = self.called.enter(Call::Scan);
        let room = keys.len();
        let scanned = self.object.scan(cursor, RSliceMut::from_mut_slice(keys));
        let scanned = scanned.into_result().map_err(Error::from)?;
        if scanned.keys as usize > room {
            let text = format!("a scan into {room} keys claims to have written {}", scanned.keys);
            return Err(Error::new(ErrorCode::INTERNAL, text));
        }
        Ok(scanned)
    }
    fn usage(&self) -> Result<TierUsage> {
        let _note = self.called.enter(Call::Usage);
        self.object.usage().into_result().map_err(Error::from)
    }
    fn event_fd(&self) -> i32 {
        let _note = self.called.enter(Call::EventFd);
        self.waker.as_ref().map_or_else(|| self.object.event_fd(), |waker| waker.fd())
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.object.shutdown(deadline_ms).into_result().map_err(Error::from)
    }
}
