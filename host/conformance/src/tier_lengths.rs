//! Cases about the lengths of values: what a storage tier reports, and how it answers a get of another length.

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{Tag, TierCompletion, TierPage};

use super::bytes::write_at;
use super::tier_world::{BACK, GUARD, World};
use super::{Case, Outcome, Subject, ensure};

pub(super) const CASES: &[Case] = &[Case {
    name: "tier-lengths",
    role: Some("tier"),
    capability: None,
    about: "a get of more or fewer bytes than were put finds nothing, and counts of bytes are right",
    run: lengths,
}];

fn lengths(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let limits = world.tier.limits();
    world.filled_without(GUARD);
    let whole = world.pages(1, 0)[0];
    let key = [whole.key];
    let done = ended(&world, "put", 1, STORED, || world.tier.put(Tag(1), &[whole]))?;
    known_bytes(&done, whole.length, "a put")?;
    let back = TierPage { offset: BACK, ..whole };
    let done = ended(&world, "get", 2, FOUND, || world.tier.get(Tag(2), &[back]))?;
    known_bytes(&done, whole.length, "a get")?;
    let done = ended(&world, "exists", 3, FOUND, || world.tier.exists(Tag(3), &key))?;
    known_bytes(&done, whole.length, "an exists")?;
    if u64::from(world.page) * 2 <= limits.max_value.min(BACK) {
        other_length(&world, 4, TierPage { length: world.page * 2, ..whole }, whole.length)?;
    }
    let half = u64::from(world.page / 2) / limits.alignment * limits.alignment;
    for (tag, shorter) in [(5, half), (6, limits.alignment)] {
        // If the value has one aligned unit, there is no shorter length.
        let shorter = u32::try_from(shorter).unwrap_or(0);
        if shorter > 0 && shorter < whole.length {
            other_length(&world, tag, TierPage { length: shorter, ..whole }, whole.length)?;
        }
    }
    // Some stores do not report their usage.
    if let Ok(usage) = world.tier.usage() {
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
    }
    let done = ended(&world, "delete", 7, FOUND, || world.tier.delete(Tag(7), &key))?;
    known_bytes(&done, whole.length, "a delete")
}

/// Starts a batch of one page, which must end with `status`.
fn ended(
    world: &World,
    what: &str,
    tag: u64,
    status: i32,
    call: impl FnMut() -> i32,
) -> Result<TierCompletion, super::Stop> {
    world.start(what, call)?;
    let done = world.one(what, tag)?;
    ensure!(done.status == status, "the {what} ended with {}, it should be {status}", done.status);
    Ok(done)
}

/// Checks that a get of another length than the value's is refused or fails, and writes nothing outside of its page.
fn other_length(world: &World, tag: u64, page: TierPage, stored: u32) -> Outcome {
    let alignment = world.tier.limits().alignment;
    // Leaves room before and behind the page, in which a wrong write shows. A page that is too long for that starts at `BACK`.
    let before = if u64::from(page.length) + 2 * alignment.max(64) <= BACK { alignment.max(64) } else { 0 };
    let before = before.next_multiple_of(alignment);
    let page = TierPage { offset: BACK + before, ..page };
    write_at(&world.memory, BACK as usize, &[GUARD; BACK as usize]);
    if world.tier.get(Tag(tag), &[page]) != 0 {
        return Ok(());
    }
    let done = world.one("get", tag)?;
    ensure!(
        done.status <= 0,
        "a get of {} bytes of a value that has {stored} ended as if it had worked",
        page.length
    );
    let back = world.back();
    let inside = before as usize..before as usize + page.length as usize;
    let changed = |at: &usize| back[*at] != GUARD && (done.status == MISSING || !inside.contains(at));
    if let Some(at) = (0..back.len()).find(changed) {
        let place = if inside.contains(&at) { "inside its page" } else { "beside its page" };
        ensure!(
            false,
            "a get of {} bytes of a value that has {stored} ended with {} and changed byte {at}, {place}",
            page.length,
            done.status
        );
    }
    Ok(())
}

/// Checks the bytes of a completion: the length of the value, or 0 if the tier does not know it.
fn known_bytes(done: &TierCompletion, length: u32, what: &str) -> Outcome {
    ensure!(
        done.bytes == 0 || done.bytes == u64::from(length),
        "the completion of {what} of a value of {length} bytes says {} bytes",
        done.bytes
    );
    Ok(())
}
