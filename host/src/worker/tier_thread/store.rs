//! One storage plugin: batches of objects under way, and what becomes of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use anyhow::Context;
use host_core::hierarchy::{HostSlot, PageEnd, TierEvent, TierTag};
use host_core::radix::PageHash;
use host_plugin_api::tier::FOUND;
use host_plugin_api::{ErrorCode, Key, RegionId, StorageTier, Tag, TierCompletion, TierLimits, TierPage};
use rustix::fd::BorrowedFd;

use super::host_memory::HostMemory;
use super::objects::{Kind, Object, Request, key};

/// Completions taken per call.
const COMPLETIONS: usize = 256;
/// Damaged objects that wait to be removed at most; others stay until they are read again.
const DAMAGED: usize = 4096;

/// Objects that the plugin has.
struct Batch {
    /// Whose they are; nobody's when damaged ones are removed.
    of: Option<TierTag>,
    /// `None` once it has ended.
    objects: Vec<Option<Object>>,
    left: usize,
}

/// One plugin's instance.
pub(super) struct Store {
    name: String,
    tier: Arc<dyn StorageTier>,
    limits: TierLimits,
    regions: Vec<RegionId>,
    length: u32,
    requests: BTreeMap<TierTag, Request>,
    /// Requests with objects that the plugin has not been given, oldest first.
    waiting: VecDeque<TierTag>,
    batches: BTreeMap<u64, Batch>,
    /// Objects to remove, so that good ones can take their place.
    damaged: VecDeque<Object>,
    last_tag: u64,
    /// It took nothing more the last time.
    full: bool,
    /// It answers nothing any more.
    dead: bool,
}

impl Store {
    /// Registers the memory.
    ///
    /// # Errors
    /// When the plugin cannot reach it, or cannot take objects of this size.
    pub(super) fn open(name: &str, tier: Arc<dyn StorageTier>, memory: &HostMemory) -> anyhow::Result<Self> {
        let limits = tier.limits();
        let bytes = memory.object_bytes() as u64;
        let length = u32::try_from(bytes).ok().filter(|_| bytes <= limits.max_value);
        let length = length.with_context(|| {
            format!(
                "plugin {name:?} stores at most {} bytes at once, and one head of a page has {bytes}: lower --page-size",
                limits.max_value
            )
        })?;
        anyhow::ensure!(
            limits.alignment > 0 && bytes.is_multiple_of(limits.alignment),
            "plugin {name:?} stores multiples of {} bytes, and one head of a page with its seal has {bytes}",
            limits.alignment
        );
        anyhow::ensure!(
            limits.max_pages > 0 && limits.max_batches > 0,
            "plugin {name:?} says that it takes no batches"
        );
        let regions: Result<Vec<RegionId>, _> =
            memory.regions().map(|region| tier.register(&region)).collect();
        let regions = regions.with_context(|| format!("plugin {name:?} does not take host memory"))?;
        Ok(Self {
            name: name.to_owned(),
            tier,
            limits,
            regions,
            length,
            requests: BTreeMap::new(),
            waiting: VecDeque::new(),
            batches: BTreeMap::new(),
            damaged: VecDeque::new(),
            last_tag: 0,
            full: false,
            dead: false,
        })
    }

    pub(super) fn ask(&mut self, tag: TierTag, names: &[PageHash], memory: &HostMemory) {
        let pages: Vec<(PageHash, HostSlot)> = names.iter().map(|name| (*name, HostSlot(0))).collect();
        self.add(tag, Kind::Ask, &pages, memory);
    }

    pub(super) fn read(&mut self, tag: TierTag, pages: &[(PageHash, HostSlot)], memory: &HostMemory) {
        self.add(tag, Kind::Read, pages, memory);
    }

    pub(super) fn write(&mut self, tag: TierTag, pages: &[(PageHash, HostSlot)], memory: &HostMemory) {
        self.add(tag, Kind::Write, pages, memory);
    }

    fn add(&mut self, tag: TierTag, kind: Kind, pages: &[(PageHash, HostSlot)], memory: &HostMemory) {
        let mut objects = VecDeque::new();
        for (page, (name, slot)) in (0..).zip(pages) {
            // Every rank reads all that it holds; one of those that hold a head asks and writes for all.
            objects.extend(memory.blocks(*slot, kind != Kind::Read).map(|block| Object {
                key: key(name, block.head),
                page,
                rank: block.rank,
                offset: block.offset as u64,
                sealed: false,
            }));
        }
        self.requests.insert(tag, Request::new(kind, pages.len(), objects));
        self.waiting.push_back(tag);
    }

    /// What the plugin has not been given ends at once; the rest is for the plugin to end.
    pub(super) fn cancel(&mut self, tag: TierTag, events: &mut Vec<TierEvent>) {
        let queue = self.requests.get_mut(&tag).map(|request| std::mem::take(&mut request.queue));
        for object in queue.into_iter().flatten() {
            self.ended(tag, object.page, PageEnd::Failed, events);
        }
        for (plugin_tag, _) in self.batches.iter().filter(|(_, batch)| batch.of == Some(tag)) {
            // One that has just ended is not known any more.
            let _unknown = self.tier.cancel(Tag(*plugin_tag)) != 0;
        }
    }

    /// Gives the plugin what it takes, and takes what has ended. True when there may be more at once.
    pub(super) fn turn(&mut self, memory: &HostMemory, events: &mut Vec<TierEvent>) -> bool {
        if self.dead {
            self.fail_queued(events);
            return false;
        }
        self.submit(memory, events);
        self.remove_damaged();
        self.collect(memory, events)
    }

    fn submit(&mut self, memory: &HostMemory, events: &mut Vec<TierEvent>) {
        self.full = false;
        while let Some(tag) = self.waiting.front().copied() {
            if self.batches.len() >= self.limits.max_batches as usize {
                return;
            }
            let Some(request) = self.requests.get_mut(&tag).filter(|request| !request.queue.is_empty())
            else {
                self.waiting.pop_front();
                continue;
            };
            let count = request.queue.len().min(self.limits.max_pages as usize);
            let mut objects: Vec<Object> = request.queue.drain(..count).collect();
            let kind = request.kind;
            for object in objects.iter_mut().filter(|object| kind == Kind::Write && !object.sealed) {
                memory.seal(&object.key, object.rank, object.offset as usize);
                object.sealed = true;
            }
            self.last_tag += 1;
            let plugin_tag = Tag(self.last_tag);
            let answer = match kind {
                Kind::Ask => {
                    let keys: Vec<Key> = objects.iter().map(|object| object.key).collect();
                    self.tier.exists(plugin_tag, &keys)
                }
                Kind::Read => self.tier.get(plugin_tag, &self.pages(&objects)),
                Kind::Write => self.tier.put(plugin_tag, &self.pages(&objects)),
            };
            if answer == 0 {
                self.accepted(plugin_tag, Some(tag), objects);
            } else if answer == ErrorCode::WOULD_BLOCK.0 {
                if let Some(request) = self.requests.get_mut(&tag) {
                    objects.into_iter().rev().for_each(|object| request.queue.push_front(object));
                }
                self.full = true;
                return;
            } else {
                tracing::warn!(plugin = self.name, answer, "a storage tier refused a batch");
                for object in objects {
                    self.ended(tag, object.page, PageEnd::Failed, events);
                }
            }
        }
    }

    fn accepted(&mut self, plugin_tag: Tag, of: Option<TierTag>, objects: Vec<Object>) {
        let left = objects.len();
        let objects = objects.into_iter().map(Some).collect();
        self.batches.insert(plugin_tag.0, Batch { of, objects, left });
    }

    /// A plugin that has a key need not take another value for it, so what is damaged would stay.
    fn remove_damaged(&mut self) {
        let count = self.damaged.len().min(self.limits.max_pages as usize);
        if count == 0 || self.full || self.batches.len() >= self.limits.max_batches as usize {
            return;
        }
        let objects: Vec<Object> = self.damaged.drain(..count).collect();
        let keys: Vec<Key> = objects.iter().map(|object| object.key).collect();
        self.last_tag += 1;
        let plugin_tag = Tag(self.last_tag);
        match self.tier.delete(plugin_tag, &keys) {
            0 => self.accepted(plugin_tag, None, objects),
            code if code == ErrorCode::WOULD_BLOCK.0 => {
                self.damaged.extend(objects);
                self.full = true;
            }
            answer => {
                tracing::warn!(plugin = self.name, answer, "a storage tier does not remove damaged objects");
            }
        }
    }

    fn pages(&self, objects: &[Object]) -> Vec<TierPage> {
        let page = |object: &Object| TierPage {
            key: object.key,
            region: self.regions[object.rank].0,
            length: self.length,
            offset: object.offset,
        };
        objects.iter().map(page).collect()
    }

    fn collect(&mut self, memory: &HostMemory, events: &mut Vec<TierEvent>) -> bool {
        let mut completions = [TierCompletion::default(); COMPLETIONS];
        let answer = self.tier.poll(&mut completions);
        let Ok(count) = usize::try_from(answer) else {
            tracing::error!(
                plugin = self.name,
                answer,
                "a storage tier answers nothing any more; what it was doing stays set aside"
            );
            self.dead = true;
            return false;
        };
        for done in &completions[..count.min(COMPLETIONS)] {
            self.completed(done, memory, events);
        }
        count == COMPLETIONS
    }

    fn completed(&mut self, done: &TierCompletion, memory: &HostMemory, events: &mut Vec<TierEvent>) {
        let Some(batch) = self.batches.get_mut(&done.tag) else {
            tracing::warn!(plugin = self.name, tag = done.tag, "a storage tier ended what nobody began");
            return;
        };
        let Some(object) = batch.objects.get_mut(done.page as usize).and_then(Option::take) else {
            tracing::warn!(plugin = self.name, tag = done.tag, "a storage tier ended an object twice");
            return;
        };
        let of = batch.of;
        batch.left -= 1;
        if batch.left == 0 {
            self.batches.remove(&done.tag);
        }
        let Some(of) = of else { return };
        let kind = self.requests.get(&of).map(|request| request.kind);
        let mut end = match done.status {
            FOUND => PageEnd::Done,
            0 => PageEnd::Missing,
            code if kind == Some(Kind::Write) && code == ErrorCode::NO_RESOURCE.0 => PageEnd::Refused,
            _ => PageEnd::Failed,
        };
        if end == PageEnd::Done
            && kind == Some(Kind::Read)
            && !memory.is_sealed(&object.key, object.rank, object.offset as usize)
        {
            end = PageEnd::Damaged;
            if self.damaged.is_empty() {
                tracing::warn!(plugin = self.name, key = ?object.key, "what a storage tier found is not what was written");
            }
            if self.damaged.len() < DAMAGED {
                self.damaged.push_back(object);
            }
        }
        self.ended(of, object.page, end, events);
    }

    /// One object has ended.
    fn ended(&mut self, tag: TierTag, page: u32, end: PageEnd, events: &mut Vec<TierEvent>) {
        let Some(request) = self.requests.get_mut(&tag) else { return };
        let ended = request.ended(page, end);
        let done = request.is_done();
        match (request.kind, ended) {
            (Kind::Ask, _) if done => events.push(TierEvent::Answered { tag, found: request.found() }),
            (Kind::Read | Kind::Write, Some(end)) => match events.last_mut() {
                Some(TierEvent::Ended { tag: last, pages }) if *last == tag => pages.push((page, end)),
                _ => events.push(TierEvent::Ended { tag, pages: vec![(page, end)] }),
            },
            _ => {}
        }
        if done {
            self.requests.remove(&tag);
        }
    }

    /// A plugin that is gone takes nothing more. What it was given may still be touched, and never ends.
    fn fail_queued(&mut self, events: &mut Vec<TierEvent>) {
        for tag in std::mem::take(&mut self.waiting) {
            let queue = self.requests.get_mut(&tag).map(|request| std::mem::take(&mut request.queue));
            for object in queue.into_iter().flatten() {
                self.ended(tag, object.page, PageEnd::Failed, events);
            }
        }
    }

    /// What is readable when something has ended, if the plugin has such a thing.
    pub(super) fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.tier.event_fd();
        // SAFETY: the plugin keeps its descriptor open until it is shut down, which this store does last of all.
        (fd >= 0 && !self.dead).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Whether it has to be asked again in a moment.
    pub(super) fn wants_polling(&self) -> bool {
        !self.dead && (self.full || (!self.batches.is_empty() && self.tier.event_fd() < 0))
    }

    /// Ends the plugin; false when it may still touch memory.
    pub(super) fn shutdown(&self, milliseconds: u64) -> bool {
        let stopped = self.tier.shutdown(milliseconds);
        if let Err(error) = &stopped {
            tracing::error!(plugin = self.name, %error, "a storage tier did not stop");
        }
        stopped.is_ok()
    }
}

#[cfg(test)]
mod tests;
