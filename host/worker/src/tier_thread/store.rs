//! One storage plugin: its batches of objects, and how they end.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use anyhow::Context;
use host_core::hierarchy::{HostSlot, PageEnd, TierAction, TierEvent, TierTag};
use host_core::radix::PageHash;
use host_plugin_api::tier::FOUND;
use host_plugin_api::{
    ErrorCode, Key, MemoryKind, RegionId, StorageTier, Tag, TierCompletion, TierLimits, TierPage,
};
use rustix::fd::BorrowedFd;

use super::host_memory::HostMemory;
use super::objects::{Kind, Object, Request, key};
use super::traffic::Traffic;
use crate::cannot_work::not_registered;
use crate::complaints::{Code, Complaints, Failed};

/// Completions taken per call.
const COMPLETIONS: usize = 256;
/// The most damaged objects that wait to be removed. Further ones stay until they are read again.
const DAMAGED: usize = 4096;

/// Objects that the plugin has.
struct Batch {
    /// The request that they belong to, or `None` when damaged ones are removed.
    of: Option<TierTag>,
    /// Each is `None` once it has ended.
    objects: Vec<Option<Object>>,
    left: usize,
}

/// Objects that the plugin is asked to take at once.
struct Offer {
    /// As in `Batch`.
    of: Option<TierTag>,
    kind: Kind,
    objects: Vec<Object>,
}

/// What the thread does after a turn, if nothing new comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It takes another turn, because more may have ended.
    Turn,
    /// It takes another turn after a moment: the plugin is full, or has no descriptor that tells when objects have
    /// ended.
    Look,
    /// It takes another turn when the plugin's descriptor is readable or an action comes.
    Sleep,
}

/// One plugin's instance.
pub(super) struct Store {
    name: String,
    tier: Arc<dyn StorageTier>,
    limits: TierLimits,
    regions: Vec<RegionId>,
    length: u32,
    requests: BTreeMap<TierTag, Request>,
    /// Requests with objects that the plugin has not been given, oldest first: queries and reads, which waiting requests
    /// need (`awaited`), and writes.
    awaited: VecDeque<TierTag>,
    writes: VecDeque<TierTag>,
    batches: BTreeMap<u64, Batch>,
    /// Objects to remove, so that good ones can take their place.
    damaged: VecDeque<Object>,
    last_tag: u64,
    /// Bytes of the objects that it took and found, with their seals.
    traffic: Arc<Traffic>,
    /// Whether the plugin has failed, so that it is not called any more.
    dead: bool,
    complaints: Complaints,
}

impl Store {
    /// Registers the memory with a tier that [fits](crate::OffloadTiers::fit).
    ///
    /// # Errors
    /// When the plugin refuses the memory.
    pub(super) fn open(name: &str, tier: Arc<dyn StorageTier>, memory: &HostMemory) -> anyhow::Result<Self> {
        let limits = tier.limits();
        let length = u32::try_from(memory.object_bytes()).with_context(|| {
            format!("plugin {name:?} cannot be given values of {} bytes", memory.object_bytes())
        })?;
        let regions: Result<Vec<RegionId>, _> =
            memory.regions().map(|region| tier.register(&region)).collect();
        let regions =
            regions.map_err(|error| not_registered(name, "host memory", MemoryKind::DRAM, &error))?;
        Ok(Self {
            name: name.to_owned(),
            tier,
            limits,
            regions,
            length,
            requests: BTreeMap::new(),
            awaited: VecDeque::new(),
            writes: VecDeque::new(),
            batches: BTreeMap::new(),
            damaged: VecDeque::new(),
            last_tag: 0,
            traffic: Arc::default(),
            dead: false,
            complaints: Complaints::default(),
        })
    }

    /// The counter of bytes that this store moves.
    pub(super) fn traffic(&self) -> Arc<Traffic> {
        self.traffic.clone()
    }

    /// Queues an action for the plugin.
    pub(super) fn begin(&mut self, action: TierAction, memory: &HostMemory, events: &mut Vec<TierEvent>) {
        match action {
            TierAction::Query { tag, names, .. } => {
                let pages: Vec<_> = names.into_iter().map(|name| (name, HostSlot(0))).collect();
                self.add(tag, Kind::Ask, &pages, memory);
            }
            TierAction::Read { tag, pages, .. } => self.add(tag, Kind::Read, &pages, memory),
            TierAction::Write { tag, pages, .. } => self.add(tag, Kind::Write, &pages, memory),
            TierAction::Cancel { tag, .. } => self.cancel(tag, events),
            TierAction::Copy { tag, .. } => unreachable!("{tag:?} is a copy, which no plugin makes"),
        }
    }

    fn add(&mut self, tag: TierTag, kind: Kind, pages: &[(PageHash, HostSlot)], memory: &HostMemory) {
        let mut objects = VecDeque::new();
        for (page, (name, slot)) in (0..).zip(pages) {
            // Every rank reads all heads that it holds. One rank of those that hold a head queries and writes it for
            // all.
            objects.extend(memory.blocks(*slot, kind != Kind::Read).map(|block| Object {
                key: key(name, block.head),
                page,
                rank: block.rank,
                offset: block.offset as u64,
                sealed: false,
            }));
        }
        self.requests.insert(tag, Request::new(kind, pages.len(), objects));
        match kind {
            Kind::Ask | Kind::Read => self.awaited.push_back(tag),
            Kind::Write | Kind::Remove => self.writes.push_back(tag),
        }
    }

    /// Cancels a request. Objects that the plugin has not been given end at once. The plugin ends the others.
    fn cancel(&mut self, tag: TierTag, events: &mut Vec<TierEvent>) {
        let queue = self.requests.get_mut(&tag).map(|request| std::mem::take(&mut request.queue));
        for object in queue.into_iter().flatten() {
            self.ended(Some(tag), object.page, PageEnd::Failed, events);
        }
        if self.dead {
            return;
        }
        let mut panicked = false;
        for (plugin_tag, _) in self.batches.iter().filter(|(_, batch)| batch.of == Some(tag)) {
            // A batch that has just ended is unknown to the plugin, which is no failure.
            panicked |= self.tier.cancel(Tag(*plugin_tag)) == ErrorCode::PANICKED.0;
        }
        if panicked {
            self.died("cancel", ErrorCode::PANICKED.0);
        }
    }

    /// Takes completions, which makes room, and gives the plugin the objects that wait.
    pub(super) fn turn(&mut self, memory: &HostMemory, events: &mut Vec<TierEvent>) -> Next {
        let more = !self.dead && self.collect(memory, events);
        if self.dead {
            self.fail_queued(events);
            return Next::Sleep;
        }
        let full = !self.submit(memory, events);
        if self.dead {
            self.fail_queued(events);
            return Next::Sleep;
        }
        let silent = !self.batches.is_empty() && self.tier.event_fd() < 0;
        match (more, full || silent) {
            (true, _) => Next::Turn,
            (false, true) => Next::Look,
            (false, false) => Next::Sleep,
        }
    }

    /// Gives the plugin waiting objects, as long as it may have more batches. Returns false when the plugin is full or
    /// has failed.
    fn submit(&mut self, memory: &HostMemory, events: &mut Vec<TierEvent>) -> bool {
        while self.batches.len() < self.limits.max_batches as usize {
            let Some(mut offer) = self.next_offer() else { return true };
            for object in
                offer.objects.iter_mut().filter(|object| offer.kind == Kind::Write && !object.sealed)
            {
                memory.seal(&object.key, object.rank, object.offset as usize);
                object.sealed = true;
            }
            let tag = Tag(self.last_tag + 1);
            match self.call(tag, &offer) {
                0 => {
                    self.last_tag = tag.0;
                    let left = offer.objects.len();
                    let objects = offer.objects.into_iter().map(Some).collect();
                    self.batches.insert(tag.0, Batch { of: offer.of, objects, left });
                }
                code if code == ErrorCode::PANICKED.0 => {
                    self.died(offer.kind.method(), code);
                    // Reads and writes may have begun, and may still access the memory, so these objects never end
                    // either.
                    if matches!(offer.kind, Kind::Ask | Kind::Remove) {
                        for object in offer.objects {
                            self.ended(offer.of, object.page, PageEnd::Failed, events);
                        }
                    }
                    return false;
                }
                code if code == ErrorCode::WOULD_BLOCK.0 => {
                    self.take_back(offer);
                    return false;
                }
                answer => {
                    let (plugin, method, count) = (&self.name, offer.kind.method(), offer.objects.len());
                    self.complaints.tell(method, || {
                        format!(
                            "plugin {plugin:?}: {method} refused {count} values with {}; they count as failed: what is missing is \
                             computed again",
                            Code(answer)
                        )
                    });
                    for object in offer.objects {
                        self.ended(offer.of, object.page, PageEnd::Failed, events);
                    }
                }
            }
        }
        true
    }

    /// The objects to offer next: those that requests wait for, then writes, then removals. Damaged objects are removed
    /// because a plugin that has a key need not take another value for it.
    fn next_offer(&mut self) -> Option<Offer> {
        let most = self.limits.max_pages as usize;
        for waiting in [&mut self.awaited, &mut self.writes] {
            while let Some(tag) = waiting.front() {
                let request = self.requests.get_mut(tag).filter(|request| !request.queue.is_empty());
                if let Some(request) = request {
                    let count = request.queue.len().min(most);
                    let objects = request.queue.drain(..count).collect();
                    return Some(Offer { of: Some(*tag), kind: request.kind, objects });
                }
                waiting.pop_front();
            }
        }
        let count = self.damaged.len().min(most);
        let objects = self.damaged.drain(..count).collect();
        (count > 0).then_some(Offer { of: None, kind: Kind::Remove, objects })
    }

    fn take_back(&mut self, offer: Offer) {
        let request = offer.of.and_then(|tag| self.requests.get_mut(&tag));
        let queue = request.map_or(&mut self.damaged, |request| &mut request.queue);
        offer.objects.into_iter().rev().for_each(|object| queue.push_front(object));
    }

    fn call(&self, tag: Tag, offer: &Offer) -> i32 {
        let keys = || offer.objects.iter().map(|object| object.key).collect::<Vec<Key>>();
        match offer.kind {
            Kind::Ask => self.tier.exists(tag, &keys()),
            Kind::Read => self.tier.get(tag, &self.pages(&offer.objects)),
            Kind::Write => self.tier.put(tag, &self.pages(&offer.objects)),
            Kind::Remove => self.tier.delete(tag, &keys()),
        }
    }

    fn pages(&self, objects: &[Object]) -> Vec<TierPage> {
        let page = |object: &Object| TierPage {
            key: object.key,
            region: self.regions[object.rank],
            length: self.length,
            offset: object.offset,
        };
        objects.iter().map(page).collect()
    }

    /// Takes completions. Returns true when there may be more.
    fn collect(&mut self, memory: &HostMemory, events: &mut Vec<TierEvent>) -> bool {
        let mut completions = [TierCompletion::default(); COMPLETIONS];
        let answer = self.tier.poll(&mut completions);
        let Ok(count) = usize::try_from(answer) else {
            self.died("poll", answer);
            return false;
        };
        for done in &completions[..count.min(COMPLETIONS)] {
            self.completed(done, memory, events);
        }
        count == COMPLETIONS
    }

    fn died(&mut self, method: &'static str, answer: i32) {
        let what = Failed { method, code: ErrorCode(answer) }.told(|| self.tier.usage().err());
        tracing::error!(
            "plugin {:?}: {what}; nothing more is asked of this storage tier, and the memory of {} batches that it has stays set \
             aside: the worker goes on without it, and uses it again when it is started again",
            self.name,
            self.batches.len()
        );
        self.dead = true;
    }

    fn completed(&mut self, done: &TierCompletion, memory: &HostMemory, events: &mut Vec<TierEvent>) {
        let (plugin, page, tag) = (&self.name, done.page, done.tag.0);
        let Some(batch) = self.batches.get_mut(&tag) else {
            self.complaints.tell("unknown", || {
                format!(
                    "plugin {plugin:?}: poll tells the end of page {page} of batch {tag}, which is not under way; the entry is dropped"
                )
            });
            return;
        };
        let (all, left) = (batch.objects.len(), batch.left);
        let Some(object) = batch.objects.get_mut(done.page as usize).and_then(Option::take) else {
            self.complaints.tell("twice", || {
                format!(
                    "plugin {plugin:?}: poll tells the end of page {page} of batch {tag}, of whose {all} pages that one is none, or \
                     has ended already ({left} have not); the entry is dropped"
                )
            });
            return;
        };
        let of = batch.of;
        batch.left -= 1;
        if batch.left == 0 {
            self.batches.remove(&done.tag.0);
        }
        let kind = of.and_then(|of| self.requests.get(&of)).map(|request| request.kind);
        let mut end = match done.status {
            FOUND => PageEnd::Done,
            0 => PageEnd::Missing,
            code if kind == Some(Kind::Write) && code == ErrorCode::NO_RESOURCE.0 => PageEnd::Refused,
            status => {
                if status > FOUND {
                    self.complaints.tell("status", || {
                        format!(
                            "plugin {plugin:?}: poll ends page {page} of batch {tag} with the status {status}, which means nothing: \
                             1, 0 or a code does; the page counts as failed"
                        )
                    });
                }
                PageEnd::Failed
            }
        };
        if end == PageEnd::Done
            && matches!(kind, Some(Kind::Read | Kind::Write))
            && ![0, u64::from(self.length)].contains(&done.bytes)
        {
            let (told, length) = (done.bytes, self.length);
            self.complaints.tell("bytes", || {
                format!(
                    "plugin {plugin:?}: poll says that page {page} of batch {tag} has {told} bytes, and its value has {length}; the \
                     host's seal decides whether it is used"
                )
            });
        }
        if end == PageEnd::Done
            && kind == Some(Kind::Read)
            && !memory.is_sealed(&object.key, object.rank, object.offset as usize)
        {
            end = PageEnd::Damaged;
            let (key, length) = (object.key, self.length);
            self.complaints.tell("damaged", || {
                format!(
                    "plugin {plugin:?}: get found {length} bytes for key {key} that are not what was stored: the host's seal does not \
                     fit; the page counts as missing, and the value is deleted"
                )
            });
            if self.damaged.len() < DAMAGED {
                self.damaged.push_back(object);
            }
        }
        match kind.filter(|_| end == PageEnd::Done) {
            Some(Kind::Read) => self.traffic.came_up(self.length as usize),
            Some(Kind::Write) => self.traffic.went_down(self.length as usize),
            _ => {}
        }
        self.ended(of, object.page, end, events);
    }

    /// Records that an object has ended. An object that is removed belongs to no request.
    fn ended(&mut self, of: Option<TierTag>, page: u32, end: PageEnd, events: &mut Vec<TierEvent>) {
        let Some(tag) = of else { return };
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

    /// Fails all queued objects, because a failed plugin takes no more. Objects that it was given never end, because it
    /// may still access their memory.
    fn fail_queued(&mut self, events: &mut Vec<TierEvent>) {
        let awaited = std::mem::take(&mut self.awaited);
        for tag in awaited.into_iter().chain(std::mem::take(&mut self.writes)) {
            let queue = self.requests.get_mut(&tag).map(|request| std::mem::take(&mut request.queue));
            for object in queue.into_iter().flatten() {
                self.ended(Some(tag), object.page, PageEnd::Failed, events);
            }
        }
    }

    /// A descriptor that is readable when an object has ended, if the plugin has one.
    pub(super) fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.tier.event_fd();
        // SAFETY: the plugin keeps its descriptor open until it is shut down, which happens when the thread that has
        // this store has ended.
        (fd >= 0 && !self.dead).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
    }
}

#[cfg(test)]
mod tests;
