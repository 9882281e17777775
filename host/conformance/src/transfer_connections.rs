//! Cases about leftovers of connections and submissions: their ids must become unknown, and no descriptors may stay.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::collections::BTreeSet;
use std::time::Instant;

use host_plugin_api::{ErrorCode, PeerId, Submission, capability};

use super::bytes::{fill, peek};
use super::observe::{ENOUGH, descriptors, wait_for};
use super::transfer_pair::{Pair, no_notification};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-reconnect",
        role: Some("transfer"),
        capability: None,
        about: "connecting again under the same name replaces a connection that was lost, whose id is then unknown",
        run: reconnect,
    },
    Case {
        name: "transfer-descriptors",
        role: Some("transfer"),
        capability: None,
        about: "connections that were ended and submissions that completed leave no descriptor behind",
        run: leaves_no_descriptor,
    },
];

/// Connections that are lost.
const LOST: u64 = 4;
/// Number of connections, or submissions, that may each leave a descriptor behind.
const MADE: u64 = 50;
/// How often `MADE` of them are made. Descriptors that a library keeps stop growing, leftovers do not.
const TIMES: u64 = 3;

/// Ends the connection from the receiver's side. The sender loses it then.
fn lose(pair: &Pair) -> Outcome {
    let endpoint = pair.sender.endpoint().map_err(|e| format!("endpoint of the sender answered {e}"))?;
    let back = pair.receiver.connect("sender", &endpoint);
    let back = back.map_err(|e| format!("connect from the receiver to the sender answered {e}"))?;
    match pair.receiver.disconnect(back) {
        Ok(()) => Ok(()),
        Err(error) if error.code == ErrorCode::TIMEOUT => {
            Err(Stop::Skip(format!("no connection is known to be lost: disconnect answered {error}")))
        }
        Err(error) => Err(Stop::Fail(format!("the receiver's disconnect answered {error}"))),
    }
}

/// Ensures that a submission to this peer is refused, or ends with an error.
fn fails(pair: &Pair, peer: PeerId, tag: u64, what: &str) -> Outcome {
    let submission = Submission { peer, ..pair.submission(tag) };
    if pair.sender.submit(&submission, &[pair.write(0, 0, 4096)]) == 0 {
        let done = pair.completion()?;
        let done = done.ok_or_else(|| format!("a submission to {what} was accepted and never completed"))?;
        ensure!(done.status < 0, "a submission to {what} completed as if it had worked");
    }
    Ok(())
}

fn reconnect(subject: &Subject) -> Outcome {
    let mut pair = Pair::open(subject)?;
    let mut known = BTreeSet::from([pair.peer.0]);
    pair.transfer(1, &[pair.write(0, 0, 4096)])?;
    for round in 1..=LOST {
        let (old, tag) = (pair.peer, round * 10);
        lose(&pair)?;
        // Then the sender knows of the loss, too.
        fails(&pair, old, tag, "a peer that has ended the connection")?;
        pair.connect()?;
        let PeerId(id) = pair.peer;
        ensure!(
            known.insert(id),
            "connect under the name of a connection that was lost answered the id {id}, which a connection had before: \
             it should be a new one"
        );
        fill(&pair.source, round as u8);
        fill(&pair.target, 0);
        fails(&pair, old, tag + 1, "the id of a connection that was replaced")?;
        let mut found = [0; 4096];
        peek(&pair.target, 0, &mut found);
        ensure!(found == [0; 4096], "a write to the id of a connection that was replaced landed");
        ensure!(
            pair.sender.disconnect(old).is_err(),
            "disconnect of the id {} of a connection that was replaced answers 0, it should be an error",
            old.0
        );
        let done = pair.transfer(tag + 2, &[pair.write(0, 0, 4096)]);
        done.map_err(|error| format!("over a connection that replaced one: {error}"))?;
        peek(&pair.target, 0, &mut found);
        ensure!(found == [round as u8; 4096], "a write over a connection that replaced one did not arrive");
    }
    Ok(())
}

fn leaves_no_descriptor(subject: &Subject) -> Outcome {
    let mut pair = Pair::open(subject)?;
    let notifies = subject.declares("transfer", capability::ARRIVAL_NOTIFICATION);
    let mut tag = 0;
    let mut one = |pair: &Pair| {
        tag += 1;
        let submission = if notifies { pair.notifying(tag) } else { pair.submission(tag) };
        pair.complete(&submission, &[pair.write(0, 0, 4096)])?;
        let mut seen = [no_notification(); 8];
        while pair.receiver.notifications(&mut seen) > 0 {}
        Ok(())
    };
    // The first may set up what the backend keeps.
    one(&pair)?;
    leave_none("submissions that completed", || one(&pair))?;
    leave_none("connections that were ended", || {
        match pair.sender.disconnect(pair.peer) {
            Ok(()) => {}
            Err(error) if error.code == ErrorCode::TIMEOUT => {
                return Err(Stop::Skip(format!("a connection cannot be ended: disconnect answered {error}")));
            }
            Err(error) => return Err(Stop::Fail(format!("disconnect answered {error}"))),
        }
        pair.connect()?;
        one(&pair)
    })
}

/// Calls `make` `MADE` times, fewer if that takes too long, and looks for descriptors that stay open. Fails if that leaves some
/// each of `TIMES` times.
fn leave_none(what: &str, mut make: impl FnMut() -> Outcome) -> Outcome {
    make()?;
    let mut last = String::new();
    for _ in 0..TIMES {
        let (before, start, mut made) = (descriptors(), Instant::now(), 0);
        while made == 0 || (made < MADE && start.elapsed() < ENOUGH) {
            make()?;
            made += 1;
        }
        // The other side may close its descriptors later.
        if wait_for(|| (descriptors() <= before).then_some(())).is_some() {
            return Ok(());
        }
        let left = descriptors().saturating_sub(before);
        last = format!("{made} {what} left {left} descriptors behind, and those before them left some, too");
    }
    Err(Stop::Fail(last))
}
