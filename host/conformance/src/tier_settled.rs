//! Cases about `settled` of a storage tier: after it answered 1, nothing of a batch touches memory any more.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::time::Instant;

use host_memory::SharedMemory;
use host_plugin_api::{ErrorCode, Tag, TierCompletion, TierPage, capability};

use super::bytes::{fill, peek};
use super::observe::{ENOUGH, wait_for, wait_while_moving};
use super::tier_world::{GUARD, World};
use super::{Case, Outcome, Stop, Subject, ensure};

pub(super) const CASES: &[Case] = &[Case {
    name: "tier-settled",
    role: Some("tier"),
    capability: Some(capability::SETTLED),
    about: "settled answers 1 as soon as nothing of a batch touches memory any more, and not before",
    run: settled,
}];

/// Number of rounds. A slow tier gets fewer.
const ROUNDS: u64 = 12;
/// Limit of the batches in flight at once.
const BATCHES: u32 = 8;

/// A batch of gets, each into memory of its own.
struct Batch {
    tag: Tag,
    start: usize,
    /// A copy of its memory from when `settled` answered 1 for the first time.
    settled: Option<Vec<u8>>,
}

struct Setup<'a> {
    world: &'a World,
    memory: &'a SharedMemory,
    /// Bytes that a batch writes.
    bytes: usize,
}

impl Setup<'_> {
    /// Copies the memory of a batch, its second half first: a tier that copies in order writes it last.
    fn look(&self, batch: &Batch) -> Vec<u8> {
        let mut found = vec![0; self.bytes];
        let (first, second) = found.split_at_mut(self.bytes / 2);
        peek(self.memory, batch.start + first.len(), second);
        peek(self.memory, batch.start, first);
        found
    }

    /// Calls `settled` for a batch, and copies its memory when the answer becomes 1.
    fn ask(&self, batch: &mut Batch) -> Outcome {
        let answer = self.world.tier.settled(batch.tag);
        ensure!((0..=1).contains(&answer), "settled of a batch in flight answered {answer}");
        if answer == 1 && batch.settled.is_none() {
            batch.settled = Some(self.look(batch));
        }
        ensure!(
            answer == 1 || batch.settled.is_none(),
            "settled of batch {} answered 1, and then 0",
            batch.tag.0
        );
        Ok(())
    }
}

fn settled(subject: &Subject) -> Outcome {
    let world = World::stored(subject)?;
    let bytes = (world.page * world.batch) as usize;
    let memory = SharedMemory::new("settled", bytes * BATCHES as usize);
    let memory = memory.map_err(|error| Stop::Skip(format!("no memory: {error}")))?;
    let region = world.register_more(&memory)?;
    let setup = Setup { world: &world, memory: &memory, bytes };
    let begun = Instant::now();
    for round in 0..ROUNDS {
        fill(&memory, GUARD);
        let mut batches: Vec<Batch> = Vec::new();
        for number in 0..BATCHES {
            let (tag, start) = (Tag(10 + round * 8 + u64::from(number)), number as usize * bytes);
            let page = |page: TierPage| TierPage { region, offset: page.offset + start as u64, ..page };
            let pages: Vec<TierPage> = world.pages(world.batch, 0).into_iter().map(page).collect();
            match world.tier.get(tag, &pages) {
                0 => batches.push(Batch { tag, start, settled: None }),
                code if code == ErrorCode::WOULD_BLOCK.0 && !batches.is_empty() => break,
                code => return Err(Stop::Fail(format!("get answered {:?}", ErrorCode(code)))),
            }
        }
        // The newest batch first: the older ones keep the tier busy meanwhile.
        batches.iter_mut().rev().try_for_each(|batch| setup.ask(batch))?;
        end(&setup, &mut batches)?;
        // One round with a slow tier shows as much as several with a fast one.
        if begun.elapsed() > ENOUGH {
            break;
        }
    }
    world.tier.deregister(region).map_err(|error| format!("deregister answered {error}"))?;
    world.delete_all(6)
}

/// Follows the batches until each page has ended, and compares.
fn end(setup: &Setup<'_>, batches: &mut [Batch]) -> Outcome {
    let count = batches.len();
    let expected = count * setup.world.batch as usize;
    let (mut ended, mut wrong) = (0, None);
    let complete = wait_while_moving(|| {
        // One completion at a time, so that `settled` is called between any two.
        let mut one = [TierCompletion::default()];
        if setup.world.tier.poll(&mut one) == 1 {
            ended += 1;
        }
        let asked = batches.iter_mut().filter(|batch| batch.settled.is_none());
        wrong = asked.map(|batch| setup.ask(batch)).find_map(Result::err);
        ((wrong.is_some() || ended == expected).then_some(()), ended)
    });
    wrong.map_or(Ok(()), Err)?;
    ensure!(complete.is_some(), "of {expected} pages of gets {ended} ended");
    for batch in batches.iter_mut() {
        let mut failed = None;
        let settled = wait_for(|| {
            failed = setup.ask(batch).err();
            (failed.is_some() || batch.settled.is_some()).then_some(())
        });
        failed.map_or(Ok(()), Err)?;
        ensure!(settled.is_some(), "of {count} batches not all were ever settled");
    }
    for batch in batches {
        let (before, after) = (batch.settled.take().unwrap_or_default(), setup.look(batch));
        let changed = before.iter().zip(&after).position(|(before, after)| before != after);
        ensure!(
            changed.is_none(),
            "settled answered 1 of batch {}, and byte {} of its memory changed after that",
            batch.tag.0,
            changed.unwrap_or_default()
        );
    }
    Ok(())
}
