//! Agents: the peers that they know, the memory that they registered, and the messages that they get.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::{Handle, Library, Refusal, Segment, check, made};

/// The configuration that `create_configured_agent` reads. Releases place three of its numbers differently: 1.5 has a
/// 32-bit port, the synchronisation and the number of workers at 4, 8 and 12, others a 16-bit port at 2 and the rest at
/// 4 and 8. The values here mean the same in both: one thread of NIXL's own or none, port 0, one worker, and no or
/// strict synchronisation. Either synchronisation does for an agent that one thread uses.
///
/// The interface has no stable ABI and no size in it: a release that has more of these fields reads beyond the last
/// field here. It finds zeros there, which switch features off or choose defaults.
#[repr(C)]
pub struct AgentConfig {
    progress_thread: bool,
    listen_thread: bool,
    port_16: u16,
    port_32_or_synchronisation: u32,
    synchronisation_or_workers: u32,
    workers: u32,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
    later: [u8; LATER],
}

/// Bytes for fields of later releases. Seven of them only fill up the word of the last field.
const LATER: usize = 7 + 256;

unsafe extern "C" {
    fn free(memory: *mut c_void);
}

/// A place in memory, in a file or in a bucket.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    pub segment: Segment,
    pub address: u64,
    pub length: u64,
    pub device: u64,
}

/// Memory that an agent registered.
struct Registration {
    region: u32,
    list: Handle,
}

/// An agent with one backend. Dropping it ends its connections and frees its keys.
pub struct Agent {
    pub(super) library: Arc<Library>,
    pub(super) agent: Handle,
    pub(super) backend: Handle,
    received: Handle,
    /// Options with which a request is made, and options with which it is posted.
    pub(super) making: Handle,
    pub(super) posting: Handle,
    registrations: Vec<Registration>,
}

impl Agent {
    /// Makes an agent. With `thread` NIXL drives its progress, and looks for work after this time at the latest.
    ///
    /// # Errors
    /// When NIXL or the backend refuses.
    pub fn new(
        library: &Arc<Library>,
        name: &CStr,
        backend: &CStr,
        parameters: &[(CString, CString)],
        thread: Option<Duration>,
    ) -> Result<Self, Refusal> {
        let config = AgentConfig {
            progress_thread: thread.is_some(),
            listen_thread: false,
            port_16: 0,
            port_32_or_synchronisation: 0,
            synchronisation_or_workers: 1,
            workers: 1,
            progress_delay_us: thread.map_or(0, |delay| delay.as_micros() as u64),
            listen_delay_us: 0,
            telemetry: false,
            later: [0; LATER],
        };
        let api = &library.api;
        let null = std::ptr::null_mut;
        let mut new = Self {
            library: library.clone(),
            agent: null(),
            backend: null(),
            received: null(),
            making: null(),
            posting: null(),
            registrations: Vec::new(),
        };
        // Filled in one by one, so that the drop cleans up after a failure in the middle.
        // SAFETY: the name and the configuration outlive the call.
        let create = |to| unsafe { (api.create_configured_agent)(name.as_ptr(), &raw const config, to) };
        new.agent = made("create_configured_agent", create)?;
        // SAFETY: the place for the handle is ours.
        let map = made("create_params", |to| unsafe { (api.create_params)(to) })?;
        let mut added = Ok(());
        for (key, value) in parameters {
            // SAFETY: the map is alive, and the texts are copied.
            let code = unsafe { (api.params_add)(map, key.as_ptr(), value.as_ptr()) };
            added = added.and(check("params_add", code));
        }
        // SAFETY: agent and map are alive, the name outlives the call.
        let create = |to| unsafe { (api.create_backend)(new.agent, backend.as_ptr(), map, to) };
        let made_backend = added.and_then(|()| made("create_backend", create));
        // SAFETY: our own map, destroyed once. Backends keep copies.
        let _destroyed = unsafe { (api.destroy_params)(map) };
        new.backend = made_backend?;
        // SAFETY: the place for the handle is ours.
        new.received = made("create_notif_map", |to| unsafe { (api.create_notif_map)(to) })?;
        // SAFETY: the place for the handle is ours.
        new.making = made("create_opt_args", |to| unsafe { (api.create_opt_args)(to) })?;
        // SAFETY: the place for the handle is ours.
        new.posting = made("create_opt_args", |to| unsafe { (api.create_opt_args)(to) })?;
        Ok(new)
    }

    /// Returns what another agent needs to reach this one and the memory that it has registered so far.
    pub fn metadata(&self) -> Result<Vec<u8>, Refusal> {
        let (mut data, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: the agent is alive, the places for the answer are ours.
        let code = unsafe { (self.library.api.get_local_md)(self.agent, &raw mut data, &raw mut length) };
        check("get_local_md", code)?;
        if data.is_null() {
            return Ok(Vec::new());
        }
        // SAFETY: NIXL made `length` bytes for us.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) }.to_vec();
        // SAFETY: NIXL takes them from `malloc` and leaves them to the caller. They are not used after this.
        unsafe { free(data) };
        Ok(bytes)
    }

    /// Makes another agent known. Returns its name.
    pub fn learn(&mut self, metadata: &[u8]) -> Result<CString, Refusal> {
        let mut name = std::ptr::null_mut();
        let (data, length) = (metadata.as_ptr().cast(), metadata.len());
        // SAFETY: the agent is alive, the bytes outlive the call, and NIXL checks what they say.
        let code = unsafe { (self.library.api.load_remote_md)(self.agent, data, length, &raw mut name) };
        check("load_remote_md", code)?;
        if name.is_null() {
            return Err(Refusal { call: "load_remote_md", code: 0 });
        }
        // SAFETY: a terminated string that NIXL made for us.
        let copy = unsafe { CStr::from_ptr(name) }.to_owned();
        // SAFETY: NIXL takes it from `malloc` and leaves it to the caller. It is not used after this.
        unsafe { free(name.cast()) };
        Ok(copy)
    }

    /// Forgets another agent, and ends the connection to it.
    pub fn forget(&mut self, name: &CStr) {
        // NIXL may have forgotten it already, when its connection broke.
        // SAFETY: the agent is alive, the name outlives the call.
        let _unknown = unsafe { (self.library.api.invalidate_remote_md)(self.agent, name.as_ptr()) };
    }

    pub fn has_registered(&self, region: u32) -> bool {
        self.registrations.iter().any(|r| r.region == region)
    }

    /// Registers memory under the name `region`. The caller keeps it mapped until it is deregistered or the agent is dropped.
    pub fn register(&mut self, region: u32, place: Extent) -> Result<(), Refusal> {
        self.register_all(region, place.segment, &[place])
    }

    /// Registers several places of one kind under one name.
    pub fn register_all(&mut self, region: u32, segment: Segment, places: &[Extent]) -> Result<(), Refusal> {
        let named: Vec<_> = places.iter().map(|place| (*place, &[][..])).collect();
        self.register_named(region, segment, &named)
    }

    /// Registers places, each with the text that NIXL's plugin needs beside it: an object's name.
    pub fn register_named(
        &mut self,
        region: u32,
        segment: Segment,
        places: &[(Extent, &[u8])],
    ) -> Result<(), Refusal> {
        let api = &self.library.api;
        let list = self.described(segment, places)?;
        // SAFETY: agent and list are alive. The memory is the caller's promise.
        let code = unsafe { (api.register_mem)(self.agent, list, std::ptr::null_mut()) };
        let registered = check("register_mem", code);
        match registered {
            Ok(()) => self.registrations.push(Registration { region, list }),
            Err(refusal) => {
                // SAFETY: our own list, destroyed once.
                let _destroyed = unsafe { (api.destroy_reg_dlist)(list) };
                return Err(refusal);
            }
        }
        Ok(())
    }

    /// A list of places, which the caller destroys.
    pub(super) fn described(&self, segment: Segment, places: &[(Extent, &[u8])]) -> Result<Handle, Refusal> {
        let api = &self.library.api;
        let segment = segment as c_int;
        // SAFETY: the place for the handle is ours.
        let list = made("create_reg_dlist", |to| unsafe { (api.create_reg_dlist)(segment, to) })?;
        let mut added = Ok(());
        for (place, name) in places {
            let (address, length) = (place.address as usize, place.length as usize);
            let bytes = if name.is_empty() { std::ptr::null() } else { name.as_ptr().cast() };
            // SAFETY: the list is alive, the address is a number to it, and it copies the name.
            let code =
                unsafe { (api.reg_dlist_add_desc)(list, address, length, place.device, bytes, name.len()) };
            added = added.and(check("reg_dlist_add_desc", code));
        }
        if added.is_err() {
            // SAFETY: our own list, destroyed once.
            let _destroyed = unsafe { (api.destroy_reg_dlist)(list) };
        }
        added.map(|()| list)
    }

    /// Deregisters memory, if it is registered.
    pub fn deregister(&mut self, region: u32) -> Result<(), Refusal> {
        let Some(at) = self.registrations.iter().position(|r| r.region == region) else { return Ok(()) };
        let api = &self.library.api;
        let list = self.registrations[at].list;
        // SAFETY: agent and list are alive, and the list is the one that was registered.
        check("deregister_mem", unsafe { (api.deregister_mem)(self.agent, list, std::ptr::null_mut()) })?;
        self.registrations.swap_remove(at);
        // SAFETY: our own list, destroyed once.
        let _destroyed = unsafe { (api.destroy_reg_dlist)(list) };
        Ok(())
    }

    /// Deregisters memory whose name `keep` does not accept.
    pub fn deregister_unless(&mut self, keep: impl Fn(u32) -> bool) -> Result<(), Refusal> {
        let gone = |r: &Registration| !keep(r.region);
        while let Some(region) = self.registrations.iter().find(|r| gone(r)).map(|r| r.region) {
            self.deregister(region)?;
        }
        Ok(())
    }

    /// Sends a message that belongs to no request.
    pub fn notify(&mut self, to: &CStr, message: &[u8]) -> Result<(), Refusal> {
        let (data, length) = (message.as_ptr().cast(), message.len());
        let send = self.library.api.gen_notif;
        // SAFETY: the agent is alive, name and message outlive the call, which copies them.
        check("gen_notif", unsafe { send(self.agent, to.as_ptr(), data, length, std::ptr::null_mut()) })
    }

    /// Drives progress, and hands out every message that came, in the order of their senders' names.
    pub fn received(&mut self, mut each: impl FnMut(&[u8])) -> Result<(), Refusal> {
        let api = &self.library.api;
        // SAFETY: agent and map are alive.
        check("get_notifs", unsafe { (api.get_notifs)(self.agent, self.received, std::ptr::null_mut()) })?;
        let mut senders = 0;
        // SAFETY: the map is alive, the place for the answer is ours.
        check("notif_map_size", unsafe { (api.notif_map_size)(self.received, &raw mut senders) })?;
        if senders == 0 {
            return Ok(());
        }
        for sender in 0..senders {
            let mut name = std::ptr::null();
            // SAFETY: the map is alive and not changed before it is cleared below, so the name stays as long.
            let code = unsafe { (api.notif_map_get_agent_at)(self.received, sender, &raw mut name) };
            check("notif_map_get_agent_at", code)?;
            let mut count = 0;
            // SAFETY: as above.
            let code = unsafe { (api.notif_map_get_notifs_size)(self.received, name, &raw mut count) };
            check("notif_map_get_notifs_size", code)?;
            for index in 0..count {
                let (mut data, mut length) = (std::ptr::null(), 0);
                // SAFETY: as above.
                let code = unsafe {
                    (api.notif_map_get_notif)(self.received, name, index, &raw mut data, &raw mut length)
                };
                check("notif_map_get_notif", code)?;
                if length > 0 && !data.is_null() {
                    // SAFETY: the bytes belong to the map, which is not changed while `each` has them.
                    each(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) });
                }
            }
        }
        // SAFETY: the map is alive.
        check("notif_map_clear", unsafe { (api.notif_map_clear)(self.received) })
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let api = &self.library.api;
        let objects = [
            (self.received, api.destroy_notif_map),
            (self.making, api.destroy_opt_args),
            (self.posting, api.destroy_opt_args),
            (self.backend, api.destroy_backend),
            (self.agent, api.destroy_agent),
        ];
        for (object, destroy) in objects.into_iter().filter(|(object, _)| !object.is_null()) {
            // SAFETY: our own objects, each destroyed once, the agent last.
            let _destroyed = unsafe { destroy(object) };
        }
        for registration in &self.registrations {
            // SAFETY: our own list, destroyed once. The agent that knew it is gone.
            let _destroyed = unsafe { (api.destroy_reg_dlist)(registration.list) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn a_release_with_more_fields_reads_zeros_of_ours() {
        let ours = [
            offset_of!(AgentConfig, port_16),
            offset_of!(AgentConfig, port_32_or_synchronisation),
            offset_of!(AgentConfig, workers),
            offset_of!(AgentConfig, progress_delay_us),
            offset_of!(AgentConfig, telemetry),
            offset_of!(AgentConfig, later),
        ];
        assert_eq!(ours, [2, 4, 12, 16, 32, 33]);
        // Every byte after the last field of today has a value.
        assert_eq!(size_of::<AgentConfig>(), 33 + LATER);
        assert!(size_of::<AgentConfig>() >= 40 + 256);
    }
}
