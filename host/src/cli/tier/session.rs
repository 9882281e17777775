//! An open tier for a command, which runs each batch to its end.

#![allow(clippy::disallowed_methods, reason = "a command waits for storage, in real time")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use host_plugin_api::tier::FOUND;
use host_plugin_api::{
    Address, ErrorCode, Key, Memory, MemoryKind, RegionId, StorageTier, Tag, TierCompletion, TierLimits,
    TierPage, TierUsage,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;

use host_memory::Mapping;
use host_plugins::{Kind, Manifest, Services};
use host_worker::seal::{self, Damage};

/// Limit of the keys in one step of a scan.
const STEP: usize = 4096;
/// Limit of the bytes that are read at once, unless one value is longer.
const MEMORY: u64 = 32 << 20;
/// Alignment of values in memory, in bytes. Most storage can read into memory with this alignment without a copy.
const BLOCK: u64 = 4096;
/// Longest time to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two polls of a tier without a descriptor.
const PAUSE: Duration = Duration::from_millis(1);
/// Deadline of a shutdown, in milliseconds.
const SHUTDOWN_MS: u64 = 5000;
/// Name of the plugin's counter of damaged values.
const DAMAGED: &str = "corrupt";

/// The end of one page: its status, and the length of its value in bytes if the plugin reports it.
#[derive(Clone, Copy, Debug, Default)]
pub struct End {
    pub status: i32,
    pub bytes: u64,
    /// The damage of a value that was found, if there is any.
    pub damage: Option<Damage>,
}

/// A tier that is opened for one command.
pub struct Session {
    tier: Arc<dyn StorageTier>,
    limits: TierLimits,
    plugin: String,
    id: String,
    memory: Option<(Mapping, RegionId)>,
    last: u64,
    /// Whether a batch did not end: the plugin may still write to its memory.
    stuck: bool,
}

impl Session {
    pub fn new(tier: Arc<dyn StorageTier>, manifest: &Manifest) -> Self {
        let limits = tier.limits();
        let (plugin, id) = (manifest.plugin.name.clone(), manifest.plugin.id.clone());
        Self { tier, limits, plugin, id, memory: None, last: 0, stuck: false }
    }

    pub fn limits(&self) -> TierLimits {
        self.limits
    }

    pub fn usage(&self) -> anyhow::Result<TierUsage> {
        let usage = self.tier.usage();
        usage.with_context(|| format!("plugin {:?} does not say what is stored", self.plugin))
    }

    /// Number of damaged values that the plugin has counted since it was loaded, also those that no answer reported. 0 if it has no
    /// such counter.
    pub fn counted_damaged(&self) -> u64 {
        let services = Services::of(&self.id).ok();
        let metrics = services.map(|services| services.metrics()).unwrap_or_default();
        let counters = metrics.iter().filter(|metric| metric.kind == Kind::Counter && metric.name == DAMAGED);
        counters.map(|metric| metric.value()).sum()
    }

    /// Passes all keys to `each`, some at a time, until it returns false.
    pub fn scan(
        &mut self,
        mut each: impl FnMut(&mut Self, &[Key]) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let mut keys = vec![Key::default(); STEP];
        let mut cursor = 0;
        loop {
            let step = self.tier.scan(cursor, &mut keys);
            let step = step.with_context(|| format!("plugin {:?} cannot list its keys", self.plugin))?;
            if !each(self, &keys[..step.keys as usize])? || step.cursor == 0 {
                return Ok(());
            }
            cursor = step.cursor;
        }
    }

    /// Asks whether keys are stored, and how long their values are.
    pub fn exists(&mut self, keys: &[Key]) -> anyhow::Result<Vec<End>> {
        self.in_batches("exists", keys, |tier, tag, keys| tier.exists(tag, keys))
    }

    /// Removes values.
    pub fn delete(&mut self, keys: &[Key]) -> anyhow::Result<Vec<End>> {
        self.in_batches("delete", keys, |tier, tag, keys| tier.delete(tag, keys))
    }

    /// Reads values of these lengths, as many at once as fit, and compares them with the host's seal. The bytes are not kept.
    pub fn get(&mut self, values: &[(Key, u64)]) -> anyhow::Result<Vec<End>> {
        let mut ends = Vec::with_capacity(values.len());
        let align = self.limits.alignment.max(BLOCK);
        let mut rest = values;
        while !rest.is_empty() {
            let (mut pages, mut offset) = (Vec::new(), 0_u64);
            for (key, bytes) in rest.iter().take(self.limits.max_pages as usize) {
                let end = offset.saturating_add(*bytes);
                if !pages.is_empty() && end > MEMORY {
                    break;
                }
                let length = u32::try_from(*bytes)
                    .with_context(|| format!("a value of {bytes} bytes is longer than any can be"))?;
                pages.push(TierPage { key: *key, region: RegionId(0), length, offset });
                offset = end.next_multiple_of(align);
            }
            let region = self.region(offset)?;
            pages.iter_mut().for_each(|page| page.region = region);
            let read = self.in_batches("get", &pages, |tier, tag, pages| tier.get(tag, pages))?;
            ends.extend(
                pages.iter().zip(read).map(|(page, end)| End { damage: self.damage(page, end), ..end }),
            );
            rest = &rest[pages.len()..];
        }
        Ok(ends)
    }

    /// The damage of a value that was read, if there is any.
    fn damage(&self, page: &TierPage, end: End) -> Option<Damage> {
        let (memory, _region) = self.memory.as_ref().filter(|_| end.status == FOUND)?;
        let (offset, length) = (usize::try_from(page.offset).ok()?, usize::try_from(page.length).ok()?);
        // SAFETY: the batch has ended, so the plugin does not access the bytes any more, and nothing else writes them.
        let value = unsafe { memory.bytes_at(offset, length) };
        seal::check(&page.key, value).err()
    }

    /// Registers memory of at least `bytes` bytes.
    fn region(&mut self, bytes: u64) -> anyhow::Result<RegionId> {
        if let Some((memory, region)) = &self.memory {
            if memory.bytes() as u64 >= bytes {
                return Ok(*region);
            }
            self.tier.deregister(*region).context("memory cannot be taken back from the plugin")?;
            self.memory = None;
        }
        let length = bytes.max(MEMORY);
        let memory = Mapping::private(usize::try_from(length)?);
        let memory = memory.with_context(|| format!("there is no memory for {length} bytes"))?;
        let offered = Memory {
            address: Address::of(memory.address().as_ptr()),
            length,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: -1,
            generation: 1,
            fd_offset: 0,
        };
        let region = self.tier.register(&offered);
        let region =
            region.with_context(|| format!("plugin {:?} does not take memory to read into", self.plugin))?;
        self.memory = Some((memory, region));
        Ok(region)
    }

    fn in_batches<T>(
        &mut self,
        what: &str,
        items: &[T],
        start: impl Fn(&dyn StorageTier, Tag, &[T]) -> i32,
    ) -> anyhow::Result<Vec<End>> {
        let mut ends = Vec::with_capacity(items.len());
        for items in items.chunks(self.limits.max_pages as usize) {
            ends.extend(self.batch(what, items, &start)?);
        }
        Ok(ends)
    }

    fn batch<T>(
        &mut self,
        what: &str,
        items: &[T],
        start: impl Fn(&dyn StorageTier, Tag, &[T]) -> i32,
    ) -> anyhow::Result<Vec<End>> {
        self.last += 1;
        let (tag, plugin) = (self.last, self.plugin.clone());
        let mut heard = Instant::now();
        loop {
            match start(&*self.tier, Tag(tag), items) {
                0 => break,
                code if code == ErrorCode::WOULD_BLOCK.0 && heard.elapsed() < PATIENCE => self.wait(),
                code => {
                    bail!(
                        "plugin {plugin:?} refuses a {what} of {} pages: {:?}",
                        items.len(),
                        ErrorCode(code)
                    )
                }
            }
        }
        self.stuck = true;
        let mut ends = vec![None; items.len()];
        let (mut left, mut done) = (items.len(), vec![TierCompletion::default(); items.len().min(STEP)]);
        while left > 0 {
            let count = self.tier.poll(&mut done);
            let Ok(count) = usize::try_from(count) else {
                bail!("plugin {plugin:?} does not say how a {what} ended: {:?}", ErrorCode(count));
            };
            for completion in &done[..count] {
                let end = ends.get_mut(completion.page as usize).filter(|_| completion.tag.0 == tag);
                match end {
                    Some(end @ None) => {
                        let (status, bytes) = (completion.status, completion.bytes);
                        *end = Some(End { status, bytes, damage: None });
                    }
                    _ => bail!("plugin {plugin:?} says twice, or of another page, how a {what} ended"),
                }
                left -= 1;
            }
            if count > 0 {
                heard = Instant::now();
            } else if heard.elapsed() >= PATIENCE {
                bail!(
                    "plugin {plugin:?} has not answered for {} s: does its storage hang?",
                    PATIENCE.as_secs()
                );
            } else {
                self.wait();
            }
        }
        self.stuck = false;
        Ok(ends.into_iter().flatten().collect())
    }

    /// Waits until a poll may return something, but not long.
    fn wait(&self) {
        let fd = self.tier.event_fd();
        if fd < 0 {
            return std::thread::sleep(PAUSE);
        }
        // SAFETY: the plugin keeps its descriptor open as long as the instance, which `self.tier` holds.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let most = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        // The result is ignored: the tier is polled next in any case.
        let _ready = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&most));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let ended = self.tier.shutdown(SHUTDOWN_MS);
        if let Err(error) = &ended {
            tracing::warn!("plugin {:?} did not stop: {error}", self.plugin);
        }
        if self.stuck && ended.is_err() {
            // The plugin may write to this memory until the process ends, so it is leaked.
            std::mem::forget(self.memory.take());
        }
    }
}
