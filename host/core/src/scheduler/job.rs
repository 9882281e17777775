//! One request on its way through a worker.

use std::collections::BTreeSet;
use std::ops::Range;

use super::sharing::Follows;
use super::stage::CurrentStage;
use super::window::Window;
use crate::batch::Sampled;
use crate::ids::{Instance, PageId, Time};
use crate::message::Reserve;
use crate::pool::HeldPages;
use crate::radix::{PageHash, PrefixLock};
use crate::request::Request;
use crate::transfer::Tag;

/// What decode knows of a transfer towards it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Incoming {
    pub peer: Instance,
    /// The connection over which it was asked for.
    pub session: u64,
    pub attempt: u32,
    /// Attempts before this one that arrived damaged.
    pub damaged: u32,
    /// Pages of the prompt that it brings.
    pub pages: Range<usize>,
    /// Pages of the window that it brings: all that the first step sees, or none.
    pub window: usize,
    /// When it was asked for.
    pub asked: Time,
    /// Sequence numbers that arrived.
    pub arrived: BTreeSet<u32>,
    /// The highest sequence number, once known.
    pub last: Option<u32>,
    /// Whether these are the only pages that are missing: what else prefill sends was verified in an earlier attempt.
    pub supplement: bool,
    /// Whether prefill's leg has ended: it sends nothing more.
    pub leg_ended: bool,
}

/// Pages that were asked for and will not come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reclaiming {
    /// The first page that is missing.
    pub page: usize,
    /// Prefill, as long as it may write them.
    pub writer: Option<Instance>,
    /// Whether our own transfer threads may copy into them what arrived elsewhere.
    pub receiver: bool,
}

impl Incoming {
    pub(super) fn new(
        (peer, session): (Instance, u64),
        attempt: u32,
        pages: Range<usize>,
        window: usize,
        asked: Time,
    ) -> Self {
        Self {
            peer,
            session,
            attempt,
            damaged: 0,
            pages,
            window,
            asked,
            arrived: BTreeSet::new(),
            last: None,
            supplement: false,
            leg_ended: false,
        }
    }

    /// Pages of the pool that it brings.
    pub(super) fn len(&self) -> usize {
        self.pages.len() + self.window
    }

    pub(super) fn complete(&self) -> bool {
        self.last.is_some_and(|last| self.arrived.len() == last as usize + 1)
    }
}

/// Pages of a prompt that come from below the pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Restore {
    /// These are on their way.
    Pending(Range<usize>),
    /// These did not come; nothing of the restore is under way any more.
    Missing(Range<usize>),
}

/// What prefill knows of a transfer away from it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outgoing {
    pub peer: Instance,
    /// The connection over which decode asked.
    pub session: u64,
    pub attempt: u32,
    pub reserve: Reserve,
    /// Pages of the prompt sent so far or held by decode already; never moves back within an attempt.
    pub cursor: usize,
    /// Pages behind the cursor of which some layers were sent while the others are still computed.
    pub begun: Option<Begun>,
    /// Sequence number of the next part.
    pub sequence: u32,
    /// Whether the last part was sent.
    pub complete: bool,
    /// Parts that have not settled, of all attempts.
    pub tags: BTreeSet<Tag>,
}

impl Outgoing {
    pub(super) fn new(
        (peer, session): (Instance, u64),
        attempt: u32,
        reserve: Reserve,
        page_tokens: u32,
    ) -> Self {
        let cursor = (reserve.decode_prefix_len / page_tokens) as usize;
        Self {
            peer,
            session,
            attempt,
            reserve,
            cursor,
            begun: None,
            sequence: 0,
            complete: false,
            tags: BTreeSet::new(),
        }
    }
}

impl Outgoing {
    /// The page after the last that decode asked for, of the prompt's.
    pub(super) fn end(&self, page_tokens: usize) -> usize {
        self.reserve.decode_prefix_len as usize / page_tokens + self.reserve.pages.len()
    }
}

/// Pages from the cursor on, of which the first layers were sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    /// The page after the last of them, counted from the front of the prompt.
    pub end: usize,
    /// Layers that were sent, fewer than the model has.
    pub layers: u32,
}

/// A request and everything the worker holds for it.
#[derive(Debug)]
pub(super) struct Job {
    pub request: Request,
    pub submitted: Time,
    /// Its place among all requests, in order of arrival.
    pub place: u64,
    pub stage: CurrentStage,
    /// Later requests that were admitted while this one lacked pages.
    pub overtaken: u32,
    /// The page table: pages for the prompt and for as much of the answer as there is, in order; empty while queued.
    /// The locked ones are shared, the others are held.
    pub table: Vec<PageId>,
    /// Names of its first pages, as far as they were needed.
    pub names: Vec<PageHash>,
    /// Pages behind the locked ones that come from below the pool.
    pub restore: Option<Restore>,
    /// Whether what it had was looked for below the pool since it was last retracted; a new request looks when it comes.
    pub looked_below: bool,
    /// The token page behind a window that it restored, until the tree has that.
    pub restored_window: Option<usize>,
    /// The pages that the request gives back: those of the table behind the locked ones. `None` while queued.
    pub held: Option<HeldPages>,
    /// Pages that the request held and no longer uses, because the cache has others with the same contents.
    pub spare: Option<HeldPages>,
    /// The window parts of its KV, if its model has sliding layers.
    pub window: Window,
    /// Keeps the cached pages at the front of the table.
    pub lock: Option<PrefixLock>,
    pub aux: Option<u32>,
    /// Positions with KV.
    pub computed: usize,
    /// Positions, from the first one computed to the end of the cached prefix, that are computed for the window behind
    /// them alone; empty without any, and once they are.
    pub again: Range<usize>,
    /// Positions that had KV before the job was retracted; computing them is done for the second time.
    pub computed_before: usize,
    /// Tokens drawn, a stop token included.
    pub output: Vec<u32>,
    /// The first token as it was drawn: for the aux row, or kept back while ready.
    pub first: Option<Sampled>,
    /// When the last token was drawn.
    pub last_drawn: Option<Time>,
    /// Whom it waits for, or has waited for, while queued.
    pub follows: Option<Follows>,
    /// The position up to which the batch being computed computes this job.
    pub in_batch: Option<usize>,
    /// Prefill: where the pages go, once decode has said so.
    pub outgoing: Option<Outgoing>,
    pub cached_tokens: u32,
    /// Tokens of the prompt that were cached here when it was first admitted, in the pool or below.
    pub promised_tokens: u32,
    /// Those of them that were in the pool.
    pub near_tokens: u32,
    pub transferred_pages: u32,
}

impl Job {
    pub(super) fn new(mut request: Request, submitted: Time, place: u64) -> Self {
        Self {
            names: std::mem::take(&mut request.names),
            request,
            submitted,
            place,
            stage: CurrentStage::queued(),
            overtaken: 0,
            table: Vec::new(),
            restore: None,
            looked_below: true,
            restored_window: None,
            held: None,
            spare: None,
            window: Window::default(),
            lock: None,
            aux: None,
            computed: 0,
            again: 0..0,
            computed_before: 0,
            output: Vec::new(),
            first: None,
            last_drawn: None,
            follows: None,
            in_batch: None,
            outgoing: None,
            cached_tokens: 0,
            promised_tokens: 0,
            near_tokens: 0,
            transferred_pages: 0,
        }
    }

    /// The token at a position of prompt + output.
    pub(super) fn token(&self, position: usize) -> u32 {
        match position.checked_sub(self.request.prompt.len()) {
            None => self.request.prompt[position],
            Some(index) => self.output[index],
        }
    }

    /// Whether it has gone on, or is to, after a retraction.
    pub(super) fn was_retracted(&self) -> bool {
        self.computed_before > 0
    }

    /// Tokens known so far.
    pub(super) fn known(&self) -> usize {
        self.request.prompt.len() + self.output.len()
    }
}
