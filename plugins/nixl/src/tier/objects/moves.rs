//! Requests that run at NIXL: one for each object, with a buffer of its own.
//!
//! While a read runs, NIXL writes into its memory what a server sends, also the text of an error. A released request
//! goes on. So the memory of a request is never the host's. A page that was given up leaves its request and its buffer
//! here until NIXL says how the request ended. Until then they count among those that may run.

use crate::capi::{Agent, Alive, Direction, Extent, Progress, Ranges, Refusal, Request, Segment};
use crate::tier::run::Maker;

/// Most bytes in buffers, unless one alone has more.
const BYTES: u64 = 256 << 20;

struct Moving {
    /// The page of the request, unless the page was given up.
    page: Option<u64>,
    request: Request,
    progress: Progress,
    buffer: Vec<u8>,
}

/// A request that has ended.
pub struct Moved {
    pub page: u64,
    pub well: bool,
    pub buffer: Vec<u8>,
}

/// The requests that run at NIXL, and their buffers.
pub struct Moves {
    /// First, because it must be dropped before the buffers.
    agent: Agent,
    maker: Maker,
    memory: Ranges,
    objects: Ranges,
    slots: Vec<Option<Moving>>,
    bytes: u64,
    /// Last, because the agent must be dropped before it.
    _alive: Alive,
}

/// Names under which a slot's request registers its buffer and its object.
fn registered(slot: usize) -> [u32; 2] {
    [slot as u32 * 2 + 1, slot as u32 * 2 + 2]
}

impl Moves {
    /// # Errors
    /// When NIXL refuses.
    pub fn new(maker: Maker, requests: usize) -> Result<Self, Refusal> {
        let _alive = Alive::begin();
        let agent = maker.agent()?;
        let memory = Ranges::new(&maker.library, Segment::Dram)?;
        let objects = Ranges::new(&maker.library, Segment::Object)?;
        let slots = (0..requests).map(|_| None).collect();
        Ok(Self { agent, maker, memory, objects, slots, bytes: 0, _alive })
    }

    /// Whether a request of `bytes` bytes may run now.
    pub fn has_room(&self, bytes: u64) -> bool {
        let free = self.slots.iter().any(Option::is_none);
        free && (self.bytes == 0 || self.bytes.saturating_add(bytes) <= BYTES)
    }

    pub fn is_idle(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    /// Starts a request for a page: writes the buffer as the object of this name, or fills the buffer from the object's start.
    ///
    /// # Errors
    /// When NIXL refuses it. Then nothing runs.
    pub fn start(
        &mut self,
        page: u64,
        direction: Direction,
        name: &[u8],
        buffer: Vec<u8>,
    ) -> Result<(), Refusal> {
        let Some(slot) = self.slots.iter().position(Option::is_none) else {
            return Err(Refusal::of("create_xfer_req"));
        };
        let [own, object] = registered(slot);
        let started = self.post(slot, direction, name, &buffer);
        match started {
            Ok((request, progress)) => {
                self.bytes += buffer.len() as u64;
                self.slots[slot] = Some(Moving { page: Some(page), request, progress, buffer });
                Ok(())
            }
            Err(refusal) => {
                let _own = self.agent.deregister(own).is_err();
                let _object = self.agent.deregister(object).is_err();
                Err(refusal)
            }
        }
    }

    fn post(
        &mut self,
        slot: usize,
        direction: Direction,
        name: &[u8],
        buffer: &[u8],
    ) -> Result<(Request, Progress), Refusal> {
        let [own, object] = registered(slot);
        let (address, length) = (buffer.as_ptr() as u64, buffer.len() as u64);
        self.agent.register(own, Extent { segment: Segment::Dram, address, length, device: 0 })?;
        let device = slot as u64 + 1;
        let place = Extent { segment: Segment::Object, address: 0, length, device };
        self.agent.register_named(object, Segment::Object, &[(place, name)])?;
        self.memory.clear()?;
        self.memory.add(address, buffer.len(), 0)?;
        self.objects.clear()?;
        self.objects.add(0, buffer.len(), device)?;
        self.agent.start(direction, &self.memory, &self.objects, &self.maker.name)
    }

    /// Looks at the requests. Those that have ended are handed out, unless their page was given up.
    pub fn progress(&mut self, ended: &mut Vec<Moved>) {
        for slot in 0..self.slots.len() {
            let Some(moving) = &mut self.slots[slot] else { continue };
            if moving.progress == Progress::Running {
                moving.progress = self.agent.progress(&moving.request);
            }
            if moving.progress == Progress::Running {
                continue;
            }
            let Some(Moving { page, request, progress, buffer }) = self.slots[slot].take() else { continue };
            self.bytes -= buffer.len() as u64;
            self.agent.release(request);
            let mut well = progress == Progress::Done;
            for name in registered(slot) {
                well &= self.agent.deregister(name).is_ok();
            }
            ended.extend(page.map(|page| Moved { page, well, buffer }));
        }
    }

    /// Gives up a page, whose completion is not awaited any more.
    pub fn give_up(&mut self, page: u64) {
        self.slots
            .iter_mut()
            .flatten()
            .filter(|moving| moving.page == Some(page))
            .for_each(|m| m.page = None);
    }

    /// Ends the agent. False when some requests still run: then the agent, the requests and their buffers stay behind, because
    /// NIXL would wait for the requests.
    pub fn end(self) -> bool {
        let idle = self.is_idle();
        if !idle {
            std::mem::forget(self);
        }
        idle
    }
}
