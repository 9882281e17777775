//! Carries out the actions of schedulers, and computes batches.

use host_core::{Action, Batch, Event, Instance, Role, SequenceOutput, Undrawn};

use super::clients::Ending;
use super::{Clients, Pending, World};
use crate::times::Work;

impl<C: Clients> World<C> {
    pub(super) fn act(&mut self, at: Instance, actions: Vec<Action>) {
        for action in actions {
            if let Some(trace) = &mut self.trace {
                trace.push(format!("{:?} {at:?} {action:?}", self.agenda.now()));
            }
            match action {
                Action::Run(batch) => self.begin_step(at, batch),
                Action::Send { to, floor, message } => self.post(at, to, floor, &message),
                Action::Connect { peer, floor } => {
                    // An earlier connection is fenced before the peer is called.
                    let (decode, prefill) = (at, peer.instance);
                    self.cut(decode, prefill);
                    let way = Work::Handshake { from: self.place(decode), to: self.place(prefill) };
                    self.later(way, Pending::Handshake { decode, prefill, floor });
                }
                Action::Fence { peer, session } => {
                    self.later(Work::Fence { at: self.place(at) }, Pending::Fence { at, peer, session });
                }
                Action::Write(write) => self.begin_write(write, at),
                Action::CancelWrite(_) | Action::PromptReady { .. } | Action::Stalled { .. } => {}
                Action::OpenRoom(opening) => self.open(at, &opening),
                Action::CloseRoom { room } => self.close(at, room),
                Action::ForgetRoom { room } => self.forget(at, room),
                Action::Verify { room, attempt, pages, aux_slot } => {
                    self.verify(at, (room, attempt), &pages, aux_slot);
                }
                // No client of a world asks for log probabilities.
                Action::EmitScores { .. } => {}
                Action::Emit { room, token } => self.emit(room, token.token),
                Action::Finish { room, .. } => {
                    if self.open_requests.get(&room).is_some_and(|open| open.answers == at) {
                        self.end(room, Ending::Complete);
                    }
                }
                Action::Fail { room, failure } => {
                    let open = self.open_requests.get(&room);
                    if open.is_some_and(|open| open.prefill == Some(at) && !open.tokens.is_empty()) {
                        // The answer has begun, so the prefill leg is not needed any more.
                        continue;
                    }
                    // The router cancels the other leg.
                    let ending = Ending::Failed { place: self.place(at), failure };
                    if let Some(open) = self.end(room, ending) {
                        let legs = open.prefill.into_iter().chain([open.answers]);
                        for at in legs.filter(|leg| *leg != at) {
                            self.later(Work::Cancel, Pending::Tell { at, event: Event::Cancel(room) });
                        }
                    }
                }
                Action::Cache(events) => {
                    let Some(place) = self.alive(at) else { continue };
                    self.clients.cache_changed(place, &events);
                    // Naming pages would take most of the time of a large world.
                    if self.kv.words {
                        events.iter().for_each(|event| self.workers[place].log.record(event));
                    }
                }
                Action::Tier(action) => self.begin_tier(at, action),
            }
        }
    }

    fn begin_step(&mut self, at: Instance, batch: Batch) {
        let Some(place) = self.alive(at) else { return };
        let now = self.agenda.now();
        self.clients.begun(now, place, &batch);
        let takes = self.takes(Work::Step { at: place, batch: &batch });
        let (group, all) = (batch.layer_group, self.kv.layers);
        for layers in (1..=all).filter(|layers| group > 0 && layers.is_multiple_of(group)) {
            let exact = takes * layers / all;
            // Some reports come later than the batch itself.
            let late =
                if self.faults.news > 0.0 { exact * (4 + self.random.below(6) as u32) / 6 } else { exact };
            self.agenda.after(late, Pending::Layers { at, batch: batch.id, layers });
        }
        self.agenda.after(takes, Pending::Computed { at, batch: batch.id });
        let worker = &mut self.workers[place];
        worker.layers = 0;
        assert!(worker.batch.replace(batch).is_none(), "two batches at once");
    }

    pub(super) fn layers(&mut self, at: Instance, batch: u64, layers: u32) {
        let Some(worker) = self.worker(at) else { return };
        if let Some(current) = worker.batch.as_ref().filter(|current| current.id == batch) {
            worker.memory.compute(current, worker.layers..layers);
            worker.layers = worker.layers.max(layers);
        }
        if !self.strikes(self.faults.news, || format!("news of layers is lost on {at:?}")) {
            self.handle(at, Event::LayersDone { batch, layers });
        }
    }

    pub(super) fn computed(&mut self, at: Instance, batch: u64) {
        let Some(place) = self.alive(at) else { return };
        let worker = &mut self.workers[place];
        let Some(batch) = worker.batch.take_if(|current| current.id == batch) else { return };
        let rate = match worker.config.role {
            Role::Prefill => Some(self.faults.executor),
            Role::Decode | Role::Aggregated => Some(self.faults.decode_executor).filter(|rate| *rate > 0.0),
        };
        if rate.is_some_and(|rate| self.strikes(rate, || format!("a batch of worker {place} fails"))) {
            self.outcome.batches_failed += 1;
            return self.handle(at, Event::BatchFailed("the model fell over".into()));
        }
        let worker = &mut self.workers[place];
        worker.memory.compute(&batch, worker.layers..self.kv.layers);
        let mut outputs = worker.memory.outputs(&batch);
        if self.faults.late_draw > 0.0 && worker.config.may_draw_late() {
            outputs.iter_mut().for_each(|output| self.put_off(place, output));
        }
        self.handle(at, Event::BatchDone(outputs));
    }

    /// Makes a draw late at random: the tokens that may follow are not known in time.
    fn put_off(&mut self, place: usize, output: &mut SequenceOutput) {
        let room = output.room;
        let late = || format!("a draw of room {room} on worker {place} is put off");
        if !output.sampled.is_empty() && self.strikes(self.faults.late_draw, late) {
            // The late draw may be one behind a drafted token.
            output.sampled.truncate(self.random.below(output.sampled.len() as u64) as usize);
            output.undrawn = Some(Undrawn::Late);
        }
    }
}
