//! Temporary conditions: workers are frozen or slow, their clocks are ahead, or the ways between them are cut.

use std::time::Duration;

use host_core::{Event, Instance, Time};

use super::clients::Ending;
use super::{Clients, Pending, World};
use crate::times::Work;

/// A way between two workers is cut for this long at most.
const CUT: Duration = Duration::from_secs(30);
/// A worker stands still for this long at most.
const FROZEN: Duration = Duration::from_secs(20);
/// A worker is slow for this long at most. Its work takes 2 to 21 times as long.
const SLOW: (Duration, u64) = (Duration::from_secs(20), 20);
/// A clock jumps ahead by this at most.
const AHEAD: Duration = Duration::from_secs(120);
/// The time after which a handshake without an answer has failed.
const NO_ANSWER: Duration = Duration::from_secs(2);

/// The condition of one worker's process.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Condition {
    /// The process stands still until then.
    frozen: Time,
    /// Its work takes so many times as long, until then.
    slow: (u32, Time),
    /// How far its clock is ahead.
    pub ahead: Duration,
}

impl<C: Clients> World<C> {
    /// Draws the conditions that begin at this point in time.
    pub(super) fn change_conditions(&mut self) {
        let faults = self.faults;
        let lasting =
            faults.partition + faults.freeze + faults.slow + faults.clock + faults.stream + faults.wipe;
        if lasting == 0.0 || self.workers.is_empty() {
            return;
        }
        let place = self.random.place(self.workers.len());
        let other = self.random.place(self.workers.len());
        let now = self.agenda.now();
        if self.strikes(faults.partition, || format!("the way from worker {place} to worker {other} is cut"))
        {
            let until = now.after(self.soon(CUT));
            self.cuts.insert((place, other), until);
        }
        if self.strikes(faults.freeze, || format!("worker {place} stands still")) {
            self.freeze(place);
        }
        if self.strikes(faults.slow, || format!("worker {place} is slow")) {
            let times = 2 + self.random.below(SLOW.1) as u32;
            self.conditions[place].slow = (times, now.after(self.soon(SLOW.0)));
        }
        if self.strikes(faults.clock, || format!("the clock of worker {place} jumps ahead")) {
            let ahead = self.soon(AHEAD);
            self.conditions[place].ahead += ahead;
            self.awake.insert(place);
        }
        if self.strikes(faults.wipe, || "storage loses everything".to_owned()) {
            self.storage.lose_all();
        }
        if !self.open_requests.is_empty() {
            let which = self.random.place(self.open_requests.len());
            if self.strikes(faults.stream, || "the router loses the streams of a request".to_owned())
                && let Some((&room, open)) = self.open_requests.iter().nth(which)
            {
                let leg = open.answers;
                self.lose(room, leg);
            }
        }
    }

    /// Freezes a worker: its threads do nothing, it keeps its state, and its memory can be written.
    fn freeze(&mut self, place: usize) {
        let wait = self.soon(FROZEN);
        let thaws = self.agenda.now().after(wait);
        if thaws <= self.conditions[place].frozen {
            return;
        }
        self.conditions[place].frozen = thaws;
        // The worker decides again when it thaws.
        if let Some(before) = self.workers[place].deadline.take() {
            self.deadlines.remove(&(before, place));
        }
        self.awake.remove(&place);
        self.agenda.after(wait, Pending::Thaw { place });
    }

    /// The time until a frozen worker thaws.
    pub(super) fn thaws(&self, place: usize) -> Option<Duration> {
        let wait = self.conditions[place].frozen.since(self.agenda.now());
        (!wait.is_zero()).then_some(wait)
    }

    pub(super) fn thaw(&mut self, place: usize) {
        if self.thaws(place).is_none() {
            self.awake.insert(place);
        }
    }

    /// The time by a worker's clock.
    pub(super) fn local_time(&self, place: usize) -> Time {
        self.agenda.now().after(self.conditions[place].ahead)
    }

    /// The time that work takes if it begins now.
    pub(super) fn takes(&mut self, work: Work<'_>) -> Duration {
        let now = self.agenda.now();
        let wait = self.times.takes(now, work, &mut self.random);
        let factor = |place: usize| {
            let (times, until) = self.conditions[place].slow;
            if until > now { times } else { 1 }
        };
        wait * work.workers().into_iter().flatten().map(factor).max().unwrap_or(1)
    }

    /// How much longer no message and no write passes from one worker to another.
    pub(super) fn cut_off(&self, from: usize, to: usize) -> Option<Duration> {
        let until = self.cuts.get(&(from, to))?;
        let wait = until.since(self.agenda.now());
        (!wait.is_zero()).then_some(wait)
    }

    /// Whether a handshake is lost on its way. The side that waits for its answer is told after a while.
    pub(super) fn handshake_is_lost(
        &mut self,
        from: usize,
        to: usize,
        (decode, prefill): (Instance, Instance),
    ) -> bool {
        let lost = self.cut_off(from, to).is_some();
        if lost {
            let event = Event::PeerRefused { peer: prefill, message: "no answer".to_owned() };
            self.agenda.after(NO_ANSWER, Pending::Tell { at: decode, event });
        }
        lost
    }

    /// Returns `what`, unless the worker that would do it is frozen: then `what` is put off until the worker thaws.
    pub(super) fn unless_frozen(&mut self, what: Pending) -> Option<Pending> {
        let actor = match &what {
            Pending::Submit { to: at, .. }
            | Pending::Deliver { to: at, .. }
            | Pending::Layers { at, .. }
            | Pending::Computed { at, .. }
            | Pending::Tell { at, .. }
            | Pending::Handshake { prefill: at, .. }
            | Pending::Connected { decode: at, .. }
            | Pending::Fence { at, .. }
            | Pending::Close { at, .. }
            | Pending::Tier { at, .. } => *at,
            Pending::Copy(arrival) => arrival.write.to,
            Pending::Cancel(_) | Pending::Lose { .. } | Pending::Land(_) | Pending::Thaw { .. } => {
                return Some(what);
            }
        };
        match self.alive(actor).and_then(|place| self.thaws(place)) {
            None => Some(what),
            Some(wait) => {
                self.agenda.after(wait, what);
                None
            }
        }
    }

    /// The router loses a leg, and gives the request up. Once an answer has begun, the prefill worker is not needed any more.
    pub(super) fn lose(&mut self, room: host_core::Room, leg: Instance) {
        let Some(open) = self.open_requests.get(&room) else { return };
        if open.prefill == Some(leg) && !open.tokens.is_empty() {
            return;
        }
        self.give_up(room, Ending::Lost { place: self.place(leg) });
    }
}
