//! Requests of clients, and their answers.

use std::time::Duration;

use host_core::radix::CacheEvent;
use host_core::request::{Failure, Request};
use host_core::{Batch, Event, Instance, Room, Time};

use super::{Pending, World};
use crate::fixture::peer;
use crate::random::Random;

/// A request that is about to be sent.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The request. The world draws its room, and names its prefill worker.
    pub request: Request,
    /// The place of the worker that answers, and the time until it gets the request.
    pub answers: (usize, Duration),
    /// The same for the prefill worker, unless the worker that answers computes the prompt.
    pub prefill: Option<(usize, Duration)>,
    /// The time until the client leaves, if it does.
    pub leaves: Option<Duration>,
}

/// A request that was sent and has not ended.
#[derive(Clone, Debug)]
pub struct OpenRequest {
    /// The request as it was sent.
    pub request: Request,
    /// When it was sent.
    pub since: Time,
    /// Tokens of the answer that have arrived.
    pub tokens: Vec<u32>,
    /// How it ended, or `None` while it has not.
    pub ending: Option<Ending>,
    pub(super) answers: Instance,
    pub(super) prefill: Option<Instance>,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With its whole answer.
    Complete,
    /// A worker reported that the request cannot be answered.
    Failed {
        /// The worker.
        place: usize,
        /// Why.
        failure: Failure,
    },
    /// A worker was lost, or the way to it.
    Lost {
        /// The worker.
        place: usize,
    },
    /// The client left.
    Left,
}

/// The clients of a world: they send requests, and are told of everything that a client or a meter sees.
pub trait Clients {
    /// A worker begins a step.
    fn begun(&mut self, _now: Time, _place: usize, _batch: &Batch) {}

    /// A worker's radix cache has made these changes, in this order. Called only for workers whose configuration [tells
    /// of it](host_core::Config::cache_events).
    fn cache_changed(&mut self, _place: usize, _changes: &[CacheEvent]) {}

    /// A token has arrived. Returns whether the client still wants the rest.
    fn token(&mut self, _now: Time, _open: &OpenRequest) -> bool {
        true
    }

    /// An answer is complete, or will never be. Returns the requests that follow.
    fn ended(&mut self, _now: Time, _open: &OpenRequest, _complete: bool, _random: &mut Random) -> Vec<Ask> {
        Vec::new()
    }

    /// A worker has died, and its requests end soon. Returns the requests that follow.
    fn died(&mut self, _now: Time, _place: usize, _random: &mut Random) -> Vec<Ask> {
        Vec::new()
    }
}

/// No clients.
impl Clients for () {}

impl<C: Clients> World<C> {
    /// Sends a request, and cancels it later if its client leaves. Returns its room.
    pub fn ask(&mut self, ask: Ask) -> Room {
        let room = Room(self.random.word());
        let instance = |place: usize| self.workers[place].instance;
        let answers = instance(ask.answers.0);
        let prefill = ask.prefill.map(|(place, wait)| (instance(place), wait));
        let request = Request { room, prefill: None, ..ask.request };
        if let Some(wait) = ask.leaves {
            self.agenda.after(wait, Pending::Cancel(room));
        }
        if let Some((to, wait)) = prefill {
            self.agenda.after(wait, Pending::Submit { to, request: request.clone() });
        }
        let prefill = prefill.map(|(instance, _)| instance);
        let leg = Request { prefill: prefill.and_then(peer), ..request.clone() };
        self.agenda.after(ask.answers.1, Pending::Submit { to: answers, request: leg });
        let since = self.agenda.now();
        let open = OpenRequest { request, since, tokens: Vec::new(), ending: None, answers, prefill };
        self.open_requests.insert(room, open);
        room
    }

    pub(super) fn submit(&mut self, to: Instance, request: Request) {
        if self.open_requests.contains_key(&request.room) {
            self.handle(to, Event::Submit(request));
        }
    }

    /// Cancels a request: its client leaves.
    pub fn cancel(&mut self, room: Room) {
        self.give_up(room, Ending::Left);
    }

    /// Ends a request, and tells its workers at once.
    pub(super) fn give_up(&mut self, room: Room, ending: Ending) {
        let Some(open) = self.end(room, ending) else { return };
        for at in open.prefill.into_iter().chain([open.answers]) {
            self.handle(at, Event::Cancel(room));
        }
    }

    pub(super) fn emit(&mut self, room: Room, token: u32) {
        let now = self.agenda.now();
        let Some(open) = self.open_requests.get_mut(&room) else { return };
        open.tokens.push(token);
        if !self.clients.token(now, open) {
            self.agenda.after(Duration::ZERO, Pending::Cancel(room));
        }
    }

    /// Ends a request: checks a complete answer, and sends the requests that follow it.
    pub(super) fn end(&mut self, room: Room, ending: Ending) -> Option<OpenRequest> {
        let mut open = self.open_requests.remove(&room)?;
        let complete = ending == Ending::Complete;
        open.ending = Some(ending);
        if complete {
            self.outcome.finished += 1;
            let request = &open.request;
            if self.kv.words {
                let expected = self.kv.answer_to(&request.prompt, request.max_new_tokens as usize);
                assert_eq!(open.tokens, expected, "wrong answer in {room:?}");
            }
        } else {
            self.outcome.failed += 1;
        }
        let next = self.clients.ended(self.agenda.now(), &open, complete, &mut self.random);
        self.outcome.turns += next.len() as u64;
        for ask in next {
            self.ask(ask);
        }
        Some(open)
    }
}
