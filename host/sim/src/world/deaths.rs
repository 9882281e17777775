//! Faults of a whole world: deaths, broken connections, emptied caches.

use host_core::{Instance, Role, Room};

use super::conditions::Condition;
use super::worker::Worker;
use super::{Clients, Pending, World};
use crate::times::Work;

impl<C: Clients> World<C> {
    /// Draws the faults of this point in time.
    pub(super) fn strike(&mut self) {
        for (probability, prefill) in [(self.faults.death, true), (self.faults.decode_death, false)] {
            if self.strikes(probability, || "a worker dies".to_owned()) {
                let most = self.faults.more_deaths;
                let mortal = |worker: &Worker| {
                    worker.deaths <= most && (worker.config.role == Role::Prefill) == prefill
                };
                let places: Vec<usize> =
                    (0..self.workers.len()).filter(|place| mortal(&self.workers[*place])).collect();
                if !places.is_empty() {
                    let place = places[self.random.place(places.len())];
                    self.kill(place);
                }
            }
        }
        if self.strikes(self.faults.disconnect, || "one side sees a connection break".to_owned()) {
            self.disconnect();
        }
        if self.strikes(self.faults.flush, || "all caches are emptied".to_owned()) {
            self.flush();
        }
        self.change_conditions();
    }

    /// Empties all caches.
    pub fn flush(&mut self) {
        for place in 0..self.workers.len() {
            if self.thaws(place).is_some() {
                continue;
            }
            let worker = &mut self.workers[place];
            let flushed = worker.scheduler.flush_cache();
            self.outcome.flushed_in_use += flushed.map_or(0, |flushed| flushed.in_use as u64);
            // The event of the flush is still to be sent.
            self.awake.insert(place);
        }
    }

    /// Kills a worker's process, with its pool and its host memory. A new process takes its place and knows no peer.
    pub fn kill(&mut self, place: usize) {
        self.outcome.deaths += 1;
        self.count(place);
        let instance = self.new_instance();
        let worker = &mut self.workers[place];
        let dead = worker.instance;
        let deadline = worker.deadline;
        *worker = Worker {
            deaths: worker.deaths + 1,
            ..Worker::new(instance, worker.config.clone(), worker.limits, self.kv)
        };
        self.conditions[place] = Condition::default();
        deadline.map(|deadline| self.deadlines.remove(&(deadline, place)));
        self.awake.remove(&place);
        self.places.insert(instance, place);
        // A dead process writes no more. The backends of its peers tell them so.
        let ends: Vec<(Instance, Instance)> = self.links.keys().copied().collect();
        for (at, peer) in ends {
            if at == dead {
                self.links.remove(&(at, peer));
            } else if peer == dead {
                self.unlink(at, peer);
            }
        }
        // The router sees the legs on the dead worker break, and cancels the other legs of these requests.
        let legs = self.open_requests.iter();
        let legs = legs.filter(|(_, open)| open.answers == dead || open.prefill == Some(dead));
        let rooms: Vec<Room> = legs.map(|(room, _)| *room).collect();
        for room in rooms {
            self.later(Work::Cancel, Pending::Lose { room, leg: dead });
        }
        let next = self.clients.died(self.agenda.now(), place, &mut self.random);
        for ask in next {
            self.ask(ask);
        }
    }
}
