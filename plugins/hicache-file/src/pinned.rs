//! Pieces of the host's memory that are registered with the kernel of a ring. A read or write in them needs no lookup
//! of each memory page, which is half of the cost of a direct read.
//!
//! A piece is registered, and so pinned, when the first run lies in it. It stays so until its region is deregistered.
//! `RLIMIT_MEMLOCK` of the system and `pinned_mib` bound the pinned memory. Runs that do not lie in one piece go without.

use std::collections::HashMap;

use host_plugin_api::{Level, log};
use io_uring::IoUring;

use crate::memory::Vector;
use crate::queue::Queue;
use crate::run::Run;

/// Bytes of a piece, counted from the start of its region. The last one of a region is shorter.
pub const PIECE: u64 = 32 << 20;
/// Most pieces of a ring that the kernel allows.
const MOST: usize = 1 << 14;

/// The pieces that the kernel of one ring knows.
pub struct Pinned {
    /// Places in the kernel's table, by region and number of the piece in it.
    places: HashMap<(u32, u64), u16>,
    free: Vec<u16>,
    /// How many regions were gone at the last look.
    gone: u64,
    /// Whether the kernel takes several vectors of one piece.
    vectored: bool,
}

impl Pinned {
    /// For `pieces` pieces, or for none when the kernel does not support them.
    pub fn new(ring: &IoUring, pieces: usize, vectored: bool) -> Self {
        let mut free: Vec<u16> = (0..pieces.min(MOST) as u16).rev().collect();
        if !free.is_empty() && ring.submitter().register_buffers_sparse(free.len() as u32).is_err() {
            free.clear();
        }
        Self { places: HashMap::new(), free, gone: 0, vectored }
    }

    /// The place of the piece that contains the whole run. A new piece is registered first.
    pub fn place(&mut self, ring: &IoUring, run: &Run) -> Option<u16> {
        if self.free.is_empty() && self.places.is_empty() || (!self.vectored && run.rest().0.len() > 1) {
            return None;
        }
        let (region, number, piece) = run.piece(PIECE)?;
        if let Some(place) = self.places.get(&(region, number)) {
            return Some(*place);
        }
        let place = self.free.pop()?;
        match set(ring, place, piece) {
            Ok(()) => {
                self.places.insert((region, number), place);
                Some(place)
            }
            Err(e) => {
                log!(
                    Level::INFO,
                    "{} MiB of memory are pinned for reads and writes, more cannot be, which makes them a little \
                     dearer (a limit on locked memory?): {e}",
                    self.places.len() as u64 * (PIECE >> 20)
                );
                self.free.clear();
                None
            }
        }
    }

    /// Forgets the pieces of regions that were deregistered. Nothing is in flight in them.
    pub fn forget_gone(&mut self, ring: &IoUring, queue: &Queue) {
        let gone = queue.regions_gone();
        if gone == self.gone {
            return;
        }
        self.gone = gone;
        for (_, place) in self.places.extract_if(|(region, _), _| !queue.has_region(*region)) {
            let nothing = Vector { base: std::ptr::null_mut(), length: 0 };
            match set(ring, place, nothing) {
                Ok(()) => self.free.push(place),
                Err(e) => {
                    log!(Level::WARN, "memory that was deregistered stays pinned until the tier ends: {e}")
                }
            }
        }
    }
}

fn set(ring: &IoUring, place: u16, piece: Vector) -> std::io::Result<()> {
    // SAFETY: a `Vector` is laid out as an `iovec`, and lives across the call.
    let vectors = unsafe { std::slice::from_raw_parts((&raw const piece).cast(), 1) };
    // SAFETY: the piece is of registered memory, which stays mapped while a page of it is claimed, and one is. Later
    // the kernel holds the memory pages itself, and uses them for runs of the same region only.
    unsafe { ring.submitter().register_buffers_update(place.into(), vectors, None) }
}
