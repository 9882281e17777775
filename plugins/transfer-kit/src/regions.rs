//! Registered memory: that of this instance, and descriptors of peers' memory.

use host_plugin_api::{Error, ErrorCode, Memory, MemoryKind, RegionId, Result, Write};

/// Most regions of an instance at a time.
pub const MAX_REGIONS: usize = 128;

/// A region, as a peer needs to know it to write there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// Its owner's number for it.
    pub id: RegionId,
    /// The host's generation. A write that names another lands nowhere.
    pub generation: u32,
    /// First byte, in its owner's process.
    pub address: u64,
    /// Bytes. Address plus length does not overflow.
    pub length: u64,
    /// The device, for memory of a device.
    pub device: Option<u32>,
}

impl RegionDescriptor {
    /// Address of a range, if it has a byte and lies inside.
    fn range(&self, offset: u64, length: u32) -> Option<u64> {
        let end = offset.checked_add(length.into())?;
        // Address plus length does not overflow, see `length`.
        (length > 0 && end <= self.length).then(|| self.address + offset)
    }
}

/// A write's source among this instance's regions, and its address. `None` when the write is empty or leaves its region.
pub fn source<'a>(ours: &'a [RegionDescriptor], write: &Write) -> Option<(&'a RegionDescriptor, u64)> {
    let region = ours.iter().find(|region| region.id == write.source_region)?;
    Some((region, region.range(write.source_offset, write.length)?))
}

/// A write's target among a peer's regions, and its address there. `None` when the write is empty, leaves its region,
/// or names another generation of it.
pub fn target<'a>(theirs: &'a [RegionDescriptor], write: &Write) -> Option<(&'a RegionDescriptor, u64)> {
    let region = theirs.iter().find(|region| region.id == write.target_region)?;
    let address = region.range(write.target_offset, write.length)?;
    (region.generation == write.target_generation).then_some((region, address))
}

/// The regions of this instance. Ids are never used again.
#[derive(Debug)]
pub struct Regions {
    alive: Vec<RegionDescriptor>,
    /// Regions that were retired, but may still be read.
    dying: Vec<RegionId>,
    last: u32,
    devices: bool,
}

impl Regions {
    /// No regions yet. `devices` says whether memory of devices is accepted.
    pub fn new(devices: bool) -> Self {
        Self { alive: Vec::new(), dying: Vec::new(), last: 0, devices }
    }

    /// The regions that writes may name.
    pub fn alive(&self) -> &[RegionDescriptor] {
        &self.alive
    }

    /// Adds memory.
    ///
    /// # Errors
    /// `UNSUPPORTED` for a kind of memory that is not accepted, `INVALID_ARGUMENT` for an invalid range, `NO_RESOURCE`
    /// for more than [`MAX_REGIONS`].
    pub fn add(&mut self, memory: &Memory) -> Result<RegionId> {
        let device = match memory.kind {
            MemoryKind::DRAM => None,
            MemoryKind::VRAM if self.devices => Some(memory.device),
            MemoryKind(other) => {
                let taken = if self.devices { "the host's and devices'" } else { "the host's" };
                let text = format!("memory of kind {other} cannot be registered, only {taken}");
                return Err(Error::new(ErrorCode::UNSUPPORTED, text));
            }
        };
        let address = memory.address.0;
        let inside = address.checked_add(memory.length).is_some();
        if address == 0 || memory.length == 0 || !inside {
            let text = format!("{} bytes at {address:#x} are no memory", memory.length);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        if self.alive.len() + self.dying.len() >= MAX_REGIONS {
            let text = format!("{MAX_REGIONS} regions are registered, deregister one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        self.last += 1;
        let Memory { length, generation, .. } = *memory;
        let id = RegionId(self.last);
        self.alive.push(RegionDescriptor { id, generation, address, length, device });
        Ok(id)
    }

    /// Retires a region: from now on nothing new names it. Its number still counts among those that are registered.
    /// False when there is no such region.
    pub fn retire(&mut self, region: RegionId) -> bool {
        if let Some(at) = self.alive.iter().position(|other| other.id == region) {
            self.alive.swap_remove(at);
            self.dying.push(region);
        }
        self.dying.contains(&region)
    }

    /// Forgets a retired region that nothing touches any more.
    pub fn remove(&mut self, region: RegionId) {
        self.dying.retain(|id| *id != region);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_their_region_or_of_another_generation_have_no_address() {
        let theirs =
            [RegionDescriptor { id: RegionId(3), generation: 7, address: 0x1000, length: 100, device: None }];
        let good = Write {
            target_region: RegionId(3),
            target_offset: 90,
            length: 10,
            target_generation: 7,
            ..Write::default()
        };
        assert_eq!(target(&theirs, &good).map(|found| found.1), Some(0x1000 + 90));
        for bad in [
            Write { target_offset: 91, ..good },
            Write { target_offset: u64::MAX - 5, ..good },
            Write { length: 0, ..good },
            Write { target_generation: 8, ..good },
            Write { target_region: RegionId(4), ..good },
        ] {
            assert!(target(&theirs, &bad).is_none(), "{bad:?}");
        }
    }
}
