//! Registered memory that threads copy from and to, and the peers that may write to it.

use std::collections::HashMap;
use std::sync::RwLock;

use host_plugin_api::{Error, ErrorCode, Memory, RegionId, Result, Write};

use crate::locked::{reading, writing};
use crate::regions::{Regions, source, target};

/// Ends the wait of a writer's thread when the writer is cut off.
type Cut = Box<dyn Fn() + Send + Sync>;

/// Registered memory, and the writers that peers have here. Both are under one lock, because taking either back is a
/// fence. Copies hold the lock for reading, so a copy should be short. 64 KiB take some microseconds.
///
/// A backend whose threads copy bytes between memory and network needs no `unsafe` of its own.
pub struct GuardedMemory(RwLock<Table>);

struct Table {
    regions: Regions,
    writers: HashMap<u64, (String, Cut)>,
    last_writer: u64,
}

/// A peer's right to write here, until it is dismissed or cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Writer(u64);

impl Default for GuardedMemory {
    fn default() -> Self {
        Self(RwLock::new(Table { regions: Regions::new(false), writers: HashMap::new(), last_writer: 0 }))
    }
}

impl GuardedMemory {
    /// Adds host memory.
    ///
    /// # Errors
    /// Those of [`Regions::add`].
    pub fn register(&self, memory: &Memory) -> Result<RegionId> {
        writing(&self.0).regions.add(memory)
    }

    /// Ends the registration of a region. When it returns no copy touches the region.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown region.
    pub fn deregister(&self, region: RegionId) -> Result<()> {
        let mut table = writing(&self.0);
        if !table.regions.retire(region) {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", region.0)));
        }
        table.regions.remove(region);
        Ok(())
    }

    /// **Hot.** The index of the first write whose source is empty, or leaves its region.
    pub fn misfit(&self, writes: &[Write]) -> Option<usize> {
        let table = reading(&self.0);
        writes.iter().position(|write| source(table.regions.alive(), write).is_none())
    }

    /// Copies bytes of a write's source, from `at` of the write on. False when they are not there any more.
    pub fn read(&self, write: &Write, at: usize, into: &mut [u8]) -> bool {
        let table = reading(&self.0);
        let inside = at.checked_add(into.len()).is_some_and(|end| end <= write.length as usize);
        let Some((_, from)) = source(table.regions.alive(), write).filter(|_| inside) else { return false };
        // SAFETY: the range lies in a region, which the host keeps mapped until it is taken back, for which the lock that is held
        // here is needed. `into` is the caller's and no memory of the host's.
        unsafe { std::ptr::copy_nonoverlapping((from as *const u8).add(at), into.as_mut_ptr(), into.len()) };
        true
    }

    /// Lets a peer write. When the peer is cut off, `cut` is called to end the wait of its thread.
    pub fn admit(&self, name: &str, cut: impl Fn() + Send + Sync + 'static) -> Writer {
        let mut table = writing(&self.0);
        table.last_writer += 1;
        let number = table.last_writer;
        table.writers.insert(number, (name.to_owned(), Box::new(cut)));
        Writer(number)
    }

    /// Copies bytes that a writer sent to a write's target, from `at` of the write on. False when they may not land: the write
    /// leaves its region or means another generation of it, the region is gone, or the writer was cut off.
    pub fn land(&self, writer: Writer, write: &Write, at: usize, bytes: &[u8]) -> bool {
        let table = reading(&self.0);
        let inside = at.checked_add(bytes.len()).is_some_and(|end| end <= write.length as usize);
        let admitted = inside && table.writers.contains_key(&writer.0);
        let Some((_, to)) = target(table.regions.alive(), write).filter(|_| admitted) else { return false };
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (to as *mut u8).add(at), bytes.len()) };
        true
    }

    /// Ends a writer's right to write. False when it was cut off before.
    pub fn dismiss(&self, writer: Writer) -> bool {
        writing(&self.0).writers.remove(&writer.0).is_some()
    }

    /// Cuts off the writers of the chosen peers, by their names. When it returns, no write of these peers lands.
    pub fn cut(&self, chosen: impl Fn(&str) -> bool) {
        writing(&self.0).writers.retain(|_, (name, cut)| {
            let stays = !chosen(name);
            if !stays {
                cut();
            }
            stays
        });
    }
}

impl std::fmt::Debug for GuardedMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let table = reading(&self.0);
        let (regions, writers) = (table.regions.alive().len(), table.writers.len());
        f.debug_struct("GuardedMemory").field("regions", &regions).field("writers", &writers).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use host_plugin_api::{Address, MemoryKind};

    use super::*;

    #[test]
    fn only_an_admitted_writer_lands_bytes_and_only_inside_of_its_write() {
        let memory = GuardedMemory::default();
        let mut bytes = [0_u8; 16];
        let region = memory.register(&Memory {
            address: Address::of(bytes.as_mut_ptr()),
            length: 16,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 7,
            fd_offset: 0,
        });
        let write = Write {
            source_region: region.clone().expect("a region"),
            target_region: region.expect("a region"),
            target_offset: 8,
            length: 8,
            target_generation: 7,
            ..Write::default()
        };
        let was_cut = Arc::new(AtomicBool::new(false));
        let cut = was_cut.clone();
        let writer = memory.admit("prefill", move || cut.store(true, Ordering::SeqCst));
        assert!(memory.land(writer, &write, 4, &[1; 4]));
        for (write, at) in [
            (write, 5),
            (Write { target_generation: 8, ..write }, 0),
            (Write { target_offset: 9, ..write }, 0),
        ] {
            assert!(!memory.land(writer, &write, at, &[2; 4]), "{write:?} at {at}");
        }
        let mut read = [9; 4];
        assert!(memory.read(&Write { source_offset: 12, length: 4, ..write }, 0, &mut read));
        assert_eq!(read, [1; 4]);
        memory.cut(|name| name == "decode");
        assert!(memory.land(writer, &write, 0, &[3; 4]) && !was_cut.load(Ordering::SeqCst));
        memory.cut(|name| name == "prefill");
        assert!(!memory.land(writer, &write, 0, &[4; 4]) && was_cut.load(Ordering::SeqCst));
        assert!(!memory.dismiss(writer), "it was cut off before");
        let other = memory.admit("prefill", || {});
        memory.deregister(write.target_region).expect("it is registered");
        assert!(!memory.land(other, &write, 0, &[5; 4]) && !memory.read(&write, 0, &mut read));
        assert_eq!(std::hint::black_box(bytes), [0, 0, 0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 1, 1, 1, 1]);
    }
}
