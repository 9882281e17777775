//! Cases for transfer backends.

use std::collections::BTreeMap;

use host_plugin_api::{
    Address, ErrorCode, Memory, MemoryKind, NOTIFICATION_BYTES, PeerId, RegionId, Submission, Tag, Write,
};

use super::bytes::write_at;
use super::observe::{shutdown_ms, wait_for, wait_while_moving};
use super::random::{SEED, seeded};
use super::transfer_bounds::bounds;
use super::transfer_cancel::cancel;
use super::transfer_pair::{BYTES, NO_COMPLETION, Pair, read};
use super::{Case, Outcome, Stop, Subject, ensure};

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: Some("transfer"), capability: None, about, run }
}

pub(super) const CASES: &[Case] = &[
    case("transfer-data", "every byte of every write arrives, and no other byte changes", data),
    case("transfer-completions", "every accepted submission completes", completions),
    case("transfer-repeats", "no submission completes twice, and none that was not accepted", repeats),
    case("transfer-flow-control", "a full backend says WOULD_BLOCK and recovers", flow_control),
    case(
        "transfer-bounds",
        "writes outside of regions, or of another generation, land nowhere, and no notification says that they came",
        bounds,
    ),
    case("transfer-threads", "several threads submit at once", threads),
    case("transfer-panics", "wrong input is answered with a code, not with a panic", panics),
    case(
        "transfer-cancel",
        "a cancelled submission still ends in one completion, with status 0 only when all of its bytes are there",
        cancel,
    ),
    case("transfer-peer-gone", "writes to a peer that ended fail or complete, and never hang", peer_gone),
    case("transfer-closed", "after shutdown every call answers CLOSED", closed),
];

/// Submissions in the two cases about completions.
const SUBMISSIONS: u64 = 64;

fn data(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let mut random = seeded();
    let mut source = vec![0; BYTES];
    random.fill(&mut source);
    write_at(&pair.source, 0, &source);
    let mut expected = read(&pair.target);
    let most = pair.sender.limits().max_writes.clamp(1, 64) as usize;
    for tag in 1..=12u64 {
        let mut writes = Vec::new();
        for _ in 0..=random.u64(..most as u64) {
            // Odd sizes and offsets, from one byte up.
            let most_bytes = if random.u64(..4) == 0 { 60_000 } else { 500 };
            let length = 1 + random.u64(..most_bytes) as usize;
            let from = random.u64(..(BYTES - length) as u64) as usize;
            let to = random.u64(..(BYTES - length) as u64) as usize;
            let overlaps = |w: &Write| {
                let start = w.target_offset as usize;
                start < to + length && to < start + w.length as usize
            };
            // The backend may write the pages of a batch in any order, so overlapping writes are left out.
            if writes.len() == most || writes.iter().any(overlaps) {
                continue;
            }
            writes.push(pair.write(from as u64, to as u64, length as u32));
            expected[to..to + length].copy_from_slice(&source[from..from + length]);
        }
        if writes.is_empty() {
            continue;
        }
        pair.transfer(tag, &writes)?;
        let found = read(&pair.target);
        let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        if let Some(at) = wrong {
            let inside = writes
                .iter()
                .any(|w| (w.target_offset..w.target_offset + u64::from(w.length)).contains(&(at as u64)));
            let place = if inside { "inside a write" } else { "where nothing was written" };
            let (found, expected) = (found[at], expected[at]);
            ensure!(
                false,
                "after submission {tag} byte {at} of the target, {place}, is {found} instead of {expected} (seed {SEED})"
            );
        }
        ensure!(read(&pair.source) == source, "submission {tag} changed the source");
    }
    Ok(())
}

/// Counts the completions of each tag, until all tags were seen or patience ends.
fn completed(pair: &Pair) -> Result<BTreeMap<u64, u32>, Stop> {
    let mut seen = BTreeMap::new();
    for tag in 1..=SUBMISSIONS {
        let writes = [pair.write(0, (tag * 64) % BYTES as u64, 64)];
        pair.submit(&pair.submission(tag), &writes)?;
        take(pair, &mut seen)?;
    }
    let all = wait_while_moving(|| {
        let taken = take(pair, &mut seen);
        ((taken.is_err() || seen.len() as u64 >= SUBMISSIONS).then_some(taken), seen.len())
    });
    if let Some(taken) = all {
        taken?;
    }
    // Polls on, because a second completion of a tag may come late.
    for _ in 0..1000 {
        take(pair, &mut seen)?;
        std::thread::yield_now();
    }
    Ok(seen)
}

fn take(pair: &Pair, seen: &mut BTreeMap<u64, u32>) -> Result<(), Stop> {
    let mut done = [NO_COMPLETION; 16];
    let count = pair.sender.poll(&mut done);
    ensure!(count >= 0, "poll answered {:?}", ErrorCode(count));
    for completion in &done[..count as usize] {
        *seen.entry(completion.tag.0).or_insert(0) += 1;
    }
    Ok(())
}

fn completions(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let seen = completed(&pair)?;
    let missing: Vec<u64> = (1..=SUBMISSIONS).filter(|tag| !seen.contains_key(tag)).collect();
    ensure!(
        missing.is_empty(),
        "of {SUBMISSIONS} accepted submissions {} never completed, the first is number {}",
        missing.len(),
        missing.first().copied().unwrap_or_default()
    );
    Ok(())
}

fn repeats(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    for (tag, times) in completed(&pair)? {
        ensure!((1..=SUBMISSIONS).contains(&tag), "tag {tag} completed and was never submitted");
        ensure!(times == 1, "submission {tag} completed {times} times");
    }
    Ok(())
}

fn flow_control(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    ensure!(pair.sender.poll(&mut []) == 0, "poll without room answers something else than 0");
    let limits = pair.sender.limits();
    let most = u64::from(limits.max_submissions).min(4096) + 1;
    let mut accepted = 0;
    let mut full = false;
    for tag in 1..=most {
        match pair.sender.submit(&pair.submission(tag), &[pair.write(0, 0, 64)]) {
            0 => accepted += 1,
            code if code == ErrorCode::WOULD_BLOCK.0 => {
                full = true;
                break;
            }
            code => ensure!(false, "submit number {tag} answered {:?}", ErrorCode(code)),
        }
    }
    let bounded = u64::from(limits.max_submissions) < most;
    ensure!(
        full || !bounded || accepted < most,
        "limits allows {} submissions that are not yet polled, but {accepted} were accepted",
        limits.max_submissions
    );
    let mut done = [NO_COMPLETION; 64];
    wait_for(|| {
        let count = pair.sender.poll(&mut done);
        (count < 0 || pair.sender.submit(&pair.submission(most + 1), &[pair.write(0, 0, 64)]) == 0)
            .then_some(())
    })
    .ok_or_else(|| {
        "a backend that was full still answers WOULD_BLOCK after everything was polled".to_owned()
    })?;
    if limits.max_writes < 1 << 20 {
        let writes = vec![pair.write(0, 0, 1); limits.max_writes as usize + 1];
        let code = pair.sender.submit(&pair.submission(most + 2), &writes);
        ensure!(code < 0, "a submission of more writes than limits allows was accepted");
        ensure!(
            code != ErrorCode::WOULD_BLOCK.0 || full,
            "a submission that can never fit answers WOULD_BLOCK"
        );
    }
    Ok(())
}

fn threads(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let source: Vec<u8> = (0..BYTES).map(|i| (i / 1000) as u8).collect();
    write_at(&pair.source, 0, &source);
    let failed = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4u64)
            .map(|thread| {
                let pair = &pair;
                scope.spawn(move || {
                    for number in 0..8 {
                        let place = (thread * 8 + number) * 10_000;
                        let tag = thread * 8 + number + 1;
                        pair.submit(&pair.submission(tag), &[pair.write(place, place, 10_000)])?;
                    }
                    Ok::<(), String>(())
                })
            })
            .collect();
        let ends = workers.into_iter().map(|w| w.join().unwrap_or_else(|_| Err("a thread panicked".into())));
        ends.filter_map(Result::err).next()
    });
    if let Some(text) = failed {
        return Err(Stop::Fail(text));
    }
    let mut seen = 0;
    while seen < 32 {
        let done = pair.completion()?;
        let done = done.ok_or_else(|| format!("of 32 submissions by 4 threads {seen} completed"))?;
        ensure!(done.status == 0, "submission {} completed with {:?}", done.tag.0, ErrorCode(done.status));
        seen += 1;
    }
    let target = read(&pair.target);
    ensure!(target[..320_000] == source[..320_000], "4 threads submitted at once, and the bytes are wrong");
    Ok(())
}

fn panics(subject: &Subject) -> Outcome {
    let backend = subject.transfer("panics")?;
    let to_unknown_peer = Submission {
        peer: PeerId(4_000_000_000),
        notification_length: 0,
        tag: Tag(u64::MAX),
        notification: [0; NOTIFICATION_BYTES],
    };
    let long = Submission { notification_length: u32::MAX, ..to_unknown_peer };
    let everywhere = Write {
        source_region: RegionId(u32::MAX),
        target_region: RegionId(u32::MAX),
        source_offset: u64::MAX,
        target_offset: u64::MAX,
        length: u32::MAX,
        target_generation: u32::MAX,
    };
    let memory = Memory {
        address: Address(u64::MAX),
        length: u64::MAX,
        kind: MemoryKind(77),
        device: u32::MAX,
        fd: -1,
        generation: 0,
        fd_offset: u64::MAX,
    };
    let code = |result: host_plugin_api::Result<()>| result.err().map_or(0, |e| e.code.0);
    let answers: [(&str, i32); 14] = [
        ("submit to an unknown peer", backend.submit(&to_unknown_peer, &[everywhere])),
        ("submit of nothing", backend.submit(&to_unknown_peer, &[])),
        ("submit with a notification that is too long", backend.submit(&long, &[everywhere])),
        ("poll without room", backend.poll(&mut [])),
        ("notifications without room", backend.notifications(&mut [])),
        ("cancel of an unknown tag", backend.cancel(Tag(u64::MAX))),
        ("settled of an unknown tag", backend.settled(Tag(u64::MAX))),
        ("register of memory of an unknown kind", code(backend.register(&memory).map(drop))),
        ("deregister of an unknown region", code(backend.deregister(RegionId(u32::MAX)))),
        ("connect to an endpoint of no bytes", code(backend.connect("x", &[]).map(drop))),
        ("connect to a strange endpoint", code(backend.connect("", &[0xFF; 300]).map(drop))),
        ("disconnect of an unknown peer", code(backend.disconnect(PeerId(u32::MAX)))),
        ("shutdown", code(backend.shutdown(shutdown_ms()))),
        ("a second shutdown", code(backend.shutdown(shutdown_ms()))),
    ];
    for (what, answer) in answers {
        // After a first panic all calls answer `PANICKED`. The first one is reported.
        ensure!(answer != ErrorCode::PANICKED.0, "{what} made the plugin panic");
    }
    Ok(())
}

fn peer_gone(subject: &Subject) -> Outcome {
    let Pair { sender, receiver, source, target, from, to, peer } = Pair::open(subject)?;
    receiver.shutdown(shutdown_ms()).map_err(|e| format!("shutdown answered {e}"))?;
    drop(receiver);
    let before = read(&target);
    write_at(&source, 0, &[0xAA; 64]);
    let write = Write {
        source_region: from,
        target_region: to,
        length: 64,
        target_generation: super::transfer_pair::GENERATION,
        ..Write::default()
    };
    let submission =
        Submission { peer, notification_length: 0, tag: Tag(1), notification: [0; NOTIFICATION_BYTES] };
    if sender.submit(&submission, &[write]) == 0 {
        let mut one = [NO_COMPLETION];
        let done = wait_for(|| (sender.poll(&mut one) != 0).then_some(()));
        ensure!(done.is_some(), "a submission to a peer that ended was accepted and never completed");
        ensure!(one[0].status < 0, "a submission to a peer that ended completed as if it had worked");
    }
    ensure!(read(&target) == before, "a write landed in the memory of an instance that was shut down");
    let again = sender.disconnect(peer).err().map_or(0, |e| e.code.0);
    ensure!(again != ErrorCode::PANICKED.0, "disconnect from a peer that ended made the plugin panic");
    sender.shutdown(shutdown_ms()).map_err(|e| format!("shutdown after the peer ended answered {e}"))?;
    Ok(())
}

fn closed(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    pair.submit(&pair.submission(1), &[pair.write(0, 0, 64)])?;
    pair.sender
        .shutdown(shutdown_ms())
        .map_err(|e| format!("shutdown with a transfer in flight answered {e}"))?;
    let mut one = [NO_COMPLETION];
    let answers = [
        ("submit", pair.sender.submit(&pair.submission(2), &[pair.write(0, 0, 64)])),
        ("poll", pair.sender.poll(&mut one)),
        ("endpoint", pair.sender.endpoint().err().map_or(0, |e| e.code.0)),
    ];
    for (call, answer) in answers {
        let closed = answer == ErrorCode::CLOSED.0;
        ensure!(closed, "{call} after shutdown answers {answer} instead of CLOSED");
    }
    Ok(())
}
