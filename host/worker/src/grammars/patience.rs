//! How long a step waits for the masks of its sequences.

use std::time::Duration;

use host_core::{Config, Time};
use parking_lot::Mutex;

use crate::clock::Clock;

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
    /// Of workers that go on with answers: grammars make the time between two tokens of others at most 20 ms longer.
    pub const DECODE: Self =
        Self::AsLongAgain { least: Duration::from_millis(2), most: Duration::from_millis(20) };

    /// Of a worker. One that sends pages waits, since it may have sent what it would compute again, and one whose model keeps a state
    /// because it cannot compute a token again.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let keeps_state = config.window.is_some_and(|window| window.keeps_state());
        if config.role.sends_kv() || keeps_state { Self::All } else { Self::DECODE }
    }

    /// After a step that took so long to compute. `None` without an end.
    fn after(self, computed: Duration) -> Option<Duration> {
        match self {
            Self::All => None,
            Self::AsLongAgain { least, most } => Some(computed.clamp(least, most)),
        }
    }
}

/// The time of a worker's steps, one after the other.
#[derive(Debug)]
pub(super) struct StepTime {
    patience: Patience,
    clock: Clock,
    step: Mutex<Step>,
}

#[derive(Debug)]
enum Step {
    /// It has been computed since then.
    Computed(Time),
    /// It draws, and waits until then.
    Draws(Option<Time>),
}

impl StepTime {
    pub(super) fn new(patience: Patience) -> Self {
        let clock = Clock::start();
        Self { patience, clock, step: Mutex::new(Step::Computed(clock.now())) }
    }

    /// A step begins.
    pub(super) fn begins(&self) {
        *self.step.lock() = Step::Computed(self.clock.now());
    }

    /// How long the step that draws waits from now on: zero when its time is over, and `None` without an end. Its time begins with the
    /// first question.
    pub(super) fn left(&self) -> Option<Duration> {
        let now = self.clock.now();
        let mut step = self.step.lock();
        if let Step::Computed(since) = *step {
            *step = Step::Draws(self.patience.after(now.since(since)).map(|wait| now.after(wait)));
        }
        match *step {
            Step::Draws(until) => until.map(|until| until.since(now)),
            Step::Computed(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_waits_as_long_again_as_it_took_within_bounds() {
        let milliseconds = Duration::from_millis;
        let patience = Patience::AsLongAgain { least: milliseconds(2), most: milliseconds(20) };
        let wait = |computed| patience.after(milliseconds(computed));
        assert_eq!([0, 7, 90].map(wait), [2, 7, 20].map(|wait| Some(milliseconds(wait))));
        assert_eq!(Patience::All.after(milliseconds(7)), None);
    }

    #[test]
    fn the_time_of_a_step_ends_once_and_that_of_the_next_is_its_own() {
        let time = StepTime::new(Patience::AsLongAgain { least: Duration::ZERO, most: Duration::ZERO });
        time.begins();
        assert_eq!([time.left(), time.left()], [Some(Duration::ZERO); 2]);
        let hour = Duration::from_secs(3600);
        let time = StepTime::new(Patience::AsLongAgain { least: hour, most: hour });
        time.begins();
        let (first, second) = (time.left().unwrap(), time.left().unwrap());
        assert!(second <= first && first <= hour, "{first:?}, {second:?}");
        time.begins();
        assert!(time.left().unwrap() <= hour);
        let time = StepTime::new(Patience::All);
        time.begins();
        assert_eq!(time.left(), None);
    }
}
