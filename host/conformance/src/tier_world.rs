//! A storage tier in this process, with registered memory, and batches that are watched to their end.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use host_memory::SharedMemory;
use host_plugin_api::tier::STORED;
use host_plugin_api::{
    Address, ErrorCode, Key, Memory, MemoryKind, RegionId, StorageTier, Tag, TierCompletion, TierPage,
};

use super::bytes::{read_at, write_at};
use super::observe::wait_for;
use super::random::seeded;
use super::wording::with_article;
use super::{Outcome, Stop, Subject, ensure, wording};

/// Bytes of the region.
pub const BYTES: usize = 1 << 20;
/// Offset in the region of the memory for gets. The memory for puts is before it.
pub const BACK: u64 = BYTES as u64 / 2;
/// The byte with which the kit fills memory that must not be written. Values that are compared with such memory do not have it.
pub const GUARD: u8 = 0x5C;

fn register(tier: &dyn StorageTier, memory: &SharedMemory) -> Result<RegionId, Stop> {
    let offered = Memory {
        address: Address::of(memory.address().as_ptr()),
        length: memory.bytes() as u64,
        kind: MemoryKind::DRAM,
        device: 0,
        fd: memory.fd().as_raw_fd(),
        generation: 1,
        fd_offset: 0,
    };
    Ok(tier.register(&offered).map_err(|e| format!("register of shared host memory answered {e}"))?)
}

pub struct World {
    pub tier: Arc<dyn StorageTier>,
    pub memory: SharedMemory,
    pub region: RegionId,
    /// Bytes of one page, as the tier's limits allow.
    pub page: u32,
    /// Pages in one batch.
    pub batch: u32,
    run: [u8; 8],
}

impl World {
    pub fn open(subject: &Subject) -> Result<Self, Stop> {
        Self::open_as(subject, "conformance")
    }

    /// An instance with this name.
    pub fn open_as(subject: &Subject, name: &str) -> Result<Self, Stop> {
        let memory = SharedMemory::new("tier", BYTES).map_err(|e| Stop::Skip(format!("no memory: {e}")))?;
        let tier = subject.tier(name)?;
        let limits = tier.limits();
        ensure!(
            limits.max_pages > 0 && limits.max_batches > 0 && limits.max_value > 0 && limits.alignment > 0,
            "limits says that nothing fits: {limits:?}"
        );
        let alignment = limits.alignment.min(BACK);
        let page = (16_384 / alignment).max(1) * alignment;
        let page = if page > limits.max_value { limits.max_value / alignment * alignment } else { page };
        let page = u32::try_from(page).unwrap_or(16_384);
        let batch = limits.max_pages.min(16);
        ensure!(page > 0 && u64::from(page * batch) <= BACK, "no page fits the limits: {limits:?}");
        let region = register(&*tier, &memory)?;
        Ok(Self { tier, memory, region, page, batch, run: subject.run })
    }

    /// Registers the memory again.
    pub fn register(&mut self) -> Outcome {
        self.region = register(&*self.tier, &self.memory)?;
        Ok(())
    }

    /// Registers more memory for pages.
    pub fn register_more(&self, memory: &SharedMemory) -> Result<RegionId, Stop> {
        register(&*self.tier, memory)
    }

    /// Opens a tier and stores the keys of one batch. No byte of their values is [`GUARD`].
    pub fn stored(subject: &Subject) -> Result<Self, Stop> {
        let world = Self::open(subject)?;
        world.filled_without(GUARD);
        world.put_all(1)?;
        Ok(world)
    }

    pub fn key(&self, number: u32) -> Key {
        let mut key = [0x5C; 32];
        key[..8].copy_from_slice(&self.run);
        key[8..12].copy_from_slice(&number.to_le_bytes());
        Key(key)
    }

    /// Pages for the keys `0..count`, one after the other from offset `base`.
    pub fn pages(&self, count: u32, base: u64) -> Vec<TierPage> {
        (0..count)
            .map(|number| TierPage {
                key: self.key(number),
                region: self.region,
                length: self.page,
                offset: base + u64::from(number) * u64::from(self.page),
            })
            .collect()
    }

    pub fn keys(&self, count: u32) -> Vec<Key> {
        (0..count).map(|number| self.key(number)).collect()
    }

    /// Starts a batch. Repeats the call while the tier answers `WOULD_BLOCK`.
    pub fn start(&self, what: &str, mut call: impl FnMut() -> i32) -> Result<(), Stop> {
        let code = wait_for(|| Some(call()).filter(|code| *code != ErrorCode::WOULD_BLOCK.0));
        match code {
            Some(0) => Ok(()),
            Some(code) => Err(Stop::Fail(format!("{what} answered {:?}", ErrorCode(code)))),
            None => Err(Stop::Fail(format!("{what} answered WOULD_BLOCK for ever"))),
        }
    }

    /// Waits for a batch of `count` pages and returns their statuses.
    pub fn finish(&self, what: &str, tag: u64, count: u32) -> Result<Vec<i32>, Stop> {
        let mut ended: BTreeMap<u32, i32> = BTreeMap::new();
        while ended.len() < count as usize {
            let mut one = [TierCompletion::default()];
            let answer = wait_for(|| Some(self.tier.poll(&mut one)).filter(|n| *n != 0));
            let Some(answer) = answer else {
                let seen = ended.len();
                return Err(Stop::Fail(format!(
                    "of {count} pages of {} only {seen} completed",
                    with_article(what)
                )));
            };
            ensure!(answer == 1, "poll with room for one answered {:?}", ErrorCode(answer));
            let TierCompletion { tag: found, page, status, .. } = one[0];
            ensure!(found.0 == tag, "the {what} {tag} alone is in flight, but {} completed", found.0);
            ensure!(page < count, "page {page} of {} of {count} pages completed", with_article(what));
            let before = ended.insert(page, status);
            ensure!(before.is_none(), "page {page} of {} completed twice", with_article(what));
        }
        Ok(ended.into_values().collect())
    }

    /// Waits for a batch of one page and returns its completion.
    pub fn one(&self, what: &str, tag: u64) -> Result<TierCompletion, Stop> {
        let mut one = [TierCompletion::default()];
        let answer = wait_for(|| Some(self.tier.poll(&mut one)).filter(|n| *n != 0));
        ensure!(answer.is_some(), "the page of {} never ended", with_article(what));
        ensure!(
            answer == Some(1) && one[0].tag == Tag(tag),
            "the {what} {tag} alone is in flight, and poll answered {answer:?} with {:?}",
            one[0]
        );
        Ok(one[0])
    }

    pub fn all(&self, what: &str, tag: u64, count: u32, status: i32, call: impl FnMut() -> i32) -> Outcome {
        self.start(what, call)?;
        let ended = self.finish(what, tag, count)?;
        let wrong = ended.iter().position(|found| *found != status);
        if let Some(page) = wrong {
            let (what, found) = (with_article(what), wording::status(ended[page]));
            ensure!(false, "page {page} of {what} ended with {found}, it should be {status}");
        }
        Ok(())
    }

    pub fn put_all(&self, tag: u64) -> Outcome {
        let pages = self.pages(self.batch, 0);
        self.all("put", tag, self.batch, STORED, || self.tier.put(Tag(tag), &pages))
    }

    pub fn delete_all(&self, tag: u64) -> Outcome {
        let keys = self.keys(self.batch);
        self.start("delete", || self.tier.delete(Tag(tag), &keys))?;
        self.finish("delete", tag, self.batch).map(drop)
    }

    pub fn filled(&self) -> Vec<u8> {
        let mut bytes = vec![0; BACK as usize];
        seeded().fill(&mut bytes);
        write_at(&self.memory, 0, &bytes);
        bytes
    }

    /// As [`filled`](World::filled), with no byte equal to `guard`.
    pub fn filled_without(&self, guard: u8) -> Vec<u8> {
        let mut bytes = self.filled();
        bytes.iter_mut().filter(|byte| **byte == guard).for_each(|byte| *byte = !guard);
        write_at(&self.memory, 0, &bytes);
        bytes
    }

    pub fn back(&self) -> Vec<u8> {
        let mut bytes = vec![0; BACK as usize];
        read_at(&self.memory, BACK as usize, &mut bytes);
        bytes
    }
}
