//! Cases about the hot calls of storage tiers: they neither allocate nor wait.

use std::cell::Cell;

use host_plugin_api::{Tag, TierCompletion};

use super::observe::wait_while_moving;
use super::tier_world::{BACK, World};
use super::{Case, Outcome, Subject, ensure, hot};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "tier-hot-allocations",
        role: Some("tier"),
        capability: None,
        about: "put, get, exists, poll and settled allocate nothing",
        run: no_allocations,
    },
    Case {
        name: "tier-hot-blocking",
        role: Some("tier"),
        capability: None,
        about: "put, get, exists, poll and settled do not wait",
        run: no_waiting,
    },
];

const CALLS: [&str; 5] = ["put", "get", "exists", "poll", "settled"];

/// A tag that no round has.
const LAST: u64 = 1 << 40;

/// Number of pages in flight.
type Flying = Cell<u64>;

/// Makes one of the calls, in the order of [`CALLS`].
fn calls<'a>(world: &'a World, flying: &'a Flying) -> impl FnMut(u64, usize) -> i32 + 'a {
    let (pages, back, keys) = (world.pages(1, 0), world.pages(1, BACK), world.keys(1));
    let mut done = [TierCompletion::default(); 16];
    move |round, call| {
        let tag = Tag(round * 4 + call as u64);
        let started = |code: i32| {
            flying.set(flying.get() + u64::from(code == 0));
            code
        };
        let mut poll = || {
            let count = world.tier.poll(&mut done);
            flying.set(flying.get().saturating_sub(u64::try_from(count).unwrap_or(0)));
            count
        };
        match call {
            0 => started(world.tier.put(tag, &pages)),
            1 => started(world.tier.get(tag, &back)),
            2 => started(world.tier.exists(tag, &keys)),
            // The second poll often finds nothing. It must not wait then.
            3 => poll().min(poll()),
            _ => world.tier.settled(Tag(round * 4)),
        }
    }
}

/// Removes the values that the calls have stored, after all batches have ended.
fn remove(world: &World, flying: &Flying) -> Outcome {
    let mut done = [TierCompletion::default(); 16];
    let none = wait_while_moving(|| {
        let count = world.tier.poll(&mut done);
        flying.set(flying.get().saturating_sub(u64::try_from(count).unwrap_or(0)));
        ((flying.get() == 0).then_some(()), flying.get())
    });
    ensure!(none.is_some(), "{} pages of accepted batches never ended", flying.get());
    world.delete_all(LAST)
}

fn no_allocations(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let flying = Flying::default();
    hot::allocate_nothing(subject, CALLS, calls(&world, &flying))?;
    remove(&world, &flying)
}

fn no_waiting(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let flying = Flying::default();
    hot::do_not_wait(CALLS, calls(&world, &flying))?;
    remove(&world, &flying)
}
