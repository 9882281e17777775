//! What becomes of a scheduler's actions.

use host_core::{Action, Event, Instance};

use super::super::memory::LAYERS;
use super::{DECODE, Pending, World};

impl World {
    pub(super) fn act(&mut self, at: Instance, actions: Vec<Action>) {
        for action in actions {
            self.trace.push(format!("{:?} {at:?} {action:?}", self.now));
            match action {
                Action::Run(batch) => {
                    let takes = self.soon(20);
                    let due = self.now.after(takes);
                    let group = batch.layer_group;
                    for layers in (1..=LAYERS).filter(|layers| group > 0 && layers.is_multiple_of(group)) {
                        // Every now and then later than the batch itself.
                        let after = takes * layers * (4 + self.random.below(6) as u32) / (6 * LAYERS);
                        self.schedule(after, Pending::Layers { at, batch: batch.id, layers });
                    }
                    if let Some(worker) = self.worker(at) {
                        assert!(worker.batch.is_none(), "two batches at once");
                        worker.batch = Some((due, batch));
                        worker.layers = 0;
                    }
                }
                Action::Send { to, floor, message } => self.post(at, to, floor, &message),
                Action::Connect { peer, floor } => {
                    // What is left of an earlier connection is fenced before the peer is called.
                    self.cut();
                    let after = self.soon(50);
                    self.schedule(after, Pending::Handshake { prefill: peer.instance, floor });
                }
                Action::Fence { peer, session } => {
                    let after = self.soon(100);
                    self.schedule(after, Pending::Fence { at, peer, session });
                }
                Action::Write(write) => {
                    let after = self.soon(400);
                    let landing = self.begin(write, at);
                    self.schedule(after, Pending::Land(Box::new(landing)));
                }
                Action::CancelWrite(_) => {}
                Action::OpenRoom(opening) => self.open(&opening),
                Action::CloseRoom { room } => self.close(room),
                Action::ForgetRoom { room } => self.forget(room),
                Action::Verify { room, attempt, pages, aux_slot } => {
                    self.verify(at, (room, attempt), &pages, aux_slot);
                }
                Action::Emit { room, token } => {
                    if let Some(client) = self.clients.get_mut(&room) {
                        client.tokens.push(token.token);
                    }
                }
                Action::Finish { room, .. } => {
                    if at == DECODE {
                        self.end(room, true);
                    }
                }
                Action::Fail { room, .. } => {
                    self.end(room, false);
                    // The router gives the other leg up.
                    let other = if at == DECODE { self.prefill.instance } else { DECODE };
                    let after = self.soon(20);
                    self.schedule(after, Pending::Settle { at: other, event: Event::Cancel(room) });
                }
                Action::Cache(events) => {
                    let Some(worker) = self.worker(at) else { continue };
                    events.iter().for_each(|event| worker.log.record(event));
                }
                Action::Tier(action) => self.begin_below(at, action),
                Action::PromptReady { .. } => {}
            }
        }
    }
}
