//! Storage that does not answer: giving up work that takes too long, and letting a tier rest for a while.

use std::time::Duration;

use super::{Hierarchy, HostSlot, TierAction, Work};
use crate::ids::Time;

/// Longest rest of a tier that does not answer.
const LONGEST_REST: Duration = Duration::from_secs(60);

impl Hierarchy {
    /// Takes note of a deadline that a tier missed, and lets the tier rest.
    pub(super) fn strike(&mut self, now: Time, tier: usize) {
        let rests = self.rests(now, tier);
        let tier = &mut self.tiers[tier];
        tier.stats.deadlines_missed += 1;
        // Work that was under way together misses its deadlines together. It counts as one strike.
        if rests {
            return;
        }
        let rest = Duration::from_secs(1).saturating_mul(1 << tier.strikes.min(6));
        tier.strikes += 1;
        tier.rests_until = Some(now.after(rest.min(LONGEST_REST)));
    }

    pub(super) fn rests(&self, now: Time, tier: usize) -> bool {
        self.tiers[tier].rests_until.is_some_and(|until| now < until)
    }

    /// Gives up reads and writes that take too long. Their slots stay with the tier until it says that they ended.
    pub(super) fn expire_ops(&mut self, now: Time, actions: &mut Vec<TierAction>) {
        let due = self.ops.iter_mut().filter(|(_, op)| op.until.is_some_and(|until| until <= now));
        let mut given_up = Vec::new();
        for (tag, op) in due {
            op.until = None;
            let (Work::Read { tier } | Work::Write { tier }) = op.work else { continue };
            let reads = matches!(op.work, Work::Read { .. });
            given_up.push((*tag, tier, reads, op.slots.iter().flatten().copied().collect::<Vec<HostSlot>>()));
        }
        for (tag, tier, reads, slots) in given_up {
            actions.push(TierAction::Cancel { tag, tier });
            self.strike(now, tier);
            for slot in slots.into_iter().filter(|_| reads) {
                self.host.give_up(slot);
                self.tell_waiters(slot, false);
            }
        }
    }
}
