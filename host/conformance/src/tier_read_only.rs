//! Cases about an instance that is opened read-only: it must change nothing.

use host_plugin_api::tier::{FOUND, STORED};
use host_plugin_api::{ErrorCode, Tag, TierPage};

use super::observe::wait_for;
use super::tier_world::World;
use super::{Case, Outcome, Stop, Subject, ensure};

/// The configuration key that makes an instance read-only.
const KEY: &str = "read_only";

pub(super) const CASES: &[Case] = &[Case {
    name: "tier-read-only",
    role: Some("tier"),
    capability: None,
    about: "where the manifest declares read_only, an instance that is opened with it stores and removes nothing",
    run: read_only,
}];

/// The status with which a batch of one page ended, or the code that refused it.
fn answer(world: &World, what: &str, tag: u64, mut call: impl FnMut() -> i32) -> Result<i32, Stop> {
    let code = wait_for(|| Some(call()).filter(|code| *code != ErrorCode::WOULD_BLOCK.0));
    match code {
        Some(0) => world.one(what, tag).map(|done| done.status),
        Some(code) => Ok(code),
        None => Err(Stop::Fail(format!("{what} answered WOULD_BLOCK for ever"))),
    }
}

fn read_only(subject: &Subject) -> Outcome {
    let declared = subject.manifest().config.get(KEY).is_some_and(|of| of.kind == "boolean");
    let table: toml::Table = subject.config.parse().map_err(|error| format!("the configuration: {error}"))?;
    let is_set = table.get(KEY).and_then(toml::Value::as_bool) == Some(true);
    if !declared || is_set {
        return Ok(());
    }
    let writer = World::stored(subject)?;
    let mut with = table;
    with.insert(KEY.to_owned(), true.into());
    let with = Subject { entry: subject.entry.clone(), config: with.to_string(), ..*subject };
    let reader = World::open_as(&with, "read-only")?;
    reader.filled();
    let other = writer.key(writer.batch);
    let page = TierPage { key: other, ..reader.pages(1, 0)[0] };
    let put = answer(&reader, "put", 1, || reader.tier.put(Tag(1), &[page]))?;
    let delete = answer(&reader, "delete", 2, || reader.tier.delete(Tag(2), &[writer.key(0)]))?;
    let there = |world: &World, tag: u64| {
        answer(world, "exists", tag, || world.tier.exists(Tag(tag), &[other])).map(|status| status == FOUND)
    };
    // Both instances are asked, because some tiers do not share their values between instances.
    let stored = there(&reader, 3)? || there(&writer, 4)?;
    let keys = writer.keys(writer.batch);
    let told = "of an instance that was opened with read_only = true";
    ensure!(put != STORED && !stored, "a put {told} ended with {put}, and the value is there: {stored}");
    ensure!(delete != FOUND, "a delete {told} ended with {delete}: it says that the value is gone");
    let what = format!("exists after a delete {told}");
    writer.all(&what, 5, writer.batch, FOUND, || writer.tier.exists(Tag(5), &keys))?;
    writer.delete_all(6)
}
