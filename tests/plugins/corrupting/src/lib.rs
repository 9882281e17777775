//! A fake for tests: the shared-memory backend, except that one byte of the configured writes changes on the way.
//!
//! The source stays intact, and nothing else is wrong: only a comparison of digests finds such a fault. The corrupted bytes are
//! sent from a scratch region of this plugin.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use host_plugin_api::{
    Address, Completion, Error, ErrorCode, Memory, MemoryKind, Notification, Opening, PeerId, RegionId,
    Result, Submission, Tag, TransferBackend, TransferLimits, Write,
};
use host_plugin_shm::ShmBackend;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use serde::Deserialize;

const MAX_FLIPS: u64 = 64;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Config {
    flip_write: u64,
    flips: u64,
    only: String,
    /// A submission that begins while this file is there never returns.
    hang_file: String,
    /// While this file is there, some submissions mix up what they send.
    mix_file: String,
    /// A call that this file names panics.
    panic_file: String,
    /// When this file is there, the next notifications are lost, and the file is removed.
    lose_file: String,
    /// While this file is there, no completion is reported.
    hold_file: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            flip_write: 1,
            flips: 1,
            only: String::new(),
            hang_file: String::new(),
            mix_file: String::new(),
            panic_file: String::new(),
            lose_file: String::new(),
            hold_file: String::new(),
        }
    }
}

#[derive(Default)]
struct State {
    /// Address and length of the host's regions.
    sources: HashMap<u32, (u64, u64)>,
    /// Writes accepted so far.
    accepted: u64,
    /// Submissions of at least two writes while `mix_file` was there.
    mixable: u64,
    /// Files of the scratch regions, which have to stay open.
    scratch: Vec<OwnedFd>,
}

/// The shared-memory backend, with configured faults.
pub struct CorruptingBackend {
    inner: ShmBackend,
    config: Config,
    state: Mutex<State>,
}

/// Opens an instance.
///
/// # Errors
/// `CONFIG`, or an error of the shared-memory backend.
pub fn open(opening: &Opening) -> Result<CorruptingBackend> {
    let wrong = |text: String| Error::new(ErrorCode::CONFIG, text);
    let mut config: Config = toml::from_str(&opening.config).map_err(|e| wrong(e.to_string()))?;
    if config.flips > MAX_FLIPS {
        return Err(wrong(format!("flips is {}, at most {MAX_FLIPS} are allowed", config.flips)));
    }
    if !opening.name.ends_with(&config.only) {
        config.flip_write = 0;
    }
    let inner = host_plugin_shm::open(&Opening { name: opening.name.clone(), config: String::new() })?;
    Ok(CorruptingBackend { inner, config, state: Mutex::default() })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

impl CorruptingBackend {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never returns when `hang_file` is there.
    fn hang_if_told(&self) {
        if is_there(&self.config.hang_file) {
            loop {
                std::thread::park();
            }
        }
    }

    /// Panics when `panic_file` names this call.
    fn panic_if_told(&self, call: &str) {
        if self.config.panic_file.is_empty() {
            return;
        }
        let told = std::fs::read_to_string(&self.config.panic_file).unwrap_or_default();
        assert!(!told.split_whitespace().any(|word| word == call), "told to panic in {call}");
    }

    /// Whether this submission sends wrong bytes: every fourth one of at least two writes while `mix_file` is there.
    fn mixes(&self, state: &mut State, writes: usize) -> bool {
        let file = &self.config.mix_file;
        if writes < 2 || file.is_empty() || !Path::new(file).exists() {
            return false;
        }
        state.mixable += 1;
        state.mixable.is_multiple_of(4)
    }

    /// Whether the write of this number, counted from 0, is one to corrupt.
    fn is_victim(&self, number: u64) -> bool {
        let first = self.config.flip_write;
        first > 0 && (first..first + self.config.flips).contains(&(number + 1))
    }

    /// The same write from a scratch copy in which the middle byte is flipped.
    fn corrupted(&self, state: &mut State, write: &Write) -> Result<Write> {
        let outside = || Error::new(ErrorCode::INVALID_ARGUMENT, "the write leaves its source region");
        let (address, length) = *state.sources.get(&write.source_region.0).ok_or_else(outside)?;
        let end = write.source_offset.checked_add(write.length.into());
        if write.length == 0 || end.is_none_or(|end| end > length) {
            return Err(outside());
        }
        let io = |e: rustix::io::Errno| Error::new(ErrorCode::IO, format!("cannot make a scratch copy: {e}"));
        let bytes = write.length as usize;
        let fd = memfd_create("host-corrupting", MemfdFlags::CLOEXEC).map_err(io)?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(io)?;
        // SAFETY: a fresh mapping at an address the kernel chooses. It is leaked, because the backend may read the copy until the
        // end.
        let scratch = unsafe {
            let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            mmap(std::ptr::null_mut(), bytes, protection, flags, &fd, 0)
        };
        let scratch = scratch.map_err(io)?.cast::<u8>();
        // SAFETY: the source range was checked against its registration, which the host keeps mapped. The scratch mapping has the
        // same length and belongs to this plugin alone.
        unsafe {
            std::ptr::copy_nonoverlapping((address + write.source_offset) as *const u8, scratch, bytes);
            *scratch.add(bytes / 2) ^= 1;
        }
        let region = self.inner.register(&Memory {
            address: Address::of(scratch),
            length: bytes as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: fd.as_raw_fd(),
            generation: 0,
            fd_offset: 0,
        })?;
        state.scratch.push(fd);
        Ok(Write { source_region: region, source_offset: 0, ..*write })
    }

    /// Submits `writes`, corrupting those whose turn it is. Refused submissions do not count.
    fn submit_counted(&self, state: &mut State, submission: &Submission, writes: &[Write]) -> i32 {
        let (mut writes, first) = (writes.to_vec(), state.accepted);
        let mut scratch = Vec::new();
        for (write, number) in writes.iter_mut().zip(first..) {
            if self.is_victim(number) {
                match self.corrupted(state, write) {
                    Ok(other) => *write = other,
                    Err(error) => return error.code.0,
                }
                scratch.push(write.source_region);
            }
        }
        let code = self.inner.submit(submission, &writes);
        if code == 0 {
            state.accepted += writes.len() as u64;
        } else {
            for region in scratch {
                if let Err(error) = self.inner.deregister(region) {
                    return error.code.0;
                }
            }
        }
        code
    }
}

/// Whether there is such a file. False when none is configured.
fn is_there(file: &str) -> bool {
    !file.is_empty() && Path::new(file).exists()
}

/// The same writes, except that the last one sends the bytes of the first, if both have the same length.
fn mixed(writes: &[Write]) -> Vec<Write> {
    let mut writes = writes.to_vec();
    if let [first, .., last] = &mut writes[..]
        && first.length == last.length
    {
        (last.source_region, last.source_offset) = (first.source_region, first.source_offset);
    }
    writes
}

impl TransferBackend for CorruptingBackend {
    fn limits(&self) -> TransferLimits {
        self.inner.limits()
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        let region = self.inner.register(memory)?;
        self.state().sources.insert(region.0, (memory.address.0, memory.length));
        Ok(region)
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        self.inner.deregister(region)?;
        self.state().sources.remove(&region.0);
        Ok(())
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        self.inner.endpoint()
    }
    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        self.inner.connect(name, endpoint)
    }
    fn disconnect(&self, peer: PeerId) -> Result<()> {
        self.inner.disconnect(peer)
    }
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        self.hang_if_told();
        self.panic_if_told("submit");
        let mut state = self.state();
        let mixed = self.mixes(&mut state, writes.len()).then(|| mixed(writes));
        self.submit_counted(&mut state, submission, mixed.as_deref().unwrap_or(writes))
    }
    fn poll(&self, completions: &mut [Completion]) -> i32 {
        self.panic_if_told("poll");
        if is_there(&self.config.hold_file) {
            return 0;
        }
        self.inner.poll(completions)
    }
    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        match self.inner.notifications(notifications) {
            1.. if std::fs::remove_file(&self.config.lose_file).is_ok() => 0,
            count => count,
        }
    }
    fn cancel(&self, tag: Tag) -> i32 {
        self.inner.cancel(tag)
    }
    fn settled(&self, tag: Tag) -> i32 {
        self.inner.settled(tag)
    }
    fn event_fd(&self) -> i32 {
        self.inner.event_fd()
    }
    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        self.inner.shutdown(deadline_ms)
    }
}
