//! Cases about fences: what a transfer backend proves when `disconnect` or `deregister` returns, or when `settled` answers 1.
//!
//! The kit calls each while bytes are in flight. Then it fills the memory with a pattern, which must stay.

use std::collections::BTreeSet;

use host_memory::SharedMemory;
use host_plugin_api::{ErrorCode, PeerId, Tag, Write, capability};

use super::bytes::{fill, peek, write_at};
use super::observe::{wait_for, wait_while_moving};
use super::transfer_pair::{BYTES, GENERATION, NO_COMPLETION, Pair, register};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-disconnect",
        role: Some("transfer"),
        capability: None,
        about: "after a disconnect, from either side, nothing of the peer lands, and what was submitted ends",
        run: disconnect,
    },
    Case {
        name: "transfer-deregister",
        role: Some("transfer"),
        capability: None,
        about: "after a deregister no write lands in the region, also of those on their way",
        run: deregister,
    },
    Case {
        name: "transfer-settled",
        role: Some("transfer"),
        capability: Some(capability::SETTLED),
        about: "settled answers 1 as soon as nothing of a submission is in flight any more, and not before",
        run: settled,
    },
];

/// How often each fence is tried.
const ROUNDS: u64 = 12;
/// Submissions in flight at a fence, where the backend takes so many.
const IN_FLIGHT: u64 = 8;
/// How often the kit looks for a first byte that has landed, before it calls a fence.
const LOOKS: u32 = 20_000;
/// The byte with which the kit fills memory after a fence. No submission carries it.
const GUARD: u8 = 0x5C;

/// The byte that the submissions of a round carry.
fn pattern(round: u64) -> u8 {
    0x80 | (round % 64) as u8
}

/// Where the submissions of a round write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    /// Each submission writes the whole target.
    All,
    /// Each submission writes a part of its own.
    Parts,
}

/// The writes of submission `number` of a round: all of its bytes in 8 pieces, or in one if the backend takes fewer than 8 writes.
fn writes(pair: &Pair, of: Of, number: u64) -> Vec<Write> {
    let (base, bytes) = match of {
        Of::All => (0, BYTES as u64),
        Of::Parts => (number * BYTES as u64 / IN_FLIGHT, BYTES as u64 / IN_FLIGHT),
    };
    let pieces = if pair.sender.limits().max_writes < 8 { 1 } else { 8 };
    let places = (0..pieces).map(|piece| base + piece * bytes / pieces);
    places.map(|place| pair.write(place, place, (bytes / pieces) as u32)).collect()
}

/// Starts the submissions of a round. Two rounds of four wait until the first byte has landed.
fn begin(pair: &Pair, round: u64, of: Of) -> Result<BTreeSet<u64>, Stop> {
    fill(&pair.target, 0);
    write_at(&pair.source, 0, &vec![pattern(round); BYTES]);
    let mut accepted = BTreeSet::new();
    for number in 0..IN_FLIGHT {
        let tag = 1 + round * IN_FLIGHT + number;
        match pair.sender.submit(&pair.submission(tag), &writes(pair, of, number)) {
            0 => accepted.insert(tag),
            code if code == ErrorCode::WOULD_BLOCK.0 && !accepted.is_empty() => break,
            code => {
                return Err(Stop::Fail(format!("submission {tag} was answered {:?}", ErrorCode(code))));
            }
        };
    }
    if round % 4 < 2 {
        let has_landed = || {
            let mut first = [0];
            peek(&pair.target, 0, &mut first);
            first[0] == pattern(round)
        };
        for _ in 0..LOOKS {
            if has_landed() {
                break;
            }
            std::thread::yield_now();
        }
    }
    Ok(accepted)
}

/// Waits until each of these has ended, once.
fn all_end(pair: &Pair, mut left: BTreeSet<u64>, after: &str) -> Outcome {
    while !left.is_empty() {
        let mut one = [NO_COMPLETION];
        let answer = wait_for(|| Some(pair.sender.poll(&mut one)).filter(|answer| *answer != 0));
        let Some(answer) = answer else {
            let (count, first) = (left.len(), left.first().copied().unwrap_or_default());
            return Err(Stop::Fail(format!(
                "after {after} {count} accepted submissions never ended, the first is {first}"
            )));
        };
        ensure!(answer == 1, "after {after} poll answered {:?}", ErrorCode(answer));
        let tag = one[0].tag.0;
        ensure!(left.remove(&tag), "after {after} submission {tag} ended twice, or was never accepted");
    }
    Ok(())
}

fn keeps_its_pattern(memory: &SharedMemory, after: &str) -> Outcome {
    let mut found = vec![0; BYTES];
    peek(memory, 0, &mut found);
    let wrong = found.iter().position(|byte| *byte != GUARD);
    ensure!(wrong.is_none(), "byte {} of the target was written after {after}", wrong.unwrap_or_default());
    Ok(())
}

/// Connects the sender to the receiver again.
fn reconnect(pair: &mut Pair, known: &mut BTreeSet<u32>) -> Outcome {
    pair.connect()?;
    let PeerId(id) = pair.peer;
    ensure!(known.insert(id), "connect gave a peer the id {id}, which another had before");
    Ok(())
}

fn disconnect(subject: &Subject) -> Outcome {
    let mut pair = Pair::open(subject)?;
    let mut known = BTreeSet::from([pair.peer.0]);
    let (mut unproven, mut why) = (0, String::new());
    for round in 0..ROUNDS {
        // The receiver fences the sender through a connection of its own.
        let endpoint = pair.sender.endpoint().map_err(|e| format!("endpoint of the sender answered {e}"))?;
        let back = pair.receiver.connect("sender", &endpoint);
        let back = back.map_err(|e| format!("connect from the receiver to the sender answered {e}"))?;
        let accepted = begin(&pair, round, Of::All)?;
        let by_receiver = round % 2 == 0;
        let (side, ended) = match by_receiver {
            true => ("the receiver's", pair.receiver.disconnect(back)),
            false => ("the sender's", pair.sender.disconnect(pair.peer)),
        };
        let after = format!("{side} disconnect");
        let proven = match ended {
            Ok(()) => {
                fill(&pair.target, GUARD);
                true
            }
            Err(error) if error.code == ErrorCode::TIMEOUT => {
                (unproven, why) = (unproven + 1, error.to_string());
                false
            }
            Err(error) => return Err(Stop::Fail(format!("{after} answered {error}"))),
        };
        if proven {
            let tag = 100_000 + round;
            if pair.sender.submit(&pair.submission(tag), &[pair.write(0, 0, 4096)]) == 0 {
                let mut left = accepted;
                left.insert(tag);
                all_end(&pair, left, &after)?;
            } else {
                all_end(&pair, accepted, &after)?;
            }
            keeps_its_pattern(&pair.target, &after)?;
        } else {
            all_end(&pair, accepted, &after)?;
        }
        // Ends the rest of the connection, if there is any.
        let _ended = match by_receiver {
            true => pair.sender.disconnect(pair.peer),
            false => pair.receiver.disconnect(back),
        };
        reconnect(&mut pair, &mut known)?;
        pair.transfer(200_000 + round, &[pair.write(0, 0, 4096)])?;
    }
    ensure!(unproven < ROUNDS, "of {ROUNDS} disconnects from a peer that answers none was proven: {why}");
    Ok(())
}

fn deregister(subject: &Subject) -> Outcome {
    let mut pair = Pair::open(subject)?;
    let (mut known, mut regions) = (BTreeSet::from([pair.peer.0]), BTreeSet::from([pair.to.0]));
    for round in 0..ROUNDS {
        let accepted = begin(&pair, round, Of::All)?;
        pair.receiver.deregister(pair.to).map_err(|e| format!("deregister answered {e}"))?;
        fill(&pair.target, GUARD);
        all_end(&pair, accepted, "a deregister")?;
        keeps_its_pattern(&pair.target, "a deregister")?;
        pair.to = register(&*pair.receiver, &pair.target, GENERATION)?;
        let id = pair.to.0;
        ensure!(regions.insert(id), "register gave the id {id}, which another region had before");
        // An endpoint has the regions that were registered before it was made, so the sender connects again.
        let _ended = pair.sender.disconnect(pair.peer);
        reconnect(&mut pair, &mut known)?;
        pair.transfer(200_000 + round, &[pair.write(0, 0, 4096)])?;
    }
    Ok(())
}

fn settled(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    for round in 0..ROUNDS * 2 {
        let accepted = begin(&pair, round, Of::Parts)?;
        if round % 3 == 2 {
            for tag in accepted.iter().rev().take(accepted.len() / 2) {
                // The cancel may come too late. That is an error and changes nothing.
                let _too_late = pair.sender.cancel(Tag(*tag));
            }
        }
        let mut left = accepted.clone();
        let mut wrong = None;
        // Runs until all of them are settled. It polls, because polling drives a backend.
        let all = wait_while_moving(|| {
            let answers: Vec<i32> = accepted.iter().map(|tag| pair.sender.settled(Tag(*tag))).collect();
            wrong = answers.iter().copied().find(|answer| !(0..=1).contains(answer));
            if wrong.is_some() || answers.iter().all(|answer| *answer == 1) {
                return (Some(()), 0);
            }
            let mut one = [NO_COMPLETION];
            if pair.sender.poll(&mut one) == 1 {
                left.remove(&one[0].tag.0);
            }
            (None, left.len())
        });
        ensure!(wrong.is_none(), "settled of a submission in flight answered {}", wrong.unwrap_or_default());
        ensure!(all.is_some(), "of {} submissions not all were ever settled", accepted.len());
        let (mut before, mut after) = (vec![0; BYTES], vec![0; BYTES]);
        peek(&pair.target, 0, &mut before);
        all_end(&pair, left, "all was settled")?;
        peek(&pair.target, 0, &mut after);
        let changed = before.iter().zip(&after).position(|(before, after)| before != after);
        ensure!(
            changed.is_none(),
            "settled answered 1 of all submissions, and byte {} of the target changed after that",
            changed.unwrap_or_default()
        );
    }
    Ok(())
}
