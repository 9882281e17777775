//! The tier's thread when pages are objects: takes batches, and carries each page through its [`Step`]s, many at once.
//!
//! Only this thread touches host memory: it copies a value out before a write, and copies a value in after a read that was
//! found whole. So a page can end while its request still runs. After the configured deadline it ends with `TIMEOUT`.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use host_plugin_api::tier::FOUND;
use host_plugin_api::{ErrorCode, Key, Level, TierPage, log};

use super::asking::Asking;
use super::format::{HEADER, object, tombstone};
use super::moves::{Moved, Moves};
use super::settings::Settings;
use super::steps::{Case, End, Step, buried};
use super::{MAX_VALUE, name_of};
use crate::capi::Direction;
use crate::tier::front::Front;
use crate::tier::queue::{Next, Work};

/// How often ended requests are looked for, since NIXL has nothing to wait on.
const PAUSE: Duration = Duration::from_micros(300);
const IDLE: Duration = Duration::from_secs(1);
/// How often pages are looked through for those that have waited for too long.
const LOOK: Duration = Duration::from_millis(10);
/// How often it complains at most.
const COMPLAIN: Duration = Duration::from_secs(1);
/// How long requests have at the end of an instance.
const GRACE: Duration = Duration::from_secs(1);

const INVALID: End = (ErrorCode::INVALID_ARGUMENT.0, 0);
const CANCELLED: End = (ErrorCode::CANCELLED.0, 0);
const TIMEOUT: End = (ErrorCode::TIMEOUT.0, 0);
const IO: End = (ErrorCode::IO.0, 0);

/// What a page waits for.
#[derive(Clone, Copy)]
enum Waits {
    Answer,
    /// The answer for another page of the same key.
    Another,
    /// Its turn to start a request.
    Turn(Step),
    Request(Step),
}

struct Page {
    batch: u32,
    number: u32,
    of: TierPage,
    case: Case,
    waits: Waits,
    since: Instant,
    /// Pages that end as this one does.
    followers: Vec<u64>,
}

/// The state of the thread of a tier of objects.
pub struct Runner {
    front: Arc<Front>,
    settings: Settings,
    asking: Arc<Asking>,
    moves: Moves,
    pages: BTreeMap<u64, Page>,
    last: u64,
    /// The latest page that asks for a key, and the number of its question. Many prompts that begin alike ask for the
    /// same keys at once.
    questions: BTreeMap<Key, (u64, u64)>,
    /// Pages that wait for a turn: those of questions, of gets and deletes, and of puts.
    turns: [VecDeque<u64>; 3],
    /// When a question, and a request, last ended well.
    answered: Instant,
    moved: Instant,
    looked: Instant,
    /// Pages that failed since the last log line about it, and when that was.
    failed: (u64, Option<Instant>),
    ended: bool,
}

fn turn(work: Work) -> usize {
    match work {
        Work::Exists => 0,
        Work::Get | Work::Delete => 1,
        Work::Put => 2,
    }
}

impl Runner {
    pub fn new(front: Arc<Front>, settings: Settings, asking: Arc<Asking>, moves: Moves) -> Self {
        let now = Instant::now();
        Self {
            front,
            settings,
            asking,
            moves,
            pages: BTreeMap::new(),
            last: 0,
            questions: BTreeMap::new(),
            turns: Default::default(),
            answered: now,
            moved: now,
            looked: now,
            failed: (0, None),
            ended: false,
        }
    }

    /// Runs until the instance is shut down.
    pub fn run(mut self) {
        let front = self.front.clone();
        let mut moved = Vec::new();
        loop {
            let idle = self.pages.is_empty() && self.moves.is_idle();
            let mut wait = if idle { IDLE } else { PAUSE };
            loop {
                match front.queue.next_within(wait) {
                    Next::Batch(index, work) => self.accept(index, work),
                    Next::Nothing => break,
                    Next::Stop => return self.stop(),
                }
                wait = Duration::ZERO;
            }
            for (id, there) in self.asking.answers() {
                self.hear(id, there);
            }
            self.moves.progress(&mut moved);
            for one in moved.drain(..) {
                self.has_moved(one);
            }
            self.expire();
            self.start();
            if std::mem::take(&mut self.ended) {
                front.event.signal();
            }
            self.complain();
        }
    }

    fn stop(mut self) {
        let start = Instant::now();
        let mut moved = Vec::new();
        while !self.moves.is_idle() && start.elapsed() < GRACE {
            self.moves.progress(&mut moved);
            std::thread::sleep(PAUSE);
        }
        if !self.moves.end() {
            log!(
                Level::WARN,
                "{} does not answer, so what NIXL still does is left behind with its buffers",
                self.settings.place
            );
        }
    }

    fn accept(&mut self, batch: u32, work: Work) {
        let front = self.front.clone();
        let read_only = self.settings.read_only;
        let pages = front.queue.pages(batch).clone();
        for (number, of) in (0..).zip(&pages) {
            self.last += 1;
            let case = Case { work, key: of.key, length: of.length.into(), read_only };
            let since = Instant::now();
            let page =
                Page { batch, number, of: *of, case, waits: Waits::Answer, since, followers: Vec::new() };
            self.pages.insert(self.last, page);
            if work == Work::Exists && self.follows(self.last, &of.key) {
                continue;
            }
            let moves = matches!(work, Work::Get | Work::Put);
            let step = match case.first() {
                Step::Ask | Step::Read if moves && self.with_memory(of, |_, _| ()).is_none() => {
                    Step::End(INVALID)
                }
                step => step,
            };
            self.next(self.last, step);
        }
    }

    /// Lets a page share the answer of another page's question that is still to be sent.
    fn follows(&mut self, id: u64, key: &Key) -> bool {
        let Some((leader, question)) = self.questions.get(key).copied() else { return false };
        if !self.asking.is_to_come(question) {
            return false;
        }
        let Some(other) = self.pages.get_mut(&leader) else { return false };
        other.followers.push(id);
        if let Some(page) = self.pages.get_mut(&id) {
            page.waits = Waits::Another;
        }
        true
    }

    /// A page's place in registered memory, which stays registered until `touch` returns.
    fn with_memory<T>(&self, page: &TierPage, touch: impl FnOnce(*mut u8, usize) -> T) -> Option<T> {
        let regions = self.front.regions.read().unwrap_or_else(PoisonError::into_inner);
        let region = regions.get(&page.region.0)?;
        let length = u64::from(page.length);
        let end = page.offset.checked_add(length)?;
        let address = region.address.checked_add(page.offset)?;
        let fits = length > 0 && length <= MAX_VALUE && end <= region.length;
        fits.then(|| touch(address.pointer(), page.length as usize))
    }

    /// Takes the next step of a page, or ends the page.
    fn next(&mut self, id: u64, step: Step) {
        let Some(page) = self.pages.get_mut(&id) else { return };
        page.since = Instant::now();
        match step {
            Step::End(end) => self.end(id, end),
            Step::Ask => {
                page.waits = Waits::Answer;
                let (key, work) = (page.of.key, page.case.work);
                let question = self.asking.ask(id, name_of(&self.settings.prefix, &key));
                if work == Work::Exists {
                    self.questions.insert(key, (id, question));
                }
            }
            Step::Head | Step::Read | Step::Write | Step::Bury(_) => {
                page.waits = Waits::Turn(step);
                self.turns[turn(page.case.work)].push_back(id);
            }
        }
    }

    fn end(&mut self, id: u64, end: End) {
        let Some(page) = self.pages.remove(&id) else { return };
        if self.questions.get(&page.of.key).is_some_and(|(leader, _)| *leader == id) {
            self.questions.remove(&page.of.key);
        }
        for follower in page.followers {
            match end {
                CANCELLED => self.next(follower, Step::Ask),
                end => self.end(follower, end),
            }
        }
        if [ErrorCode::IO.0, ErrorCode::TIMEOUT.0].contains(&end.0) {
            self.failed.0 += 1;
        }
        self.front.queue.finish(page.batch, page.number, end);
        self.ended = true;
        log!(Level::TRACE, "page {} of {} bytes ended in {}", page.number, page.of.length, end.0);
    }

    fn hear(&mut self, id: u64, there: Option<bool>) {
        if there.is_some() {
            self.answered = Instant::now();
        }
        if let Some(page) = self.pages.get(&id) {
            let step = page.case.answered(there);
            self.next(id, step);
        }
    }

    fn has_moved(&mut self, Moved { page: id, well, buffer }: Moved) {
        if well {
            self.moved = Instant::now();
        }
        let Some(page) = self.pages.get(&id) else { return };
        let bytes = well.then_some(&buffer[..]);
        let step = match page.waits {
            Waits::Request(Step::Head) => page.case.headed(bytes),
            Waits::Request(Step::Read) => self.take(page, bytes),
            Waits::Request(Step::Write) => page.case.written(well),
            Waits::Request(Step::Bury(end)) => buried(end, well),
            _ => Step::End((ErrorCode::INTERNAL.0, 0)),
        };
        self.next(id, step);
    }

    /// The next step after a read. Copies a whole value into host memory.
    fn take(&self, page: &Page, bytes: Option<&[u8]>) -> Step {
        let step = page.case.read(bytes);
        match (step, bytes) {
            (Step::End((FOUND, _)), Some(bytes)) => {
                let copy = |to: *mut u8, length: usize| {
                    // SAFETY: `length` bytes of registered memory, which are the batch's until the page's completion. The value
                    // was found to have as many, in a buffer of our own.
                    unsafe { to.copy_from_nonoverlapping(bytes[HEADER..][..length].as_ptr(), length) }
                };
                self.with_memory(&page.of, copy).map_or(Step::End(INVALID), |()| step)
            }
            (Step::Bury(_), _) => {
                log!(
                    Level::ERROR,
                    "a page of {} bytes is damaged, and a tombstone is put there",
                    page.of.length
                );
                step
            }
            (Step::End(IO), Some(_)) => {
                log!(Level::WARN, "a page of {} bytes is damaged, and stays where it is", page.of.length);
                step
            }
            _ => step,
        }
    }

    /// Starts requests that may run.
    fn start(&mut self) {
        for turn in 0..self.turns.len() {
            while let Some(id) = self.turns[turn].front().copied() {
                let Some((batch, of, step)) = self.pages.get(&id).and_then(|page| match page.waits {
                    Waits::Turn(step) => Some((page.batch, page.of, step)),
                    _ => None,
                }) else {
                    self.turns[turn].pop_front();
                    continue;
                };
                let bytes = match step {
                    Step::Read | Step::Write => HEADER as u64 + u64::from(of.length),
                    _ => HEADER as u64,
                };
                if !self.moves.has_room(bytes) {
                    return;
                }
                self.turns[turn].pop_front();
                if self.front.queue.is_cancelled(batch) {
                    self.end(id, CANCELLED);
                    continue;
                }
                self.request(id, &of, step, bytes as usize);
            }
        }
    }

    fn request(&mut self, id: u64, of: &TierPage, step: Step, bytes: usize) {
        let value = |from: *mut u8, length: usize| {
            // SAFETY: registered memory, which is the batch's until the page's completion, so that nothing changes it.
            object(&of.key, unsafe { std::slice::from_raw_parts(from, length) })
        };
        let (direction, buffer) = match step {
            Step::Write => (Direction::Write, self.with_memory(of, value)),
            Step::Bury(_) => (Direction::Write, Some(tombstone(&of.key))),
            // Zeros, so that a read that comes short leaves no bytes of another object behind.
            _ => (Direction::Read, Some(vec![0; bytes])),
        };
        let Some(buffer) = buffer else { return self.end(id, INVALID) };
        let name = name_of(&self.settings.prefix, &of.key);
        match self.moves.start(id, direction, &name, buffer) {
            Ok(()) => {
                if let Some(page) = self.pages.get_mut(&id) {
                    (page.waits, page.since) = (Waits::Request(step), Instant::now());
                }
            }
            Err(refusal) => {
                log!(Level::ERROR, "a request for a page of {} bytes: {refusal}", of.length);
                self.end(id, IO);
            }
        }
    }

    /// Ends pages that have waited for longer than the deadline. For a page that waits for an answer or a turn, the
    /// time starts anew when any answer comes or any request ends well.
    fn expire(&mut self) {
        let now = Instant::now();
        if now.duration_since(self.looked) < LOOK {
            return;
        }
        self.looked = now;
        let late = |page: &Page| {
            let since = match page.waits {
                Waits::Answer => page.since.max(self.answered),
                Waits::Turn(_) => page.since.max(self.moved),
                Waits::Request(_) => page.since,
                Waits::Another => return false,
            };
            now.saturating_duration_since(since) > self.settings.deadline
        };
        let late: Vec<u64> = self.pages.iter().filter(|(_, page)| late(page)).map(|(id, _)| *id).collect();
        if late.is_empty() {
            return;
        }
        for id in late {
            self.moves.give_up(id);
            self.end(id, TIMEOUT);
        }
        let pages = &self.pages;
        self.asking.keep(|id| pages.contains_key(&id));
    }

    fn complain(&mut self) {
        let (count, last) = self.failed;
        if count > 0 && last.is_none_or(|last| last.elapsed() > COMPLAIN) {
            log!(Level::WARN, "{count} pages failed; {} does not do what it should", self.settings.place);
            self.failed = (0, Some(Instant::now()));
        }
    }
}
