//! Processes that die, and the fences after which the other workers continue.

use host_core::{Instance, Room};

use super::rooms::{Side, Stage};
use super::workers::{DecodeWorker, PrefillWorker};
use super::{Pending, World};

impl World {
    pub fn die(&mut self, side: Side, worker: usize) {
        let old = match side {
            Side::Prefill => self.prefill[worker].instance,
            Side::Decode => self.decode[worker].instance,
        };
        let instance = self.new_instance();
        match side {
            Side::Prefill => {
                let (ranks, bytes) = (self.prefill[worker].ranks(), self.prefill[worker].bytes);
                self.prefill[worker] = PrefillWorker::new(instance, ranks, bytes);
            }
            Side::Decode => {
                let (ranks, bytes) = (self.decode[worker].ranks(), self.decode[worker].bytes);
                self.decode[worker] = DecodeWorker::new(instance, ranks, bytes, self.layers);
            }
        }
        for story in self.stories.values_mut() {
            match side {
                Side::Prefill if story.prefill.1 == old => story.under_way = 0,
                Side::Decode if story.decode.1 == old && story.stage != Stage::Completed => {
                    story.stage = Stage::Failed;
                }
                _ => {}
            }
        }
        let wait = self.random.micros(100..200_000);
        self.after(wait, Pending::Fence { side, instance: old });
    }

    /// Tells the other side of a death. No write between it and the dead worker lands any more.
    pub fn fence(&mut self, side: Side, dead: Instance) {
        match side {
            Side::Prefill => {
                for decode in 0..self.decode.len() {
                    for session in 1..4 {
                        self.cut.insert((dead, self.decode[decode].instance, session));
                    }
                }
                let rooms: Vec<Room> = self
                    .stories
                    .iter()
                    .filter(|(_, story)| story.prefill.1 == dead)
                    .map(|(room, _)| *room)
                    .collect();
                for room in rooms {
                    self.abort(room);
                    self.drained(room);
                }
            }
            Side::Decode => {
                self.lost.insert(dead);
                for prefill in 0..self.prefill.len() {
                    for rank in 0..self.prefill[prefill].ranks() {
                        for session in 1..4 {
                            let mut actions = Vec::new();
                            let sender = &mut self.prefill[prefill].senders[rank].sender;
                            sender.peer_lost(self.agenda.now(), dead, session, &mut actions);
                            self.sender_acts(prefill, rank, actions);
                        }
                    }
                }
            }
        }
    }
}
