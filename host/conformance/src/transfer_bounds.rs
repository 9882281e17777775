//! Cases about writes outside of a region: nothing lands, and no notification comes for pages that did not land.

use std::collections::BTreeMap;

use host_plugin_api::{Notification, NotificationKind, RegionId, Submission, Write, capability};

use super::bytes::write_at;
use super::transfer_pair::{BYTES, Pair, no_notification, read};
use super::{Outcome, Stop, Subject, ensure};

/// Submissions with a write that must be refused. The key is the number in their notification, the value says what is wrong.
#[derive(Default)]
struct Refused(BTreeMap<u64, String>);

impl Refused {
    /// Submits, and ensures that the submission does not succeed.
    fn submit(&mut self, pair: &Pair, submission: &Submission, what: String, writes: &[Write]) -> Outcome {
        if pair.sender.submit(submission, writes) == 0 {
            let done = pair.completion()?;
            let done = done.ok_or_else(|| format!("a write {what} was accepted and never completed"))?;
            ensure!(done.status < 0, "a write {what} completed as if it had worked");
        }
        self.0.insert(submission.tag.0, what);
        Ok(())
    }

    fn check(&self, seen: &Notification) -> Outcome {
        let what = (seen.kind == NotificationKind::ARRIVED).then(|| self.0.get(&number(seen))).flatten();
        match what {
            None => Ok(()),
            Some(what) => Err(Stop::Fail(format!(
                "the notification of a submission with a write {what} was delivered: it should not be, \
                 because the receiver would read bytes that never came"
            ))),
        }
    }

    /// Checks all notifications up to the one of this submission.
    fn check_until(&self, pair: &Pair, tag: u64) -> Outcome {
        while let Some(seen) = pair.notification()? {
            self.check(&seen)?;
            if number(&seen) == tag {
                return Ok(());
            }
        }
        // Whether that notification comes at all is checked by `transfer-order`.
        Ok(())
    }

    /// Looks at all notifications that wait.
    fn check_all(&self, pair: &Pair) -> Outcome {
        let mut one = [no_notification()];
        while pair.receiver.notifications(&mut one) == 1 {
            self.check(&one[0])?;
        }
        Ok(())
    }
}

fn number(seen: &Notification) -> u64 {
    seen.payload.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

pub(super) fn bounds(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let notifies = subject.declares("transfer", capability::ARRIVAL_NOTIFICATION);
    let submission = |tag: u64| match notifies {
        true => pair.notifying(tag),
        false => pair.submission(tag),
    };
    write_at(&pair.source, 0, &vec![0xAA; BYTES]);
    let before = read(&pair.target);
    let good = pair.write(0, 0, 64);
    let end = BYTES as u64;
    let cases = [
        ("beyond the target", Write { target_offset: end - 32, ..good }),
        ("beyond the source", Write { source_offset: end - 32, ..good }),
        ("past the end of all numbers", Write { target_offset: u64::MAX - 8, ..good }),
        ("from past the end of all numbers", Write { source_offset: u64::MAX - 8, ..good }),
        ("of no bytes", Write { length: 0, ..good }),
        ("into an unknown region", Write { target_region: RegionId(999_999), ..good }),
        ("from an unknown region", Write { source_region: RegionId(999_999), ..good }),
        ("of another generation", Write { target_generation: 8, ..good }),
    ];
    let mut refused = Refused::default();
    for (tag, (what, write)) in (1..).zip(cases) {
        refused.submit(&pair, &submission(tag), what.to_owned(), &[write])?;
        ensure!(read(&pair.target) == before, "a write {what} changed the target");
    }
    // A refused write must not land later either. This submission comes after them on the same path.
    let mut after = before.clone();
    after[..64].fill(0xAA);
    pair.complete(&submission(50), &[good])?;
    ensure!(
        read(&pair.target) == after,
        "a write outside of its region changed the target after it had ended"
    );
    let told = |refused: &Refused, tag| if notifies { refused.check_until(&pair, tag) } else { Ok(()) };
    told(&refused, 50)?;
    // A refused write among good ones. The good writes may land, and do not change the target.
    if pair.sender.limits().max_writes > 2 {
        for (tag, (what, write)) in (101..).zip(cases) {
            let what = format!("{what}, among others");
            refused.submit(&pair, &submission(tag), what.clone(), &[good, write, good])?;
            ensure!(read(&pair.target) == after, "a write {what} changed the target");
        }
    }
    write_at(&pair.source, 0, &[0; 64]);
    pair.complete(&submission(51), &[good])?;
    told(&refused, 51)?;
    write_at(&pair.source, 0, &[0xAA; 64]);
    pair.receiver.deregister(pair.to).map_err(|e| format!("deregister answered {e}"))?;
    if pair.sender.submit(&submission(200), &[good]) == 0 {
        let done = pair.completion()?;
        ensure!(done.is_some(), "a write into a region that is gone was accepted and never completed");
    }
    refused.0.insert(200, "into a region that is gone".to_owned());
    ensure!(read(&pair.target) == before, "a write landed in a region that was deregistered");
    refused.check_all(&pair)
}
