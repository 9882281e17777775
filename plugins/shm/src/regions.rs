//! This instance's registered memory.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Mutex;

use host_plugin_api::{Error, ErrorCode, Memory, MemoryKind, RegionId, Result};
use rustix::fs::{Mode, OFlags, fstat, open};

pub use crate::live::MAX_REGIONS;
use crate::live::{LiveTable, Places};
use crate::mapping::{SharedPage, Writers};

/// What a peer is told of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDescriptor {
    pub id: u32,
    pub generation: u32,
    pub length: u64,
    pub fd_offset: u64,
}

struct Held {
    region: RegionDescriptor,
    fd: OwnedFd,
}

/// See the module.
pub struct Regions {
    live: SharedPage<LiveTable>,
    /// The table's file, opened for reading. That alone would not keep peers from writing: they could open it again. The file's
    /// seals do.
    live_fd: OwnedFd,
    places: Places,
    held: Mutex<Book>,
}

struct Book {
    slots: [Option<Held>; MAX_REGIONS],
    /// How often each slot was used. Makes ids unique within the instance.
    uses: [u32; MAX_REGIONS],
}

impl Regions {
    pub fn new() -> Result<Self> {
        let io = |e| Error::new(ErrorCode::IO, format!("cannot create the table of regions: {e}"));
        let (live, fd) = SharedPage::<LiveTable>::create("host-shm-regions", Writers::Creator).map_err(io)?;
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let live_fd = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(io)?;
        Ok(Self {
            live,
            live_fd,
            places: Places::default(),
            held: Mutex::new(Book { slots: [const { None }; MAX_REGIONS], uses: [0; MAX_REGIONS] }),
        })
    }

    pub fn add(&self, memory: &Memory) -> Result<RegionId> {
        if memory.kind != MemoryKind::DRAM || memory.fd < 0 {
            let text = "shm registers host memory with a shareable file behind it, and got none";
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
        let mut book = self.book();
        let free = (0..MAX_REGIONS).find(|slot| book.slots[*slot].is_none());
        let epoch = free.map(|slot| book.uses[slot] + 1).filter(|e| *e < u32::MAX / MAX_REGIONS as u32);
        let (Some(slot), Some(epoch)) = (free, epoch) else {
            let text = format!("{MAX_REGIONS} regions are registered, deregister one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        };
        book.uses[slot] = epoch;
        let id = epoch * MAX_REGIONS as u32 + slot as u32;
        let descriptor = RegionDescriptor {
            id,
            generation: memory.generation,
            length: memory.length,
            fd_offset: memory.fd_offset,
        };
        book.slots[slot] = Some(Held { region: descriptor, fd });
        self.places.set(id, memory.address.0, memory.length);
        self.live.set(id, memory.generation);
        Ok(RegionId(id))
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
        }
    }

    /// The address of a live region's bytes, when the range lies inside. Meaningful while busy.
    #[inline]
    pub fn source(&self, id: u32, offset: u64, length: u64) -> Option<*const u8> {
        self.places.find(&self.live, id, offset, length).map(|address| address as *const u8)
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
        let fds: Vec<BorrowedFd<'_>> = held.iter().map(|h| h.fd.as_fd()).collect();
        with(&regions, self.live_fd.as_fd(), &fds)
    }

    fn book(&self) -> std::sync::MutexGuard<'_, Book> {
        host_transfer_kit::locked(&self.held)
    }
}
