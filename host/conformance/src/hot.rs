//! Checks that hot calls neither allocate nor wait, measured call by call.

use host_plugin_api::ErrorCode;

use super::observe::waits;
use super::{Outcome, Stop, Subject, allocations, ensure};

/// Rounds before counting starts. They set up what is set up only once.
const WARM_UP: u64 = 32;
/// Rounds that are measured.
pub const ROUNDS: u64 = 200;
/// How often a measurement is repeated while it finds something.
const PASSES: u64 = 3;

/// Makes the calls named `calls`, round after round. `make` gets the number of the round, counted from `first` + 1, and the index
/// of the call, and returns the call's answer.
///
/// Returns for each call how much `measure` grew in it, over all rounds after the warm-up.
fn rounds<const CALLS: usize>(
    calls: [&str; CALLS],
    first: u64,
    measure: impl Fn() -> u64,
    mut make: impl FnMut(u64, usize) -> i32,
) -> Result<[u64; CALLS], Stop> {
    let mut sums = [0; CALLS];
    for round in first + 1..=first + WARM_UP + ROUNDS {
        for (place, (call, sum)) in calls.iter().zip(&mut sums).enumerate() {
            let before = measure();
            let code = make(round, place);
            let after = measure();
            let fine = code >= 0 || code == ErrorCode::WOULD_BLOCK.0 || code == ErrorCode::UNSUPPORTED.0;
            ensure!(fine, "{call} answered {:?} in round {round}", ErrorCode(code));
            if round > first + WARM_UP {
                *sum += after - before;
            }
        }
        std::thread::yield_now();
    }
    Ok(sums)
}

/// Runs [`rounds`], and repeats them while one of the sums is more than `most`. An effect that happens only once is not found
/// again.
fn found_again<const CALLS: usize>(
    calls: [&str; CALLS],
    most: u64,
    measure: impl Fn() -> u64,
    mut make: impl FnMut(u64, usize) -> i32,
) -> Result<[u64; CALLS], Stop> {
    let mut sums = [0; CALLS];
    for pass in 0..PASSES {
        sums = rounds(calls, pass * (WARM_UP + ROUNDS), &measure, &mut make)?;
        if sums.iter().all(|sum| *sum <= most) {
            break;
        }
    }
    Ok(sums)
}

/// That none of the calls allocates.
pub fn allocate_nothing<const CALLS: usize>(
    subject: &Subject,
    calls: [&str; CALLS],
    make: impl FnMut(u64, usize) -> i32,
) -> Outcome {
    let cannot = |text| Stop::Skip(format!("allocations cannot be counted: {text}"));
    allocations::watch(&subject.entry.path).map_err(cannot)?;
    // A lock sets up a queue the first time that another thread holds it. That allocates once.
    let sums = found_again(calls, 0, allocations::count, make)?;
    for (call, sum) in calls.iter().zip(sums) {
        ensure!(sum == 0, "{ROUNDS} calls of {call} allocated {sum} times");
    }
    Ok(())
}

/// That none of the calls waits.
pub fn do_not_wait<const CALLS: usize>(calls: [&str; CALLS], make: impl FnMut(u64, usize) -> i32) -> Outcome {
    // A call sometimes meets a lock that a thread of the plugin holds for an instant, and more often while that thread does not
    // run.
    let most = ROUNDS / 4;
    for (call, sum) in calls.iter().zip(found_again(calls, most, waits, make)?) {
        ensure!(sum <= most, "in {ROUNDS} rounds {call} gave up the processor {sum} times to wait");
    }
    Ok(())
}
