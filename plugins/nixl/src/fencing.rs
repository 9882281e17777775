//! How connections end, and what is proven by then.

use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Level, PeerId, RegionId, Result, log};

use crate::connecting::Connecting;
use crate::driver::Driver;
use crate::wire::{Body, Random};

/// How often a peer is asked again to close a door.
const ASK_AGAIN: Duration = Duration::from_millis(200);
/// How often a peer is asked whether it is there, so that a broken connection shows,
const PING: Duration = Duration::from_millis(500);
/// and how often when it has left so many without an answer. It may be stopped; messages to it pile up.
const PATIENT: (u32, Duration) = (20, Duration::from_secs(10));

/// A disconnect that waits for its proof.
pub struct Fence {
    peer: PeerId,
    deadline: Instant,
    reply: SyncSender<Result<()>>,
}

/// A deregistration that waits until nothing reads the region any more.
pub struct Deregistration {
    region: RegionId,
    /// Links with what they had started, up to which everything has to end.
    marks: Vec<(u32, u64)>,
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

impl Driver {
    /// Ends the connections to and from a peer.
    pub fn disconnect(&mut self, id: PeerId, reply: SyncSender<Result<()>>) {
        let Some(link) = self.links.get_mut(&id.0) else {
            let unknown = Error::new(ErrorCode::INVALID_ARGUMENT, format!("no peer {}", id.0));
            return answer(&reply, Err(unknown));
        };
        link.end(&self.shared);
        link.told = true;
        let instance = link.peer.instance;
        self.close_doors(|door_instance, _| door_instance == instance);
        self.ask_to_close(id.0);
        let deadline = Instant::now() + self.shared.config.fence_timeout();
        self.fences.push(Fence { peer: id, deadline, reply });
    }

    /// Closes the doors that are meant, and tells those who came through them. Once this returns, nothing lands through
    /// them.
    fn close_doors(&mut self, meant: impl Fn(Random, &crate::door::Door) -> bool) {
        let mut closed = Vec::new();
        self.doors.retain(|door| {
            let close = meant(door.instance, door);
            if close {
                closed.push((door.instance, door.connection));
            }
            !close
        });
        for (instance, connection) in closed {
            self.say(instance, connection, Body::Closed);
        }
    }

    /// A link failed. Its door is closed at both ends.
    pub fn end_link(&mut self, id: u32) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.end(&self.shared);
        log!(Level::WARN, "the connection to {} failed, asking it to close its end", link.peer.name);
        self.ask_to_close(id);
    }

    fn ask_to_close(&mut self, id: u32) {
        let Some(link) = self.links.get_mut(&id) else { return };
        link.asked = Some(Instant::now());
        let instance = link.peer.instance;
        self.say(instance, id.into(), Body::Cut);
    }

    /// The sender of a connection wants its door closed.
    pub fn cut(&mut self, instance: Random, connection: u64) {
        let before = self.doors.len();
        let mut name = None;
        self.doors.retain(|door| {
            let meant = door.instance == instance && door.connection == connection;
            if meant {
                name = Some(door.peer_name.clone());
            }
            !meant
        });
        // Said also of a door that is closed already: the answer may be the second.
        self.say(instance, connection, Body::CutDone);
        if self.doors.len() < before {
            self.report_if_alone(instance, name.as_deref());
        }
    }

    /// A peer has closed the door of one of our links.
    pub fn door_is_closed(&mut self, instance: Random, connection: u64) {
        let Some(id) = u32::try_from(connection).ok() else { return };
        let Some(link) = self.links.get_mut(&id).filter(|link| link.peer.instance == instance) else {
            return;
        };
        let news = !std::mem::replace(&mut link.told, true);
        link.end(&self.shared);
        link.settle(&self.shared);
        let name = link.peer.own_name.clone();
        if news {
            self.report_if_alone(instance, Some(&name));
        }
    }

    /// Says that a peer is lost if no connection in either direction is left. None of its writes can land then.
    fn report_if_alone(&mut self, instance: Random, name: Option<&str>) {
        let door = self.doors.iter().any(|door| door.instance == instance);
        let link = self.links.values().any(|link| link.is_open() && link.peer.instance == instance);
        if let Some(name) = name
            && !door
            && !link
        {
            self.shared.notices.peer_lost(name);
        }
    }

    /// An instance is gone, or its connections are broken. It takes all of them with it.
    pub fn lose(&mut self, instance: Random) {
        let mut name = None;
        self.doors.retain(|door| {
            if door.instance == instance {
                name = Some(door.peer_name.clone());
            }
            door.instance != instance
        });
        for link in self.links.values_mut().filter(|link| link.peer.instance == instance) {
            if !std::mem::replace(&mut link.told, true) {
                name = Some(link.peer.own_name.clone());
            }
            link.end(&self.shared);
            link.settle(&self.shared);
        }
        let (lost, rest): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.connecting).into_iter().partition(|c| c.instance == instance);
        self.connecting = rest;
        for connecting in lost {
            let text = format!("nobody answers for {}: its instance is gone", connecting.name());
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
        }
        if let Some(front) = self.fronts.remove(&instance) {
            self.front.forget(&front.agent);
        }
        if let Some(name) = name {
            log!(Level::INFO, "{name} is gone");
            self.shared.notices.peer_lost(&name);
        }
    }

    /// Takes a region back, which new submissions cannot name any more.
    pub fn deregister(&mut self, region: RegionId, reply: SyncSender<Result<()>>) {
        // Peers know the region by its address, and only a closed door keeps them away from it.
        self.close_doors(|_, door| door.agent.has_registered(region.0));
        let marks = self.links.iter().map(|(id, link)| (*id, link.mark())).collect();
        let deadline = Instant::now() + self.shared.config.fence_timeout();
        self.deregistrations.push(Deregistration { region, marks, deadline, reply });
    }

    /// What time brings: answers that wait for others, and questions that are repeated.
    pub fn keep_time(&mut self) {
        let now = Instant::now();
        for instance in std::mem::take(&mut self.suspects) {
            self.lose(instance);
            self.wake_host();
        }
        self.finish_fences(now);
        self.finish_deregistrations(now);
        self.end_waiting(now);
        let unsettled = |link: &crate::link::Link| {
            link.unsettled && link.asked.is_none_or(|asked| now.duration_since(asked) >= ASK_AGAIN)
        };
        let again: Vec<u32> =
            self.links.iter().filter(|(_, link)| unsettled(link)).map(|(id, _)| *id).collect();
        for id in again {
            self.ask_to_close(id);
        }
        let due = |front: &crate::driver::Front| {
            let every = if front.unanswered < PATIENT.0 { PING } else { PATIENT.1 };
            now.duration_since(front.asked) >= every
        };
        let due: Vec<Random> =
            self.fronts.iter().filter(|(_, front)| due(front)).map(|(instance, _)| *instance).collect();
        for instance in due {
            if let Some(front) = self.fronts.get_mut(&instance) {
                front.asked = now;
                front.unanswered += 1;
            }
            self.say(instance, 0, Body::Ping);
        }
    }

    fn wake_host(&self) {
        if !self.shared.nothing_waits() {
            crate::shared::signal(&self.shared.event);
        }
    }

    fn finish_fences(&mut self, now: Instant) {
        for fence in std::mem::take(&mut self.fences) {
            let id = fence.peer.0;
            let unsettled = self.links.get(&id).filter(|link| link.unsettled);
            match unsettled.map(|link| link.peer.name.clone()) {
                None => {
                    self.links.remove(&id);
                    self.shared.remove_peer(fence.peer);
                    answer(&fence.reply, Ok(()));
                }
                Some(name) if now >= fence.deadline => {
                    answer(&fence.reply, Err(timeout(&format!("to {name}"), "pages it may be sent")));
                }
                Some(_) => self.fences.push(fence),
            }
        }
    }

    fn finish_deregistrations(&mut self, now: Instant) {
        for waiting in std::mem::take(&mut self.deregistrations) {
            let region = waiting.region.0;
            let ended =
                |(id, mark): &(u32, u64)| self.links.get(id).is_none_or(|link| link.has_ended_before(*mark));
            if waiting.marks.iter().all(ended) {
                let taken = self.links.values_mut().try_for_each(|link| link.forget_region(region));
                let refused = |refusal: crate::capi::Refusal| Error::new(ErrorCode::IO, refusal.to_string());
                answer(&waiting.reply, taken.map_err(refused));
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
            connecting.fail(Error::new(ErrorCode::PEER_LOST, text));
        }
    }
}
