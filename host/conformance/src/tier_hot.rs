//! Cases about the hot calls of storage tiers: they neither allocate nor wait.

use host_plugin_api::{Tag, TierCompletion};

use super::tier_world::{BACK, World};
use super::{Case, Outcome, Subject, hot};

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

/// Makes one of the calls, in the order of [`CALLS`].
fn calls(world: &World) -> impl FnMut(u64, usize) -> i32 {
    let (pages, back, keys) = (world.pages(1, 0), world.pages(1, BACK), world.keys(1));
    let mut done = [TierCompletion::default(); 16];
    move |round, call| {
        let tag = Tag(round * 4 + call as u64);
        match call {
            0 => world.tier.put(tag, &pages),
            1 => world.tier.get(tag, &back),
            2 => world.tier.exists(tag, &keys),
            // The second often finds nothing, which must not make it wait.
            3 => world.tier.poll(&mut done).min(world.tier.poll(&mut done)),
            _ => world.tier.settled(Tag(round * 4)),
        }
    }
}

fn no_allocations(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    hot::allocate_nothing(subject, CALLS, calls(&world))
}

fn no_waiting(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    hot::do_not_wait(CALLS, calls(&world))
}
