//! Cases about calls that must be refused: for unknown ids and keys, and after shutdown.

use host_plugin_api::tier::{MISSING, STORED};
use host_plugin_api::{
    Address, ErrorCode, Memory, MemoryKind, NOTIFICATION_BYTES, PeerId, RegionId, Submission, Tag,
    TierCompletion, TierPage,
};

use super::observe::{shutdown_ms, wait_for};
use super::tier_world::{BYTES, World};
use super::transfer_pair::{NO_COMPLETION, Pair, no_notification, read};
use super::wording::status;
use super::{Case, Outcome, Subject, ensure};

const fn case(
    name: &'static str,
    role: &'static str,
    about: &'static str,
    run: fn(&Subject) -> Outcome,
) -> Case {
    Case { name, role: Some(role), capability: None, about, run }
}

pub(super) const CASES: &[Case] = &[
    case("transfer-refusals", "transfer", "what names nothing is refused, and says so", transfer),
    case(
        "transfer-closed-all",
        "transfer",
        "after shutdown each of the other calls answers CLOSED, too",
        transfer_closed,
    ),
    case("transfer-constant", "transfer", "limits stay as they are", transfer_constant),
    case("tier-refusals", "tier", "what names nothing is refused, and says so", tier),
    case(
        "tier-closed-all",
        "tier",
        "after shutdown each of the other calls answers CLOSED, too",
        tier_closed,
    ),
    case("tier-constant", "tier", "limits stay as they are", tier_constant),
    case("tier-limits", "tier", "as many pages, batches and bytes as limits says are taken", tier_limits),
];

fn code<T>(result: host_plugin_api::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.code.0)
}

/// Memory of an unknown kind.
fn strange_memory() -> Memory {
    Memory {
        address: Address(4096),
        length: 4096,
        kind: MemoryKind(77),
        device: u32::MAX,
        fd: -1,
        generation: 0,
        fd_offset: 0,
    }
}

fn refused(answers: &[(&str, i32)]) -> Outcome {
    for (what, answer) in answers {
        ensure!(*answer < 0, "{what} answers {answer}, it should be an error");
    }
    Ok(())
}

fn closed(answers: &[(&str, i32)]) -> Outcome {
    for (what, answer) in answers {
        ensure!(*answer == ErrorCode::CLOSED.0, "{what} after shutdown answers {answer} instead of CLOSED");
    }
    Ok(())
}

/// Maps the answer `UNSUPPORTED` of an optional call to the expected code.
pub(super) fn or_unsupported(answer: i32, otherwise: ErrorCode) -> i32 {
    if answer == ErrorCode::UNSUPPORTED.0 { otherwise.0 } else { answer }
}

fn transfer(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let unknown = Submission { peer: PeerId(4_000_000_000), ..pair.submission(1) };
    let write = [pair.write(0, 0, 64)];
    let long = Submission { notification_length: NOTIFICATION_BYTES as u32 + 1, ..pair.submission(2) };
    let endpoint = pair.receiver.endpoint().map_err(|error| format!("endpoint answered {error}"))?;
    let cut = endpoint.get(..endpoint.len() / 2).unwrap_or_default();
    refused(&[
        ("register of memory of an unknown kind", code(pair.sender.register(&strange_memory()))),
        ("deregister of an unknown region", code(pair.sender.deregister(RegionId(4_000_000_000)))),
        ("connect to an endpoint of no bytes", code(pair.sender.connect("stranger", &[]))),
        ("connect to an endpoint of other bytes", code(pair.sender.connect("stranger", &[0xA5; 200]))),
        ("connect to half of an endpoint", code(pair.sender.connect("stranger", cut))),
        ("disconnect of an unknown peer", code(pair.sender.disconnect(PeerId(4_000_000_000)))),
        ("submit to an unknown peer", pair.sender.submit(&unknown, &write)),
        ("submit with a notification that is too long", pair.sender.submit(&long, &write)),
        ("cancel of an unknown tag", pair.sender.cancel(Tag(12_345))),
    ])?;
    // A submission without writes and without a notification completes and changes nothing.
    let before = read(&pair.target);
    pair.transfer(4, &[]).map_err(|error| format!("without writes and notification: {error}"))?;
    ensure!(read(&pair.target) == before, "a submission of nothing changed the target");
    ensure!(
        pair.sender.cancel(Tag(4)) < 0,
        "cancel of a submission that has completed answers {}, it should be an error",
        pair.sender.cancel(Tag(4))
    );
    let mut one = [NO_COMPLETION];
    ensure!(pair.sender.poll(&mut one) == 0, "a submission that was refused completed: {:?}", one[0]);
    pair.sender.disconnect(pair.peer).map_err(|error| format!("disconnect answered {error}"))?;
    refused(&[("a second disconnect of a peer", code(pair.sender.disconnect(pair.peer)))])?;
    pair.receiver.deregister(pair.to).map_err(|error| format!("deregister answered {error}"))?;
    refused(&[("a second deregister of a region", code(pair.receiver.deregister(pair.to)))])
}

fn transfer_closed(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let endpoint = pair.receiver.endpoint().map_err(|error| format!("endpoint answered {error}"))?;
    pair.sender.shutdown(shutdown_ms()).map_err(|error| format!("shutdown answered {error}"))?;
    let memory = Memory { kind: MemoryKind::DRAM, ..strange_memory() };
    closed(&[
        ("register", code(pair.sender.register(&memory))),
        ("deregister", code(pair.sender.deregister(pair.from))),
        ("connect", code(pair.sender.connect("receiver", &endpoint))),
        ("disconnect", code(pair.sender.disconnect(pair.peer))),
        ("notifications", pair.sender.notifications(&mut [no_notification()])),
        ("cancel", pair.sender.cancel(Tag(1))),
        ("settled", pair.sender.settled(Tag(1))),
    ])
}

fn transfer_constant(subject: &Subject) -> Outcome {
    let pair = Pair::open(subject)?;
    let limits = pair.sender.limits();
    for tag in 1..=8 {
        pair.transfer(tag, &[pair.write(0, 0, 4096)])?;
        let now = pair.sender.limits();
        ensure!(now == limits, "limits was {limits:?} and is {now:?}");
    }
    Ok(())
}

fn tier(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    refused(&[
        ("register of memory of an unknown kind", code(world.tier.register(&strange_memory()))),
        ("deregister of an unknown region", code(world.tier.deregister(RegionId(4_000_000_000)))),
        ("cancel of an unknown tag", world.tier.cancel(Tag(12_345))),
    ])?;
    world.filled();
    world.put_all(1)?;
    refused(&[("cancel of a batch that has completed", world.tier.cancel(Tag(1)))])?;
    world.delete_all(3)?;
    world.tier.deregister(world.region).map_err(|error| format!("deregister answered {error}"))?;
    refused(&[("a second deregister of a region", code(world.tier.deregister(world.region)))])
}

fn tier_closed(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let (pages, keys) = (world.pages(1, 0), world.keys(1));
    world.tier.shutdown(shutdown_ms()).map_err(|error| format!("shutdown answered {error}"))?;
    let memory = Memory { kind: MemoryKind::DRAM, ..strange_memory() };
    closed(&[
        ("register", code(world.tier.register(&memory))),
        ("deregister", code(world.tier.deregister(world.region))),
        ("get", world.tier.get(Tag(1), &pages)),
        ("put", world.tier.put(Tag(1), &pages)),
        ("delete", world.tier.delete(Tag(1), &keys)),
        ("cancel", world.tier.cancel(Tag(1))),
        ("settled", world.tier.settled(Tag(1))),
        ("scan", or_unsupported(code(world.tier.scan(0, &mut [])), ErrorCode::CLOSED)),
    ])
}

fn tier_constant(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    let limits = world.tier.limits();
    for tag in 1..=4 {
        world.put_all(tag)?;
        let now = world.tier.limits();
        ensure!(now == limits, "limits was {limits:?} and is {now:?}");
    }
    world.delete_all(5)
}

/// Limit of the values that are tried of a declared limit.
const MOST: u32 = 1024;

fn tier_limits(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let limits = world.tier.limits();
    let count = limits.max_pages.min(MOST);
    let keys = world.keys(count);
    let all = MISSING;
    world.all("exists", 1, count, all, || world.tier.exists(Tag(1), &keys))?;
    // Nothing is in flight here. The batches are not polled.
    let batches = limits.max_batches.min(MOST);
    for number in 0..u64::from(batches) {
        let code = world.tier.exists(Tag(2 + number), &keys[..1]);
        ensure!(
            code == 0,
            "limits allows {} batches that are not yet polled, and after {number} exists answered {:?}",
            limits.max_batches,
            ErrorCode(code)
        );
    }
    let mut left = batches;
    let mut one = [TierCompletion::default()];
    while left > 0 {
        let answer = wait_for(|| Some(world.tier.poll(&mut one)).filter(|answer| *answer != 0));
        ensure!(answer == Some(1), "of {batches} batches at once {left} never ended ({answer:?})");
        left -= 1;
    }
    let longest = limits.max_value.min(BYTES as u64) / limits.alignment * limits.alignment;
    let length = u32::try_from(longest).unwrap_or(u32::MAX);
    let page = TierPage { length, ..world.pages(1, 0)[0] };
    let tag = 2 + u64::from(batches);
    world.start("put of the longest value", || world.tier.put(Tag(tag), &[page]))?;
    let done = world.one("put of the longest value", tag)?;
    ensure!(
        done.status == STORED,
        "limits allows values of {} bytes, and a put of {length} ended with {}",
        limits.max_value,
        status(done.status)
    );
    world.delete_all(tag + 1)
}
