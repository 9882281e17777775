//! What a storage tier does to the memory that it was given.

use std::collections::BTreeSet;

use host_plugin_api::tier::{FOUND, STORED};
use host_plugin_api::{ErrorCode, Tag, TierCompletion, TierPage};

use super::bytes::{fill, peek, write_at};
use super::observe::wait_for;
use super::tier_world::{BACK, BYTES, GUARD, World};
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
        "tier-deregister",
        "after a deregister no get lands in the region, also of those on their way",
        deregister,
    ),
];

/// Rounds of the cases about batches in flight.
const ROUNDS: u64 = 12;

/// Pages of `length` bytes, with a gap before each.
fn apart(world: &World, length: u32, base: u64) -> Vec<TierPage> {
    let alignment = world.tier.limits().alignment;
    // The gap has at least a cache line, and an odd size if odd offsets are allowed.
    let gap = 67_u64.next_multiple_of(alignment);
    let (page, room) = (u64::from(length), BACK / (u64::from(length) + gap));
    let count = u64::from(world.batch).min(room.saturating_sub(1)).max(1) as u32;
    let place = |number: u32| base + gap + u64::from(number) * (page + gap);
    (0..count)
        .map(|number| TierPage {
            key: world.key(number),
            region: world.region,
            length,
            offset: place(number),
        })
        .collect()
}

fn guards(subject: &Subject) -> Outcome {
    let whole = World::open(subject)?;
    let alignment = whole.tier.limits().alignment;
    guarded(&whole, whole.page)?;
    if alignment > 1 || whole.page <= 8 {
        return Ok(());
    }
    // All values of an instance have one length, so values of another length need another instance.
    drop(whole);
    let odd = World::open(subject)?;
    // The length is one more than a multiple of 8, because a tier may copy in units of 8.
    guarded(&odd, (odd.page - 8) / 8 * 8 + 1)
}

fn guarded(world: &World, length: u32) -> Outcome {
    let bytes = world.filled_without(GUARD);
    let (put, got) = (apart(world, length, 0), apart(world, length, BACK));
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
        ensure!(
            false,
            "a get of values of {length} bytes changed byte {at}, {place}: it is {} instead of {}",
            found[at],
            expected[at]
        );
    }
    let mut put_from = vec![0; BACK as usize];
    peek(&world.memory, 0, &mut put_from);
    ensure!(put_from == bytes, "a put changed the memory that it stores");
    world.delete_all(3)
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

fn deregister(subject: &Subject) -> Outcome {
    let mut world = World::stored(subject)?;
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
