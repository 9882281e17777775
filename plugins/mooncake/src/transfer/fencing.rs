//! How connections end, and what is proven by then.

use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, PeerId, RegionId, Result, log};

use super::connecting::Connecting;
use super::door::{Door, Stage};
use super::queue::locked;
use super::service::{Known, Service};
use super::shared::Connection;
use super::wire::{Body, Random};

/// How often a peer that has heard us is asked again to close a door.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How long a peer with which there is a connection may be silent before it is asked whether it is there.
const SILENCE: Duration = Duration::from_millis(500);
/// How long an instance is remembered with which there is none.
const MEMORY: Duration = Duration::from_secs(60);

/// A disconnect that waits for its proof.
pub struct Fence {
    peer: PeerId,
    /// The doors that were there when it began. Those that come later are other connections'.
    doors: Vec<Connection>,
    deadline: Instant,
    reply: SyncSender<Result<()>>,
}

/// A deregistration that waits until nothing reads or writes the region any more.
pub struct Deregistration {
    region: RegionId,
    deadline: Instant,
    reply: SyncSender<Result<()>>,
}

fn timeout(what: &str, pages: &str) -> Error {
    let text =
        format!("cannot prove that nothing is in flight {what}: {pages} must stay quarantined, try again");
    Error::new(ErrorCode::TIMEOUT, text)
}

/// Answers a call. Whoever asked has given up when nobody takes the answer.
fn answer(reply: &SyncSender<Result<()>>, result: Result<()>) {
    let _gone = reply.try_send(result).is_err();
}

impl Known {
    /// Whether nothing of the link is in flight any more.
    pub fn is_over(&self) -> bool {
        !self.running && (self.shut || !locked(&self.link.report).unsettled)
    }
}

impl Door {
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open(_))
    }
}

impl Service {
    /// Ends the connections to and from a peer.
    pub fn disconnect(&mut self, id: PeerId, reply: SyncSender<Result<()>>) {
        let Some(known) = self.links.get_mut(&id.0) else {
            let unknown = Error::new(ErrorCode::INVALID_ARGUMENT, format!("no peer {}", id.0));
            return answer(&reply, Err(unknown));
        };
        known.link.peer.set_gone();
        known.told = true;
        let instance = known.link.peer.instance;
        let doors = self.close_doors(|door| door.connection.instance == instance);
        self.ask_to_close(id.0);
        let deadline = Instant::now() + self.shared.config.fence_timeout();
        self.fences.push(Fence { peer: id, doors, deadline, reply });
    }

    /// Starts to close the doors that are meant. Those who come through them are told when they are closed.
    fn close_doors(&mut self, meant: impl Fn(&Door) -> bool) -> Vec<Connection> {
        let close = |door: &mut Door| {
            door.close(&self.shared);
            door.connection
        };
        self.doors.iter_mut().filter(|door| meant(door)).map(close).collect()
    }

    /// A door's engine is gone: nothing lands through it any more.
    pub fn door_closed(&mut self, connection: Connection) {
        let Some(at) = self.doors.iter().position(|door| door.connection == connection) else { return };
        let door = self.doors.swap_remove(at);
        let body = if door.cut { Body::CutDone } else { Body::Closed };
        self.say(connection.instance, connection.number, body);
        if door.report {
            self.report_if_alone(connection.instance, &door.peer_name);
        }
    }

    /// A link failed, or was told to. Its door is closed at both ends.
    pub fn link_failed(&mut self, id: u32, why: &str) {
        let Some(known) = self.links.get_mut(&id) else {
            return;
        };
        if !known.told {
            self.shared.counts.links_failed.add(1);
            let name = &known.link.peer.name;
            log!(Level::WARN, "the connection to {name} failed, asking it to close its end: {why}");
            self.ask_to_close(id);
        }
    }

    fn ask_to_close(&mut self, id: u32) {
        let Some(known) = self.links.get_mut(&id) else { return };
        if known.shut {
            return;
        }
        known.asked = Some(Instant::now());
        let instance = known.link.peer.instance;
        self.say(instance, id.into(), Body::Cut);
    }

    /// The sender of a connection wants its door closed.
    pub fn cut(&mut self, connection: Connection) {
        match self.doors.iter_mut().find(|door| door.connection == connection) {
            Some(door) => {
                (door.cut, door.report) = (true, true);
                door.close(&self.shared);
            }
            // Closed already: the answer may be the second.
            None => self.say(connection.instance, connection.number, Body::CutDone),
        }
    }

    /// A peer has closed the door of one of our links.
    pub fn door_is_shut(&mut self, instance: Random, number: u64) {
        let Some(id) = u32::try_from(number).ok() else { return };
        let Some(known) = self.links.get_mut(&id).filter(|k| k.link.peer.instance == instance) else {
            return;
        };
        known.shut = true;
        known.link.peer.set_gone();
        let news = !std::mem::replace(&mut known.told, true);
        let name = known.link.peer.own_name.clone();
        self.settle(id);
        if news {
            self.report_if_alone(instance, &name);
        }
    }

    /// Says that a link's submissions have settled, if they have.
    pub fn settle(&mut self, id: u32) {
        if self.links.get(&id).is_some_and(Known::is_over) {
            self.shared.queue.settle(PeerId(id));
        }
    }

    /// Says that a peer is lost if no connection in either direction is left. None of its writes can land then.
    fn report_if_alone(&mut self, instance: Random, name: &str) {
        let door = self.doors.iter().any(|door| door.connection.instance == instance);
        let open = |known: &Known| !known.told && known.link.peer.instance == instance;
        if !door && !self.links.values().any(open) {
            self.shared.counts.peers_lost.add(1);
            self.shared.notices.peer_lost(name);
        }
    }

    /// An instance is gone. It takes its connections with it; the host hears of it when its doors are closed.
    pub fn lose(&mut self, instance: Random, why: &str) {
        let Some(front) = self.fronts.remove(&instance) else { return };
        front.courier.stop();
        let (lost, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.connecting).into_iter().partition(|c| c.instance == instance);
        self.connecting = rest;
        for connecting in lost {
            let text = format!("nobody answers for {}: {why}", connecting.name());
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
        }
        self.close_doors(|door| door.connection.instance == instance);
        for door in self.doors.iter_mut().filter(|door| door.connection.instance == instance) {
            door.report = true;
        }
        let mut name = None;
        let mut over = Vec::new();
        for (id, known) in self.links.iter_mut().filter(|(_, k)| k.link.peer.instance == instance) {
            known.shut = true;
            known.link.peer.set_gone();
            if !std::mem::replace(&mut known.told, true) {
                name = Some(known.link.peer.own_name.clone());
            }
            over.push(*id);
        }
        over.into_iter().for_each(|id| self.settle(id));
        if let Some(name) = name {
            log!(Level::INFO, "{name} is gone: {why}");
            self.report_if_alone(instance, &name);
        }
    }

    /// Takes a region back, which new submissions cannot name any more.
    pub fn deregister(&mut self, region: RegionId, reply: SyncSender<Result<()>>) {
        // Peers know the region by its address, and only a closed door keeps them away from it.
        self.close_doors(|door| door.regions.iter().any(|card| card.id == region.0));
        for known in self.links.values() {
            known.link.peer.nudge();
        }
        let deadline = Instant::now() + self.shared.config.fence_timeout();
        self.deregistrations.push(Deregistration { region, deadline, reply });
    }

    /// What time brings: answers that wait for others, and questions that are repeated.
    pub fn keep_time(&mut self) {
        let now = Instant::now();
        self.finish_fences(now);
        self.finish_deregistrations(now);
        self.end_waiting(now);
        let due = |known: &Known| {
            let asked = known.asked.is_some_and(|asked| now.duration_since(asked) >= ASK_AGAIN);
            // What it has not heard is repeated anyway.
            let heard = self.fronts.get(&known.link.peer.instance).is_some_and(|f| f.courier.is_idle());
            asked && heard && !known.running && !known.is_over()
        };
        let again: Vec<u32> = self.links.iter().filter(|(_, known)| due(known)).map(|(id, _)| *id).collect();
        again.into_iter().for_each(|id| self.ask_to_close(id));
        self.look_after_fronts(now);
    }

    /// Whether there is a connection with an instance, or what is left of one.
    pub fn is_concerned_with(&self, instance: Random) -> bool {
        let door = self.doors.iter().any(|door| door.connection.instance == instance);
        door || self.links.values().any(|k| (!k.told || !k.is_over()) && k.link.peer.instance == instance)
    }

    /// Asks silent peers whether they are there, and forgets those with whom there is nothing.
    fn look_after_fronts(&mut self, now: Instant) {
        let mut idle = Vec::new();
        for (instance, front) in &self.fronts {
            let silence = now.duration_since(front.spoke);
            if silence < SILENCE || !front.courier.is_idle() {
                continue;
            }
            if self.is_concerned_with(*instance) {
                front.courier.say(0, Body::Ping);
            } else if silence >= MEMORY {
                idle.push(*instance);
            }
        }
        for instance in idle {
            if let Some(front) = self.fronts.remove(&instance) {
                front.courier.stop();
            }
        }
    }

    fn finish_fences(&mut self, now: Instant) {
        for fence in std::mem::take(&mut self.fences) {
            let id = fence.peer.0;
            let Some(known) = self.links.get(&id) else {
                answer(&fence.reply, Ok(()));
                continue;
            };
            let door = self.doors.iter().any(|door| fence.doors.contains(&door.connection));
            if known.is_over() && !door {
                self.links.remove(&id);
                self.shared.remove_peer(fence.peer);
                answer(&fence.reply, Ok(()));
            } else if now >= fence.deadline {
                let name = &known.link.peer.name;
                answer(&fence.reply, Err(timeout(&format!("to {name}"), "pages it may be sent")));
            } else {
                self.fences.push(fence);
            }
        }
    }

    fn finish_deregistrations(&mut self, now: Instant) {
        for waiting in std::mem::take(&mut self.deregistrations) {
            let region = waiting.region.0;
            let door = self.doors.iter().any(|door| door.regions.iter().any(|card| card.id == region));
            if !door && !self.links.values().any(|known| known.link.knows(region)) {
                answer(&waiting.reply, Ok(()));
            } else if now >= waiting.deadline {
                answer(&waiting.reply, Err(timeout(&format!("from region {region}"), "its pages")));
            } else {
                self.deregistrations.push(waiting);
            }
        }
    }

    /// Ends the calls that nobody answered.
    fn end_waiting(&mut self, now: Instant) {
        let late = |c: &Connecting| now >= c.deadline;
        let (late, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.connecting).into_iter().partition(late);
        self.connecting = rest;
        for connecting in late {
            let text = format!("nobody answers for {}", connecting.name());
            let (instance, number) = (connecting.instance, connecting.id.into());
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
            // If there is a door by now, nobody will come through it.
            self.say(instance, number, Body::Cut);
        }
    }
}
