//! Cases about the hot calls of transfer backends: they neither allocate nor wait.

use host_plugin_api::Tag;

use super::transfer_pair::{NO_COMPLETION, Pair, no_notification};
use super::{Case, Outcome, Subject, hot};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-hot-allocations",
        role: Some("transfer"),
        capability: None,
        about: "submit, poll, notifications and settled allocate nothing",
        run: no_allocations,
    },
    Case {
        name: "transfer-hot-blocking",
        role: Some("transfer"),
        capability: None,
        about: "submit, poll, notifications and settled do not wait",
        run: no_waiting,
    },
];

const CALLS: [&str; 4] = ["submit", "poll", "notifications", "settled"];

/// Makes one of the calls, in the order of [`CALLS`].
fn calls(pair: &Pair) -> impl FnMut(u64, usize) -> i32 {
    let writes = [pair.write(0, 0, 4096), pair.write(4096, 8192, 100)];
    let (mut done, mut seen) = ([NO_COMPLETION; 8], [no_notification(); 8]);
    move |round, call| match call {
        0 => pair.sender.submit(&pair.submission(round), &writes),
        // The second poll often finds nothing. It must not wait then.
        1 => pair.sender.poll(&mut done).min(pair.sender.poll(&mut done)),
        2 => pair.receiver.notifications(&mut seen),
        _ => pair.sender.settled(Tag(round)),
    }
}

fn no_allocations(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    hot::allocate_nothing(subject, CALLS, calls(&pair))
}

fn no_waiting(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    hot::do_not_wait(CALLS, calls(&pair))
}
