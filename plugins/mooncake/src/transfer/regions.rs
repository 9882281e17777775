//! Registered memory: ours, and what peers told us of theirs.

use host_plugin_api::{Error, ErrorCode, Memory, MemoryKind, RegionId, Result, Write};

use crate::engine::Range;

/// Most regions at a time.
pub const MAX_REGIONS: usize = 128;

/// A region as a peer needs to know it. Mooncake's own metadata has the keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    pub id: u32,
    pub generation: u32,
    pub address: u64,
    pub length: u64,
}

impl Card {
    /// As Mooncake is told of it.
    pub fn memory(&self) -> Range {
        Range { address: self.address, length: self.length }
    }

    /// Address of a range, if it lies inside.
    fn range(&self, offset: u64, length: u32) -> Option<u64> {
        let end = offset.checked_add(length.into())?;
        // Address plus length was found not to overflow.
        (length > 0 && end <= self.length).then(|| self.address + offset)
    }
}

/// A write's source: its region, and its address.
pub fn source<'a>(ours: &'a [Card], write: &Write) -> Option<(&'a Card, u64)> {
    let region = ours.iter().find(|card| card.id == write.source_region)?;
    Some((region, region.range(write.source_offset, write.length)?))
}

/// A write's target, if it is of the generation that the write means: its region, and its address.
pub fn target<'a>(theirs: &'a [Card], write: &Write) -> Option<(&'a Card, u64)> {
    let region = theirs.iter().find(|card| card.id == write.target_region)?;
    let address = region.range(write.target_offset, write.length)?;
    (region.generation == write.target_generation).then_some((region, address))
}

/// Our regions. Ids are never used again.
#[derive(Default)]
pub struct Regions {
    alive: Vec<Card>,
    /// Taken back, but perhaps still being read.
    dying: Vec<u32>,
    last: u32,
}

impl Regions {
    pub fn alive(&self) -> &[Card] {
        &self.alive
    }

    pub fn add(&mut self, memory: &Memory) -> Result<RegionId> {
        if memory.kind != MemoryKind::DRAM {
            let text = format!("memory of kind {} cannot be registered, only the host's", memory.kind.0);
            return Err(Error::new(ErrorCode::UNSUPPORTED, text));
        }
        let inside = memory.address.checked_add(memory.length).is_some();
        if memory.address == 0 || memory.length == 0 || !inside {
            let text = format!("{} bytes at {:#x} are no memory", memory.length, memory.address);
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, text));
        }
        if self.alive.len() + self.dying.len() >= MAX_REGIONS {
            let text = format!("{MAX_REGIONS} regions are registered, deregister one first");
            return Err(Error::new(ErrorCode::NO_RESOURCE, text));
        }
        self.last += 1;
        let Memory { address, length, generation, .. } = *memory;
        self.alive.push(Card { id: self.last, generation, address, length });
        Ok(RegionId(self.last))
    }

    /// From now on nothing new names the region. False when there is no such region.
    pub fn kill(&mut self, region: RegionId) -> bool {
        if let Some(at) = self.alive.iter().position(|card| card.id == region.0) {
            self.alive.swap_remove(at);
            self.dying.push(region.0);
        }
        self.dying.contains(&region.0)
    }

    /// Nothing touches it any more.
    pub fn bury(&mut self, region: RegionId) {
        self.dying.retain(|id| *id != region.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_outside_their_region_or_of_another_generation_have_no_address() {
        let theirs = [Card { id: 3, generation: 7, address: 0x1000, length: 100 }];
        let good = Write {
            target_region: 3,
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
            Write { target_region: 4, ..good },
        ] {
            assert!(target(&theirs, &bad).is_none(), "{bad:?}");
        }
    }
}
