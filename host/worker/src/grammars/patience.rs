//! How long a step waits for the masks of its sequences.

use std::time::Duration;

use host_core::{Config, Time};
use parking_lot::Mutex;

/// How long a step waits for masks that are not known when its logits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// Until all are known.
    All,
    /// As long again as it took to compute, within these bounds, for all of them together.
    AsLongAgain {
        /// At least so long.
        least: Duration,
        /// And no longer.
        most: Duration,
    },
}

impl Patience {
    /// The patience of a worker. One that [may draw late](Config::may_draw_late) waits 20 ms at most, and no longer than
    /// a quarter of its target for the time between tokens. Other workers wait for all masks.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        if !config.may_draw_late() {
            return Self::All;
        }
        let (least, most) = (Duration::from_millis(2), Duration::from_millis(20));
        let most = config.target_itl.map_or(most, |target| most.min(target / 4));
        Self::AsLongAgain { least: least.min(most), most }
    }
}

/// Measures the time of a worker's steps, one after the other.
#[derive(Debug)]
pub(super) struct StepTime {
    patience: Patience,
    step: Mutex<Step>,
}

#[derive(Debug, Default)]
struct Step {
    begun: Time,
    /// When it had computed and began to wait for masks.
    computed: Option<Time>,
    /// Whether the step makes progress for some sequence. Sequences without a mask may not hold that up.
    gains: bool,
}

impl StepTime {
    pub(super) fn new(patience: Patience) -> Self {
        Self { patience, step: Mutex::default() }
    }

    /// Begins a step. `gains` says that it makes progress for a sequence, whatever masks are known.
    pub(super) fn begins(&self, now: Time, gains: bool) {
        *self.step.lock() = Step { begun: now, computed: None, gains };
    }

    /// The step draws for a sequence whose mask is known.
    pub(super) fn draws(&self) {
        self.step.lock().gains = true;
    }

    /// How long the step waits from now on: zero when its time is over, and `None` without an end. `late` says that all
    /// masks it waits for were late before. A step without progress waits as long as a step may, for such masks too,
    /// because the next step would have the same work.
    pub(super) fn left(&self, now: Time, late: bool) -> Option<Duration> {
        let Patience::AsLongAgain { least, most } = self.patience else { return None };
        let step = &mut *self.step.lock();
        let computed = *step.computed.get_or_insert(now);
        let wait = match (step.gains, late) {
            (false, _) => most,
            (true, false) => computed.since(step.begun).clamp(least, most),
            (true, true) => Duration::ZERO,
        };
        Some(computed.after(wait).since(now))
    }
}

#[cfg(test)]
mod tests {
    use host_core::Role;
    use host_core::window::WindowShape;

    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    fn at(milliseconds: u32) -> Time {
        Time(MILLISECOND * milliseconds)
    }

    fn left(time: &StepTime, now: u32) -> Option<u128> {
        time.left(at(now), false).map(|left| left.as_millis())
    }

    #[test]
    fn a_step_waits_once_as_long_again_as_it_took_within_bounds() {
        let time = StepTime::new(Patience::AsLongAgain { least: 2 * MILLISECOND, most: 20 * MILLISECOND });
        time.begins(at(100), true);
        assert_eq!([107, 110, 114, 120].map(|now| left(&time, now)), [7, 4, 0, 0].map(Some));
        time.begins(at(120), true);
        assert_eq!([120, 121, 122].map(|now| left(&time, now)), [2, 1, 0].map(Some), "at least");
        time.begins(at(200), true);
        assert_eq!([300, 319, 320].map(|now| left(&time, now)), [20, 1, 0].map(Some), "at most");
    }

    #[test]
    fn a_step_that_gets_nothing_done_waits_as_long_as_one_may_and_for_late_masks_too() {
        let time = StepTime::new(Patience::AsLongAgain { least: 2 * MILLISECOND, most: 20 * MILLISECOND });
        time.begins(at(0), false);
        assert_eq!([5, 10, 25].map(|now| left(&time, now)), [20, 15, 0].map(Some));
        time.begins(at(100), false);
        assert_eq!(time.left(at(105), true), Some(20 * MILLISECOND));
        time.draws();
        assert_eq!(left(&time, 106), Some(4), "from then on as others");
        assert_eq!(time.left(at(106), true), Some(Duration::ZERO));
    }

    #[test]
    fn workers_that_cannot_compute_a_token_again_wait_for_all() {
        let config = |role| host_sim::config(role, 40);
        let of = |role, window| Patience::of(&Config { window, ..config(role) });
        let (least, most) = (2 * MILLISECOND, 20 * MILLISECOND);
        for role in [Role::Decode, Role::Aggregated] {
            assert_eq!(of(role, None), Patience::AsLongAgain { least, most });
            assert_eq!(of(role, Some(WindowShape::state(1))), Patience::All);
        }
        assert_eq!(of(Role::Prefill, None), Patience::All);
        let target = |milliseconds| {
            let target_itl = Some(milliseconds * MILLISECOND);
            Patience::of(&Config { target_itl, ..config(Role::Decode) })
        };
        assert_eq!(target(40), Patience::AsLongAgain { least, most: 10 * MILLISECOND });
        assert_eq!(target(4), Patience::AsLongAgain { least: MILLISECOND, most: MILLISECOND });
    }

    #[test]
    fn patience_without_an_end_has_none() {
        let time = StepTime::new(Patience::All);
        time.begins(at(0), true);
        assert_eq!(left(&time, 1_000_000), None);
    }
}
