//! Workers for tests of transfer plugins: memory with a loaded backend, in this process, or in another one that is driven by
//! lines.
//!
//! The other process is the example `plugin_process` of this crate, and [`process`] starts it.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

pub mod between_processes;
pub mod device;
pub mod process;
pub mod ranks;

use std::path::Path;
use std::sync::Arc;

use host_memory::SharedMemory;
use host_plugin_api::*;
use host_plugins::{Catalog, open_transfer};
use host_tests::wait::poll_until;

pub use device::{DeviceMemory, Place};
pub use process::Remote;

/// An instance of a plugin with one registered region.
pub struct Worker {
    /// The instance.
    pub backend: Arc<dyn TransferBackend>,
    /// Its memory on the host. Only 4096 bytes when the worker's memory is on a device.
    pub memory: SharedMemory,
    /// Its memory on a device, if it is there.
    pub device: Option<DeviceMemory>,
    /// The id of the registered memory.
    pub region: RegionId,
    /// The registration's generation.
    pub generation: u32,
}

impl Worker {
    /// Opens the plugin `plugin` of a directory, and registers so many bytes.
    pub fn open(directory: &Path, plugin: &str, name: &str, bytes: usize, config: &str) -> Self {
        Self::open_on(Place::Host, directory, plugin, name, bytes, config)
    }

    /// As [`open`](Self::open), with memory at `place`.
    pub fn open_on(
        place: Place,
        directory: &Path,
        plugin: &str,
        name: &str,
        bytes: usize,
        config: &str,
    ) -> Self {
        let catalog = Catalog::scan([directory]);
        let entry = catalog.find(plugin).unwrap();
        let opening = Opening { name: name.to_owned(), config: config.to_owned() };
        let backend = open_transfer(entry, &opening).unwrap();
        let on_host = if place == Place::Host { bytes } else { 4096 };
        let memory = SharedMemory::new("test", on_host).unwrap();
        let device = (place == Place::Device).then(|| DeviceMemory::new(bytes));
        let mut worker = Self { backend, memory, device, region: RegionId(0), generation: 1 };
        worker.register().unwrap();
        worker
    }

    /// Registers its memory with its generation.
    ///
    /// # Errors
    /// The backend's.
    pub fn register(&mut self) -> Result<()> {
        self.region = match &self.device {
            None => register(&*self.backend, &self.memory, self.generation),
            Some(memory) => self.backend.register(&memory.offer(self.generation)),
        }?;
        Ok(())
    }

    fn place(&self) -> (*mut u8, usize) {
        match &self.device {
            None => (self.memory.address().as_ptr(), self.memory.bytes()),
            // The device of the stand-in is the CPU, so its address is a pointer.
            Some(memory) => (memory.address.pointer(), memory.bytes),
        }
    }

    /// All of its memory.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping lives as long as `self`. Tests read bytes only when nothing writes them any more.
        unsafe { std::slice::from_raw_parts(self.place().0, self.place().1) }
    }

    /// All of its memory, to write.
    #[allow(clippy::mut_from_ref, reason = "the memory is shared with other processes anyway")]
    pub fn bytes_mut(&self) -> &mut [u8] {
        // SAFETY: as above. Tests hold one such slice at a time.
        unsafe { std::slice::from_raw_parts_mut(self.place().0, self.place().1) }
    }

    /// Waits for the next completion. Drives nothing else.
    pub fn completion(&self) -> Completion {
        let mut one = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
        wait("a completion", || match self.backend.poll(&mut one) {
            0 => None,
            1 => Some(one[0]),
            code => panic!("poll answered {code}"),
        })
    }

    /// Waits for the next notification. Drives nothing else.
    pub fn notification(&self) -> Notification {
        let mut one = [empty_notification()];
        wait("a notification", || match self.backend.notifications(&mut one) {
            0 => None,
            1 => Some(one[0]),
            code => panic!("notifications answered {code}"),
        })
    }
}

/// An empty notification, for a backend to fill.
pub fn empty_notification() -> Notification {
    Notification {
        kind: NotificationKind(0),
        length: 0,
        peer_name_length: 0,
        reserved: 0,
        payload: [0; NOTIFICATION_BYTES],
        peer_name: [0; 64],
    }
}

/// Registers memory with a backend.
///
/// # Errors
/// The backend's.
pub fn register(backend: &dyn TransferBackend, memory: &SharedMemory, generation: u32) -> Result<RegionId> {
    use std::os::fd::AsRawFd;
    backend.register(&Memory {
        address: Address::of(memory.address().as_ptr()),
        length: memory.bytes() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: memory.fd().as_raw_fd(),
        generation,
        fd_offset: 0,
    })
}

/// A submission with `text` as its notification.
pub fn submission(peer: PeerId, tag: u64, text: &[u8]) -> Submission {
    let mut notification = [0; NOTIFICATION_BYTES];
    notification[..text.len()].copy_from_slice(text);
    Submission { peer, notification_length: text.len() as u32, tag: Tag(tag), notification }
}

/// Polls `ask` until it has an answer.
pub fn wait<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    poll_until(what, || ask().ok_or("still no answer"))
}

/// A digest of bytes, to compare memory between processes.
pub fn hash(bytes: &[u8]) -> u64 {
    xxhash_rust::xxh3::xxh3_64(bytes)
}

/// Bytes as text.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The bytes of [`hex`].
pub fn unhex(text: &str) -> Vec<u8> {
    let digit = |i| u8::from_str_radix(&text[i..i + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}
