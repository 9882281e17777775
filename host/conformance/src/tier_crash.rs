//! Cases of several processes: after a process was killed, values are whole or missing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use host_plugin_api::tier::{FOUND, STORED};
use host_plugin_api::{ErrorCode, Key, Tag, TierCompletion, TierPage, capability};

use super::bytes::{read_at, write_at};
use super::observe::wait_while_moving;
use super::tier_whole::{byte, is_whole, length};
use super::tier_world::{BACK, World};
use super::verdict::pass_and_die;
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const NAME: &str = "tier-crash";

pub(super) const CASES: &[Case] = &[Case {
    name: NAME,
    role: Some("tier"),
    capability: Some(capability::PERSISTENT),
    about: "when a process is killed while it puts, the next one finds all of a value or none of it",
    run: put_until_killed,
}];

/// How often a process is killed and another one looks. Each round kills at another point.
pub(super) const ROUNDS: u64 = 4;
/// Most values that are put in a round: the process may end before the last one.
const VALUES: u32 = 48;
/// Values in flight at once, each in memory of its own.
const AT_ONCE: u32 = 8;

/// The page with this number, at this place of the memory from `base` on.
fn page(world: &World, number: u32, base: u64, place: u32) -> TierPage {
    let length = length(world, AT_ONCE);
    let offset = base + u64::from(place) * u64::from(length);
    TierPage { key: world.key(number), region: world.region, length, offset }
}

/// Puts values, each in a batch of its own, until the process kills itself.
fn put_until_killed(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let stored = Arc::new(AtomicU64::new(0));
    // Each round kills at another point, because a store may treat its first values differently from later ones.
    let (seen, enough) = (stored.clone(), 1 + u64::from_le_bytes(subject.run) % ROUNDS * 9);
    // A thread of its own, so that the kill also interrupts a tier that works within the call.
    std::thread::spawn(move || {
        while seen.load(Ordering::Acquire) < enough {
            std::thread::yield_now();
        }
        pass_and_die()
    });
    put_all(&world, &stored)?;
    loop {
        std::thread::park();
    }
}

fn put_all(world: &World, stored: &AtomicU64) -> Outcome {
    // For each place, the tag of the put in flight.
    let mut flying = [None; AT_ONCE as usize];
    let (mut next, mut stop) = (0, None);
    let all = wait_while_moving(|| {
        if let Some(place) = flying.iter().position(Option::is_none).filter(|_place| next < VALUES) {
            let page = page(world, next, 0, place as u32);
            write_at(&world.memory, page.offset as usize, &vec![byte(next); page.length as usize]);
            match world.tier.put(Tag(u64::from(next)), &[page]) {
                0 => (flying[place], next) = (Some(next), next + 1),
                code if code == ErrorCode::WOULD_BLOCK.0 => {}
                code => stop = Some(format!("put answered {:?}", ErrorCode(code))),
            }
        }
        let mut one = [TierCompletion::default()];
        if world.tier.poll(&mut one) == 1 {
            let TierCompletion { tag, status, .. } = one[0];
            if status != STORED {
                stop = Some(format!("a put ended with {status}, it should be {STORED}"));
            }
            let own = |of: &&mut Option<u32>| of.is_some_and(|of| u64::from(of) == tag.0);
            if let Some(place) = flying.iter_mut().find(own) {
                *place = None;
            }
            stored.fetch_add(u64::from(status == STORED), Ordering::Release);
        }
        let is_over = stop.is_some() || (next == VALUES && flying.iter().all(Option::is_none));
        (is_over.then_some(()), (next, stored.load(Ordering::Relaxed)))
    });
    stop.map_or(Ok(()), |text| Err(Stop::Fail(text)))?;
    ensure!(all.is_some(), "of {next} puts {} ended", stored.load(Ordering::Relaxed));
    Ok(())
}

/// Checks the values that the process before it has put, and removes them.
pub(super) fn look(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let each = AT_ONCE.min(world.tier.limits().max_pages);
    let mut wrong = Ok(());
    for first in (0..VALUES).step_by(each as usize) {
        let count = each.min(VALUES - first);
        let pages: Vec<TierPage> = (0..count).map(|n| page(&world, first + n, BACK, n)).collect();
        let tag = u64::from(first) * 2;
        world.start("get", || world.tier.get(Tag(tag), &pages))?;
        let ended = world.finish("get", tag, count)?;
        for ((page, status), number) in pages.iter().zip(ended).zip(first..) {
            // An error and a missing value both count as no value.
            if status == FOUND && wrong.is_ok() {
                let mut found = vec![0; page.length as usize];
                read_at(&world.memory, page.offset as usize, &mut found);
                wrong = is_whole(&found, number, "after its process was killed");
            }
        }
        let keys: Vec<Key> = pages.iter().map(|page| page.key).collect();
        world.start("delete", || world.tier.delete(Tag(tag + 1), &keys))?;
        world.finish("delete", tag + 1, count)?;
    }
    wrong
}
