//! A storage tier in C.

use std::ffi::c_void;

use host_plugin_api::abi::{AbiResult, RResult, RSlice, RSliceMut, TierObject, TierRole, tier_object};
use host_plugin_api::{
    Error, ErrorCode, Key, Memory, RegionId, Result, Scanned, Tag, TierCompletion, TierLimits, TierPage,
    TierUsage, c,
};

use super::{Instance, fallible, needed, uncancelled};

type Batch<T> = unsafe extern "C" fn(*mut c_void, u64, *const T, usize) -> i32;
type About = unsafe extern "C" fn(*mut c_void, u32, *mut c::ErrorText) -> i32;

/// An instance of the storage role and its functions.
struct CTier {
    instance: Instance,
    limits: unsafe extern "C" fn(*mut c_void, *mut TierLimits),
    register: unsafe extern "C" fn(*mut c_void, *const Memory, *mut u32, *mut c::ErrorText) -> i32,
    deregister: About,
    exists: Batch<Key>,
    get: Batch<TierPage>,
    put: Batch<TierPage>,
    remove: Batch<Key>,
    poll: unsafe extern "C" fn(*mut c_void, *mut TierCompletion, usize) -> i32,
    settled: unsafe extern "C" fn(*mut c_void, u64) -> i32,
    /// The plugin's table, for the functions that it may leave out.
    table: c::TierTable,
}

/// Opens an instance.
///
/// # Errors
/// When the table lacks a function, or the plugin's own error.
pub(super) fn open(table: &c::TierTable, opening: &c::Opening) -> Result<TierObject> {
    let make = needed("tier", "open", table.open)?;
    let (close, shutdown) =
        (needed("tier", "close", table.close)?, needed("tier", "shutdown", table.shutdown)?);
    let limits = needed("tier", "limits", table.limits)?;
    let register = needed("tier", "register_memory", table.register_memory)?;
    let deregister = needed("tier", "deregister_memory", table.deregister_memory)?;
    let (exists, get) = (needed("tier", "exists", table.exists)?, needed("tier", "get", table.get)?);
    let (put, remove) = (needed("tier", "put", table.put)?, needed("tier", "remove", table.remove)?);
    let (poll, settled) = (needed("tier", "poll", table.poll)?, needed("tier", "settled", table.settled)?);
    // SAFETY: all arguments are valid until the function returns.
    let instance = Instance::open(close, shutdown, |at, error| unsafe { make(opening, at, error) })?;
    let table = *table;
    Ok(tier_object(CTier {
        instance,
        limits,
        register,
        deregister,
        exists,
        get,
        put,
        remove,
        poll,
        settled,
        table,
    }))
}

impl CTier {
    fn cold(&self, call: impl FnOnce(*mut c_void, *mut c::ErrorText) -> i32) -> AbiResult<()> {
        fallible(|error| call(self.instance.at, error)).map_err(Into::into).into()
    }
}

// For all blocks below that call a function of the plugin: its arguments are valid until it returns, as the header promises, and
// the lengths are those of the slices.
impl TierRole for CTier {
    fn limits(&self) -> TierLimits {
        let mut limits =
            TierLimits { max_pages: 0, max_batches: 0, max_value: 0, alignment: 0, reserved: [0; 4] };
        // SAFETY: see above.
        unsafe { (self.limits)(self.instance.at, &raw mut limits) };
        limits
    }
    fn register(&self, memory: &Memory) -> AbiResult<RegionId> {
        let mut region = 0;
        let at = &raw mut region;
        // SAFETY: see above. The region is read after the call.
        self.cold(|instance, error| unsafe { (self.register)(instance, memory, at, error) })
            .map(|()| RegionId(region))
    }
    fn deregister(&self, region: RegionId) -> AbiResult<()> {
        // SAFETY: see above.
        self.cold(|instance, error| unsafe { (self.deregister)(instance, region.0, error) })
    }
    fn exists(&self, tag: Tag, keys: RSlice<'_, Key>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.exists)(self.instance.at, tag.0, keys.as_ptr(), keys.len()) }
    }
    fn get(&self, tag: Tag, pages: RSlice<'_, TierPage>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.get)(self.instance.at, tag.0, pages.as_ptr(), pages.len()) }
    }
    fn put(&self, tag: Tag, pages: RSlice<'_, TierPage>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.put)(self.instance.at, tag.0, pages.as_ptr(), pages.len()) }
    }
    fn delete(&self, tag: Tag, keys: RSlice<'_, Key>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.remove)(self.instance.at, tag.0, keys.as_ptr(), keys.len()) }
    }
    fn poll(&self, mut completions: RSliceMut<'_, TierCompletion>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.poll)(self.instance.at, completions.as_mut_ptr(), completions.len()) }
    }
    fn cancel(&self, tag: Tag) -> i32 {
        match self.table.cancel {
            // SAFETY: see above.
            Some(cancel) => unsafe { cancel(self.instance.at, tag.0) },
            None => uncancelled(self.settled(tag)),
        }
    }
    fn settled(&self, tag: Tag) -> i32 {
        // SAFETY: see above.
        unsafe { (self.settled)(self.instance.at, tag.0) }
    }
    fn scan(&self, cursor: u64, mut keys: RSliceMut<'_, Key>) -> AbiResult<Scanned> {
        let Some(scan) = self.table.scan else { return unsupported("scan") };
        let mut scanned = Scanned::default();
        let (room, to, at) = (keys.len(), keys.as_mut_ptr(), &raw mut scanned);
        // SAFETY: see above.
        self.cold(|instance, error| unsafe { scan(instance, cursor, to, room, at, error) }).map(|()| scanned)
    }
    fn usage(&self) -> AbiResult<TierUsage> {
        let Some(usage) = self.table.usage else { return unsupported("usage") };
        let mut used = TierUsage::default();
        let at = &raw mut used;
        // SAFETY: see above.
        self.cold(|instance, error| unsafe { usage(instance, at, error) }).map(|()| used)
    }
    fn event_fd(&self) -> i32 {
        // SAFETY: see above.
        self.table.event_fd.map_or(-1, |event_fd| unsafe { event_fd(self.instance.at) })
    }
    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()> {
        self.instance.shutdown(deadline_ms).map_err(Into::into).into()
    }
}

fn unsupported<R>(what: &str) -> AbiResult<R> {
    RResult::RErr(Error::new(ErrorCode::UNSUPPORTED, format!("the plugin has no {what}")).into())
}
