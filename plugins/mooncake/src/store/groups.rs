//! The tier's threads that call Mooncake: each takes a batch, and makes calls of it.
//!
//! A call has at most [`CALL_KEYS`] keys and [`CALL_BYTES`], so that the first pages of a long batch end early, and a
//! cancelled batch ends soon.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use host_plugin_api::{ErrorCode, Level, TierPage, log};
use host_transfer_kit::{Event, locked};

use super::client::{CALL_KEYS, Client, End, GONE, Span, Verdict, existed, got, put, removed, verdict};
use super::keys::{Keys, Waiting};
use super::link::Link;
use super::memory::Regions;
use super::metrics::Metrics;
use super::queue::{Group, Queue, Work};

/// A call with this many bytes takes no more pages.
const CALL_BYTES: u64 = 256 << 20;

/// A page of a batch, and how it ends once nothing touches its memory.
type Held = (u32, u32, TierPage, End);

/// The state that the threads of the tier and of the host share.
pub struct Shared {
    pub queue: Queue,
    pub link: Link,
    pub regions: Regions,
    pub metrics: Metrics,
    /// Pages that end when the client has ended.
    pub held: Mutex<Vec<Held>>,
    /// Keys that are read and removed.
    pub keys: Keys,
    /// Readable while completions wait.
    pub event: Event,
    /// A call that failed after this time may have left transfers behind that go on:
    /// [`UNSETTLED`](super::link::UNSETTLED) except in tests.
    pub unsettled: Duration,
    /// Whether nothing may be stored or removed.
    pub read_only: bool,
}

/// A page in a call.
struct Item {
    number: u32,
    page: TierPage,
    span: Span,
}

/// The span of work that moves no bytes.
const NOWHERE: Span = Span { address: 0, length: 0 };

fn name(page: &TierPage) -> String {
    let mut name = String::with_capacity(72);
    name.push_str("host-kv/");
    for byte in page.key.0 {
        for digit in [byte >> 4, byte & 15] {
            name.push(char::from_digit(digit.into(), 16).unwrap_or('0'));
        }
    }
    name
}

impl Shared {
    /// Runs one thread of a group, until the instance is shut down.
    pub fn serve(&self, group: Group, thread: usize) {
        while let Some((index, work)) = self.queue.next(group) {
            self.carry_out(index, work, group, thread);
            self.event.signal();
        }
    }

    fn carry_out(&self, index: u32, work: Work, group: Group, thread: usize) {
        let pages = self.queue.pages(index);
        let room = CALL_KEYS.min(pages.len());
        let mut rest = (0..).zip(pages);
        let mut items = Vec::with_capacity(room);
        loop {
            let refused = match work {
                _ if self.queue.is_cancelled(index) => Some(ErrorCode::CANCELLED),
                Work::Put | Work::Delete if self.read_only => Some(ErrorCode::UNSUPPORTED),
                _ => None,
            };
            let mut bytes = 0;
            while items.len() < CALL_KEYS
                && bytes < CALL_BYTES
                && let Some((number, page)) = rest.next()
            {
                if let Some(code) = refused {
                    self.queue.finish(index, number, (code.0, 0));
                    continue;
                }
                if !self.may_begin(work, index, number, &page) {
                    continue;
                }
                let span = match group {
                    Group::Ask => Some(NOWHERE),
                    Group::Read | Group::Write => self.regions.pin(&page),
                };
                match span {
                    Some(span) => {
                        bytes += span.length;
                        items.push(Item { number, page, span });
                    }
                    None => {
                        self.over(work, std::iter::once(&page));
                        self.queue.finish(index, number, (ErrorCode::INVALID_ARGUMENT.0, 0));
                    }
                }
            }
            if items.is_empty() {
                return;
            }
            self.call(index, work, thread, &items);
            items.clear();
            self.event.signal();
        }
    }

    /// Whether a page's work may begin now. Else it has ended, or another thread carries it out later.
    fn may_begin(&self, work: Work, index: u32, number: u32, page: &TierPage) -> bool {
        let may = match work {
            Work::Exists | Work::Put => true,
            Work::Delete => self.keys.may_remove(Instant::now(), index, number, page),
            Work::Get => self.keys.may_read(page),
        };
        if !may && work == Work::Get {
            let missing = got(GONE, 0);
            self.metrics.ended(work, missing);
            self.queue.finish(index, number, missing);
        }
        may
    }

    /// Ends work that had begun for these pages. Carries out removals that waited for that.
    fn over<'a>(&self, work: Work, pages: impl Iterator<Item = &'a TierPage>) {
        match work {
            Work::Exists | Work::Put => {}
            Work::Delete => pages.for_each(|page| self.keys.removed(page)),
            Work::Get => self.remove(&self.keys.read(pages)),
        }
    }

    /// Carries out removals whose reads have ended now.
    fn remove(&self, waiting: &[Waiting]) {
        if waiting.is_empty() {
            return;
        }
        let names: Vec<String> = waiting.iter().map(|waiting| name(&waiting.page)).collect();
        let results = match self.link.enter() {
            Ok(call) => answered(call.client.remove(&names), names.len()),
            Err(code) => {
                let lost = (code.0, 0);
                waiting.iter().for_each(|waiting| self.end_removal(waiting, lost));
                return;
            }
        };
        let results = results.unwrap_or_else(|why| {
            log!(Level::ERROR, "a removal of {} values of Mooncake Store went wrong: {why}", names.len());
            vec![i64::MIN; names.len()]
        });
        for (waiting, result) in waiting.iter().zip(results) {
            if verdict(result) == Verdict::MasterLost {
                self.link.lost("it does not answer");
            }
            self.metrics.ended(Work::Delete, removed(result));
            self.end_removal(waiting, removed(result));
        }
    }

    fn end_removal(&self, waiting: &Waiting, end: End) {
        self.keys.removed(&waiting.page);
        self.queue.finish(waiting.index, waiting.number, end);
    }

    /// Makes one call and ends its pages, or holds them.
    fn call(&self, index: u32, work: Work, thread: usize, items: &[Item]) {
        let group = work.group();
        let call = match self.link.enter() {
            Ok(call) => call,
            Err(code) => {
                self.metrics.skipped_no_master.add(items.len() as u64);
                self.over(work, items.iter().map(|item| &item.page));
                items.iter().for_each(|item| self.end(index, group, item, (code.0, 0)));
                return;
            }
        };
        let started = Instant::now();
        self.queue.in_call(group, thread, Some(started));
        let results = ask(&*call.client, work, items);
        self.queue.in_call(group, thread, None);
        let took = started.elapsed();
        let (results, unknown) = match results {
            Ok(results) => (results, false),
            Err(why) => {
                log!(Level::ERROR, "a call of {} pages of Mooncake Store went wrong: {why}", items.len());
                (vec![i64::MIN; items.len()], true)
            }
        };
        if results.iter().any(|result| verdict(*result) == Verdict::MasterLost) {
            self.link.lost("it does not answer");
        }
        let (mut ends, mut held) = (Vec::with_capacity(items.len()), Vec::new());
        for (item, result) in items.iter().zip(results) {
            let end = match work {
                Work::Exists => existed(result),
                Work::Delete => removed(result),
                Work::Get => got(result, item.span.length),
                Work::Put => put(result, item.span.length),
            };
            self.metrics.ended(work, end);
            let touched = group != Group::Ask && end.0 < 0;
            if touched && (unknown || took >= self.unsettled) {
                held.push((index, item.number, item.page, end));
            } else {
                ends.push((item, end));
            }
        }
        if !held.is_empty() {
            let mut all = locked(&self.held);
            all.extend(held);
            self.metrics.pages_held.set(all.len() as u64);
            drop(all);
            self.link.fence();
        }
        self.over(work, items.iter().map(|item| &item.page));
        ends.into_iter().for_each(|(item, end)| self.end(index, group, item, end));
        drop(call);
        log!(Level::TRACE, "{work:?} of {} pages took {took:?}", items.len());
    }

    fn end(&self, index: u32, group: Group, item: &Item, end: End) {
        if group != Group::Ask {
            self.regions.release(&item.page);
        }
        self.queue.finish(index, item.number, end);
    }

    /// Ends the pages that were held, when nothing touches memory any more.
    pub fn release_held(&self) {
        for (index, number, page, end) in std::mem::take(&mut *locked(&self.held)) {
            self.regions.release(&page);
            self.queue.finish(index, number, end);
        }
        self.metrics.pages_held.set(0);
        self.event.signal();
    }

    /// Ends work that has waited for too long. To be called now and then.
    pub fn watch(&self, patience: Duration) {
        let now = Instant::now();
        let late = self.keys.expire(now, patience);
        late.iter().for_each(|waiting| self.end_removal(waiting, (ErrorCode::TIMEOUT.0, 0)));
        let (pages, hangs) = self.queue.expire(now, patience);
        let pages = pages + late.len() as u32;
        if hangs {
            self.link.lost("a question to it hangs");
        }
        if pages > 0 {
            self.metrics.timed_out.add(pages.into());
            self.event.signal();
        }
    }
}

fn ask(client: &dyn Client, work: Work, items: &[Item]) -> Result<Vec<i64>, String> {
    let names: Vec<String> = items.iter().map(|item| name(&item.page)).collect();
    let spans = || items.iter().map(|item| item.span).collect::<Vec<_>>();
    let results = match work {
        Work::Exists => client.exist(&names),
        Work::Delete => client.remove(&names),
        Work::Get => client.get(&names, &spans()),
        Work::Put => client.put(&names, &spans()),
    };
    answered(results, items.len())
}

/// The results of a call, if there is one for each key.
fn answered(results: Result<Vec<i64>, String>, keys: usize) -> Result<Vec<i64>, String> {
    let results = results?;
    match results.len() == keys {
        true => Ok(results),
        false => Err(format!("of {keys} keys {} were answered", results.len())),
    }
}
