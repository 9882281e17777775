//! Slots of one staging region, handed out and taken back in any order.

use std::collections::BTreeMap;
use std::ops::Range;

/// Slots begin at multiples of this.
const ALIGNMENT: u64 = 64;

/// A region's free gaps and taken slots. A piece gets the smallest gap that is large enough, which keeps large gaps for
/// large pieces.
#[derive(Debug)]
pub(super) struct Slots {
    capacity: u64,
    /// Lengths of gaps by offset. No two gaps touch each other.
    free: BTreeMap<u64, u64>,
    /// Lengths of slots by offset, and when they were taken.
    taken: BTreeMap<u64, (u64, u64)>,
    used: u64,
    handed_out: u64,
    /// A window that is kept free for a piece that needs a large gap.
    claim: Option<Range<u64>>,
}

impl Slots {
    pub(super) fn new(capacity: u64) -> Self {
        let capacity = capacity / ALIGNMENT * ALIGNMENT;
        let free = (capacity > 0).then_some((0, capacity)).into_iter().collect();
        Self { capacity, free, taken: BTreeMap::new(), used: 0, handed_out: 0, claim: None }
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn used(&self) -> u64 {
        self.used
    }

    pub(super) fn unused(&self) -> u64 {
        self.capacity - self.used
    }

    /// Bytes that a slot of this length takes up.
    pub(super) fn size_of(length: u64) -> u64 {
        length.max(1).next_multiple_of(ALIGNMENT)
    }

    /// A slot outside of the claimed window, or `None` when no gap is large enough.
    pub(super) fn take(&mut self, length: u64) -> Option<u64> {
        let length = Self::size_of(length);
        let claim = self.claim.clone().unwrap_or(0..0);
        let parts = self.free.iter().flat_map(|(start, gap)| {
            let (start, end) = (*start, start + gap);
            if claim.is_empty() {
                return [start..end, end..end];
            }
            [start..end.min(claim.start).max(start), start.max(claim.end).min(end)..end]
        });
        let fitting = parts.filter(|part| part.end - part.start >= length);
        let at = fitting.min_by_key(|part| (part.end - part.start, part.start))?.start;
        self.carve(at, length);
        Some(at)
    }

    /// Keeps a window free from now on: of all windows of this length the one whose oldest slot is youngest, because
    /// slots of a sender that has stopped are old.
    pub(super) fn claim(&mut self, length: u64) {
        let length = Self::size_of(length);
        let ends = self.taken.iter().map(|(offset, (length, _))| offset + length);
        let starts = ends.chain([0, self.capacity.saturating_sub(length)]);
        let oldest = |start: u64| {
            let before = self.taken.range(..start + length).rev();
            let inside = before.take_while(|(offset, (length, _))| **offset + length > start);
            inside.map(|(_, (_, when))| *when).min().unwrap_or(u64::MAX)
        };
        let fitting = starts.filter(|start| start + length <= self.capacity);
        self.claim =
            fitting.max_by_key(|start| (oldest(*start), u64::MAX - start)).map(|start| start..start + length);
    }

    /// The claimed window as a slot, once it is empty.
    pub(super) fn take_claimed(&mut self, length: u64) -> Option<u64> {
        let length = Self::size_of(length);
        let claim = self.claim.clone()?;
        let (start, gap) = self.free.range(..=claim.start).next_back()?;
        if start + gap < claim.end || length > claim.end - claim.start {
            return None;
        }
        self.claim = None;
        self.carve(claim.start, length);
        Some(claim.start)
    }

    pub(super) fn unclaim(&mut self) {
        self.claim = None;
    }

    /// Takes a slot back.
    ///
    /// # Panics
    /// When no slot begins at this offset: the caller gave back a slot that was not its own.
    pub(super) fn give_back(&mut self, offset: u64) {
        let taken = self.taken.remove(&offset);
        assert!(taken.is_some(), "no slot begins at {offset}");
        let (mut start, mut length) = (offset, taken.map_or(0, |(length, _)| length));
        self.used -= length;
        if let Some((before, gap)) = self.free.range(..offset).next_back().map(|(start, gap)| (*start, *gap))
            && before + gap == offset
        {
            (start, length) = (before, gap + length);
        }
        if let Some(gap) = self.free.remove(&(start + length)) {
            length += gap;
        }
        self.free.insert(start, length);
    }

    fn carve(&mut self, at: u64, length: u64) {
        let gap = self.free.range(..=at).next_back().map(|(start, gap)| (*start, *gap));
        let (start, gap) = gap.unwrap_or((at, 0));
        assert!(at + length <= start + gap, "{length} bytes at {at} are not free");
        self.free.remove(&start);
        if at > start {
            self.free.insert(start, at - start);
        }
        if at + length < start + gap {
            self.free.insert(at + length, start + gap - at - length);
        }
        self.used += length;
        self.handed_out += 1;
        self.taken.insert(at, (length, self.handed_out));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_never_overlap_and_what_comes_back_is_one_gap_again() {
        for seed in 0..200u64 {
            let mut state = seed;
            let mut random = |bound: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % bound
            };
            let mut slots = Slots::new(4096 + 17);
            let mut held: Vec<(u64, u64)> = Vec::new();
            for _ in 0..300 {
                if random(20) == 0 {
                    slots.claim(1 + random(1000));
                }
                if random(5) < 2 && !held.is_empty() {
                    let (offset, _) = held.swap_remove(random(held.len() as u64) as usize);
                    slots.give_back(offset);
                    continue;
                }
                let length = 1 + random(700);
                let Some(at) = slots.take_claimed(length).or_else(|| slots.take(length)) else { continue };
                assert!(at + length <= 4096, "seed {seed}");
                let overlaps = |other: &(u64, u64)| at < other.0 + other.1 && other.0 < at + length;
                assert!(!held.iter().any(overlaps), "seed {seed}");
                held.push((at, length));
            }
            for (offset, _) in held {
                slots.give_back(offset);
            }
            assert_eq!((slots.used(), slots.free.len(), slots.unused()), (0, 1, 4096), "seed {seed}");
        }
    }

    #[test]
    fn a_claimed_window_avoids_the_old_slots_and_is_given_to_no_other() {
        let mut slots = Slots::new(1024);
        let held: Vec<u64> = (0..8).map_while(|_| slots.take(128)).collect();
        // The sender in the first slot has stopped. Everything else comes and goes.
        slots.claim(512);
        for offset in &held[1..] {
            slots.give_back(*offset);
            if let Some(at) = slots.take(128) {
                assert!(!slots.claim.clone().unwrap().contains(&at));
            }
        }
        assert_eq!(slots.take_claimed(512), Some(512));
        assert_eq!(slots.take(1), None);
    }

    #[test]
    fn a_small_slot_leaves_the_large_gap_alone() {
        let mut slots = Slots::new(1024);
        let held: Vec<u64> = (0..16).map_while(|_| slots.take(64)).collect();
        for offset in [held[1], held[4], held[5], held[6], held[7]] {
            slots.give_back(offset);
        }
        assert_eq!(slots.take(64), Some(held[1]));
        assert_eq!(slots.take(256), Some(held[4]));
    }
}
