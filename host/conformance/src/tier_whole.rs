//! Cases about reading while a value is put: a reader gets all of the value or nothing.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use host_plugin_api::tier::{FOUND, STORED};
use host_plugin_api::{ErrorCode, Tag, TierCompletion, TierPage};

use super::bytes::{read_at, write_at};
use super::observe::{ENOUGH, wait_while_moving};
use super::tier_world::{BACK, World};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[Case {
    name: "tier-whole",
    role: Some("tier"),
    capability: None,
    about: "a get while its value is put or deleted finds all of the value or none of it",
    run: whole,
}];

/// Number of values that are put one after the other. A slow tier gets fewer.
const VALUES: u32 = 24;
/// Gets in flight at once, each into memory of its own.
const GETS: u32 = 4;
/// Added to the tags of puts and deletes.
const WRITES: u64 = 1 << 32;

/// Length of a value in bytes: as long as possible, so that it is in flight for long. `values` of them fit the half of the memory
/// that is for gets.
pub(super) fn length(world: &World, values: u32) -> u32 {
    let limits = world.tier.limits();
    let most = (BACK / u64::from(values)).min(limits.max_value) / limits.alignment * limits.alignment;
    u32::try_from(most).unwrap_or(world.page).max(world.page)
}

/// The byte of which a value consists. Values with neighbouring numbers have different bytes.
pub(super) fn byte(number: u32) -> u8 {
    0x80 | (number % 64) as u8
}

/// Checks that all bytes of a found value are its own.
pub(super) fn is_whole(found: &[u8], number: u32, when: &str) -> Outcome {
    let own = found.iter().filter(|found| **found == byte(number)).count();
    ensure!(
        own == found.len(),
        "a get {when} found {own} bytes of the value and other bytes in place of {}",
        found.len() - own
    );
    Ok(())
}

/// State that the two threads share.
#[derive(Default)]
struct Shared {
    /// The newest value whose put has begun.
    newest: AtomicU32,
    /// Set while the tier refuses a put or delete with `WOULD_BLOCK`. No get may take its place then.
    waits: AtomicBool,
    is_over: AtomicBool,
}

fn whole(subject: &Subject) -> Outcome {
    let world = World::open(subject)?;
    if world.tier.limits().max_batches < 2 {
        return Err(Stop::Skip("limits allows one batch at a time, so no get meets a put".to_owned()));
    }
    let (shared, (tell, told)) = (Shared::default(), channel());
    let length = length(&world, GETS);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let written = write(&world, &shared, length, told);
            shared.is_over.store(true, Ordering::Release);
            written
        });
        // If reading fails, the sender is dropped. The writer then ends, too.
        let read = read(&world, &shared, length, tell);
        let written = writer.join().unwrap_or(Ok(()));
        read.and(written)
    })
}

/// Puts each value while the one before is still stored, then deletes the one before.
fn write(world: &World, shared: &Shared, length: u32, told: Receiver<i32>) -> Outcome {
    let begun = Instant::now();
    let mut tag = WRITES;
    let mut ended = |what: &str, call: &dyn Fn(Tag) -> i32| -> Result<Option<i32>, Stop> {
        tag += 1;
        let started = world.start(what, || {
            let code = call(Tag(tag));
            shared.waits.store(code == ErrorCode::WOULD_BLOCK.0, Ordering::Release);
            code
        });
        shared.waits.store(false, Ordering::Release);
        started?;
        // Without an answer, reading has failed. Its error says why.
        Ok(told.recv().ok())
    };
    let delete = |number: u32| move |tag: Tag| world.tier.delete(tag, &[world.key(number)]);
    let mut last = 0;
    for number in 1..=VALUES {
        let place = u64::from(number % 2) * u64::from(length);
        write_at(&world.memory, place as usize, &vec![byte(number); length as usize]);
        let page = TierPage { key: world.key(number), region: world.region, length, offset: place };
        shared.newest.store(number, Ordering::Release);
        let Some(status) = ended("put", &|tag| world.tier.put(tag, &[page]))? else { return Ok(()) };
        ensure!(status == STORED, "a put ended with {status}, it should be {STORED}");
        if number > 1 && ended("delete", &delete(number - 1))?.is_none() {
            return Ok(());
        }
        last = number;
        if begun.elapsed() > ENOUGH {
            break;
        }
    }
    ended("delete", &delete(last)).map(drop)
}

/// Gets the two newest values again and again, and fetches all completions.
fn read(world: &World, shared: &Shared, length: u32, tell: Sender<i32>) -> Outcome {
    let most = GETS.min(world.tier.limits().max_batches - 1) as usize;
    // For each place, the tag of the get and the number of the value.
    let mut flying: Vec<Option<(u64, u32)>> = vec![None; most];
    let (mut next, mut ended, mut stop) = (0, 0_u64, None);
    let mut found = vec![0; length as usize];
    let all = wait_while_moving(|| {
        let free = flying.iter().position(Option::is_none);
        let (is_over, newest) =
            (shared.is_over.load(Ordering::Acquire), shared.newest.load(Ordering::Acquire));
        if let Some(place) = free
            && newest > 0
            && !is_over
            && !shared.waits.load(Ordering::Acquire)
        {
            next += 1;
            let number = newest.saturating_sub((next % 2) as u32).max(1);
            let offset = BACK + place as u64 * u64::from(length);
            let page = TierPage { key: world.key(number), region: world.region, length, offset };
            match world.tier.get(Tag(next), &[page]) {
                0 => flying[place] = Some((next, number)),
                code if code == ErrorCode::WOULD_BLOCK.0 => {}
                code => stop = Some(Stop::Fail(format!("get answered {:?}", ErrorCode(code)))),
            }
        }
        let mut one = [TierCompletion::default()];
        if world.tier.poll(&mut one) == 1 {
            ended += 1;
            let TierCompletion { tag, status, .. } = one[0];
            if tag.0 >= WRITES {
                // A failure is ignored: then the writer has ended.
                let _ended = tell.send(status);
            }
            if let Some(place) = flying.iter().position(|of| of.is_some_and(|(own, _)| own == tag.0)) {
                let number = flying[place].take().map_or(0, |(_, number)| number);
                if status == FOUND {
                    read_at(&world.memory, BACK as usize + place * length as usize, &mut found);
                    stop = is_whole(&found, number, "while its value was put or deleted").err();
                }
            }
        }
        let quiet = is_over && flying.iter().all(Option::is_none);
        ((stop.is_some() || quiet).then_some(()), (ended, is_over))
    });
    stop.map_or(Ok(()), Err)?;
    ensure!(all.is_some(), "{ended} pages of gets, puts and deletes ended, and then no more");
    Ok(())
}
