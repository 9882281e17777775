//! A transfer backend that copies between instances in one process. It fulfils the whole contract without a network.
//!
//! The copy happens inside `submit`, which keeps the example short. A real backend starts the work there, lets a thread
//! or the hardware finish it, and reports it from `poll`.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use host_plugin_api::{
    Completion, Error, ErrorCode, Memory, MemoryKind, NOTIFICATION_BYTES, Notification, NotificationKind,
    Opening, PeerId, RegionId, Result, Submission, Tag, TransferBackend, TransferLimits, Write,
};

const MAX_WRITES: u32 = 1024;
const MAX_SUBMISSIONS: usize = 256;
/// Notifications that wait at a receiver, at most. When it is full, senders get `WOULD_BLOCK`.
const MAX_INBOX: usize = 1024;
const MAX_REGIONS: usize = 1024;
const MAX_PEERS: usize = 1024;

/// The instances that are open, so that an endpoint can be a number.
static INSTANCES: Mutex<Vec<(u64, Weak<Side>)>> = Mutex::new(Vec::new());
static NEXT_INSTANCE: AtomicU64 = AtomicU64::new(1);

/// A backend that copies between instances in one process.
pub struct LoopbackBackend {
    side: Arc<Side>,
}

struct Side {
    instance: u64,
    name: String,
    state: Mutex<State>,
}

struct State {
    closed: bool,
    next: u32,
    regions: HashMap<u32, Memory>,
    peers: HashMap<u32, Weak<Side>>,
    /// These two are allocated once, because the calls that use them must not allocate.
    completions: VecDeque<Completion>,
    inbox: VecDeque<Notification>,
}

/// Opens an instance.
///
/// # Errors
/// `INVALID_ARGUMENT` for a name that notifications cannot carry.
pub fn open(opening: &Opening) -> Result<LoopbackBackend> {
    if opening.name.len() > 64 {
        return Err(invalid("the name is longer than 64 bytes"));
    }
    let state = State {
        closed: false,
        next: 1,
        regions: HashMap::new(),
        peers: HashMap::new(),
        completions: VecDeque::with_capacity(MAX_SUBMISSIONS),
        // Room beyond the limit, for senders that checked the limit at the same time.
        inbox: VecDeque::with_capacity(MAX_INBOX * 2),
    };
    // Unique among all instances, also those of other processes.
    let instance = (u64::from(std::process::id()) << 32) + NEXT_INSTANCE.fetch_add(1, Ordering::Relaxed);
    let side = Arc::new(Side { instance, name: opening.name.clone(), state: Mutex::new(state) });
    let mut instances = INSTANCES.lock().unwrap_or_else(PoisonError::into_inner);
    instances.retain(|(_, side)| side.strong_count() > 0);
    instances.push((instance, Arc::downgrade(&side)));
    Ok(LoopbackBackend { side })
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
}

fn invalid(text: &str) -> Error {
    Error::new(ErrorCode::INVALID_ARGUMENT, text)
}

fn closed() -> Error {
    Error::new(ErrorCode::CLOSED, "the instance was shut down")
}

impl Side {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The address of a range in a region, if the range lies inside.
fn address(region: Option<&Memory>, offset: u64, length: u32) -> Option<u64> {
    let region = region?;
    let end = offset.checked_add(u64::from(length))?;
    (length > 0 && end <= region.length).then(|| region.address.0 + offset)
}

impl LoopbackBackend {
    fn open_state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.side.state();
        if state.closed { Err(closed()) } else { Ok(state) }
    }

    /// Copies, notifies the peer, and queues the completion. Or does nothing and returns an error code.
    fn run(&self, submission: &Submission, writes: &mut dyn Iterator<Item = Write>, count: usize) -> i32 {
        let length = submission.notification_length as usize;
        if count > MAX_WRITES as usize || length > NOTIFICATION_BYTES {
            return ErrorCode::INVALID_ARGUMENT.0;
        }
        let peer = {
            let state = self.side.state();
            if state.closed {
                return ErrorCode::CLOSED.0;
            }
            if state.completions.len() >= MAX_SUBMISSIONS {
                return ErrorCode::WOULD_BLOCK.0;
            }
            match state.peers.get(&submission.peer.0) {
                None => return ErrorCode::INVALID_ARGUMENT.0,
                Some(peer) => peer.upgrade(),
            }
        };
        let Some(peer) = peer else { return ErrorCode::PEER_LOST.0 };
        if length > 0 && peer.state().inbox.len() >= MAX_INBOX {
            return ErrorCode::WOULD_BLOCK.0;
        }
        let (mut bytes, mut status) = (0, 0);
        for write in writes {
            // The two sides are locked one after the other, never both: two instances may write to each other.
            let source = self.side.state().regions.get(&write.source_region.0).copied();
            let state = peer.state();
            let target = state.regions.get(&write.target_region.0);
            let alive = target.filter(|t| t.generation == write.target_generation && !state.closed);
            let from = address(source.as_ref(), write.source_offset, write.length);
            let to = address(alive, write.target_offset, write.length);
            let (Some(from), Some(to)) = (from, to) else {
                status = ErrorCode::INVALID_ARGUMENT.0;
                break;
            };
            // SAFETY: both ranges lie in registered memory, which the host keeps mapped. The target cannot be deregistered while
            // its state is locked. The ranges may overlap.
            unsafe { std::ptr::copy(from as *const u8, to as *mut u8, write.length as usize) };
            bytes += u64::from(write.length);
        }
        if status == 0 && length > 0 {
            let mut state = peer.state();
            let mut peer_name = [0; 64];
            peer_name[..self.side.name.len()].copy_from_slice(self.side.name.as_bytes());
            state.inbox.push_back(Notification {
                kind: NotificationKind::ARRIVED,
                length: submission.notification_length,
                peer_name_length: self.side.name.len() as u32,
                reserved: 0,
                payload: submission.notification,
                peer_name,
            });
        }
        let mut state = self.side.state();
        state.completions.push_back(Completion { tag: submission.tag, bytes, status, reserved: 0 });
        0
    }
}

/// Moves as much as fits from the queue into the caller's slice.
fn drain<T>(queue: &mut VecDeque<T>, room: &mut [T]) -> i32 {
    let count = room.len().min(queue.len());
    for (slot, item) in room.iter_mut().zip(queue.drain(..count)) {
        *slot = item;
    }
    count as i32
}

impl TransferBackend for LoopbackBackend {
    fn limits(&self) -> TransferLimits {
        let max_submissions = MAX_SUBMISSIONS as u32;
        TransferLimits::new(MAX_WRITES, max_submissions)
    }
    fn register(&self, memory: &Memory) -> Result<RegionId> {
        if memory.kind != MemoryKind::DRAM {
            return Err(Error::new(ErrorCode::UNSUPPORTED, "only host memory can be registered"));
        }
        if memory.address.0 == 0 || memory.length == 0 || memory.address.checked_add(memory.length).is_none()
        {
            return Err(invalid("the memory is empty or leaves the address space"));
        }
        let mut state = self.open_state()?;
        if state.regions.len() >= MAX_REGIONS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_REGIONS} regions are registered")));
        }
        let id = state.next;
        state.next += 1;
        state.regions.insert(id, *memory);
        Ok(RegionId(id))
    }
    fn deregister(&self, region: RegionId) -> Result<()> {
        let removed = self.open_state()?.regions.remove(&region.0);
        removed.map(drop).ok_or_else(|| invalid("no such region"))
    }
    fn endpoint(&self) -> Result<Vec<u8>> {
        let _open = self.open_state()?;
        Ok(self.side.instance.to_le_bytes().to_vec())
    }
    fn connect(&self, _name: &str, endpoint: &[u8]) -> Result<PeerId> {
        let wrong = |_| Error::new(ErrorCode::VERSION, "the endpoint is not one of this backend");
        let instance = u64::from_le_bytes(endpoint.try_into().map_err(wrong)?);
        let instances = INSTANCES.lock().unwrap_or_else(PoisonError::into_inner);
        let peer = instances.iter().find(|(id, side)| *id == instance && side.strong_count() > 0);
        let peer = peer.map(|(_, side)| side.clone());
        drop(instances);
        let gone = || Error::new(ErrorCode::PEER_LOST, format!("instance {instance} is not in this process"));
        let peer = peer.ok_or_else(gone)?;
        let mut state = self.open_state()?;
        if state.peers.len() >= MAX_PEERS {
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_PEERS} peers are connected")));
        }
        let id = state.next;
        state.next += 1;
        state.peers.insert(id, peer);
        Ok(PeerId(id))
    }
    fn disconnect(&self, peer: PeerId) -> Result<()> {
        let removed = self.open_state()?.peers.remove(&peer.0);
        let other = removed.ok_or_else(|| invalid("no such peer"))?;
        // Nothing is in flight outside a submit. The other side must start nothing more towards this instance.
        if let Some(other) = other.upgrade() {
            let ours = self.side.instance;
            other.state().peers.retain(|_, p| p.upgrade().is_some_and(|p| p.instance != ours));
        }
        Ok(())
    }
    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        self.run(submission, &mut writes.iter().copied(), writes.len())
    }
    fn poll(&self, completions: &mut [Completion]) -> i32 {
        let mut state = self.side.state();
        if state.closed { ErrorCode::CLOSED.0 } else { drain(&mut state.completions, completions) }
    }
    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let mut state = self.side.state();
        if state.closed { ErrorCode::CLOSED.0 } else { drain(&mut state.inbox, notifications) }
    }
    fn cancel(&self, _tag: Tag) -> i32 {
        // Everything has ended by the time submit returns.
        if self.side.state().closed { ErrorCode::CLOSED.0 } else { ErrorCode::INVALID_ARGUMENT.0 }
    }
    fn settled(&self, _tag: Tag) -> i32 {
        if self.side.state().closed { ErrorCode::CLOSED.0 } else { 1 }
    }
    fn event_fd(&self) -> i32 {
        -1
    }
    fn shutdown(&self, _deadline_ms: u64) -> Result<()> {
        self.side.state().closed = true;
        Ok(())
    }
}
