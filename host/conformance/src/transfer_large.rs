//! Cases about writes as long as pages, and longer: their bytes land in the right place, before the submission completes.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::time::Instant;

use host_plugin_api::{ErrorCode, Tag, Write};

use super::bytes::{peek, read_at, write_at};
use super::observe::{ENOUGH, wait_for};
use super::random::{SEED, seeded};
use super::transfer_pair::{NO_COMPLETION, Pair, read};
use super::{Case, Outcome, Subject, ensure};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-large",
        role: Some("transfer"),
        capability: None,
        about: "every byte of writes of up to 4 MiB arrives at its place",
        run: large,
    },
    Case {
        name: "transfer-landed",
        role: Some("transfer"),
        capability: None,
        about: "all bytes of a submission are in the target at the moment of its completion",
        run: landed,
    },
];

const MIB: u32 = 1 << 20;
/// Bytes of each side's region.
const ROOM: usize = 8 << 20;
/// The target is checked when each of these submissions completes: their number and their bytes. Bytes that are missing for
/// microseconds show in some of them only.
const LOOKS: [(u64, u32); 2] = [(96, 4 * MIB), (160, MIB)];
/// Number of submissions that are checked even if the backend is so slow that all would take too long.
const LEAST: u64 = 16;
/// Polls between two readings of the clock, so that a completion is seen as soon as it is there.
const QUESTIONS: u32 = 256;

fn large(subject: &Subject) -> Outcome {
    let pair = Pair::open_with(subject, ROOM)?;
    let mut source = vec![0; ROOM];
    seeded().fill(&mut source);
    write_at(&pair.source, 0, &source);
    let mut expected = read(&pair.target);
    let page = |number: u64| number * u64::from(MIB);
    let mut submissions: Vec<Vec<Write>> = [(192 << 10) + 1, MIB, MIB + 4097, 4 * MIB]
        .into_iter()
        .map(|length| vec![pair.write(u64::from(length % 1000) + 13, 77, length)])
        .collect();
    if pair.sender.limits().max_writes >= 4 {
        // Pages, each to another place than its own.
        submissions.push((0..4).map(|number| pair.write(page(number), page(7 - number), MIB)).collect());
    }
    for (tag, writes) in (1..).zip(&submissions) {
        pair.transfer(tag, writes)?;
        for write in writes {
            let (from, to, length) =
                (write.source_offset as usize, write.target_offset as usize, write.length as usize);
            expected[to..to + length].copy_from_slice(&source[from..from + length]);
        }
        let found = read(&pair.target);
        if found == expected {
            continue;
        }
        for write in writes {
            let (to, length) = (write.target_offset as usize, write.length as usize);
            let wrong = (to..to + length).find(|at| found[*at] != expected[*at]);
            ensure!(
                wrong.is_none(),
                "byte {} of a write of {length} bytes is {} instead of {} (seed {SEED})",
                wrong.map_or(0, |at| at - to),
                wrong.map_or(0, |at| found[at]),
                wrong.map_or(0, |at| expected[at])
            );
        }
        ensure!(false, "a write of {} bytes changed the target beside it", writes[0].length);
    }
    Ok(())
}

fn landed(subject: &Subject) -> Outcome {
    let pair = Pair::open_with(subject, ROOM)?;
    let several = pair.sender.limits().max_writes >= 4;
    let sizes = LOOKS.into_iter().flat_map(|(count, bytes)| (0..count).map(move |_| bytes));
    let start = Instant::now();
    for (round, bytes) in (1..).zip(sizes) {
        if round > LEAST && start.elapsed() > ENOUGH {
            break;
        }
        let pattern = (round % 255) as u8 + 1;
        // Either four pages or one write of the same length.
        let length = if several && round % 2 == 0 { bytes / 4 } else { bytes };
        let writes: Vec<Write> = (0..u64::from(bytes / length))
            .map(|number| number * u64::from(length))
            .map(|place| pair.write(place, place, length))
            .collect();
        write_at(&pair.source, 0, &vec![pattern; bytes as usize]);
        pair.submit(&pair.submission(round), &writes)?;
        let mut one = [NO_COMPLETION];
        let ask = || (0..QUESTIONS).map(|_| pair.sender.poll(&mut one)).find(|answer| *answer != 0);
        let answer = wait_for(ask);
        // Reads the last byte of each write first, because missing bytes may arrive within a microsecond.
        let ends = writes.iter().map(|write| (write.target_offset + u64::from(write.length)) as usize - 1);
        let mut last = [0];
        let missing = ends.rev().find(|at| {
            read_at(&pair.target, *at, &mut last);
            last[0] != pattern
        });
        ensure!(answer.is_some(), "submission {round} of {bytes} bytes never completed");
        ensure!(
            answer == Some(1) && one[0].tag == Tag(round) && one[0].status == 0,
            "submission {round} of {bytes} bytes ended with {:?}: poll answered {answer:?}",
            ErrorCode(one[0].status)
        );
        let mut found = vec![0; bytes as usize];
        peek(&pair.target, 0, &mut found);
        let missing = missing.or_else(|| found.iter().position(|byte| *byte != pattern));
        ensure!(
            missing.is_none(),
            "submission {round} completed before all of its data was there: byte {} was not",
            missing.unwrap_or_default()
        );
    }
    Ok(())
}
