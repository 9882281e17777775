//! The thread that lets devices copy. It begins batches of writes and sees when they have ended. Several are under way at once.
//!
//! A batch of a device corresponds to a piece of a [copy thread](crate::copier): its marks are set before the check
//! whether it is allowed, and stay until the device has ended it. Each batch that is under way has a line of its own,
//! because a batch that was begun before a fence may still run when the batch before it has ended.
//!
//! The writes of one submission land in their order where they touch the same bytes. The bytes to be written must be in
//! the source when the host submits: the thread waits for no kernel of the host's.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use host_plugin_api::{ErrorCode, Level, log};

use crate::control::{DEVICE_BATCHES, MAX_COPY_THREADS};
use crate::copier::{self, Between, Content, Refusal, Step};
use crate::cuda::{Batch, Refused, Run, Stream};
use crate::outbound::Outbound;
use crate::shared::Core;

/// The line for notifications.
const NOTIFICATIONS: usize = MAX_COPY_THREADS + DEVICE_BATCHES;
/// How many times the thread looks at batches before it sleeps between two looks.
const LOOKS: u32 = 200;
/// How long it sleeps then: a batch takes about as long.
const PAUSE: Duration = Duration::from_micros(20);

/// A batch that a device copies.
struct Flight {
    index: u32,
    peer: Arc<Outbound>,
    /// The stream, and its slot. The slot's number is that of the line, too.
    stream: usize,
    slot: usize,
    /// The step after its end, if nothing more of the submission is to be begun.
    then: Option<After>,
}

/// The step when all begun batches of a submission have ended.
#[derive(Clone, Copy)]
enum After {
    /// All writes are there.
    Conclude,
    /// Another step.
    Step(Step),
}

struct DeviceCopier<'a> {
    core: &'a Core,
    streams: Vec<Stream>,
    /// In the order in which they were begun. Different devices may end them in another order.
    flights: VecDeque<Flight>,
    batch: Batch,
    /// Set when a device has refused a call: devices copy nothing any more. Batches that were under way stay marked. It
    /// is unknown whether they have ended before this process has.
    broken: bool,
}

/// Works until the instance stops.
pub fn run(core: &Core) {
    let flights = VecDeque::with_capacity(DEVICE_BATCHES);
    let mut copier =
        DeviceCopier { core, streams: Vec::new(), flights, batch: Batch::default(), broken: false };
    // Made before the first submission, because the driver compiles the kernel.
    for device in core.devices.known() {
        if let Err(refused) = copier.stream(device.ordinal) {
            copier.refused(&refused);
        }
    }
    // The submission of which more is to be begun.
    let mut current = None;
    let mut looks = 0;
    loop {
        if current.is_none() && copier.flights.is_empty() {
            current = core.device_ready.next();
            if current.is_none() {
                return;
            }
        }
        if copier.flights.len() < DEVICE_BATCHES {
            current = current.or_else(|| core.device_ready.next_now());
            if let Some(index) = current {
                if copier.begin(index) {
                    current = None;
                }
                looks = 0;
                continue;
            }
        }
        if copier.end_some() {
            looks = 0;
        } else {
            looks += 1;
            if looks < LOOKS { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
        }
    }
}

/// A batch that was begun, or why none was.
enum Begun {
    /// `last` is set when nothing is left for this thread to begin for the submission.
    Flight { stream: usize, slot: usize, last: Option<After> },
    /// No batch was begun: there is nothing more to do.
    Nothing(After),
}

impl DeviceCopier<'_> {
    /// Begins a batch of a submission. True when nothing more of it is to be begun.
    fn begin(&mut self, index: u32) -> bool {
        let mut content = self.core.instance.queue.content(index);
        // The peer is there until the submission is finished.
        let Some(peer) = content.peer().cloned() else { return true };
        let begun = self.begin_batch(index, &mut content, &peer);
        drop(content);
        let (then, over) = match begun {
            Ok(Begun::Flight { stream, slot, last }) => {
                self.flights.push_back(Flight { index, peer, stream, slot, then: last });
                return last.is_some();
            }
            Ok(Begun::Nothing(after)) => (after, true),
            Err(code) => (After::Step(Step::Ended(code.0)), true),
        };
        // Batches of the submission that are still under way have to end first.
        match self.flights.iter_mut().rev().find(|flight| flight.index == index) {
            Some(flight) => flight.then = Some(then),
            None => self.after(index, &peer, then),
        }
        over
    }

    fn begin_batch(&mut self, index: u32, content: &mut Content, peer: &Outbound) -> Result<Begun, Refusal> {
        if self.broken {
            return Err(ErrorCode::IO);
        }
        if content.progress.next == content.len() {
            return Ok(Begun::Nothing(After::Conclude));
        }
        let slot = (0..DEVICE_BATCHES).find(|slot| self.flights.iter().all(|flight| flight.slot != *slot));
        let slot = slot.ok_or(ErrorCode::INTERNAL)?;
        let line = MAX_COPY_THREADS + slot;
        // The same two marks as of a copy thread.
        let ours = self.core.holds[line].enter();
        let theirs = peer.enter(line)?;
        copier::may_copy(self.core, index, peer)?;
        let mut device = None;
        let mut last = None;
        let mut between: Option<Between> = None;
        self.batch.clear();
        loop {
            let Some(write) = content.write(content.progress.next) else {
                last = Some(After::Conclude);
                break;
            };
            let between = match &between {
                Some(known) if known.is_of(&write) => known,
                _ => {
                    let found = Between::regions_of(self.core, peer, &write).filter(|_| peer.lives(&write));
                    between.insert(found.ok_or(ErrorCode::INVALID_ARGUMENT)?)
                }
            };
            let (source, target) = between.places(&write).ok_or(ErrorCode::INVALID_ARGUMENT)?;
            let Some(its) = target.device.or(source.device) else {
                last = Some(After::Step(Step::ByThread));
                break;
            };
            // One device copies all of a batch.
            if *device.get_or_insert(its) != its {
                break;
            }
            let at = u64::from(content.progress.copied);
            let host = [source, target].into_iter().find(|spot| spot.device.is_none());
            let taken = self.batch.take(Run {
                to: target.address + at,
                from: source.address + at,
                bytes: u64::from(write.length) - at,
                in_reach: host.map_or(source.device == target.device, |spot| spot.pinned),
                to_or_from_host: host.is_some(),
            });
            if taken == 0 {
                break;
            }
            // At most what was left of the write.
            content.progress.advance(&write, taken as u32);
        }
        let Some(device) = device else {
            return Ok(Begun::Nothing(last.unwrap_or(After::Conclude)));
        };
        let stream = self.stream(device).map_err(|refused| self.refused(&refused))?;
        // From here on the device may be copying.
        std::mem::forget((ours, theirs));
        // SAFETY: all ranges were checked against their regions just now. Sources stay while our mark is set, targets are held by
        // `peer` and stay while its mark is set. What is in reach is memory of devices, or was pinned. The host's page accounting
        // sees to it that no other write touches the same bytes meanwhile.
        let begun = unsafe { self.streams[stream].begin(slot, &self.batch) };
        if let Err(refused) = begun {
            self.broken = true;
            self.refused(&refused);
            return Ok(Begun::Nothing(After::Step(Step::Unproven)));
        }
        Ok(Begun::Flight { stream, slot, last })
    }

    fn refused(&self, refused: &Refused) -> Refusal {
        log!(Level::ERROR, "a GPU does not copy: {refused}");
        ErrorCode::IO
    }

    fn stream(&mut self, device: u32) -> Result<usize, Refused> {
        if let Some(at) = self.streams.iter().position(|stream| stream.device() == device) {
            return Ok(at);
        }
        self.streams.push(Stream::new(self.core.devices.get(device)?, DEVICE_BATCHES)?);
        Ok(self.streams.len() - 1)
    }

    /// Checks which batches have ended. True when one has.
    fn end_some(&mut self) -> bool {
        let mut any = false;
        let mut at = 0;
        while let Some(flight) = self.flights.get(at) {
            match self.streams[flight.stream].is_done(flight.slot) {
                Ok(false) => {
                    at += 1;
                    continue;
                }
                Ok(true) => {
                    let line = MAX_COPY_THREADS + flight.slot;
                    flight.peer.leave(line);
                    self.core.holds[line].leave();
                }
                // Its marks stay, see `broken`.
                Err(refused) => {
                    self.refused(&refused);
                    self.broken = true;
                }
            }
            any = true;
            if let Some(flight) = self.flights.remove(at) {
                self.ended(flight);
            }
        }
        any
    }

    fn ended(&mut self, flight: Flight) {
        let Some(then) = flight.then else { return };
        let then = if self.broken { After::Step(Step::Unproven) } else { then };
        // Of two batches on different devices the later one may end first.
        match self.flights.iter_mut().rev().find(|other| other.index == flight.index) {
            Some(other) => other.then = Some(then),
            None => self.after(flight.index, &flight.peer, then),
        }
    }

    fn after(&self, index: u32, peer: &Outbound, then: After) {
        let content = self.core.instance.queue.content(index);
        let bytes = content.progress.bytes;
        let step = match then {
            After::Conclude => copier::conclude(self.core, NOTIFICATIONS, index, &content, peer),
            After::Step(step) => step,
        };
        drop(content);
        step.take(self.core, index, peer, bytes);
    }
}
