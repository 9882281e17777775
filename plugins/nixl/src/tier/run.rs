//! The tier's thread: takes batches, and moves their pages between memory and files through NIXL.
//!
//! One request runs at a time, with many pages, so that it fills the kernel's queue. While it runs the thread computes
//! checksums, and answers questions. A failed request does not tell which page failed, nor that nothing more touches
//! memory. So its agent ends, and each of its pages is tried again alone.

use std::ffi::CString;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use host_plugin_api::tier::{FOUND, MISSING, STORED};
use host_plugin_api::{Address, ErrorCode, Key, Level, Memory, TierPage, host, log};

use super::front::Front;
use super::queue::Work;
use super::store::{BelowFloor, Lookup, Store, StoredFile, Unfinished, checksum};
use crate::capi::{Agent, Direction, Extent, Library, Progress, Ranges, Refusal, Segment};

/// Most pages in one request. With the bytes below it takes no more, either.
const PAGES: usize = 64;
const BYTES: u64 = 64 << 20;
/// How often a request is polled.
const ASK: Duration = Duration::from_micros(20);
/// Name of the running request's files among what the agent has registered. Regions count from 1.
const FILES: u32 = 0;

/// How a page ended: a status, and the bytes of its value.
type End = (i32, u64);

/// The state that the thread shares with the host's threads.
pub struct Shared {
    pub front: Arc<Front>,
    pub store: Store,
    pub direct: bool,
}

impl Deref for Shared {
    type Target = Front;

    fn deref(&self) -> &Front {
        &self.front
    }
}

/// What is needed to make an agent.
pub struct Maker {
    pub library: Arc<Library>,
    pub backend: CString,
    pub parameters: Vec<(CString, CString)>,
    pub name: CString,
}

/// The state of the thread of a tier of files.
pub struct Runner {
    shared: Arc<Shared>,
    maker: Maker,
    agent: Option<Agent>,
    memory: Ranges,
    files: Ranges,
}

/// A page of a batch with its file.
struct Item {
    page: u32,
    of: TierPage,
    address: u64,
    file: Kept,
}

enum Kept {
    Written(Unfinished, u64),
    Read(StoredFile),
}

impl Item {
    fn descriptor(&self) -> u64 {
        let file = match &self.file {
            Kept::Written(unfinished, _) => &unfinished.file,
            Kept::Read(found) => &found.file,
        };
        file.as_raw_fd() as u64
    }

    fn value(&self) -> &[u8] {
        // SAFETY: the range was found to lie in registered memory, which stays mapped during a turn of `touching`, and is the
        // batch's until the page's completion.
        unsafe { std::slice::from_raw_parts(self.address as *const u8, self.of.length as usize) }
    }
}

impl Maker {
    /// # Errors
    /// When NIXL refuses.
    pub fn agent(&self) -> Result<Agent, Refusal> {
        Agent::new(&self.library, &self.name, &self.backend, &self.parameters, None)
    }
}

impl Runner {
    /// # Errors
    /// When NIXL refuses.
    pub fn new(shared: Arc<Shared>, maker: Maker) -> Result<Self, Refusal> {
        let agent = Some(maker.agent()?);
        let memory = Ranges::new(&maker.library, Segment::Dram)?;
        let files = Ranges::new(&maker.library, Segment::File)?;
        Ok(Self { shared, maker, agent, memory, files })
    }

    /// Runs until the instance is shut down.
    pub fn run(mut self) {
        let shared = self.shared.clone();
        while let Some((index, work)) = shared.queue.next() {
            match work {
                Work::Exists => answer(&shared, index),
                Work::Delete if shared.store.is_read_only() => for_each(&shared, index, |_| REFUSED),
                Work::Delete => {
                    for_each(&shared, index, |page| match shared.store.remove(&page.key) {
                        Ok(Some(bytes)) => (FOUND, bytes),
                        Ok(None) => (MISSING, 0),
                        Err(error) => failed("removed", &error),
                    });
                }
                Work::Get | Work::Put => self.move_pages(index, work),
            }
            shared.event.signal();
        }
    }

    /// Moves a batch's pages, some at a time.
    fn move_pages(&mut self, index: u32, work: Work) {
        let shared = self.shared.clone();
        let pages = shared.queue.pages(index).clone();
        let mut next = 0;
        while next < pages.len() {
            if shared.queue.is_cancelled(index) {
                (next..pages.len()).for_each(|page| shared.queue.finish(index, page as u32, CANCELLED));
                return;
            }
            let turn = shared.touching.begin();
            let (mut items, mut bytes) = (Vec::with_capacity(PAGES), 0);
            while next < pages.len() && items.len() < PAGES && bytes < BYTES {
                match self.open(next as u32, &pages[next], work) {
                    Ok(item) => {
                        bytes += u64::from(item.of.length);
                        items.push(item);
                    }
                    Err(end) => shared.queue.finish(index, next as u32, end),
                }
                next += 1;
            }
            self.settle(index, items);
            drop(turn);
            shared.event.signal();
        }
    }

    /// Finds a page's memory and its file. An error is how the page ends at once.
    fn open(&self, number: u32, page: &TierPage, work: Work) -> Result<Item, End> {
        let address = self.place(page).ok_or((ErrorCode::INVALID_ARGUMENT.0, 0))?;
        let store = &self.shared.store;
        let length = u64::from(page.length);
        let file = if work == Work::Get {
            match store.find(&page.key, length).map_err(|error| failed("opened", &error))? {
                Lookup::There(found) => Kept::Read(found),
                Lookup::Missing => return Err((MISSING, 0)),
                Lookup::Damaged => return Err(damaged(store, &page.key, length)),
            }
        } else if store.is_read_only() {
            return Err(REFUSED);
        } else {
            match store.length(&page.key) {
                // The file holds what was put first: a value never changes.
                Ok(Some(there)) if there == length => return Err((STORED, length)),
                Ok(_) => {}
                Err(error) => return Err(failed("looked at", &error)),
            }
            Kept::Written(store.create().map_err(|error| failed("made", &error))?, 0)
        };
        Ok(Item { page: number, of: *page, address, file })
    }

    fn place(&self, page: &TierPage) -> Option<u64> {
        let regions = self.shared.regions.read().unwrap_or_else(PoisonError::into_inner);
        let region = regions.get(&page.region.0)?;
        let end = page.offset.checked_add(page.length.into())?;
        let address = region.address.checked_add(page.offset)?.0;
        let whole = |number: u64| number.is_multiple_of(super::BLOCK);
        let fits = !self.shared.direct || (whole(address) && whole(page.length.into()));
        (page.length > 0 && end <= region.length && fits).then_some(address)
    }

    /// Moves these pages and ends them, one by one if the request for all fails.
    fn settle(&mut self, index: u32, mut items: Vec<Item>) {
        if items.is_empty() {
            return;
        }
        let moved = self.transfer(&mut items);
        if let Err(refusal) = &moved {
            log!(Level::WARN, "{refusal}; {} pages are tried again one by one", items.len());
            // Dropping the agent ends the part of the request that still runs.
            self.agent = None;
            if items.len() > 1 {
                items.into_iter().for_each(|item| self.settle(index, vec![item]));
                return;
            }
        }
        for item in items {
            let Item { page, of, .. } = item;
            let end = if moved.is_ok() { self.end(item) } else { self.give_up(item) };
            self.shared.queue.finish(index, page, end);
            log!(Level::TRACE, "page {page} of {} bytes ended in {}", of.length, end.0);
        }
    }

    /// Makes one request for all of them.
    fn transfer(&mut self, items: &mut [Item]) -> Result<(), Refusal> {
        if self.agent.is_none() {
            self.agent = Some(self.maker.agent()?);
        }
        let Some(agent) = &mut self.agent else { return Ok(()) };
        let regions = self.shared.regions.read().unwrap_or_else(PoisonError::into_inner).clone();
        agent.deregister_unless(|name| name != FILES && regions.contains_key(&name))?;
        for (id, memory) in regions {
            if !agent.has_registered(id) {
                let Memory { address: Address(address), length, .. } = memory;
                agent.register(id, Extent { segment: Segment::Dram, address, length, device: 0 })?;
            }
        }
        self.memory.clear()?;
        self.files.clear()?;
        let mut places = Vec::with_capacity(items.len());
        for item in &*items {
            let length = u64::from(item.of.length);
            let device = item.descriptor();
            places.push(Extent { segment: Segment::File, address: 0, length, device });
            self.memory.add(item.address, item.of.length as usize, 0)?;
            self.files.add(0, item.of.length as usize, device)?;
        }
        agent.register_all(FILES, Segment::File, &places)?;
        let direction = match items[0].file {
            Kept::Read(_) => Direction::Read,
            Kept::Written(..) => Direction::Write,
        };
        let (request, mut progress) = agent.start(direction, &self.memory, &self.files, &self.maker.name)?;
        for item in items {
            if let Kept::Written(..) = item.file {
                let sum = checksum(&item.of.key, item.value());
                if let Kept::Written(_, place) = &mut item.file {
                    *place = sum;
                }
            }
            // NIXL hands the kernel a few pages at a time, and more when it is polled.
            if progress == Progress::Running {
                progress = agent.progress(&request);
            }
        }
        while progress == Progress::Running {
            match self.shared.queue.next_question() {
                Some(question) => {
                    answer(&self.shared, question);
                    self.shared.event.signal();
                }
                None => std::thread::sleep(ASK),
            }
            progress = agent.progress(&request);
        }
        agent.release(request);
        if progress == Progress::Failed {
            return Err(Refusal::of("get_xfer_status"));
        }
        agent.deregister(FILES)
    }

    /// Ends a page whose bytes were moved.
    fn end(&self, item: Item) -> End {
        let length = u64::from(item.of.length);
        let store = &self.shared.store;
        match &item.file {
            Kept::Read(found) if found.is(&item.of.key, item.value()) => (FOUND, length),
            Kept::Read(found) => {
                // NIXL reports a read as done that came short, or that met an error once. The file may be whole.
                match store.is_whole(&item.of.key, found, length) {
                    Ok(true) => {
                        log!(Level::WARN, "a page of {length} bytes was not read well, and stays");
                        (ErrorCode::IO.0, 0)
                    }
                    Ok(false) => damaged(store, &item.of.key, length),
                    Err(error) => failed("read", &error),
                }
            }
            Kept::Written(..) => {
                let Kept::Written(unfinished, checksum) = item.file else {
                    return (ErrorCode::INTERNAL.0, 0);
                };
                match store.publish(&item.of.key, unfinished, length, checksum) {
                    Ok(()) => (STORED, length),
                    Err(error) => failed("published", &error),
                }
            }
        }
    }

    fn give_up(&self, item: Item) -> End {
        let mut code = ErrorCode::IO;
        if let Kept::Written(unfinished, _) = item.file {
            // NIXL does not say why it failed.
            if unfinished.lacks_room(item.of.length.into()) {
                code = ErrorCode::NO_RESOURCE;
            }
            self.shared.store.discard(unfinished);
        }
        (code.0, 0)
    }
}

const CANCELLED: End = (ErrorCode::CANCELLED.0, 0);
/// For changes of a tier that is only read.
const REFUSED: End = (ErrorCode::UNSUPPORTED.0, 0);

/// Ends the get of a page whose file is damaged. The file is removed, so that the page can be put again, unless the
/// tier is read-only.
fn damaged(store: &Store, key: &Key, length: u64) -> End {
    if let Ok(corrupt) = host().counter("corrupt") {
        corrupt.add(1);
    }
    if store.is_read_only() {
        log!(Level::WARN, "a page of {length} bytes is damaged, and stays where it is");
        return (ErrorCode::IO.0, 0);
    }
    log!(Level::ERROR, "a page of {length} bytes is damaged and was removed");
    match store.remove(key) {
        Ok(_) => (ErrorCode::IO.0, 0),
        Err(error) => failed("removed", &error),
    }
}

fn failed(what: &str, error: &std::io::Error) -> End {
    if error.get_ref().is_none_or(|inner| !inner.is::<BelowFloor>()) {
        log!(Level::ERROR, "a page cannot be {what}: {error}");
    }
    let full = matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded);
    (if full { ErrorCode::NO_RESOURCE.0 } else { ErrorCode::IO.0 }, 0)
}

/// Ends a batch of questions.
fn answer(shared: &Shared, index: u32) {
    for_each(shared, index, |page| match shared.store.length(&page.key) {
        // A put writes over an empty file. A read-only tier reports it as damaged.
        Ok(Some(0)) if !shared.store.is_read_only() => (MISSING, 0),
        Ok(Some(0)) => damaged(&shared.store, &page.key, 0),
        Ok(Some(bytes)) => (FOUND, bytes),
        Ok(None) => (MISSING, 0),
        Err(error) => failed("looked at", &error),
    });
}

fn for_each(shared: &Shared, index: u32, mut each: impl FnMut(&TierPage) -> End) {
    let pages = shared.queue.pages(index).clone();
    for (number, page) in pages.iter().enumerate() {
        let end = if shared.queue.is_cancelled(index) { CANCELLED } else { each(page) };
        shared.queue.finish(index, number as u32, end);
    }
}
