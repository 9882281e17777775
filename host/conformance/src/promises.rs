//! Cases for declared capabilities. A capability that this machine cannot check is reported as skipped, with the reason. A report
//! without failures then does not claim more than was checked.

use host_plugin_api::capability as can;
use host_plugin_api::{Notification, Tag};

use super::bytes::{read_at, write_at};
use super::observe::shutdown_ms;
use super::transfer_pair::{GENERATION, Pair, register};
use super::{Case, Outcome, Stop, Subject, ensure};

const fn promise(
    name: &'static str,
    role: &'static str,
    capability: &'static str,
    about: &'static str,
    run: fn(&Subject) -> Outcome,
) -> Case {
    Case { name, role: Some(role), capability: Some(capability), about, run }
}

pub(super) const CASES: &[Case] = &[
    Case {
        name: "transfer-capabilities",
        role: Some("transfer"),
        capability: None,
        about: "what the manifest declares is so",
        run: capabilities,
    },
    promise(
        "transfer-peer-restart",
        "transfer",
        can::PEER_RESTART,
        "a peer that was opened again is connected again, and is not reached through the old connection",
        peer_restart,
    ),
    promise("transfer-vram", "transfer", can::VRAM, "device memory can be registered", |_| {
        unchecked("the kit has no device memory to register")
    }),
    promise(
        "transfer-multi-host",
        "transfer",
        can::MULTI_HOST,
        "peers on other machines are reached",
        |_| unchecked("the kit has one machine"),
    ),
    promise("tier-shared", "tier", can::SHARED, "workers on other machines see what was put", |_| {
        unchecked("the kit has one machine")
    }),
];

fn unchecked(why: &str) -> Outcome {
    Err(Stop::Skip(format!("declared, and not checked: {why}")))
}

/// Checks as much of the capability as one process can: the peer shuts down and another instance takes its place.
fn peer_restart(subject: &Subject) -> Outcome {
    let mut pair = Pair::open(subject)?;
    pair.transfer(1, &[pair.write(0, 0, 4096)])?;
    let (old_peer, old_region) = (pair.peer, pair.to);
    pair.receiver.shutdown(shutdown_ms()).map_err(|e| format!("shutdown of the peer answered {e}"))?;
    pair.receiver = subject.transfer("receiver-again")?;
    pair.to = register(&*pair.receiver, &pair.target, GENERATION)?;
    let endpoint =
        pair.receiver.endpoint().map_err(|e| format!("endpoint of the new instance answered {e}"))?;
    let peer = pair.sender.connect("receiver-again", &endpoint);
    pair.peer = peer.map_err(|e| format!("connect to a peer that was opened again answered {e}"))?;
    ensure!(pair.peer != old_peer, "the new connection has the name of the old one");
    write_at(&pair.source, 0, &[0x5A; 4096]);
    pair.transfer(2, &[pair.write(0, 0, 4096)])?;
    let mut landed = [0; 4096];
    read_at(&pair.target, 0, &mut landed);
    ensure!(landed == [0x5A; 4096], "a write to a peer that was opened again did not arrive");
    // A write to the instance that was shut down must land nowhere.
    write_at(&pair.source, 0, &[0xEE; 64]);
    let mut late = pair.submission(3);
    late.peer = old_peer;
    let mut write = pair.write(0, 0, 64);
    write.target_region = old_region;
    if pair.sender.submit(&late, &[write]) == 0 {
        let done = pair.completion()?;
        ensure!(
            done.is_some_and(|done| done.tag == Tag(3) && done.status < 0),
            "a submission to the instance that is gone was accepted, and ended in {done:?}"
        );
    }
    read_at(&pair.target, 0, &mut landed);
    ensure!(landed == [0x5A; 4096], "a write to the instance that is gone landed in its successor's memory");
    Ok(())
}

fn capabilities(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let declares = |c| subject.declares("transfer", c);
    let limits = pair.sender.limits();
    ensure!(limits.max_writes > 0 && limits.max_submissions > 0, "limits says that nothing fits: {limits:?}");
    if declares(can::ARRIVAL_NOTIFICATION) {
        for round in 1..=8u64 {
            let bytes = [round as u8; 5000];
            write_at(&pair.source, 0, &bytes);
            let mut submission = pair.submission(round);
            submission.notification[..8].copy_from_slice(&round.to_le_bytes());
            submission.notification_length = 8;
            pair.submit(&submission, &[pair.write(0, 1234, 5000)])?;
            let Some(seen) = pair.notification()? else {
                return Err(Stop::Fail(
                    "arrival_notification is declared, but no notification came".to_owned(),
                ));
            };
            check_notification(&seen, round)?;
            let mut landed = [0; 5000];
            read_at(&pair.target, 1234, &mut landed);
            ensure!(landed == bytes, "notification {round} was there before all of its data");
            let done = pair.completion()?;
            ensure!(done.is_some(), "submission {round} with a notification never completed");
        }
    }
    if declares(can::SETTLED) {
        pair.transfer(100, &[pair.write(0, 0, 4096)])?;
        for tag in [100, 987_654_321] {
            let code = pair.sender.settled(Tag(tag));
            let what = if tag == 100 { "that completed" } else { "never seen" };
            ensure!(code == 1, "settled is declared, but answers {code} for a tag {what}");
        }
    }
    if declares(can::VRAM) {
        let role = subject.manifest().role("transfer");
        let listed = role.is_some_and(|role| role.memory.iter().any(|m| m == "vram"));
        ensure!(listed, "vram is declared, but not listed under memory");
    }
    Ok(())
}

fn check_notification(seen: &Notification, round: u64) -> Outcome {
    let length = seen.length as usize;
    ensure!(
        length == 8 && seen.payload[..8] == round.to_le_bytes(),
        "notification {round} carries other bytes than were sent"
    );
    let name = seen.peer_name.get(..seen.peer_name_length as usize);
    ensure!(name == Some(b"sender"), "notification {round} does not name its sender");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Capabilities that a case about something else checks.
    const CHECKED: &[(&str, &str)] = &[
        (can::PAGE_WRITES, "transfer-data"),
        (can::ARRIVAL_NOTIFICATION, "transfer-capabilities"),
        (can::SETTLED, "tier-cancel"),
        (can::SCAN, "tier-scan"),
        (can::WINDOW, "allocator-window"),
        (can::STATE, "allocator-state"),
    ];

    #[test]
    fn every_capability_is_checked_or_skipped_with_a_reason() {
        for capability in can::ALL {
            let own = CASES
                .iter()
                .chain(super::super::persistence::CASES)
                .any(|case| case.capability == Some(capability));
            let elsewhere = CHECKED.iter().any(|(name, case)| {
                name == capability && super::super::cases().any(|known| known.name == *case)
            });
            assert!(own || elsewhere, "no case says anything about {capability}");
        }
    }
}
