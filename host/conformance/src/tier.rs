//! Cases for storage tiers.

use std::collections::{BTreeMap, BTreeSet};

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{
    Address, ErrorCode, Key, Memory, MemoryKind, RegionId, Tag, TierCompletion, TierPage, capability,
};

use super::bytes::{read_at, write_at};
use super::observe::{shutdown_ms, wait_for, wait_while_moving};
use super::refusals::or_unsupported;
use super::tier_world::{BACK, BYTES, World};
use super::{Case, Outcome, Stop, Subject, ensure};

const fn case(name: &'static str, about: &'static str, run: fn(&Subject) -> Outcome) -> Case {
    Case { name, role: Some("tier"), capability: None, about, run }
}

pub(super) const CASES: &[Case] = &[
    case("tier-data", "what was put comes back, byte for byte, and deleted values are gone", data),
    case("tier-completions", "each page of a batch ends in exactly one completion", completions),
    case("tier-missing", "a key that is not there is missing, and memory stays as it was", missing),
    case(
        "tier-scan",
        "a scan lists each key once, knows its own cursors alone, and usage counts the keys",
        scan,
    ),
    case("tier-bounds", "pages outside of regions are refused or fail, and touch nothing", bounds),
    case("tier-flow-control", "a full tier says WOULD_BLOCK and recovers", flow_control),
    case("tier-threads", "several threads start batches at once", threads),
    case("tier-panics", "wrong input is answered with a code, not with a panic", panics),
    case(
        "tier-cancel",
        "each page of a cancelled batch still ends once, and then the batch is settled",
        cancel,
    ),
    case("tier-closed", "after shutdown every call answers CLOSED", closed),
];

fn data(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let (bytes, count) = (world.filled(), world.batch);
    world.put_all(1)?;
    let keys = world.keys(count);
    world.all("exists", 2, count, FOUND, || world.tier.exists(Tag(2), &keys))?;
    let pages = world.pages(count, BACK);
    world.all("get", 3, count, FOUND, || world.tier.get(Tag(3), &pages))?;
    let length = (count * world.page) as usize;
    let wrong = world.back()[..length].iter().zip(&bytes).position(|(found, put)| found != put);
    ensure!(wrong.is_none(), "byte {} of what was put came back changed", wrong.unwrap_or_default());
    // Putting the same keys again answers that they are stored.
    world.put_all(4)?;
    world.all("delete", 5, count, FOUND, || world.tier.delete(Tag(5), &keys))?;
    world.all("exists of deleted keys", 6, count, MISSING, || world.tier.exists(Tag(6), &keys))
}

fn completions(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    // Several batches in flight. They may end in any order.
    let keys = world.keys(world.batch);
    let batches = u64::from(world.tier.limits().max_batches.min(8));
    for tag in 1..=batches {
        world.start("exists", || world.tier.exists(Tag(tag), &keys))?;
    }
    let mut seen: BTreeMap<(u64, u32), u32> = BTreeMap::new();
    let expected = batches as usize * world.batch as usize;
    let mut take = || {
        let mut done = [TierCompletion::default(); 32];
        let count = world.tier.poll(&mut done);
        for completion in &done[..usize::try_from(count).unwrap_or(0)] {
            *seen.entry((completion.tag.0, completion.page)).or_insert(0) += 1;
        }
        ((count < 0 || seen.len() >= expected).then_some(()), seen.len())
    };
    wait_while_moving(&mut take);
    for _ in 0..1000 {
        take();
    }
    ensure!(seen.len() == expected, "of {expected} pages in flight {} completed", seen.len());
    for ((tag, page), times) in seen {
        let known = (1..=batches).contains(&tag) && page < world.batch;
        ensure!(known, "page {page} of batch {tag} completed and was never asked for");
        ensure!(times == 1, "page {page} of batch {tag} completed {times} times");
    }
    Ok(())
}

fn missing(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    // Not zeros: a tier that fills missing pages with zeros would change nothing then.
    write_at(&world.memory, BACK as usize, &[0x5C; BACK as usize]);
    let (count, before) = (world.batch, world.back());
    let (keys, pages) = (world.keys(count), world.pages(count, BACK));
    world.all("exists of unknown keys", 1, count, MISSING, || world.tier.exists(Tag(1), &keys))?;
    world.all("get of unknown keys", 2, count, MISSING, || world.tier.get(Tag(2), &pages))?;
    world.all("delete of unknown keys", 3, count, MISSING, || world.tier.delete(Tag(3), &keys))?;
    ensure!(world.back() == before, "a get that found nothing changed memory");
    Ok(())
}

fn scan(subject: &Subject) -> Outcome {
    if !subject.declares("tier", capability::SCAN) {
        return Err(Stop::Skip("the manifest does not declare scan".to_owned()));
    }
    let world = World::open(subject)?;
    world.filled();
    world.put_all(1)?;
    let mut found = BTreeSet::new();
    let (mut cursor, mut steps) = (0, 0);
    loop {
        let mut keys = [Key::default(); 5];
        let step = match world.tier.scan(cursor, &mut keys) {
            // The configured store cannot list its keys.
            Err(error) if error.code == ErrorCode::UNSUPPORTED => return Err(Stop::Skip(error.message)),
            step => step.map_err(|e| format!("scan answered {e}"))?,
        };
        for key in &keys[..step.keys as usize] {
            ensure!(found.insert(*key), "a scan lists a key twice");
        }
        (cursor, steps) = (step.cursor, steps + 1);
        if cursor == 0 {
            break;
        }
        ensure!(steps < 1_000_000, "a scan does not come to its end");
    }
    let lacking = world.keys(world.batch).into_iter().filter(|key| !found.contains(key)).count();
    ensure!(lacking == 0, "a scan leaves out {lacking} of {} keys", world.batch);
    let strange = world.tier.scan(u64::MAX - 1, &mut [Key::default(); 5]).err().map(|error| error.code);
    ensure!(
        strange == Some(ErrorCode::INVALID_ARGUMENT),
        "scan from a cursor that no scan gave out answers {}, it should be INVALID_ARGUMENT",
        strange.map_or("with success".to_owned(), |code| format!("{code:?}"))
    );
    let usage = world.tier.usage().map_err(|e| format!("usage answered {e}"))?;
    ensure!(
        usage.values >= u64::from(world.batch),
        "usage counts {} values, {} are there",
        usage.values,
        found.len()
    );
    world.delete_all(2)
}

fn bounds(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let before = world.filled();
    let good = world.pages(1, 0)[0];
    let cases = [
        ("beyond its region", TierPage { offset: BYTES as u64 - 1, ..good }),
        ("past the end of all numbers", TierPage { offset: u64::MAX - 8, ..good }),
        ("of no bytes", TierPage { length: 0, ..good }),
        ("of an unknown region", TierPage { region: RegionId(999_999), ..good }),
    ];
    for (number, (what, page)) in cases.into_iter().enumerate() {
        for (call, code) in [
            ("put", world.tier.put(Tag(number as u64 * 2 + 1), &[page])),
            ("get", world.tier.get(Tag(number as u64 * 2 + 2), &[page])),
        ] {
            if code == 0 {
                let mut one = [TierCompletion::default()];
                let done = wait_for(|| (world.tier.poll(&mut one) == 1).then_some(()));
                ensure!(done.is_some(), "a {call} of a page {what} was accepted and never completed");
                ensure!(one[0].status <= 0, "a {call} of a page {what} ended as if it had worked");
            }
        }
    }
    let mut after = vec![0; before.len()];
    read_at(&world.memory, 0, &mut after);
    ensure!(after == before, "a page outside of its region changed memory");
    Ok(())
}

fn flow_control(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let limits = world.tier.limits();
    let keys = world.keys(1);
    ensure!(world.tier.poll(&mut []) == 0, "poll without room answers something else than 0");
    for tag in 1..=u64::from(limits.max_batches.min(4096)) * u64::from(limits.max_pages.min(4096)) + 1 {
        match world.tier.exists(Tag(tag), &keys) {
            0 if tag > 200_000 => break,
            0 => {}
            code if code == ErrorCode::WOULD_BLOCK.0 => break,
            code => ensure!(false, "exists number {tag} answered {:?}", ErrorCode(code)),
        }
    }
    let mut done = [TierCompletion::default(); 64];
    let recovered = wait_for(|| {
        let _drained = world.tier.poll(&mut done);
        (world.tier.exists(Tag(u64::MAX), &keys) == 0).then_some(())
    });
    ensure!(
        recovered.is_some(),
        "a tier that was full still answers WOULD_BLOCK after everything was polled"
    );
    if limits.max_pages < 1 << 20 {
        let keys = vec![world.key(0); limits.max_pages as usize + 1];
        let code = world.tier.exists(Tag(u64::MAX - 1), &keys);
        ensure!(code < 0, "a batch of more keys than limits allows was accepted");
    }
    Ok(())
}

fn threads(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    world.put_all(1)?;
    let keys = world.keys(world.batch);
    let failed = std::thread::scope(|scope| {
        let start = |thread: u64| {
            let (world, keys) = (&world, &keys);
            move || {
                (0..4).try_for_each(|n| {
                    let tag = Tag(100 + thread * 4 + n);
                    world.start("exists", || world.tier.exists(tag, keys))
                })
            }
        };
        let workers: Vec<_> = (0..4).map(|thread| scope.spawn(start(thread))).collect();
        // Polled meanwhile, so that a tier with a small queue does not stay full.
        let mut done = [TierCompletion::default(); 16];
        let mut found = 0;
        let all = wait_while_moving(|| {
            let count = world.tier.poll(&mut done);
            let done = &done[..usize::try_from(count).unwrap_or(0)];
            found += done.iter().filter(|d| d.status == FOUND).count();
            ((count < 0 || found >= 16 * keys.len()).then_some(()), found)
        });
        let ends: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        if all.is_none() {
            return Some(Stop::Fail(format!(
                "4 threads asked for {} keys, {found} were found",
                16 * keys.len()
            )));
        }
        ends.into_iter().filter_map(|end| end.ok().and_then(Result::err)).next()
    });
    failed.map_or(Ok(()), Err)?;
    world.delete_all(2)
}

fn panics(subject: &Subject) -> Outcome {
    let tier = subject.tier("panics")?;
    let page =
        TierPage { key: Key([0xFF; 32]), region: RegionId(u32::MAX), length: u32::MAX, offset: u64::MAX };
    let memory = Memory {
        address: Address(u64::MAX),
        length: u64::MAX,
        kind: MemoryKind(77),
        device: u32::MAX,
        fd: -1,
        generation: 0,
        fd_offset: u64::MAX,
    };
    let code = |result: host_plugin_api::Result<()>| result.err().map_or(0, |e| e.code.0);
    let answers: [(&str, i32); 12] = [
        ("put of a page in no region", tier.put(Tag(u64::MAX), &[page])),
        ("get of a page in no region", tier.get(Tag(u64::MAX), &[page])),
        ("put of nothing", tier.put(Tag(0), &[])),
        ("exists of nothing", tier.exists(Tag(0), &[])),
        ("delete of nothing", tier.delete(Tag(0), &[])),
        ("cancel of an unknown tag", tier.cancel(Tag(3))),
        ("settled of an unknown tag", tier.settled(Tag(3))),
        ("register of memory of an unknown kind", code(tier.register(&memory).map(drop))),
        ("deregister of an unknown region", code(tier.deregister(RegionId(u32::MAX)))),
        ("scan from an unknown cursor", code(tier.scan(u64::MAX, &mut []).map(drop))),
        ("shutdown", code(tier.shutdown(shutdown_ms()))),
        ("a second shutdown", code(tier.shutdown(shutdown_ms()))),
    ];
    for (what, answer) in answers {
        ensure!(answer != ErrorCode::PANICKED.0, "{what} made the plugin panic");
    }
    Ok(())
}

fn cancel(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    world.filled();
    let unknown = world.tier.cancel(Tag(12_345));
    ensure!(unknown < 0, "cancel of a tag that is not in flight answers {unknown}, it should be an error");
    let exact = subject.declares("tier", capability::SETTLED);
    let never = world.tier.settled(Tag(987_654_321));
    ensure!(!exact || never == 1, "settled is declared, but answers {never} for a tag never seen");
    for tag in 1..=8 {
        let pages = world.pages(world.batch, 0);
        world.start("put", || world.tier.put(Tag(tag), &pages))?;
        // The cancel may come too late. That is an error and changes nothing.
        let _too_late = world.tier.cancel(Tag(tag));
        for status in world.finish("cancelled put", tag, world.batch)? {
            let fine = status == STORED || status < 0;
            ensure!(fine, "a page of a cancelled put ended with {status}: neither stored nor an error");
        }
        let settled = wait_for(|| Some(world.tier.settled(Tag(tag))).filter(|answer| *answer == 1));
        ensure!(!exact || settled.is_some(), "batch {tag} was cancelled and completed, and is never settled");
    }
    world.delete_all(100)
}

fn closed(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    let keys = world.keys(1);
    world.start("exists", || world.tier.exists(Tag(1), &keys))?;
    let ended = world.tier.shutdown(shutdown_ms());
    ended.map_err(|e| format!("shutdown with a batch in flight answered {e}"))?;
    let mut one = [TierCompletion::default()];
    let answers = [
        ("exists", world.tier.exists(Tag(2), &keys)),
        ("poll", world.tier.poll(&mut one)),
        // Some stores do not report their usage.
        ("usage", or_unsupported(world.tier.usage().err().map_or(0, |e| e.code.0), ErrorCode::CLOSED)),
    ];
    for (call, answer) in answers {
        let closed = answer == ErrorCode::CLOSED.0;
        ensure!(closed, "{call} after shutdown answers {answer} instead of CLOSED");
    }
    Ok(())
}
