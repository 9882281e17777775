//! Cases about `event_fd`, the descriptor that is readable when completions or notifications wait.

use std::os::fd::BorrowedFd;

use host_plugin_api::Tag;
use host_plugin_api::tier::TierCompletion;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::observe::wait_for;
use super::tier_world::World;
use super::transfer_pair::{NO_COMPLETION, Pair, no_notification};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-event-fd",
        role: Some("transfer"),
        capability: None,
        about: "the descriptor is readable while completions or notifications wait, and quiet when none does",
        run: transfer,
    },
    Case {
        name: "tier-event-fd",
        role: Some("tier"),
        capability: None,
        about: "the descriptor is readable while completions wait, and quiet when none does",
        run: tier,
    },
];

/// Rounds of waiting and draining. A level-triggered descriptor works in each of them.
const ROUNDS: u64 = 8;

/// Whether the descriptor is readable now.
fn readable(fd: i32) -> Result<bool, Stop> {
    // SAFETY: the plugin keeps its descriptor open while the instance lives, and the caller holds the instance.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let ready = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec::default()));
    let ready = ready.map_err(|error| Stop::Fail(format!("the descriptor cannot be waited for: {error}")))?;
    Ok(ready > 0)
}

/// Waits until the descriptor is readable or not, as `wanted` says. Calls `drain` meanwhile.
fn becomes(fd: i32, wanted: bool, mut drain: impl FnMut()) -> Result<bool, Stop> {
    let seen = wait_for(|| {
        drain();
        readable(fd).map(|now| (now == wanted).then_some(())).transpose()
    });
    seen.transpose().map(|seen| seen.is_some())
}

fn offered(fd: i32) -> Result<i32, Stop> {
    let none = || {
        Stop::Skip("event_fd answers -1: the plugin offers no descriptor, and is asked instead".to_owned())
    };
    (fd >= 0).then_some(fd).ok_or_else(none)
}

fn transfer(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let (ours, theirs) = (offered(pair.sender.event_fd())?, offered(pair.receiver.event_fd())?);
    let mut submission = pair.submission(0);
    submission.notification_length = 8;
    for round in 1..=ROUNDS {
        submission.tag = Tag(round);
        pair.submit(&submission, &[pair.write(0, 0, 4096)])?;
        // Neither is polled meanwhile: a host that waits for the descriptor does not poll.
        ensure!(
            becomes(ours, true, || {})?,
            "submission {round} ended, and the sender's descriptor stays quiet"
        );
        ensure!(
            becomes(theirs, true, || {})?,
            "notification {round} waits, and the receiver's descriptor stays quiet"
        );
        let (mut done, mut seen) = ([NO_COMPLETION; 8], [no_notification(); 8]);
        let mut drain = || {
            let _ended = (pair.sender.poll(&mut done), pair.sender.notifications(&mut seen));
            let _ended = (pair.receiver.poll(&mut done), pair.receiver.notifications(&mut seen));
        };
        ensure!(
            becomes(ours, false, &mut drain)? && becomes(theirs, false, &mut drain)?,
            "nothing waits any more after round {round}, and a descriptor stays readable"
        );
    }
    Ok(())
}

fn tier(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let fd = offered(world.tier.event_fd())?;
    let keys = world.keys(world.batch.min(2));
    for round in 1..=ROUNDS {
        world.start("exists", || world.tier.exists(Tag(round), &keys))?;
        ensure!(becomes(fd, true, || {})?, "batch {round} ended, and the descriptor stays quiet");
        let mut done = [TierCompletion::default(); 8];
        let quiet = becomes(fd, false, || {
            let _ended = world.tier.poll(&mut done);
        })?;
        ensure!(quiet, "nothing waits any more after batch {round}, and the descriptor stays readable");
    }
    Ok(())
}
