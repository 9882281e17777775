//! This instance's registered memory.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use host_plugin_api::{Error, ErrorCode, Memory, MemoryKind, RegionId, Result};
use host_transfer_kit::{Random, locked};
use rustix::fs::{Mode, OFlags, fstat, open};

use crate::cuda::{Device, Export, Pinned, Refused};
pub use crate::live::MAX_REGIONS;
use crate::live::{LiveTable, Places};
use crate::mapping::{SharedPage, Writers};

/// What a peer is told of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDescriptor {
    pub id: u32,
    pub generation: u32,
    pub length: u64,
    pub place: RegionPlace,
}

/// Where a peer finds a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionPlace {
    /// In a file, which travels as a descriptor, from an offset on.
    File { offset: u64 },
    /// On a device.
    Device(Export),
}

/// Where bytes are, for a copy.
#[derive(Clone, Copy, Debug)]
pub struct Spot {
    pub address: u64,
    /// The number of the device, or `None` for host memory.
    pub device: Option<u32>,
    /// Whether it is host memory that devices reach.
    pub pinned: bool,
}

impl Spot {
    /// The place `bytes` bytes further on.
    pub fn after(self, bytes: u64) -> Self {
        Self { address: self.address + bytes, ..self }
    }
}

struct Held {
    region: RegionDescriptor,
    address: u64,
    /// The file of a region in host memory.
    fd: Option<OwnedFd>,
    /// Dropped with the region, before the host unmaps it.
    pinned: Option<Pinned>,
}

/// Regions on devices in this process, of all instances, because the driver does not open a process's own memory. Each
/// with its instance, its id and its address.
static ON_DEVICES: Mutex<Vec<(Random, u32, u64)>> = Mutex::new(Vec::new());

/// The address of another instance's region on a device, if that instance is in this process.
pub fn in_this_process(instance: &Random, id: u32) -> Option<u64> {
    let all = locked(&ON_DEVICES);
    let found = all.iter().find(|(other, region, _)| other == instance && *region == id);
    found.map(|(_, _, address)| *address)
}

/// The table of registered regions.
pub struct Regions {
    live: SharedPage<LiveTable>,
    /// The table's file, opened for reading. That alone would not keep peers from writing: they could open it again.
    /// The file's seals keep them from writing.
    live_fd: OwnedFd,
    places: Places,
    /// By slot: 0 for host memory, or one more than the number of the device. Set before the region's gate is opened.
    devices: [AtomicU32; MAX_REGIONS],
    /// By slot: whether the region is host memory that devices reach.
    pinned: [AtomicBool; MAX_REGIONS],
    instance: Random,
    held: Mutex<Book>,
}

struct Book {
    slots: [Option<Held>; MAX_REGIONS],
    /// How often each slot was used. Makes ids unique within the instance.
    uses: [u32; MAX_REGIONS],
}

impl Regions {
    pub fn new(instance: Random) -> Result<Self> {
        let io = |e| Error::new(ErrorCode::IO, format!("cannot create the table of regions: {e}"));
        let (live, fd) = SharedPage::<LiveTable>::create("host-shm-regions", Writers::Creator).map_err(io)?;
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let live_fd = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(io)?;
        Ok(Self {
            live,
            live_fd,
            places: Places::default(),
            devices: std::array::from_fn(|_| AtomicU32::new(0)),
            pinned: std::array::from_fn(|_| AtomicBool::new(false)),
            instance,
            held: Mutex::new(Book { slots: [const { None }; MAX_REGIONS], uses: [0; MAX_REGIONS] }),
        })
    }

    /// Adds host memory with a file behind it.
    pub fn add(&self, memory: &Memory) -> Result<RegionId> {
        if memory.kind != MemoryKind::DRAM || memory.fd < 0 {
            let text = "shm registers host memory with a shareable file behind it, and memory of GPUs. It got neither";
            return Err(Error::new(ErrorCode::UNSUPPORTED, text));
        }
        // SAFETY: the contract of `Memory::fd` is that the host keeps it open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(memory.fd) };
        let io = |e| Error::new(ErrorCode::IO, format!("cannot use descriptor {}: {e}", memory.fd));
        let size = u64::try_from(fstat(fd).map_err(io)?.st_size).unwrap_or(0);
        let end = memory.fd_offset.checked_add(memory.length).filter(|end| *end <= size);
        if memory.length == 0 || memory.address.checked_add(memory.length).is_none() || end.is_none() {
            let text = format!("{} bytes at {} of a file of {size} bytes", memory.length, memory.fd_offset);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("cannot register {text}")));
        }
        let fd = rustix::io::fcntl_dupfd_cloexec(fd, 3).map_err(io)?;
        self.hold(memory, RegionPlace::File { offset: memory.fd_offset }, 0, Some(fd))
    }

    /// Adds memory of a device.
    pub fn add_on(&self, device: &Device, memory: &Memory) -> Result<RegionId> {
        if memory.length == 0 || memory.address.checked_add(memory.length).is_none() {
            let text = format!("cannot register {} bytes at {:#x}", memory.length, memory.address);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        let export = device.export(memory.address.0, memory.length).map_err(|e| no_device(&e))?;
        self.hold(memory, RegionPlace::Device(export), memory.device + 1, None)
    }

    fn hold(
        &self,
        memory: &Memory,
        place: RegionPlace,
        device: u32,
        fd: Option<OwnedFd>,
    ) -> Result<RegionId> {
        let mut book = self.book();
        let free = (0..MAX_REGIONS).find(|slot| book.slots[*slot].is_none());
        let epoch = free.map(|slot| book.uses[slot] + 1).filter(|e| *e < u32::MAX / MAX_REGIONS as u32);
        let (Some(slot), Some(epoch)) = (free, epoch) else {
            let text = format!("{MAX_REGIONS} regions are registered, deregister one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        };
        book.uses[slot] = epoch;
        let id = epoch * MAX_REGIONS as u32 + slot as u32;
        let region = RegionDescriptor { id, generation: memory.generation, length: memory.length, place };
        book.slots[slot] = Some(Held { region, address: memory.address.0, fd, pinned: None });
        self.devices[slot].store(device, Ordering::Relaxed);
        self.pinned[slot].store(false, Ordering::Relaxed);
        if device != 0 {
            locked(&ON_DEVICES).push((self.instance, id, memory.address.0));
        }
        self.places.set(id, memory.address.0, memory.length);
        self.live.set(id, memory.generation);
        Ok(RegionId(id))
    }

    /// Pins all regions in host memory for this device. To be called by one thread at a time. Returns the first error
    /// of a region that could not be pinned.
    pub fn pin(&self, device: &Arc<Device>) -> std::result::Result<(), Refused> {
        let book = self.book();
        let unpinned = |(slot, held): (usize, &Option<Held>)| {
            let held = held.as_ref().filter(|held| held.fd.is_some())?;
            let wanted = !self.pinned[slot].load(Ordering::Relaxed);
            wanted.then_some((slot, held.region.id, held.address, held.region.length))
        };
        let unpinned: Vec<_> = book.slots.iter().enumerate().filter_map(unpinned).collect();
        // Unlocked, because pinning takes seconds for a large region, and peers connect meanwhile.
        drop(book);
        let mut first = Ok(());
        for (slot, id, address, length) in unpinned {
            match device.pin(address, length) {
                Ok(pinned) => {
                    let mut book = self.book();
                    if let Some(held) = book.slots[slot].as_mut().filter(|held| held.region.id == id) {
                        held.pinned = pinned;
                        self.pinned[slot].store(true, Ordering::Release);
                    }
                }
                Err(refused) => first = first.and(Err(refused)),
            }
        }
        first
    }

    /// Whether the region, which lives or was killed, is on a device.
    pub fn is_on_device(&self, region: RegionId) -> bool {
        let slot = &self.book().slots[region.0 as usize % MAX_REGIONS];
        slot.as_ref().is_some_and(|held| held.region.id == region.0 && held.fd.is_none())
    }

    /// The devices of the regions that live.
    pub fn devices(&self) -> Vec<u32> {
        let book = self.book();
        let held = book.slots.iter().enumerate().filter(|(_, held)| held.is_some());
        held.filter_map(|(slot, _)| self.devices[slot].load(Ordering::Relaxed).checked_sub(1)).collect()
    }

    /// Closes the gate of a region. Its slot stays taken until [`remove`](Self::remove), after the fence.
    pub fn kill(&self, region: RegionId) -> Result<()> {
        let book = self.book();
        let held = book.slots[region.0 as usize % MAX_REGIONS].as_ref();
        if held.is_none_or(|h| h.region.id != region.0) {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", region.0)));
        }
        self.live.clear(region.0);
        Ok(())
    }

    pub fn remove(&self, region: RegionId) {
        let slot = &mut self.book().slots[region.0 as usize % MAX_REGIONS];
        if slot.as_ref().is_some_and(|h| h.region.id == region.0) {
            *slot = None;
            locked(&ON_DEVICES).retain(|(instance, id, _)| (instance, *id) != (&self.instance, region.0));
        }
    }

    /// Where a live region begins, and how long it is. Meaningful while busy.
    pub fn whole(&self, id: u32) -> Option<(Spot, u64)> {
        let (address, length) = self.places.whole(&self.live, id)?;
        Some((self.spot(id, address), length))
    }

    /// Where a live region's bytes are, when the range lies inside. Meaningful while busy.
    #[inline]
    pub fn source(&self, id: u32, offset: u64, length: u64) -> Option<Spot> {
        self.places.find(&self.live, id, offset, length).map(|address| self.spot(id, address))
    }

    #[inline]
    fn spot(&self, id: u32, address: u64) -> Spot {
        let slot = id as usize % MAX_REGIONS;
        let device = self.devices[slot].load(Ordering::Relaxed).checked_sub(1);
        Spot { address, device, pinned: self.pinned[slot].load(Ordering::Acquire) }
    }

    /// Calls `with` with what a peer needs to map all live regions.
    pub fn offer<R>(
        &self,
        with: impl FnOnce(&[RegionDescriptor], BorrowedFd<'_>, &[BorrowedFd<'_>]) -> R,
    ) -> R {
        use std::os::fd::AsFd;
        let book = self.book();
        let live = |h: &&Held| self.live.lives(h.region.id, h.region.generation);
        let held: Vec<&Held> = book.slots.iter().flatten().filter(live).collect();
        let regions: Vec<RegionDescriptor> = held.iter().map(|h| h.region).collect();
        let fds: Vec<BorrowedFd<'_>> =
            held.iter().filter_map(|h| h.fd.as_ref()).map(|fd| fd.as_fd()).collect();
        with(&regions, self.live_fd.as_fd(), &fds)
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        locked(&self.held)
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        locked(&ON_DEVICES).retain(|(instance, _, _)| *instance != self.instance);
    }
}

/// The error that says why memory of a device cannot be registered, and what works instead.
pub fn no_device(why: &dyn std::fmt::Display) -> Error {
    let instead = "pages can go through host memory (--staging always)";
    let text = format!("shm cannot register memory of a GPU: {why}; {instead}");
    Error::new(ErrorCode::UNSUPPORTED, text)
}
