//! Cases of two processes, one after the other, about data that outlives a process.

use host_plugin_api::tier::FOUND;
use host_plugin_api::{Tag, capability};

use super::observe::shutdown_ms;
use super::tier_world::{BACK, World};
use super::{Case, Outcome, Subject, ensure, tier_crash};

pub(super) const CASES: &[Case] = &[Case {
    name: "tier-persistent",
    role: Some("tier"),
    capability: Some(capability::PERSISTENT),
    about: "what one process has put, the next one finds",
    run: put,
}];

/// The function that the second process of a case runs, if the case has one.
pub(super) fn second(name: &str) -> Option<fn(&Subject) -> Outcome> {
    match name {
        "tier-persistent" => Some(get),
        tier_crash::NAME => Some(tier_crash::look),
        _ => None,
    }
}

/// How often the processes of a case run.
pub(super) fn rounds(name: &str) -> u64 {
    if dies(name) { tier_crash::ROUNDS } else { 1 }
}

/// Whether the first process of a case kills itself after it has reported that it passed.
pub(super) fn dies(name: &str) -> bool {
    name == tier_crash::NAME
}

fn put(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    world.put_all(1)?;
    world.tier.shutdown(shutdown_ms()).map_err(|error| format!("shutdown answered {error}"))?;
    Ok(())
}

fn get(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let (bytes, count) = (world.filled(), world.batch);
    let keys = world.keys(count);
    let again = |what: &str| format!("{what} in a second process");
    world.all(&again("exists"), 1, count, FOUND, || world.tier.exists(Tag(1), &keys))?;
    let pages = world.pages(count, BACK);
    world.all(&again("get"), 2, count, FOUND, || world.tier.get(Tag(2), &pages))?;
    let length = (count * world.page) as usize;
    let wrong = world.back()[..length].iter().zip(&bytes).position(|(found, put)| found != put);
    ensure!(
        wrong.is_none(),
        "byte {} of what another process had put came back changed",
        wrong.unwrap_or_default()
    );
    world.delete_all(3)
}
