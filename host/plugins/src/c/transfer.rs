//! A transfer backend in C.

use std::ffi::c_void;

use host_plugin_api::abi::{
    AbiResult, RResult, RSlice, RSliceMut, RStr, RVec, TransferObject, TransferRole, transfer_object,
};
use host_plugin_api::{
    Completion, Error, ErrorCode, Memory, Notification, PeerId, RegionId, Result, Submission, Tag,
    TransferLimits, Write, c,
};

use super::{Instance, fallible, needed, text, uncancelled};

/// Size in bytes of the first buffer that the host offers for an endpoint.
const ENDPOINT_BYTES: usize = 4096;
/// Longest endpoint that is accepted, in bytes.
const LONGEST_ENDPOINT: usize = 16 << 20;

type About = unsafe extern "C" fn(*mut c_void, u32, *mut c::ErrorText) -> i32;

/// An instance of the transfer role and its functions.
struct CTransfer {
    instance: Instance,
    limits: unsafe extern "C" fn(*mut c_void, *mut TransferLimits),
    register: unsafe extern "C" fn(*mut c_void, *const Memory, *mut u32, *mut c::ErrorText) -> i32,
    deregister: About,
    endpoint: unsafe extern "C" fn(*mut c_void, *mut u8, usize, *mut usize, *mut c::ErrorText) -> i32,
    connect: unsafe extern "C" fn(*mut c_void, c::Text, *const u8, usize, *mut u32, *mut c::ErrorText) -> i32,
    disconnect: About,
    submit: unsafe extern "C" fn(*mut c_void, *const Submission, *const Write, usize) -> i32,
    poll: unsafe extern "C" fn(*mut c_void, *mut Completion, usize) -> i32,
    notifications: unsafe extern "C" fn(*mut c_void, *mut Notification, usize) -> i32,
    settled: unsafe extern "C" fn(*mut c_void, u64) -> i32,
    /// The plugin's table, for the functions that it may leave out.
    table: c::TransferTable,
}

/// Opens an instance.
///
/// # Errors
/// When the table lacks a function, or the plugin's own error.
pub(super) fn open(table: &c::TransferTable, opening: &c::Opening) -> Result<TransferObject> {
    let role = "transfer";
    let make = needed(role, "open", table.open)?;
    let (close, shutdown) = (needed(role, "close", table.close)?, needed(role, "shutdown", table.shutdown)?);
    let limits = needed(role, "limits", table.limits)?;
    let register = needed(role, "register_memory", table.register_memory)?;
    let deregister = needed(role, "deregister_memory", table.deregister_memory)?;
    let endpoint = needed(role, "endpoint", table.endpoint)?;
    let connect = needed(role, "connect", table.connect)?;
    let disconnect = needed(role, "disconnect", table.disconnect)?;
    let (submit, poll) = (needed(role, "submit", table.submit)?, needed(role, "poll", table.poll)?);
    let notifications = needed(role, "notifications", table.notifications)?;
    let settled = needed(role, "settled", table.settled)?;
    // SAFETY: all arguments are valid until the function returns.
    let instance = Instance::open(close, shutdown, |at, error| unsafe { make(opening, at, error) })?;
    Ok(transfer_object(CTransfer {
        instance,
        limits,
        register,
        deregister,
        endpoint,
        connect,
        disconnect,
        submit,
        poll,
        notifications,
        settled,
        table: *table,
    }))
}

impl CTransfer {
    fn cold(&self, call: impl FnOnce(*mut c_void, *mut c::ErrorText) -> i32) -> AbiResult<()> {
        fallible(|error| call(self.instance.at, error)).map_err(Into::into).into()
    }
}

// For all blocks below that call a function of the plugin: its arguments are valid until it returns, as the header promises, and
// the lengths are those of the slices.
impl TransferRole for CTransfer {
    fn limits(&self) -> TransferLimits {
        let mut limits = TransferLimits::new(0, 0);
        // SAFETY: see above.
        unsafe { (self.limits)(self.instance.at, &raw mut limits) };
        limits
    }
    fn register(&self, memory: &Memory) -> AbiResult<RegionId> {
        let mut region = 0;
        let at = &raw mut region;
        // SAFETY: see above.
        let done = self.cold(|instance, error| unsafe { (self.register)(instance, memory, at, error) });
        done.map(|()| RegionId(region))
    }
    fn deregister(&self, region: RegionId) -> AbiResult<()> {
        // SAFETY: see above.
        self.cold(|instance, error| unsafe { (self.deregister)(instance, region.0, error) })
    }
    fn endpoint(&self) -> AbiResult<RVec<u8>> {
        let mut bytes = vec![0_u8; ENDPOINT_BYTES];
        // The endpoint may grow between two calls, when another thread registers a region.
        for _try in 0..8 {
            let (to, room, mut length) = (bytes.as_mut_ptr(), bytes.len(), 0);
            let at = &raw mut length;
            // SAFETY: see above.
            let done = self.cold(|instance, error| unsafe { (self.endpoint)(instance, to, room, at, error) });
            if let RResult::RErr(error) = done {
                return RResult::RErr(error);
            }
            if length <= room {
                bytes.truncate(length);
                return RResult::ROk(bytes.into());
            }
            if length > LONGEST_ENDPOINT {
                break;
            }
            bytes.resize(length, 0);
        }
        let why = format!("its endpoint has more than {LONGEST_ENDPOINT} bytes, or grows without end");
        RResult::RErr(Error::new(ErrorCode::INTERNAL, why).into())
    }
    fn connect(&self, name: RStr<'_>, endpoint: RSlice<'_, u8>) -> AbiResult<PeerId> {
        let mut peer = 0;
        let (name, from, length, at) =
            (text(name.as_str()), endpoint.as_ptr(), endpoint.len(), &raw mut peer);
        let done =
            // SAFETY: see above.
            self.cold(|instance, error| unsafe { (self.connect)(instance, name, from, length, at, error) });
        done.map(|()| PeerId(peer))
    }
    fn disconnect(&self, peer: PeerId) -> AbiResult<()> {
        // SAFETY: see above.
        self.cold(|instance, error| unsafe { (self.disconnect)(instance, peer.0, error) })
    }
    fn submit(&self, submission: &Submission, writes: RSlice<'_, Write>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.submit)(self.instance.at, submission, writes.as_ptr(), writes.len()) }
    }
    fn poll(&self, mut completions: RSliceMut<'_, Completion>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.poll)(self.instance.at, completions.as_mut_ptr(), completions.len()) }
    }
    fn notifications(&self, mut notifications: RSliceMut<'_, Notification>) -> i32 {
        // SAFETY: see above.
        unsafe { (self.notifications)(self.instance.at, notifications.as_mut_ptr(), notifications.len()) }
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
    fn event_fd(&self) -> i32 {
        // SAFETY: see above.
        self.table.event_fd.map_or(-1, |event_fd| unsafe { event_fd(self.instance.at) })
    }
    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()> {
        self.instance.shutdown(deadline_ms).map_err(Into::into).into()
    }
}
