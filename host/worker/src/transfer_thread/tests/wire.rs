//! A transfer backend between instances in one process. Bytes move when they are submitted. Completions and notifications
//! come late, in another order, and twice.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, Weak};

use host_plugin_api::transfer::{
    Completion, Memory, MemoryKind, Notification, NotificationKind, PeerId, RegionId, Submission, Tag,
    TransferBackend, TransferLimits, Write,
};
use host_plugin_api::{Error, ErrorCode, Result};
use host_tests::wait::{PATIENCE, until};

use super::told::Script;

/// The connection between all instances.
pub struct Wire {
    nodes: Mutex<BTreeMap<String, Arc<Node>>>,
    /// Whether completions and notifications are kept back.
    hold: AtomicBool,
    /// The number of fences that must be in progress at once before any of them ends.
    meet: Barrier,
    /// With a script, instances are called as loaded plugins are, and act as the script says.
    pub script: Option<Arc<Script>>,
    /// Whether instances say which submissions have settled. If not, asking them is a mistake.
    pub settles: bool,
}

/// A barrier with a timeout.
#[derive(Default)]
struct Barrier {
    /// The number of calls that are waited for, and the number of calls that have come.
    waiting: Mutex<(u32, u32)>,
    changed: Condvar,
}

impl Barrier {
    /// Waits for the other calls. When they do not come, the error says how many have come.
    fn meet(&self) -> std::result::Result<(), String> {
        let mut waiting = self.waiting.lock().unwrap();
        waiting.1 += 1;
        self.changed.notify_all();
        let met = self.changed.wait_timeout_while(waiting, PATIENCE, |(wanted, here)| here < wanted);
        let (waiting, waited) = met.unwrap();
        let (wanted, here) = *waiting;
        if waited.timed_out() { Err(format!("only {here} of {wanted} fences have begun")) } else { Ok(()) }
    }
}

/// One instance of the backend.
pub struct Node {
    wire: Weak<Wire>,
    name: String,
    regions: Mutex<Vec<(usize, usize)>>,
    kinds: Mutex<Vec<MemoryKind>>,
    peers: Mutex<HashMap<u32, String>>,
    last_peer: AtomicU32,
    /// The instances from which it takes writes.
    open_to: Mutex<BTreeSet<String>>,
    completions: Mutex<VecDeque<Completion>>,
    notifications: Mutex<VecDeque<Notification>>,
    fails: AtomicBool,
    writes_fail: AtomicBool,
    panics: AtomicBool,
    fences_fail: AtomicU32,
    /// Called once after the host has taken a notification that a peer is gone, before the host does anything about it.
    meanwhile: Mutex<Option<Meanwhile>>,
    /// Whether the host has taken a notification that a peer is gone.
    told: AtomicBool,
}

type Meanwhile = Box<dyn FnOnce() + Send>;

impl Wire {
    pub fn new() -> Arc<Self> {
        Self::scripted(None)
    }

    pub fn scripted(script: Option<Arc<Script>>) -> Arc<Self> {
        Self::made(script, true)
    }

    /// A wire whose instances do not say which submissions have settled.
    pub fn unproven() -> Arc<Self> {
        Self::made(None, false)
    }

    fn made(script: Option<Arc<Script>>, settles: bool) -> Arc<Self> {
        let hold = AtomicBool::new(false);
        Arc::new(Self { nodes: Mutex::default(), hold, meet: Barrier::default(), script, settles })
    }

    /// An instance as its host calls it.
    pub fn backend(&self, node: &Arc<Node>) -> Arc<dyn TransferBackend> {
        match &self.script {
            None => node.clone(),
            Some(script) => script.guard(node.clone()),
        }
    }

    pub fn node(self: &Arc<Self>, name: &str) -> Arc<Node> {
        assert!(name.len() <= 64, "{name} is longer than a plugin takes");
        let node = Arc::new(Node {
            wire: Arc::downgrade(self),
            name: name.into(),
            regions: Mutex::default(),
            kinds: Mutex::default(),
            peers: Mutex::default(),
            last_peer: AtomicU32::new(0),
            open_to: Mutex::default(),
            completions: Mutex::default(),
            notifications: Mutex::default(),
            fails: AtomicBool::new(false),
            writes_fail: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            fences_fail: AtomicU32::new(0),
            meanwhile: Mutex::default(),
            told: AtomicBool::new(false),
        });
        self.nodes.lock().unwrap().insert(name.into(), node.clone());
        node
    }

    fn find(&self, name: &str) -> Arc<Node> {
        self.nodes.lock().unwrap()[name].clone()
    }

    /// Keeps all completions and notifications back, or lets them go.
    pub fn hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::SeqCst);
    }

    /// Everything that this instance submits from now on fails.
    pub fn fail(&self, name: &str) {
        self.find(name).fails.store(true, Ordering::SeqCst);
    }

    /// Everything that this instance submits from now on fails, if it writes anything.
    pub fn fail_writes(&self, name: &str) {
        self.find(name).writes_fail.store(true, Ordering::SeqCst);
    }

    /// Submissions of this instance answer from now on as a guarded plugin does that panicked.
    pub fn panic(&self, name: &str) {
        self.find(name).panics.store(true, Ordering::SeqCst);
    }

    /// The next `times` fences of this instance fail.
    pub fn fences_fail(&self, name: &str, times: u32) {
        self.find(name).fences_fail.store(times, Ordering::SeqCst);
    }

    /// From now on so many fences of all instances end when the last of them has begun.
    pub fn fences_meet(&self, count: u32) {
        *self.meet.waiting.lock().unwrap() = (count, 0);
    }

    /// Tells one instance that another is gone. `meanwhile` is called before the instance's host does anything about it.
    pub fn lose_to(&self, name: &str, lost: &str, meanwhile: impl FnOnce() + Send + 'static) {
        let node = self.find(name);
        *node.meanwhile.lock().unwrap() = Some(Box::new(meanwhile));
        node.notify(lost, NotificationKind::PEER_LOST, &[]);
    }

    /// Tells all instances that are connected to this one that it is gone.
    pub fn lose(&self, name: &str) {
        for node in self.nodes.lock().unwrap().values() {
            if node.peers.lock().unwrap().values().any(|peer| peer == name) {
                node.notify(name, NotificationKind::PEER_LOST, &[]);
            }
        }
    }
}

impl Node {
    /// Waits until it has notifications that its host has not taken.
    pub fn until_told(&self) {
        until("a notification", || {
            let told = !self.notifications.lock().unwrap().is_empty();
            if told { Ok(()) } else { Err(format!("{:?} has none", self.name)) }
        });
    }

    /// The kinds of memory that were registered.
    pub fn kinds(&self) -> Vec<MemoryKind> {
        self.kinds.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        self.peers.lock().unwrap().len()
    }

    fn notify(&self, from: &str, kind: NotificationKind, bytes: &[u8]) {
        let (mut payload, mut name) = ([0; 48], [0; 64]);
        payload[..bytes.len()].copy_from_slice(bytes);
        name[..from.len()].copy_from_slice(from.as_bytes());
        let notification = Notification {
            kind,
            length: bytes.len() as u32,
            peer_name_length: from.len() as u32,
            reserved: 0,
            payload,
            peer_name: name,
        };
        let mut waiting = self.notifications.lock().unwrap();
        // Out of order, and every third one twice.
        if waiting.len().is_multiple_of(2) {
            waiting.push_front(notification)
        } else {
            waiting.push_back(notification)
        }
        if waiting.len().is_multiple_of(3) {
            waiting.push_front(notification);
        }
    }

    fn held(&self) -> bool {
        self.wire.upgrade().is_none_or(|wire| wire.hold.load(Ordering::SeqCst))
    }
}

fn taken<T: Copy>(waiting: &Mutex<VecDeque<T>>, room: &mut [T]) -> i32 {
    let mut waiting = waiting.lock().unwrap();
    let count = waiting.len().min(room.len());
    for (place, item) in room.iter_mut().zip(waiting.drain(..count)) {
        *place = item;
    }
    count as i32
}

impl TransferBackend for Node {
    fn limits(&self) -> TransferLimits {
        TransferLimits::new(5, 1000)
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        assert!((memory.kind == MemoryKind::VRAM) == (memory.fd < 0), "{memory:?}");
        self.kinds.lock().unwrap().push(memory.kind);
        let mut regions = self.regions.lock().unwrap();
        regions.push((memory.address.0 as usize, memory.length as usize));
        Ok(RegionId(regions.len() as u32 - 1))
    }

    fn deregister(&self, _: RegionId) -> Result<()> {
        Ok(())
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        Ok(self.name.clone().into_bytes())
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        if endpoint != name.as_bytes() {
            return Err(Error::new(ErrorCode::INVALID_ARGUMENT, "the endpoint is another instance's"));
        }
        self.open_to.lock().unwrap().insert(name.into());
        let id = self.last_peer.fetch_add(1, Ordering::SeqCst) + 1;
        self.peers.lock().unwrap().insert(id, name.into());
        Ok(PeerId(id))
    }

    fn disconnect(&self, peer: PeerId) -> Result<()> {
        let failing =
            self.fences_fail.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        if failing.is_ok() {
            return Err(Error::new(ErrorCode::TIMEOUT, "not proven"));
        }
        if let Some(wire) = self.wire.upgrade() {
            wire.meet.meet().map_err(|why| Error::new(ErrorCode::TIMEOUT, why))?;
        }
        let name = self.peers.lock().unwrap().remove(&peer.0);
        let name = name.ok_or_else(|| Error::new(ErrorCode::INVALID_ARGUMENT, "unknown peer"))?;
        self.open_to.lock().unwrap().remove(&name);
        Ok(())
    }

    fn submit(&self, submission: &Submission, writes: &[Write]) -> i32 {
        assert!(writes.len() <= 5);
        if self.panics.load(Ordering::SeqCst) {
            return ErrorCode::PANICKED.0;
        }
        let Some(wire) = self.wire.upgrade() else { return ErrorCode::CLOSED.0 };
        let name = self.peers.lock().unwrap().get(&submission.peer.0).cloned();
        let Some(name) = name else { return ErrorCode::INVALID_ARGUMENT.0 };
        let peer = wire.find(&name);
        let fails = self.fails.load(Ordering::SeqCst)
            || !writes.is_empty() && self.writes_fail.load(Ordering::SeqCst);
        let cut = !peer.open_to.lock().unwrap().contains(&self.name) || fails;
        let status = if cut { ErrorCode::PEER_LOST.0 } else { 0 };
        if !cut {
            // The locks are taken one after the other, because the peer may be submitting to this instance.
            let from = self.regions.lock().unwrap().clone();
            let to = peer.regions.lock().unwrap().clone();
            for write in writes {
                let (source, source_bytes) = from[write.source_region.0 as usize];
                let (target, target_bytes) = to[write.target_region.0 as usize];
                let (length, at) = (write.length as usize, write.target_offset as usize);
                assert!(write.source_offset as usize + length <= source_bytes && at + length <= target_bytes);
                // SAFETY: both ranges were just checked to lie in memory that a test keeps mapped, of different pools,
                // and the target is not looked at before the notification.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        (source + write.source_offset as usize) as *const u8,
                        (target + at) as *mut u8,
                        length,
                    );
                }
            }
            let length = submission.notification_length as usize;
            peer.notify(&self.name, NotificationKind::ARRIVED, &submission.notification[..length]);
        }
        let bytes = writes.iter().map(|write| u64::from(write.length)).sum();
        let completion = Completion { tag: submission.tag, bytes, status, reserved: 0 };
        self.completions.lock().unwrap().push_back(completion);
        0
    }

    fn poll(&self, completions: &mut [Completion]) -> i32 {
        if self.told.load(Ordering::SeqCst)
            && let Some(meanwhile) = self.meanwhile.lock().unwrap().take()
        {
            meanwhile();
        }
        if self.held() { 0 } else { taken(&self.completions, completions) }
    }

    fn notifications(&self, notifications: &mut [Notification]) -> i32 {
        let count = if self.held() { 0 } else { taken(&self.notifications, notifications) };
        let lost = |notification: &Notification| notification.kind == NotificationKind::PEER_LOST;
        self.told.fetch_or(notifications[..count as usize].iter().any(lost), Ordering::SeqCst);
        count
    }

    fn cancel(&self, _: Tag) -> i32 {
        ErrorCode::INVALID_ARGUMENT.0
    }

    fn settled(&self, _: Tag) -> i32 {
        let asked = self.wire.upgrade().is_some_and(|wire| wire.settles);
        if asked { 1 } else { ErrorCode::PANICKED.0 }
    }

    fn event_fd(&self) -> i32 {
        -1
    }

    fn shutdown(&self, _: u64) -> Result<()> {
        Ok(())
    }
}
