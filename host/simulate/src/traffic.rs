//! The clients of a simulation ([`Clients`]): their requests, and the answers that they see.

mod prompt;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use host_core::radix::CacheEvent;
use host_core::request::Request;
use host_core::routing::BlockKey;
use host_core::{Room, Sampling, Time};
use host_sim::{Clients, OpenRequest, Random};

use crate::cluster::Cluster;
use crate::router::{Router, Wanted};
use crate::seen::Seen;
use prompt::Namer;
pub use prompt::Prompt;

/// The time from a client to the router, and from there to a worker.
const HOP: Duration = Duration::from_micros(200);

/// The latest time at which a request may arrive: 30 days. A simulation does something every second.
pub const LATEST_ARRIVAL: Duration = Duration::from_secs(30 * 24 * 3600);

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// When it arrives. A closed loop ignores it.
    pub at: Duration,
    /// Its prompt.
    pub prompt: Prompt,
    /// Tokens of its answer, at least one.
    pub answer: u32,
}

/// Requests, and the rule by which they are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Each request arrives at its own time. The list is in order of these times.
    Open(Vec<Ask>),
    /// A limited number of requests is in flight. The next one is sent when one has ended.
    Closed {
        /// The requests, in order.
        asks: Vec<Ask>,
        /// The most requests in flight, at least one.
        concurrency: usize,
    },
    /// Conversations, a limited number at a time. A turn is sent when the one before is answered. Its prompt is the whole
    /// conversation so far and then its own text, so the answer's KV may be found again.
    Conversations {
        /// The turns of each conversation.
        turns: Vec<Vec<Ask>>,
        /// The most conversations in progress, at least one.
        concurrency: usize,
    },
}

impl Workload {
    /// The number of requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        match self {
            Workload::Open(asks) | Workload::Closed { asks, .. } => asks.len(),
            Workload::Conversations { turns, .. } => turns.iter().map(Vec::len).sum(),
        }
    }
}

/// What a client saw of one request. Times are those of the simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Record {
    pub sent: Time,
    /// The times of its first token, and of its last so far.
    pub tokens: Option<(Time, Time)>,
    pub ended: Option<Time>,
    pub complete: bool,
    pub prompt: u32,
    pub received: u32,
    /// The places of its workers.
    pub prefill: Option<usize>,
    pub answers: usize,
}

impl Record {
    /// What the client saw of it.
    pub(crate) fn seen(&self) -> Seen {
        Seen {
            sent: self.sent.0,
            tokens: self.tokens.map(|(first, last)| (first.0, last.0)),
            ended: self.ended.map(|at| at.0),
            complete: self.complete,
            prompt: self.prompt,
            received: self.received,
        }
    }
}

/// Sends the requests of a workload by way of the router, and records the answers.
pub(crate) struct Traffic {
    /// Conversations that have not begun. A single request is a conversation of one turn.
    waiting: VecDeque<VecDeque<Ask>>,
    /// The turns that follow a request, by its number.
    following: BTreeMap<u64, VecDeque<Ask>>,
    /// The most requests in flight, or `None` in an open loop.
    concurrency: Option<usize>,
    pub in_flight: usize,
    pub router: Router,
    namer: Namer,
    /// The router's time for each request.
    routing: Duration,
    /// When the router has dealt with all requests so far.
    routed: Time,
    pub records: Vec<Record>,
    /// The first requests, which are not measured.
    warm_up: usize,
    /// Seconds between two tokens of one answer, over all measured requests.
    pub gaps: Vec<f64>,
    /// Tokens that came in each second of the simulation. Seconds without a token are left out.
    pub tokens_by_second: Vec<(u64, u64)>,
}

impl Traffic {
    pub(crate) fn new(workload: &Workload, router: Router, cluster: &Cluster, warm_up: usize) -> Self {
        let alone = |asks: &[Ask]| asks.iter().map(|ask| VecDeque::from([ask.clone()])).collect();
        let (waiting, concurrency) = match workload {
            Workload::Open(asks) => (alone(asks), None),
            Workload::Closed { asks, concurrency } => (alone(asks), Some((*concurrency).max(1))),
            Workload::Conversations { turns, concurrency } => {
                let turns = turns.iter().filter(|turns| !turns.is_empty());
                (turns.map(|turns| turns.iter().cloned().collect()).collect(), Some((*concurrency).max(1)))
            }
        };
        Self {
            waiting,
            following: BTreeMap::new(),
            concurrency,
            in_flight: 0,
            namer: Namer::new(cluster.page_tokens, router.looks()),
            routing: Duration::from_secs_f64(cluster.router_us / 1e6),
            routed: Time::default(),
            router,
            records: Vec::with_capacity(workload.requests()),
            warm_up,
            gaps: Vec::new(),
            tokens_by_second: Vec::new(),
        }
    }

    /// The requests that are measured.
    pub(crate) fn measured(&self) -> &[Record] {
        self.records.get(self.warm_up..).unwrap_or_default()
    }

    /// When the next request is sent, unless it waits for another one to end.
    pub(crate) fn next(&self) -> Option<Time> {
        let next = self.waiting.front()?.front()?;
        match self.concurrency {
            None => Some(Time(next.at)),
            Some(most) => (self.in_flight < most).then(Time::default),
        }
    }

    /// Whether all requests were sent, except turns that follow a request in flight.
    pub(crate) fn has_sent_all(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The next request, with its route.
    pub(crate) fn send(&mut self, now: Time) -> Option<host_sim::Ask> {
        let mut turns = self.waiting.pop_front()?;
        let ask = turns.pop_front()?;
        let keys = self.namer.keys(&ask.prompt);
        Some(self.sent(now, ask.prompt.text(), keys, ask.answer, turns))
    }

    /// The turn that follows a request, with its route.
    fn follow(&mut self, now: Time, before: &OpenRequest) -> Option<host_sim::Ask> {
        let mut turns = self.following.remove(&Self::number(before))?;
        let ask = turns.pop_front()?;
        let text = [&before.request.prompt[..], &before.tokens, &ask.prompt.text()].concat();
        let keys = self.namer.keys_of(&text);
        Some(self.sent(now, text, keys, ask.answer, turns))
    }

    fn sent(
        &mut self,
        now: Time,
        prompt: Vec<u32>,
        keys: Vec<BlockKey>,
        answer: u32,
        turns: VecDeque<Ask>,
    ) -> host_sim::Ask {
        let number = self.records.len() as u64;
        let tokens = prompt.len() as u64;
        let route = self.router.route(now, Wanted { room: Room(number), keys, tokens, avoid: Vec::new() });
        self.records.push(Record {
            sent: now,
            tokens: None,
            ended: None,
            complete: false,
            prompt: u32::try_from(prompt.len()).unwrap_or(u32::MAX),
            received: 0,
            prefill: route.prefill,
            answers: route.answers,
        });
        if !turns.is_empty() {
            self.following.insert(number, turns);
        }
        self.in_flight += 1;
        let request = Request {
            // The client's number of the request, because the world draws the room.
            sampling: Sampling { seed: number, ..GREEDY },
            prompt,
            ..host_sim::request(number, &[], answer)
        };
        self.routed = self.routed.max(now).after(self.routing);
        let wait = self.routed.since(now) + 2 * HOP;
        host_sim::Ask {
            request,
            answers: (route.answers, wait),
            prefill: route.prefill.map(|place| (place, wait)),
            leaves: None,
        }
    }

    fn number(open: &OpenRequest) -> u64 {
        open.request.sampling.seed
    }

    fn record(&mut self, open: &OpenRequest) -> Option<&mut Record> {
        self.records.get_mut(usize::try_from(Self::number(open)).ok()?)
    }
}

const GREEDY: Sampling = Sampling::GREEDY;

impl Clients for Traffic {
    fn cache_changed(&mut self, place: usize, changes: &[CacheEvent]) {
        self.router.cache_changed(place, changes);
    }

    fn token(&mut self, now: Time, open: &OpenRequest) -> bool {
        match self.tokens_by_second.last_mut().filter(|(second, _)| *second == now.0.as_secs()) {
            Some((_, tokens)) => *tokens += 1,
            None => self.tokens_by_second.push((now.0.as_secs(), 1)),
        }
        let Some(record) = self.record(open) else { return true };
        record.received += 1;
        match &mut record.tokens {
            None => {
                record.tokens = Some((now, now));
                self.router.computed(Room(Self::number(open)));
            }
            Some((_, last)) => {
                let gap = now.since(*last).as_secs_f64();
                *last = now;
                if Self::number(open) >= self.warm_up as u64 {
                    self.gaps.push(gap);
                }
            }
        }
        true
    }

    fn ended(&mut self, now: Time, open: &OpenRequest, complete: bool, _: &mut Random) -> Vec<host_sim::Ask> {
        self.in_flight -= 1;
        if let Some(record) = self.record(open) {
            (record.ended, record.complete) = (Some(now), complete);
        }
        self.router.ended(now, Room(Self::number(open)));
        let follows = if complete { self.follow(now, open) } else { None };
        let next = follows.or_else(|| self.concurrency.and_then(|_| self.send(now)));
        next.into_iter().collect()
    }
}
