//! What a storage tier keeps of the memory that it was given, and what it says of values.

use std::collections::BTreeSet;

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{ErrorCode, Tag, TierCompletion, TierPage, capability};

use super::bytes::{fill, peek, write_at};
use super::observe::{wait_for, wait_while_moving};
use super::random::seeded;
use super::tier_world::{BACK, BYTES, World};
use super::wording::status;
use super::{Case, Outcome, Stop, Subject, ensure};

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: Some("tier"), capability: None, about, run }
}

pub(super) const CASES: &[Case] = &[
    case(
        "tier-guards",
        "a get writes its pages, at any offset that limits allows, and no byte beside them",
        guards,
    ),
    case(
        "tier-lengths",
        "a get of another length than was put finds nothing, and counts of bytes are right",
        lengths,
    ),
    case(
        "tier-deregister",
        "after a deregister no get lands in the region, also of those on their way",
        deregister,
    ),
    Case {
        capability: Some(capability::SETTLED),
        ..case(
            "tier-settled",
            "settled answers 1 as soon as nothing of a batch touches memory any more, and not before",
            settled,
        )
    },
];

/// Rounds of the cases about what is on its way.
const ROUNDS: u64 = 12;
/// What memory is filled with. No value has it.
const GUARD: u8 = 0x5C;

/// Pages with a gap between each two, the first after a gap.
fn apart(world: &World, base: u64) -> Vec<TierPage> {
    let alignment = world.tier.limits().alignment;
    // At least a cache line, and odd where odd offsets are allowed.
    let gap = 67_u64.next_multiple_of(alignment);
    let (page, room) = (u64::from(world.page), BACK / (u64::from(world.page) + gap));
    let count = u64::from(world.batch).min(room.saturating_sub(1)).max(1) as u32;
    let place = |number: u32| base + gap + u64::from(number) * (page + gap);
    (0..count)
        .map(|number| TierPage { offset: place(number), ..world.pages(count, 0)[number as usize] })
        .collect()
}

fn guards(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let mut bytes = world.filled();
    // No byte of a value is that of the guard.
    bytes.iter_mut().filter(|byte| **byte == GUARD).for_each(|byte| *byte = 0);
    write_at(&world.memory, 0, &bytes);
    let (put, got) = (apart(&world, 0), apart(&world, BACK));
    let count = put.len() as u32;
    world.all("put", 1, count, STORED, || world.tier.put(Tag(1), &put))?;
    write_at(&world.memory, BACK as usize, &[GUARD; BACK as usize]);
    world.all("get", 2, count, FOUND, || world.tier.get(Tag(2), &got))?;
    let found = world.back();
    let mut expected = vec![GUARD; BACK as usize];
    for (from, to) in put.iter().zip(&got) {
        let (from, to, length) = (from.offset as usize, (to.offset - BACK) as usize, from.length as usize);
        expected[to..to + length].copy_from_slice(&bytes[from..from + length]);
    }
    let wrong = found.iter().zip(&expected).position(|(found, expected)| found != expected);
    if let Some(at) = wrong {
        let inside = got.iter().any(|page| {
            let start = page.offset - BACK;
            (start..start + u64::from(page.length)).contains(&(at as u64))
        });
        let place = if inside { "inside a page" } else { "beside the pages" };
        ensure!(false, "a get changed byte {at}, {place}: it is {} instead of {}", found[at], expected[at]);
    }
    let mut put_from = vec![0; BACK as usize];
    peek(&world.memory, 0, &mut put_from);
    ensure!(put_from == bytes, "a put changed the memory that it stores");
    world.delete_all(3)
}

fn lengths(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let limits = world.tier.limits();
    world.filled();
    let whole = world.pages(1, 0)[0];
    let longest = u64::from(world.page) * 2 <= limits.max_value.min(BACK);
    world.start("put", || world.tier.put(Tag(1), &[whole]))?;
    let done = world.one("put", 1)?;
    ensure!(done.status == STORED, "a put ended with {}", status(done.status));
    known_bytes(&done, whole.length, "put")?;
    world.start("get", || world.tier.get(Tag(2), &[TierPage { offset: BACK, ..whole }]))?;
    let done = world.one("get", 2)?;
    ensure!(done.status == FOUND, "a get ended with {}", status(done.status));
    known_bytes(&done, whole.length, "get")?;
    if longest {
        write_at(&world.memory, BACK as usize, &[GUARD; BACK as usize]);
        let longer = TierPage { offset: BACK, length: world.page * 2, ..whole };
        let code = world.tier.get(Tag(3), &[longer]);
        if code == 0 {
            let done = world.one("get", 3)?;
            ensure!(
                done.status <= 0,
                "a get of {} bytes of a value that has {} ended as if it had worked",
                longer.length,
                whole.length
            );
            if done.status == MISSING {
                let back = world.back();
                ensure!(back.iter().all(|byte| *byte == GUARD), "a get that found nothing changed memory");
            }
        }
    }
    // Not every store says what it holds.
    let Ok(usage) = world.tier.usage() else { return world.delete_all(4) };
    ensure!(
        usage.values >= 1 && usage.bytes >= u64::from(whole.length),
        "a value of {} bytes is stored, and usage says {} values of {} bytes",
        whole.length,
        usage.values,
        usage.bytes
    );
    ensure!(
        usage.capacity == 0 || usage.capacity >= usage.bytes,
        "usage says {} bytes of at most {}",
        usage.bytes,
        usage.capacity
    );
    world.delete_all(4)
}

/// The bytes of a completion are those of the value, or 0 where they are not known.
fn known_bytes(done: &TierCompletion, length: u32, what: &str) -> Outcome {
    ensure!(
        done.bytes == 0 || done.bytes == u64::from(length),
        "the completion of a {what} of {length} bytes says {} bytes",
        done.bytes
    );
    Ok(())
}

/// Starts gets of everything, as many batches as the tier takes at once, up to 8.
fn begin(world: &World, round: u64) -> Result<BTreeSet<u64>, Stop> {
    fill(&world.memory, GUARD);
    let pages = world.pages(world.batch, BACK);
    let mut accepted = BTreeSet::new();
    for number in 0..8 {
        let tag = 10 + round * 8 + number;
        match world.tier.get(Tag(tag), &pages) {
            0 => accepted.insert(tag),
            code if code == ErrorCode::WOULD_BLOCK.0 && !accepted.is_empty() => break,
            code => return Err(Stop::Fail(format!("get answered {:?}", ErrorCode(code)))),
        };
    }
    Ok(accepted)
}

/// Waits until each page of these batches has ended.
fn all_end(world: &World, batches: &BTreeSet<u64>, after: &str) -> Outcome {
    let mut left: BTreeSet<(u64, u32)> =
        batches.iter().flat_map(|tag| (0..world.batch).map(|page| (*tag, page))).collect();
    while !left.is_empty() {
        let mut one = [TierCompletion::default()];
        let answer = wait_for(|| Some(world.tier.poll(&mut one)).filter(|answer| *answer != 0));
        ensure!(answer.is_some(), "after {after} {} pages of accepted gets never ended", left.len());
        ensure!(answer == Some(1), "after {after} poll with room for one answered {answer:?}");
        let TierCompletion { tag, page, .. } = one[0];
        ensure!(
            left.remove(&(tag.0, page)),
            "after {after} page {page} of batch {} ended twice, or was not asked for",
            tag.0
        );
    }
    Ok(())
}

fn stored(subject: &Subject) -> Result<World, Stop> {
    let world = World::open(subject)?;
    let mut bytes = vec![0; BACK as usize];
    seeded().fill(&mut bytes);
    bytes.iter_mut().filter(|byte| **byte == GUARD).for_each(|byte| *byte = 0);
    write_at(&world.memory, 0, &bytes);
    world.put_all(1)?;
    Ok(world)
}

fn deregister(subject: &Subject) -> Outcome {
    let mut world = stored(subject)?;
    let mut known = BTreeSet::from([world.region.0]);
    for round in 0..ROUNDS {
        let batches = begin(&world, round)?;
        world.tier.deregister(world.region).map_err(|error| format!("deregister answered {error}"))?;
        fill(&world.memory, GUARD);
        all_end(&world, &batches, "a deregister")?;
        let mut found = vec![0; BYTES];
        peek(&world.memory, 0, &mut found);
        let wrong = found.iter().position(|byte| *byte != GUARD);
        ensure!(wrong.is_none(), "byte {} was written after a deregister", wrong.unwrap_or_default());
        let code = world.tier.get(Tag(5), &world.pages(1, BACK));
        if code == 0 {
            let done = world.one("get", 5)?;
            ensure!(done.status < 0, "a get into a region that is gone ended with {}", status(done.status));
        }
        world.register()?;
        let id = world.region.0;
        ensure!(known.insert(id), "register gave the id {id}, which another region had before");
    }
    world.delete_all(6)
}

fn settled(subject: &Subject) -> Outcome {
    let world = stored(subject)?;
    for round in 0..ROUNDS {
        let batches = begin(&world, round)?;
        let mut wrong = None;
        let mut ended = Vec::new();
        let all = wait_while_moving(|| {
            let answers: Vec<i32> = batches.iter().map(|tag| world.tier.settled(Tag(*tag))).collect();
            wrong = answers.iter().copied().find(|answer| !(0..=1).contains(answer));
            if wrong.is_some() || answers.iter().all(|answer| *answer == 1) {
                return (Some(()), 0);
            }
            let mut done = [TierCompletion::default(); 16];
            let count = usize::try_from(world.tier.poll(&mut done)).unwrap_or(0);
            ended.extend(done[..count].iter().map(|done| (done.tag, done.page)));
            (None, ended.len())
        });
        ensure!(wrong.is_none(), "settled of a batch in flight answered {}", wrong.unwrap_or_default());
        ensure!(all.is_some(), "of {} batches not all were ever settled", batches.len());
        let (mut before, mut after) = (vec![0; BYTES], vec![0; BYTES]);
        peek(&world.memory, 0, &mut before);
        let expected = batches.len() * world.batch as usize;
        let complete = wait_while_moving(|| {
            let mut done = [TierCompletion::default(); 16];
            let count = usize::try_from(world.tier.poll(&mut done)).unwrap_or(0);
            ended.extend(done[..count].iter().map(|done| (done.tag, done.page)));
            ((ended.len() >= expected).then_some(()), ended.len())
        });
        ensure!(complete.is_some(), "of {expected} pages of settled gets {} ended", ended.len());
        peek(&world.memory, 0, &mut after);
        let changed = before.iter().zip(&after).position(|(before, after)| before != after);
        ensure!(
            changed.is_none(),
            "settled answered 1 of all batches, and byte {} changed after that",
            changed.unwrap_or_default()
        );
    }
    world.delete_all(6)
}
