//! What hot calls must not do, measured call by call.

use host_plugin_api::ErrorCode;

use super::observe::waits;
use super::{Outcome, Stop, Subject, allocations, ensure};

/// Rounds before counting starts, in which whatever is set up once is set up.
const WARM_UP: u64 = 32;
/// Rounds that are measured.
pub const ROUNDS: u64 = 200;
/// Times that allocations are looked for, as long as there are some.
const PASSES: u64 = 3;

/// Makes the calls named `calls` round after round. `make` is given the round's number, after `first`, and the call's place,
/// and returns what the call answered.
///
/// Returns how much `measure` grew in each of the calls, over all rounds that count.
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

/// That none of the calls allocates.
pub fn allocate_nothing<const CALLS: usize>(
    subject: &Subject,
    calls: [&str; CALLS],
    mut make: impl FnMut(u64, usize) -> i32,
) -> Outcome {
    let cannot = |text| Stop::Skip(format!("allocations cannot be counted: {text}"));
    allocations::watch(&subject.entry.path).map_err(cannot)?;
    let mut sums = rounds(calls, 0, allocations::count, &mut make)?;
    // A lock that is held by another thread for the first time sets up a queue, once, whenever that is. What allocates again is
    // no such thing.
    for again in 1..PASSES {
        if sums.iter().all(|sum| *sum == 0) {
            break;
        }
        sums = rounds(calls, again * (WARM_UP + ROUNDS), allocations::count, &mut make)?;
    }
    for (call, sum) in calls.iter().zip(sums) {
        ensure!(sum == 0, "{ROUNDS} calls of {call} allocated {sum} times");
    }
    Ok(())
}

/// That none of the calls waits.
pub fn do_not_wait<const CALLS: usize>(calls: [&str; CALLS], make: impl FnMut(u64, usize) -> i32) -> Outcome {
    for (call, sum) in calls.iter().zip(rounds(calls, 0, waits, make)?) {
        // A lock that a thread of the plugin holds for an instant is met now and then.
        ensure!(sum < ROUNDS / 4, "in {ROUNDS} rounds {call} gave up the processor {sum} times to wait");
    }
    Ok(())
}
