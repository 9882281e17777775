//! A check of all counters, by counting again.

use std::collections::BTreeMap;

use super::fetch::Fetch;
use super::{Hierarchy, HostSlot, Op, Work};
use crate::ids::Room;

impl Hierarchy {
    /// Recounts everything for which a running count is kept.
    ///
    /// # Panics
    /// When an invariant does not hold.
    pub(crate) fn audit(&self) {
        self.host.audit();
        let mut pins: BTreeMap<HostSlot, usize> = BTreeMap::new();
        let mut pin = |slot: HostSlot| *pins.entry(slot).or_default() += 1;
        self.fetches.values().flat_map(Fetch::slots).for_each(&mut pin);
        self.tiers.iter().flat_map(|tier| &tier.to_write).for_each(|(_, slot)| pin(*slot));
        let holds = |op: &&Op| matches!(op.work, Work::Load { .. } | Work::Write { .. });
        self.ops.values().filter(holds).flat_map(|op| op.slots.iter().flatten()).for_each(|slot| pin(*slot));
        assert_eq!(pins.len(), self.host.pinned(), "every pin has an owner");
        let fills = |op: &&Op| matches!(op.work, Work::Save { .. } | Work::Read { .. });
        let running = self.ops.values().filter(fills).map(|op| op.left).sum::<usize>();
        let queued = self.saves.iter().map(|queued| queued.pages.len()).sum::<usize>()
            + self.tiers.iter().map(|tier| tier.to_read.len()).sum::<usize>();
        let counts = self.host.counts();
        assert_eq!(running + queued, counts.filling + counts.abandoned, "every slot that fills has a writer");
        for op in self.ops.values() {
            assert_eq!(op.left, op.slots.iter().flatten().count(), "pages of a batch that have not ended");
        }
        let unloaded: usize = self.fetches.values().map(Fetch::unloaded).sum();
        assert_eq!(unloaded, self.unloaded, "pages of restores that are not loaded");
        let known = |room: &Room| self.fetches.contains_key(room);
        assert!(self.deadlines.iter().all(|(_, room)| known(room)), "a deadline without a request");
        let sum = |wanted: fn(&Work) -> bool| {
            let ops = self.ops.values().filter(|op| wanted(&op.work));
            ops.map(|op| self.bytes(op.slots.len())).sum::<u64>()
        };
        assert_eq!(sum(|work| matches!(work, Work::Load { .. })), self.loading_bytes, "bytes being loaded");
        assert_eq!(sum(|work| matches!(work, Work::Save { .. })), self.saving_bytes, "bytes being saved");
    }
}
