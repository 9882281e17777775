//! How the models are run.

use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::{Config, FailurePersistence, Runner};

/// Schedules of each kind for a model. `SHUTTLE_ITERATIONS` sets another number, as `cargo xtask nightly shuttle` does.
const SCHEDULES: usize = 1_000;

/// Most changes of priority in a schedule of probabilistic concurrency testing.
const DEPTH: usize = 3;

/// Runs a model under schedules that are drawn evenly, and under schedules with few switches (probabilistic concurrency testing).
/// A failure prints its schedule, which `shuttle::replay` repeats.
pub fn many_schedules(model: impl Fn() + Send + Sync + Copy + 'static) {
    let schedules = std::env::var("SHUTTLE_ITERATIONS").ok().and_then(|text| text.parse().ok());
    let schedules = schedules.unwrap_or(SCHEDULES);
    let mut config = Config::default();
    config.failure_persistence = FailurePersistence::Print;
    Runner::new(RandomScheduler::new(schedules), config.clone()).run(model);
    Runner::new(PctScheduler::new(DEPTH, schedules), config).run(model);
}
