//! The table of live regions, as copy threads see it, here and in peers.
//!
//! `tests/loom` compiles this file with loom's atomics.

use crate::mapping::Shared;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Most regions registered at once: with the connection's own, as many descriptors as fit one message.
pub const MAX_REGIONS: usize = 128;

/// The live regions: `id << 32 | generation`, or 0. Ids are never 0, and those of one slot are `SLOTS` apart.
#[repr(C)]
pub struct LiveTable<const SLOTS: usize = MAX_REGIONS>([AtomicU64; SLOTS]);

// SAFETY: atomics only.
unsafe impl<const SLOTS: usize> Shared for LiveTable<SLOTS> {}

/// Zeros, as in a fresh mapping.
impl<const SLOTS: usize> Default for LiveTable<SLOTS> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

fn word(id: u32, generation: u32) -> u64 {
    u64::from(id) << 32 | u64::from(generation)
}

impl<const SLOTS: usize> LiveTable<SLOTS> {
    fn slot(&self, id: u32) -> &AtomicU64 {
        &self.0[id as usize % SLOTS]
    }

    /// Whether region `id` lives and has this generation. Meaningful only while busy, see the crate's page.
    pub fn lives(&self, id: u32, generation: u32) -> bool {
        self.slot(id).load(Ordering::Acquire) == word(id, generation)
    }

    /// Opens a region's gate.
    pub fn set(&self, id: u32, generation: u32) {
        // Release: a thread that finds the region also finds its place.
        self.slot(id).store(word(id, generation), Ordering::Release);
    }

    /// Closes a region's gate. Copies behind it have ended once the lines of all copy threads were waited for after this.
    pub fn clear(&self, id: u32) {
        self.slot(id).store(0, Ordering::Relaxed);
    }
}

/// Where this instance's regions lie.
pub struct Places<const SLOTS: usize = MAX_REGIONS> {
    addresses: [AtomicU64; SLOTS],
    lengths: [AtomicU64; SLOTS],
}

impl<const SLOTS: usize> Default for Places<SLOTS> {
    fn default() -> Self {
        let zeros = || std::array::from_fn(|_| AtomicU64::new(0));
        Self { addresses: zeros(), lengths: zeros() }
    }
}

impl<const SLOTS: usize> Places<SLOTS> {
    /// Sets a region's place. To be called before its gate is opened, and after the fence for the region before it in the slot.
    pub fn set(&self, id: u32, address: u64, length: u64) {
        self.addresses[id as usize % SLOTS].store(address, Ordering::Relaxed);
        self.lengths[id as usize % SLOTS].store(length, Ordering::Relaxed);
    }

    /// Address and length of a live region. Meaningful while busy.
    pub fn whole(&self, live: &LiveTable<SLOTS>, id: u32) -> Option<(u64, u64)> {
        let address = self.find(live, id, 0, 0)?;
        Some((address, self.lengths[id as usize % SLOTS].load(Ordering::Relaxed)))
    }

    /// The address of a live region's bytes, when the range lies inside. Meaningful while busy.
    #[inline]
    pub fn find(&self, live: &LiveTable<SLOTS>, id: u32, offset: u64, length: u64) -> Option<u64> {
        let end = offset.checked_add(length)?;
        let alive = (live.slot(id).load(Ordering::Acquire) >> 32) as u32;
        if alive != id || id == 0 || end > self.lengths[id as usize % SLOTS].load(Ordering::Relaxed) {
            return None;
        }
        Some(self.addresses[id as usize % SLOTS].load(Ordering::Relaxed) + offset)
    }
}
