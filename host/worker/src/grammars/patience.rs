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
    /// Of a worker that goes on with answers: 20 ms at most, and a quarter of its target for the time between tokens. One that sends
    /// pages waits for all, since it may have sent what it would compute again, and so does one whose model keeps a state, because
    /// it cannot compute a token again.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        if config.role.sends_kv() || config.window.is_some_and(|window| window.keeps_state()) {
            return Self::All;
        }
        let (least, most) = (Duration::from_millis(2), Duration::from_millis(20));
        let most = config.target_itl.map_or(most, |target| most.min(target / 4));
        Self::AsLongAgain { least: least.min(most), most }
    }
}

/// The time of a worker's steps, one after the other.
#[derive(Debug)]
pub(super) struct StepTime {
    patience: Patience,
    step: Mutex<Step>,
}

#[derive(Debug, Default)]
struct Step {
    begun: Time,
    /// When the wait for its masks ends, from the first question on.
    until: Option<Time>,
    /// It draws a token for some sequence, which the others may not hold up.
    draws: bool,
}

impl StepTime {
    pub(super) fn new(patience: Patience) -> Self {
        Self { patience, step: Mutex::default() }
    }

    /// A step begins. `draws`: it draws for a sequence that needs no mask.
    pub(super) fn begins(&self, now: Time, draws: bool) {
        *self.step.lock() = Step { begun: now, until: None, draws };
    }

    /// The step draws for a sequence whose mask is known.
    pub(super) fn draws(&self) {
        self.step.lock().draws = true;
    }

    /// How long the step waits from now on: zero when its time is over, and `None` without an end. Without an end, too, as long as it
    /// draws nothing, because the next step would have the same to do.
    pub(super) fn left(&self, now: Time) -> Option<Duration> {
        let Patience::AsLongAgain { least, most } = self.patience else { return None };
        let step = &mut *self.step.lock();
        let computed = now.since(step.begun).clamp(least, most);
        let until = *step.until.get_or_insert(now.after(computed));
        step.draws.then(|| until.since(now))
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
        time.left(at(now)).map(|left| left.as_millis())
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
    fn a_step_that_draws_nothing_waits_for_its_first_mask() {
        let time = StepTime::new(Patience::AsLongAgain { least: 2 * MILLISECOND, most: 20 * MILLISECOND });
        time.begins(at(0), false);
        assert_eq!([10, 500].map(|now| left(&time, now)), [None, None]);
        time.draws();
        assert_eq!(left(&time, 501), Some(0), "its time is over");
        time.begins(at(600), false);
        assert_eq!(left(&time, 605), None);
        time.draws();
        assert_eq!(left(&time, 606), Some(4));
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
