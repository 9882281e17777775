//! Cases about cancelled submissions: each ends once, and reports success only if all of its bytes are there.

use std::collections::BTreeSet;

use host_plugin_api::{Completion, ErrorCode, Tag, capability};

use super::bytes::{fill, peek};
use super::observe::wait_for;
use super::transfer_pair::{BYTES, Pair, no_notification};
use super::{Outcome, Stop, Subject, ensure};

/// Submissions that are cancelled one by one, each with its own range of the target.
const ALONE: u64 = 16;
/// Bytes of each submission that is cancelled alone.
const ALONE_BYTES: u64 = 60_000;
/// Submissions that are cancelled at once, if the backend takes so many. Most have not started by then.
const AT_ONCE: u64 = 8;
/// Bytes of each submission that is cancelled with others.
const AT_ONCE_BYTES: u64 = BYTES as u64 / AT_ONCE;
/// How often `AT_ONCE` submissions are cancelled.
const ROUNDS: u64 = 12;

/// Ensures that a cancelled submission that reports success has written all of its bytes.
fn is_whole(pair: &Pair, done: &Completion, place: u64, bytes: u64, pattern: u8) -> Outcome {
    let Completion { tag: Tag(tag), status, bytes: counted, .. } = *done;
    if status < 0 {
        return Ok(());
    }
    ensure!(status == 0, "submission {tag} was cancelled and completed with the status {status}");
    ensure!(
        counted == bytes,
        "submission {tag} was cancelled and completed with status 0 and {counted} of its {bytes} bytes: \
         it should be an error, or all bytes"
    );
    let mut found = vec![0; bytes as usize];
    peek(&pair.target, place as usize, &mut found);
    let missing = found.iter().position(|byte| *byte != pattern);
    ensure!(
        missing.is_none(),
        "submission {tag} was cancelled and completed with status 0, but byte {} of it is not in the target",
        missing.unwrap_or_default()
    );
    Ok(())
}

pub(super) fn cancel(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let unknown = pair.sender.cancel(Tag(12_345));
    ensure!(unknown < 0, "cancel of a tag that is not in flight answers {unknown}, it should be an error");
    fill(&pair.source, 0xA1);
    for tag in 1..=ALONE {
        let place = (tag - 1) * ALONE_BYTES;
        pair.submit(&pair.submission(tag), &[pair.write(place, place, ALONE_BYTES as u32)])?;
        // The cancel may come too late. That is an error and changes nothing.
        let _too_late = pair.sender.cancel(Tag(tag));
        let done = pair.completion()?;
        let done = done.ok_or_else(|| format!("submission {tag} was cancelled and never completed"))?;
        ensure!(done.tag == Tag(tag), "submission {tag} was cancelled, but {} completed", done.tag.0);
        is_whole(&pair, &done, place, ALONE_BYTES, 0xA1)?;
    }
    // Without `settled`, late bytes of one round may land among those of the next. So such a backend gets one round.
    let settles = subject.declares("transfer", capability::SETTLED);
    for round in 0..if settles { ROUNDS } else { 1 } {
        at_once(&pair, round, settles)?;
    }
    let mut one = [no_notification()];
    ensure!(pair.receiver.notifications(&mut one) <= 0, "a notification came that was not sent");
    Ok(())
}

/// Cancels several that are in flight, the last first.
fn at_once(pair: &Pair, round: u64, settles: bool) -> Outcome {
    let pattern = 0xB0 | (round % 16) as u8;
    fill(&pair.source, pattern);
    fill(&pair.target, 0);
    let first = 100 + round * AT_ONCE;
    let mut left = BTreeSet::new();
    for tag in first..first + AT_ONCE {
        let place = (tag - first) * AT_ONCE_BYTES;
        match pair.sender.submit(&pair.submission(tag), &[pair.write(place, place, AT_ONCE_BYTES as u32)]) {
            0 => left.insert(tag),
            code if code == ErrorCode::WOULD_BLOCK.0 && !left.is_empty() => break,
            code => return Err(Stop::Fail(format!("submission {tag} was answered {:?}", ErrorCode(code)))),
        };
    }
    let accepted = left.clone();
    for tag in left.iter().rev() {
        let _too_late = pair.sender.cancel(Tag(*tag));
    }
    while !left.is_empty() {
        let done = pair.completion()?;
        let done = done.ok_or_else(|| {
            format!("of {} cancelled submissions {} never completed", accepted.len(), left.len())
        })?;
        let tag = done.tag.0;
        ensure!(
            left.remove(&tag),
            "submission {tag} was cancelled and completed twice, or was never accepted"
        );
        is_whole(pair, &done, (tag - first) * AT_ONCE_BYTES, AT_ONCE_BYTES, pattern)?;
    }
    let is_settled = || accepted.iter().all(|tag| pair.sender.settled(Tag(*tag)) == 1).then_some(());
    ensure!(!settles || wait_for(is_settled).is_some(), "cancelled submissions completed and never settled");
    Ok(())
}
