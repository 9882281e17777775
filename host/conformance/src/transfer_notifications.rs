//! Cases about submissions that carry a notification and no data, with which two hosts exchange messages.

use host_plugin_api::{ErrorCode, NOTIFICATION_BYTES, capability};

use super::bytes::write_at;
use super::transfer_pair::{Pair, read};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[Case {
    name: "transfer-words",
    role: Some("transfer"),
    capability: None,
    about: "a submission without writes delivers its notification and completes",
    run: notifications,
}];

fn notifications(subject: &Subject) -> Outcome {
    if !subject.declares("transfer", capability::ARRIVAL_NOTIFICATION) {
        let why = "the manifest declares no arrival_notification, so there is no notification to deliver";
        return Err(Stop::Skip(why.into()));
    }
    let pair = Pair::open(subject)?;
    write_at(&pair.source, 0, &[0xAA; 4096]);
    let before = read(&pair.target);
    for round in 1..=8u8 {
        // Alternates between the greatest length and one byte.
        let mut submission = pair.submission(u64::from(round));
        submission.notification = [round; NOTIFICATION_BYTES];
        submission.notification_length = if round % 2 == 0 { 1 } else { NOTIFICATION_BYTES as u32 };
        pair.submit(&submission, &[]).map_err(|error| format!("a notification alone: {error}"))?;
        let seen = pair.notification()?;
        let seen = seen.ok_or_else(|| "no notification came of a submission without writes".to_owned())?;
        let length = seen.length as usize;
        ensure!(
            length == submission.notification_length as usize
                && seen.payload[..length] == submission.notification[..length],
            "a notification alone: notification {round} carries other bytes than were sent"
        );
        let done =
            pair.completion()?.ok_or_else(|| "a submission without writes never completed".to_owned())?;
        ensure!(
            done.status == 0 && done.bytes == 0 && done.tag == submission.tag,
            "a submission without writes completed with {:?} and {} bytes",
            ErrorCode(done.status),
            done.bytes
        );
    }
    ensure!(read(&pair.target) == before, "a submission without writes changed the target");
    Ok(())
}
