//! Cases about what a transfer backend must keep apart or in order: regions, peers, data before notifications, and its limits.

use std::collections::BTreeSet;

use host_memory::SharedMemory;
use host_plugin_api::{Completion, ErrorCode, NotificationKind, Tag, Write, capability};

use super::bytes::{peek, write_at};
use super::observe::wait_while_moving;
use super::transfer_pair::{BYTES, GENERATION, NO_COMPLETION, Pair, read, register};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-regions",
        role: Some("transfer"),
        capability: None,
        about: "regions and peers have ids of their own, and a write goes from the one region to the other",
        run: regions,
    },
    Case {
        name: "transfer-order",
        role: Some("transfer"),
        capability: Some(capability::ARRIVAL_NOTIFICATION),
        about: "a notification comes after all data of its submission, says ARRIVED, and is the sender's",
        run: order,
    },
    Case {
        name: "transfer-limits",
        role: Some("transfer"),
        capability: None,
        about: "as many writes and submissions as limits says are taken",
        run: limits,
    },
];

/// Rounds of the case about order: a backend that is wrong now and then is found.
const ROUNDS: u64 = 64;

fn memory(name: &str) -> Result<SharedMemory, Stop> {
    SharedMemory::new(name, BYTES).map_err(|error| Stop::Skip(format!("no memory: {error}")))
}

fn reconnect(pair: &mut Pair) -> Outcome {
    // The connection may be lost already.
    let _ended = pair.sender.disconnect(pair.peer);
    pair.connect()
}

fn regions(subject: &Subject) -> Outcome {
    let mut pair = Pair::open(subject)?;
    let (source, target) = (memory("source-2")?, memory("target-2")?);
    let from = register(&*pair.sender, &source, 2)?;
    // It has the same generation as the first region, so only the id distinguishes them.
    let to = register(&*pair.receiver, &target, GENERATION)?;
    ensure!(from != pair.from && to != pair.to, "two regions of one instance have the same id");
    // An endpoint has the regions that were registered before it was made, so the sender connects again.
    reconnect(&mut pair)?;
    write_at(&pair.source, 0, &[1; BYTES / 4]);
    write_at(&source, 0, &[2; BYTES / 4]);
    let mut expected = [read(&pair.target), read(&target)];
    let (mut tag, length) = (0, 5000);
    for (from_number, from) in [(1, pair.from), (2, from)] {
        for (to_number, to) in [pair.to, to].into_iter().enumerate() {
            tag += 1;
            let place = tag * 10_000;
            let write = Write { source_region: from, target_region: to, ..pair.write(0, place, length) };
            pair.transfer(tag, &[write])?;
            expected[to_number][place as usize..(place + u64::from(length)) as usize].fill(from_number);
        }
    }
    let found = [read(&pair.target), read(&target)];
    for number in 0..2 {
        let wrong =
            found[number].iter().zip(&expected[number]).position(|(found, expected)| found != expected);
        ensure!(
            wrong.is_none(),
            "of two regions on each side: byte {} of target region {} is {} instead of {}",
            wrong.unwrap_or_default(),
            number + 1,
            wrong.map_or(0, |at| found[number][at]),
            wrong.map_or(0, |at| expected[number][at])
        );
    }
    // One region is deregistered, the other one stays.
    pair.receiver
        .deregister(pair.to)
        .map_err(|e| format!("deregister of one of two regions answered {e}"))?;
    let write = [Write { target_region: to, ..pair.write(0, 0, length) }];
    // To be sure of the first region, a backend may cut its peers off. Then the peers connect again.
    if pair.sender.submit(&pair.submission(tag + 1), &write) != 0
        || pair.completion()?.is_none_or(|done| done.status < 0)
    {
        reconnect(&mut pair)?;
        let done = pair.transfer(tag + 2, &write);
        done.map_err(|error| format!("one of two regions was deregistered, and of the other: {error}"))?;
    }
    let other = subject.transfer("receiver-2")?;
    let _region = register(&*other, &target, GENERATION)?;
    let endpoint = other.endpoint().map_err(|e| format!("endpoint of another instance answered {e}"))?;
    let peer = pair.sender.connect("receiver-2", &endpoint);
    let peer = peer.map_err(|e| format!("connect to a second peer answered {e}"))?;
    ensure!(peer != pair.peer, "two peers have the same id");
    Ok(())
}

fn order(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let pieces = if pair.sender.limits().max_writes < 8 { 1 } else { 8 };
    let length = (BYTES / pieces) as u32;
    let places = (0..pieces as u64).map(|piece| piece * u64::from(length));
    let writes: Vec<Write> = places.map(|place| pair.write(place, place, length)).collect();
    for round in 1..=ROUNDS {
        write_at(&pair.source, 0, &vec![round as u8; BYTES]);
        let mut submission = pair.submission(round);
        submission.notification[..8].copy_from_slice(&round.to_le_bytes());
        submission.notification_length = 8;
        pair.submit(&submission, &writes)?;
        let seen = pair.notification()?;
        let seen = seen.ok_or_else(|| format!("no notification came of submission {round}"))?;
        let mut found = vec![0; BYTES];
        peek(&pair.target, 0, &mut found);
        let late = found.iter().position(|byte| *byte != round as u8);
        ensure!(
            late.is_none(),
            "notification {round} was there before all of its data: byte {} was not",
            late.unwrap_or_default()
        );
        ensure!(
            seen.kind == NotificationKind::ARRIVED,
            "the notification of a submission has kind {}, it should be ARRIVED",
            seen.kind.0
        );
        ensure!(
            seen.length == 8 && seen.payload[..8] == round.to_le_bytes(),
            "notification {round} carries other bytes than were sent"
        );
        let name = seen.peer_name.get(..seen.peer_name_length as usize);
        ensure!(name == Some(b"sender"), "notification {round} does not name its sender");
        let done = pair.completion()?;
        ensure!(
            done.is_some_and(|done| done.tag == Tag(round) && done.status == 0),
            "submission {round} ended in {done:?}"
        );
    }
    Ok(())
}

/// Limit of the values that are tried of a declared limit.
const MOST: u32 = 4096;

fn limits(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let limits = pair.sender.limits();
    let most = limits.max_writes.min(MOST);
    write_at(&pair.source, 0, &[7; BYTES]);
    let apart = BYTES as u64 / u64::from(most);
    let writes: Vec<Write> =
        (0..u64::from(most)).map(|number| pair.write(number * apart, number * apart, 16)).collect();
    pair.transfer(1, &writes).map_err(|error| format!("limits allows {most} writes and more: {error}"))?;
    let found = read(&pair.target);
    let wrong = writes.iter().position(|write| {
        let place = write.target_offset as usize;
        found[place..place + 16] != [7; 16]
    });
    ensure!(
        wrong.is_none(),
        "of a submission of {most} writes number {} is missing",
        wrong.unwrap_or_default()
    );
    // Nothing is in flight here. The submissions are not polled.
    let most = limits.max_submissions.min(MOST);
    let mut accepted = BTreeSet::new();
    for tag in 2..2 + u64::from(most) {
        match pair.sender.submit(&pair.submission(tag), &[pair.write(0, 0, 64)]) {
            0 => accepted.insert(tag),
            code => {
                let (code, before) = (ErrorCode(code), accepted.len());
                return Err(Stop::Fail(format!(
                    "limits allows {} submissions that are not yet polled, and after {before} submit answered {code:?}",
                    limits.max_submissions
                )));
            }
        };
    }
    let mut done = [NO_COMPLETION; 64];
    let mut wrong: Option<Completion> = None;
    let all = wait_while_moving(|| {
        let count = usize::try_from(pair.sender.poll(&mut done)).unwrap_or(0);
        for completion in &done[..count] {
            if completion.status != 0 || !accepted.remove(&completion.tag.0) {
                wrong = Some(*completion);
            }
        }
        ((accepted.is_empty() || wrong.is_some()).then_some(()), accepted.len())
    });
    ensure!(wrong.is_none(), "of {most} submissions at once one ended in {wrong:?}");
    ensure!(all.is_some(), "of {most} submissions at once {} never ended", accepted.len());
    Ok(())
}
