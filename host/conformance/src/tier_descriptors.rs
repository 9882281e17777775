//! Cases about descriptors that a storage tier leaves open for values.

use host_plugin_api::tier::{FOUND, STORED};
use host_plugin_api::{ErrorCode, Tag, TierCompletion, TierPage};

use super::observe::{descriptors, wait_for, wait_while_moving};
use super::tier_world::{BACK, World};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[Case {
    name: "tier-descriptors",
    role: Some("tier"),
    capability: None,
    about: "values that are put, read and deleted leave no descriptor open",
    run: left_open,
}];

/// Values in a round.
const VALUES: u32 = 48;
/// Values in flight at once, each in memory of its own.
const AT_ONCE: u32 = 8;
/// Rounds, which stop when one leaves fewer descriptors than values behind. Descriptors that a tier keeps open for good are open
/// after the first.
const ROUNDS: u64 = 3;

fn left_open(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    let mut left = 0;
    for round in 0..ROUNDS {
        let before = descriptors();
        let tag =
            |call: u64, number: u32| Tag(1 + (round * 4 + call) * u64::from(VALUES) + u64::from(number));
        let page = |number: u32, base: u64| {
            let place = world.pages(world.batch.min(AT_ONCE), base);
            TierPage { key: world.key(number), ..place[number as usize % place.len()] }
        };
        alone(&world, "put", STORED, |n| world.tier.put(tag(0, n), &[page(n, 0)]))?;
        alone(&world, "get", FOUND, |n| world.tier.get(tag(1, n), &[page(n, BACK)]))?;
        alone(&world, "exists", FOUND, |n| world.tier.exists(tag(2, n), &[world.key(n)]))?;
        alone(&world, "delete", FOUND, |n| world.tier.delete(tag(3, n), &[world.key(n)]))?;
        // Threads of the tier may close their descriptors after the completion.
        let few = || descriptors().saturating_sub(before) < VALUES as usize;
        if wait_for(|| few().then_some(())).is_some() {
            return Ok(());
        }
        left = descriptors().saturating_sub(before);
    }
    let text = format!(
        "{VALUES} values that were put, read and deleted left {left} descriptors open, and those before them left some, too"
    );
    Err(Stop::Fail(text))
}

/// Starts a batch for each value alone, some at once, and waits until all have ended with `status`.
fn alone(world: &World, what: &str, status: i32, mut call: impl FnMut(u32) -> i32) -> Outcome {
    let places = world.batch.min(AT_ONCE);
    for first in (0..VALUES).step_by(places as usize) {
        let count = places.min(VALUES - first);
        let (mut started, mut ended, mut stop) = (0, 0, None);
        let all = wait_while_moving(|| {
            if started < count {
                let code = call(first + started);
                started += u32::from(code == 0);
                if code != 0 && code != ErrorCode::WOULD_BLOCK.0 {
                    stop = Some(format!("{what} of one value answered {:?}", ErrorCode(code)));
                }
            }
            let mut one = [TierCompletion::default()];
            if world.tier.poll(&mut one) == 1 {
                ended += 1;
                if one[0].status != status {
                    stop = Some(format!("a {what} ended with {}, it should be {status}", one[0].status));
                }
            }
            ((stop.is_some() || ended == count).then_some(()), (started, ended))
        });
        stop.map_or(Ok(()), |text| Err(Stop::Fail(text)))?;
        ensure!(all.is_some(), "of {count} batches of one {what} {ended} ended");
    }
    Ok(())
}
