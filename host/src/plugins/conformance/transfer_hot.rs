//! Cases about the hot calls of transfer backends: they neither allocate nor wait.

use host_plugin_api::{ErrorCode, Tag};

use super::observe::waits;
use super::transfer_pair::{NO_COMPLETION, Pair, no_notification};
use super::{Case, Outcome, Stop, Subject, allocations, ensure};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-hot-allocations",
        role: Some("transfer"),
        about: "submit, poll, notifications and settled allocate nothing",
        run: no_allocations,
    },
    Case {
        name: "transfer-hot-blocking",
        role: Some("transfer"),
        about: "submit, poll, notifications and settled do not wait",
        run: no_waiting,
    },
];

/// Rounds before counting starts, in which whatever is set up once is set up.
const WARM_UP: u64 = 32;
const ROUNDS: u64 = 200;
const CALLS: [&str; 4] = ["submit", "poll", "notifications", "settled"];

/// Makes the hot calls round after round; `measure` is read before and after each, and its growth summed per call.
fn rounds(pair: &Pair, measure: impl Fn() -> u64) -> Result<[u64; 4], Stop> {
    let writes = [pair.write(0, 0, 4096), pair.write(4096, 8192, 100)];
    let (mut done, mut seen) = ([NO_COMPLETION; 8], [no_notification(); 8]);
    let mut sums = [0; 4];
    for round in 1..=WARM_UP + ROUNDS {
        let submission = pair.submission(round);
        let mut at = [measure(); 5];
        let submitted = pair.sender.submit(&submission, &writes);
        at[1] = measure();
        // The second often finds nothing, which must not make it wait.
        let polled = pair.sender.poll(&mut done).min(pair.sender.poll(&mut done));
        at[2] = measure();
        let notified = pair.receiver.notifications(&mut seen);
        at[3] = measure();
        let settled = pair.sender.settled(Tag(round));
        at[4] = measure();
        for (call, code) in CALLS.iter().zip([submitted, polled, notified, settled]) {
            let fine = code >= 0 || code == ErrorCode::WOULD_BLOCK.0 || code == ErrorCode::UNSUPPORTED.0;
            ensure!(fine, "{call} answered {:?} in round {round}", ErrorCode(code));
        }
        if round > WARM_UP {
            for (sum, pair) in sums.iter_mut().zip(at.windows(2)) {
                *sum += pair[1] - pair[0];
            }
        }
        std::thread::yield_now();
    }
    Ok(sums)
}

fn no_allocations(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let cannot = |text| Stop::Skip(format!("allocations cannot be counted: {text}"));
    allocations::watch(&subject.entry.path).map_err(cannot)?;
    for (call, sum) in CALLS.iter().zip(rounds(&pair, allocations::count)?) {
        ensure!(sum == 0, "{ROUNDS} calls of {call} allocated {sum} times");
    }
    Ok(())
}

fn no_waiting(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    for (call, sum) in CALLS.iter().zip(rounds(&pair, waits)?) {
        // A lock that a thread of the plugin holds for an instant is met now and then.
        ensure!(sum < ROUNDS / 4, "in {ROUNDS} rounds {call} gave up the processor {sum} times to wait");
    }
    Ok(())
}
