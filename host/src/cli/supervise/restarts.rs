//! Decides when a child that ended is started again. The caller passes the time, and nothing here waits.

use std::time::Duration;

use tokio::time::Instant;

/// Number of consecutive lives that may fail before the child is ready. After one more, the child is given up.
const FAILURES: u32 = 5;
/// First wait before a restart. It doubles with each short life.
pub(super) const FIRST_WAIT: Duration = Duration::from_millis(200);
/// Number of doublings: up to 6.4 s. Requests wait 30 s for a worker, and it must also start in this time.
const DOUBLINGS: u32 = 5;
/// Failures older than this do not count.
const FORGOTTEN: Duration = Duration::from_secs(600);
/// A child that was ready for so long is started again without a longer wait.
const STEADY: Duration = Duration::from_secs(10);

/// The way in which a life of a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// It drained and ended, as it was told.
    Drained,
    /// It reported that its configuration cannot work.
    Refused,
    /// Any other end, or it could not be started.
    Failed,
}

/// The next step after an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Start it again after this wait.
    Again(Duration),
    /// Give it up, because this many consecutive lives failed before the child was ready.
    GiveUp(u32),
    /// Give it up, because its configuration has never worked.
    Refused,
}

/// The lives of one child.
#[derive(Debug, Default)]
pub(super) struct Restarts {
    /// Whether the configuration has worked once. Then it is right, although something that it names, such as a file system, may be
    /// away for a while.
    accepted: bool,
    /// Time at which the child became ready in this life.
    ready: Option<Instant>,
    /// Lives in a row that failed before the child was ready.
    failures: u32,
    /// Time at which the last of them ended.
    failed: Option<Instant>,
    /// Number of consecutive lives in which it was ready for less than [`STEADY`].
    short: u32,
    /// Number of consecutive lives that ended with a refusal.
    refusals: u32,
}

impl Restarts {
    /// The child is ready.
    pub fn is_ready(&mut self, now: Instant) {
        self.ready.get_or_insert(now);
    }

    /// Notes that the child has ended, and decides what to do.
    pub fn ended(&mut self, end: End, now: Instant) -> Next {
        let ready = self.ready.take();
        if let Some(since) = ready {
            self.accepted = true;
            self.failures = 0;
            if now.saturating_duration_since(since) >= STEADY {
                self.short = 0;
            }
        }
        if end == End::Refused && !self.accepted {
            return Next::Refused;
        }
        if end == End::Refused {
            return Next::Again(next(&mut self.refusals));
        }
        self.accepted = true;
        self.refusals = 0;
        if end == End::Drained {
            self.failures = 0;
            // An operator has drained it and waits for its restart.
            if ready.is_some() {
                return Next::Again(FIRST_WAIT);
            }
        } else if ready.is_none() {
            if self.failed.replace(now).is_some_and(|last| now.saturating_duration_since(last) >= FORGOTTEN) {
                self.failures = 0;
            }
            self.failures += 1;
            if self.failures > FAILURES {
                return Next::GiveUp(self.failures);
            }
        }
        Next::Again(next(&mut self.short))
    }
}

/// The wait after `row` consecutive lives. Counts one more.
fn next(row: &mut u32) -> Duration {
    let wait = FIRST_WAIT * (1 << (*row).min(DOUBLINGS));
    *row = row.saturating_add(1);
    wait
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child with its own clock.
    struct Child {
        restarts: Restarts,
        now: Instant,
    }

    impl Child {
        fn new() -> Self {
            Self { restarts: Restarts::default(), now: Instant::now() }
        }

        /// Runs a life that is ready for this long, or never.
        fn lives(&mut self, ready_for: Option<Duration>, end: End) -> Next {
            if let Some(ready_for) = ready_for {
                self.restarts.is_ready(self.now);
                self.now += ready_for;
            }
            self.restarts.ended(end, self.now)
        }
    }

    fn millis(wait: u64) -> Next {
        Next::Again(Duration::from_millis(wait))
    }

    const MOMENT: Option<Duration> = Some(Duration::from_millis(1));

    #[test]
    fn a_child_that_is_never_ready_is_given_up_after_six_lives() {
        let mut child = Child::new();
        for wait in [200, 400, 800, 1600, 3200] {
            child.now += FORGOTTEN - Duration::from_millis(1);
            assert_eq!(child.lives(None, End::Failed), millis(wait));
        }
        assert_eq!(child.lives(None, End::Failed), Next::GiveUp(6));
    }

    #[test]
    fn failures_that_are_old_count_no_more() {
        let mut child = Child::new();
        for _ in 0..20 {
            child.now += FORGOTTEN;
            assert!(matches!(child.lives(None, End::Failed), Next::Again(_)));
        }
    }

    #[test]
    fn one_that_was_ready_is_never_given_up_and_waits_longer_and_longer_up_to_a_bound() {
        let mut child = Child::new();
        let waits: Vec<_> = (0..1000).map(|_| child.lives(MOMENT, End::Failed)).collect();
        assert_eq!(waits[..7], [200, 400, 800, 1600, 3200, 6400, 6400].map(millis));
        assert!(waits[7..].iter().all(|wait| *wait == millis(6400)));
    }

    #[test]
    fn a_life_that_was_ready_starts_the_count_of_failures_anew() {
        let mut child = Child::new();
        for _ in 0..3 {
            for _ in 0..5 {
                assert!(matches!(child.lives(None, End::Failed), Next::Again(_)));
            }
            assert!(matches!(child.lives(MOMENT, End::Failed), Next::Again(_)));
        }
        for _ in 0..5 {
            assert!(matches!(child.lives(None, End::Failed), Next::Again(_)));
        }
        assert_eq!(child.lives(None, End::Failed), Next::GiveUp(6));
    }

    #[test]
    fn a_steady_life_starts_the_waits_anew() {
        let mut child = Child::new();
        for wait in [200, 400, 800] {
            assert_eq!(child.lives(MOMENT, End::Failed), millis(wait));
        }
        assert_eq!(child.lives(Some(STEADY - Duration::from_millis(1)), End::Failed), millis(1600));
        assert_eq!(child.lives(Some(STEADY), End::Failed), millis(200));
        assert_eq!(child.lives(MOMENT, End::Failed), millis(400));
    }

    #[test]
    fn a_configuration_that_never_worked_ends_at_once_and_one_that_did_is_tried_until_it_does() {
        assert_eq!(Child::new().lives(None, End::Refused), Next::Refused);
        for (ready_for, end) in [(MOMENT, End::Refused), (None, End::Failed), (None, End::Drained)] {
            let mut child = Child::new();
            assert!(matches!(child.lives(ready_for, end), Next::Again(_)));
            for _ in 0..100 {
                assert!(matches!(child.lives(None, End::Refused), Next::Again(_)), "{end:?}");
            }
        }
        // Refusals do not count as failures.
        let mut child = Child::new();
        assert_eq!(child.lives(None, End::Failed), millis(200));
        for wait in [200, 400, 800] {
            assert_eq!(child.lives(None, End::Refused), millis(wait));
        }
        for wait in [400, 800, 1600, 3200] {
            assert_eq!(child.lives(None, End::Failed), millis(wait));
        }
        assert_eq!(child.lives(None, End::Failed), Next::GiveUp(6));
    }

    #[test]
    fn one_that_drained_comes_back_soon() {
        let mut child = Child::new();
        for _ in 0..10 {
            assert_eq!(child.lives(MOMENT, End::Drained), millis(200));
        }
        // A child that repeatedly ends by itself before it is ready is started with growing waits.
        for wait in [200, 400, 800] {
            assert_eq!(child.lives(None, End::Drained), millis(wait));
        }
    }
}
