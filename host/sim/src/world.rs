//! Several workers, their clients, and the network and storage between them.

mod acts;
mod clients;
mod conditions;
mod deaths;
mod ends;
mod flights;
mod mishaps;
mod network;
mod pending;
mod rooms;
mod storage;
mod transfer;
mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use host_core::pool::PoolLimits;
use host_core::{Config, Event, Instance, Room, Scheduler, Time};

use crate::agenda::Agenda;
use crate::faults::{Faults, Outcome};
use crate::kv::Kv;
use crate::random::Random;
use crate::times::{Times, Work};
pub use clients::{Ask, Clients, Ending, OpenRequest};
use conditions::Condition;
use flights::Flight;
pub use mishaps::Mishap;
use mishaps::Mishaps;
use pending::Pending;
use storage::Storage;
use worker::Worker;

/// Steps after which [`World::run`] takes a world for one that does not come to rest.
const RESTLESS: u64 = 200_000;

/// Workers and their clients under one clock and one seed. The same seed, configuration and calls give the same run.
///
/// A worker is named by its place, in the order in which workers were [added](Self::add). When its process dies another
/// one takes its place.
pub struct World<C> {
    /// The source of everything random in this world.
    pub random: Random,
    /// The clients, which send requests and get answers.
    pub clients: C,
    agenda: Agenda<Pending>,
    times: Box<dyn Times>,
    faults: Faults,
    kv: Kv,
    workers: Vec<Worker>,
    /// Temporary conditions of each worker.
    conditions: Vec<Condition>,
    /// Ways between workers that are cut (from one to another), and until when.
    cuts: BTreeMap<(usize, usize), Time>,
    /// The place of each process, also of those that died.
    places: BTreeMap<Instance, usize>,
    /// Workers that got an event since they last decided.
    awake: BTreeSet<usize>,
    /// Times at which workers must decide without an event.
    deadlines: BTreeSet<(Time, usize)>,
    open_requests: BTreeMap<Room, OpenRequest>,
    /// The session of a worker's connection to a peer. A write lands only if this is still the session that it was
    /// given for.
    links: BTreeMap<(Instance, Instance), u64>,
    last_session: u64,
    last_instance: u64,
    fences_to_fail: u64,
    /// Pages and layers that were sent, by sender, room and attempt. A page is named by its place in the attempt.
    sent: BTreeMap<(Instance, Room, u32), BTreeSet<(u32, u32)>>,
    /// Writes that may still land, in worlds whose pages have contents.
    flights: BTreeMap<u64, Flight>,
    last_flight: u64,
    mishaps: Mishaps,
    /// Storage that all workers write to and read from.
    storage: Storage,
    outcome: Outcome,
    audit_every: u64,
    decisions: u64,
    trace: Option<Vec<String>>,
}

impl<C: Clients> World<C> {
    /// A world without workers.
    #[must_use]
    pub fn new(seed: u64, kv: Kv, faults: Faults, times: impl Times + 'static, clients: C) -> Self {
        Self {
            random: Random::new(seed),
            clients,
            agenda: Agenda::default(),
            times: Box::new(times),
            faults,
            kv,
            workers: Vec::new(),
            conditions: Vec::new(),
            cuts: BTreeMap::new(),
            places: BTreeMap::new(),
            awake: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            open_requests: BTreeMap::new(),
            links: BTreeMap::new(),
            last_session: 0,
            last_instance: 0,
            fences_to_fail: 0,
            sent: BTreeMap::new(),
            flights: BTreeMap::new(),
            last_flight: 0,
            mishaps: Mishaps::default(),
            storage: Storage::default(),
            outcome: Outcome::default(),
            audit_every: 1,
            decisions: 0,
            trace: None,
        }
    }

    /// Adds a worker, and returns its place.
    ///
    /// # Panics
    /// When the configuration does not fit the world's KV.
    pub fn add(&mut self, config: Config, limits: PoolLimits) -> usize {
        assert_eq!(config.page_tokens as usize, self.kv.page_tokens, "one model has one size of pages");
        assert_eq!(config.window, self.kv.window(), "one model has one window");
        let worker = Worker::new(self.new_instance(), config, limits, self.kv);
        let place = self.workers.len();
        self.places.insert(worker.instance, place);
        self.workers.push(worker);
        self.conditions.push(Condition::default());
        place
    }

    /// Audits workers once in so many decisions instead of at each. Audits take most of the time of large worlds.
    pub fn audit_every(&mut self, decisions: u64) {
        self.audit_every = decisions;
    }

    /// Records the events and the actions of workers from now on.
    pub fn keep_trace(&mut self) {
        self.trace.get_or_insert_default();
    }

    /// The recorded events and actions.
    #[must_use]
    pub fn trace(&self) -> &[String] {
        self.trace.as_deref().unwrap_or_default()
    }

    /// The time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.agenda.now()
    }

    /// The scheduler at a place.
    #[must_use]
    pub fn scheduler(&self, place: usize) -> &Scheduler {
        &self.workers[place].scheduler
    }

    fn new_instance(&mut self) -> Instance {
        self.last_instance += 1;
        Instance(self.last_instance)
    }

    /// The place of a process, also of one that died.
    fn place(&self, at: Instance) -> usize {
        self.places[&at]
    }

    /// The place of a process, unless it died.
    fn alive(&self, at: Instance) -> Option<usize> {
        Some(self.place(at)).filter(|place| self.workers[*place].instance == at)
    }

    fn worker(&mut self, at: Instance) -> Option<&mut Worker> {
        self.alive(at).map(|place| &mut self.workers[place])
    }

    /// Lets something happen as soon as this work is done.
    fn later(&mut self, work: Work<'_>, what: Pending) {
        let wait = self.takes(work);
        self.agenda.after(wait, what);
    }

    /// Gives a worker an event as soon as its threads have passed it on.
    fn tell(&mut self, at: Instance, event: Event) {
        self.later(Work::News { at: self.place(at) }, Pending::Tell { at, event });
    }

    fn soon(&mut self, most: Duration) -> Duration {
        self.random.up_to(most)
    }

    /// Runs until nothing is left to do, and checks that the workers have given everything back.
    ///
    /// # Panics
    /// When the world does not come to rest, leaks something, or a request has not ended.
    pub fn run(&mut self) {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < RESTLESS, "the world does not come to rest: {:?}", self.stuck());
        }
        self.check_rest();
    }

    /// Runs until a time.
    pub fn run_until(&mut self, until: Time) {
        while self.next().is_some_and(|next| next <= until) && self.step() {}
        self.agenda.go_to(until);
    }

    fn stuck(&self) -> Option<&Scheduler> {
        self.workers.iter().map(|worker| &worker.scheduler).rfind(|scheduler| !scheduler.is_settled())
    }

    fn next(&self) -> Option<Time> {
        if !self.awake.is_empty() {
            return Some(self.agenda.now());
        }
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        self.agenda.next().into_iter().chain(deadline).min()
    }

    /// Advances to the next point in time. All events that are due happen, and then the workers that got an event
    /// decide. Returns whether there was a next point in time.
    ///
    /// # Panics
    /// When work is left, but no event is pending that could continue it.
    pub fn step(&mut self) -> bool {
        if self.agenda.is_empty() && self.stuck().is_none() && self.awake.is_empty() {
            return false;
        }
        self.strike();
        let Some(next) = self.next() else { panic!("nothing will ever happen: {:?}", self.stuck()) };
        self.agenda.go_to(next);
        while let Some(what) = self.agenda.take_due() {
            if let Some(what) = self.unless_frozen(what) {
                self.happen(what);
            }
        }
        let now = self.agenda.now();
        let due = self.deadlines.iter().take_while(|(at, _)| *at <= now).map(|(_, place)| *place);
        self.awake.extend(due);
        for place in std::mem::take(&mut self.awake) {
            self.decide(place);
        }
        true
    }

    /// Gives a worker an event that did not happen, so that a test sees that the lie is found.
    pub fn lie(&mut self, place: usize, event: Event) {
        self.handle(self.workers[place].instance, event);
    }

    fn happen(&mut self, what: Pending) {
        match what {
            Pending::Submit { to, request } => self.submit(to, request),
            Pending::Cancel(room) => self.cancel(room),
            Pending::Lose { room, leg } => self.lose(room, leg),
            Pending::Thaw { place } => self.thaw(place),
            Pending::Deliver { to, from, floor, message } => {
                self.handle(to, Event::Message { from, floor, message });
            }
            Pending::Layers { at, batch, layers } => self.layers(at, batch, layers),
            Pending::Computed { at, batch } => self.computed(at, batch),
            Pending::Tell { at, event } => self.handle(at, event),
            Pending::Handshake { decode, prefill, floor } => self.shake_hands(decode, prefill, floor),
            Pending::Connected { decode, prefill } => self.connected(decode, prefill),
            Pending::Fence { at, peer, session } => self.fence(at, peer, session),
            Pending::Land(landing) => self.land(*landing),
            Pending::Copy(arrival) => self.copy(&arrival),
            Pending::Close { at, room } => self.closed(at, room),
            Pending::Tier { at, work } => self.tier(at, work),
        }
    }

    fn handle(&mut self, at: Instance, event: Event) {
        let now = self.agenda.now();
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:?} {at:?} {event:?}"));
        }
        let Some(place) = self.alive(at) else { return };
        if let Some(wait) = self.thaws(place) {
            return self.agenda.after(wait, Pending::Tell { at, event });
        }
        self.awake.insert(place);
        let mut actions = Vec::new();
        let now = self.local_time(place);
        self.workers[place].scheduler.handle(now, event, &mut actions);
        self.act(at, actions);
    }

    fn tick(&mut self, place: usize) {
        let now = self.local_time(place);
        let worker = &mut self.workers[place];
        let mut actions = Vec::new();
        worker.scheduler.tick(now, &mut actions);
        let at = worker.instance;
        self.act(at, actions);
    }

    fn decide(&mut self, place: usize) {
        if self.thaws(place).is_some() {
            return;
        }
        self.tick(place);
        let (now, ahead) = (self.local_time(place), self.conditions[place].ahead);
        let worker = &mut self.workers[place];
        let next = worker.scheduler.next_deadline();
        assert!(next.is_none_or(|next| next > now), "what is due was not done: a worker would spin");
        let next = next.map(|next| Time(next.0.saturating_sub(ahead)));
        if next != worker.deadline {
            let before = std::mem::replace(&mut worker.deadline, next);
            before.map(|before| self.deadlines.remove(&(before, place)));
            self.deadlines.extend(next.map(|next| (next, place)));
        }
        self.decisions += 1;
        if self.decisions.is_multiple_of(self.audit_every) {
            worker.scheduler.audit();
            self.outcome.quarantined += worker.scheduler.stats().pool.quarantined as u64;
        }
        self.check_flights(place);
    }
}
