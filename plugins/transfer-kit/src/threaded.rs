//! A thread for each peer: for networks whose calls wait, such as sockets.
//!
//! A backend brings a [`Network`], which connects, and for each peer a [`Line`], which sends a submission and waits for its end.
//! [`Threaded`] is the [`Backend`] around them: memory, peers, threads, fences. The threads that receive are the backend's. They
//! land bytes through an [`Inbound`].
//!
//! ```text
//!   submit ──► queue ──► thread of the peer ──► Line::send ═══ network ═══► Inbound::land ──► memory
//!   disconnect ──► cut the peer's Inbounds. Line::end returns when nothing that was sent lands any more
//! ```

use std::io;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use host_plugin_api::{Error, ErrorCode, Memory, Opening, PeerId, RegionId, Result, TransferLimits, Write};

use crate::backend::{Backend, unknown_peer, unproven};
use crate::guarded::{GuardedMemory, Writer};
use crate::instance::Instance;
use crate::locked::locked;
use crate::peer::Peer;
use crate::queue::Content;
use crate::system::start_thread;

/// Most peers that are written to at a time.
pub const MAX_PEERS: usize = 256;
/// How long a disconnect waits for the proof that nothing is in flight any more.
const FENCE: Duration = Duration::from_secs(2);
/// How long a thread with a notification waits for room before it looks whether the instance ends.
const ROOM: Duration = Duration::from_millis(50);

/// How a backend meets its peers.
pub trait Network: Send + Sync + 'static {
    /// What a peer needs to connect to this instance.
    ///
    /// # Errors
    /// When no endpoint can be offered.
    fn endpoint(&self) -> Result<Vec<u8>>;

    /// Connects to a peer.
    ///
    /// # Errors
    /// `PEER_LOST` when the peer does not answer, `VERSION` when the endpoint is of another kind.
    fn connect(&self, own_name: &str, peer_name: &str, endpoint: &[u8]) -> Result<Connection>;

    /// Ends the receiving threads, all of whose inbounds were cut off, and waits for them. False when one did not end.
    fn stop(&self) -> bool;
}

/// A connection to a peer, driven by a thread of its own.
pub trait Line: Send + 'static {
    /// Sends a submission, and waits until all of its writes are in the peer's memory and the peer has its notification. Returns 0
    /// with the bytes written, or the code with which the peer refuses the submission. After a code nothing of it is in flight.
    ///
    /// # Errors
    /// When the connection is lost. Bytes that were sent may still land.
    fn send(
        &mut self,
        submission: &Content<ThreadedPeer, ()>,
        memory: &GuardedMemory,
    ) -> io::Result<(i32, u64)>;

    /// Ends the connection, and returns when nothing that was sent over it lands any more. `lost` says that
    /// [`send`](Self::send) failed. Otherwise this end is on purpose, and the peer's host must not be told of a loss.
    fn end(&mut self, lost: bool);
}

/// How to interrupt a thread that waits in a [`Line`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Nothing more is to be sent: `send` fails, and `end` goes on waiting for the proof.
    Sending,
    /// The instance ends without the proof: `end` returns, too.
    Waiting,
}

/// A connection that [`Network::connect`] made.
pub struct Connection {
    /// The line on which the thread sends.
    pub line: Box<dyn Line>,
    /// Ends the wait of the thread. Called from other threads.
    pub interrupt: Box<dyn Fn(Interrupt) + Send + Sync>,
}

/// A peer that this instance writes to.
pub struct ThreadedPeer {
    id: PeerId,
    name: String,
    interrupt: Box<dyn Fn(Interrupt) + Send + Sync>,
    /// Slots of the queue on their way to the thread. `None` once no more may come.
    work: Mutex<Option<SyncSender<u32>>>,
    /// Whether the host wants it to end, or the connection is lost.
    gone: AtomicBool,
    /// Disconnected when the thread is done, and nothing is in flight to the peer.
    ended: Mutex<Receiver<()>>,
}

impl Peer for ThreadedPeer {
    fn id(&self) -> PeerId {
        self.id
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }
}

impl std::fmt::Debug for ThreadedPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ThreadedPeer").field("id", &self.id).field("name", &self.name).finish()
    }
}

impl ThreadedPeer {
    /// Ends the connection. True when it is proven in time that nothing lands at the peer any more. Else the thread goes on
    /// waiting for the proof.
    fn end(&self, deadline: Instant) -> bool {
        self.close();
        // A running submission may finish in half of the time. Then it gets an error, instead of waiting for a peer
        // that does not answer.
        let half = deadline.saturating_duration_since(Instant::now()) / 2;
        if self.is_done(half) {
            return true;
        }
        (self.interrupt)(Interrupt::Sending);
        self.is_done(deadline.saturating_duration_since(Instant::now()))
    }

    fn is_done(&self, within: Duration) -> bool {
        locked(&self.ended).recv_timeout(within) == Err(RecvTimeoutError::Disconnected)
    }

    fn close(&self) {
        self.gone.store(true, Ordering::SeqCst);
        locked(&self.work).take();
    }

    fn run(&self, station: &Station, line: &mut dyn Line, todo: &Receiver<u32>) {
        let (instance, mut lost) = (&station.instance, false);
        let queue = &instance.queue;
        for index in todo {
            if queue.is_cancelled(index) {
                queue.finish(index, ErrorCode::CANCELLED.0, 0, None);
            } else if self.is_gone() {
                queue.finish(index, ErrorCode::PEER_LOST.0, 0, None);
            } else {
                let sent = line.send(&queue.content(index), &station.memory);
                match sent {
                    Ok((0, bytes)) => instance.succeed(index, bytes),
                    Ok((code, _)) => queue.finish(index, code, 0, None),
                    Err(_connection) => {
                        self.close();
                        lost = true;
                        queue.finish(index, ErrorCode::PEER_LOST.0, 0, Some(self.id));
                    }
                }
            }
            instance.announce();
        }
        line.end(lost);
        queue.settle(self.id);
    }
}

/// The state that the threads of an instance share.
#[derive(Debug)]
pub struct Station {
    /// The instance.
    pub instance: Instance<ThreadedPeer>,
    /// Its memory.
    pub memory: GuardedMemory,
}

impl Station {
    /// Starts a thread of the instance. When it panics, every call of the host answers `PANICKED`.
    ///
    /// # Errors
    /// Those of [`start_thread`].
    pub fn thread(
        self: &Arc<Self>,
        name: &str,
        body: impl FnOnce(&Arc<Station>) + Send + 'static,
    ) -> Result<std::thread::JoinHandle<()>> {
        let (own, broken) = (self.clone(), self.clone());
        start_thread(name, move || body(&own), move || broken.instance.set_broken())
    }

    /// Lets a peer write that has connected to this instance. `cut` ends the wait of its thread.
    pub fn admit(self: &Arc<Self>, name: &str, cut: impl Fn() + Send + Sync + 'static) -> Inbound {
        Inbound { station: self.clone(), name: name.to_owned(), writer: self.memory.admit(name, cut) }
    }
}

/// A peer that writes to this instance, for the thread that receives from it.
#[derive(Debug)]
pub struct Inbound {
    station: Arc<Station>,
    name: String,
    writer: Writer,
}

impl Inbound {
    /// Lands bytes. See [`GuardedMemory::land`].
    pub fn land(&self, write: &Write, at: usize, bytes: &[u8]) -> bool {
        self.station.memory.land(self.writer, write, at, bytes)
    }

    /// Gives the host the notification of a submission whose data has all landed, if there is one. Waits while the host
    /// fetches none.
    pub fn arrived(&self, notification: &[u8]) {
        if notification.is_empty() {
            return;
        }
        let instance = &self.station.instance;
        while !instance.notifications.wait_for_room(ROOM) && !instance.is_stopping() {}
        instance.notifications.arrived(&self.name, notification);
        instance.announce();
    }

    /// Ends the connection. Nothing of the peer lands any more then. Unless the end was on purpose, or the peer was cut
    /// off, the host hears that the peer is lost.
    pub fn ended(self, on_purpose: bool) {
        let was_cut = !self.station.memory.dismiss(self.writer);
        if !was_cut && !on_purpose {
            self.station.instance.notifications.peer_lost(&self.name);
            self.station.instance.announce();
        }
    }
}

/// The backend around a [`Network`].
#[derive(Debug)]
pub struct Threaded<N: Network> {
    station: Arc<Station>,
    network: N,
    last_peer: AtomicU32,
    stopped: AtomicBool,
}

impl<N: Network> Threaded<N> {
    /// Makes an instance that runs. `network` may start threads of the station that it is given.
    ///
    /// # Errors
    /// Those of [`Instance::new`] and of `network`.
    pub fn open(
        opening: &Opening,
        limits: TransferLimits,
        network: impl FnOnce(&Arc<Station>) -> Result<N>,
    ) -> Result<Self> {
        let instance = Instance::new(&opening.name, limits, 1024)?;
        let station = Arc::new(Station { instance, memory: GuardedMemory::default() });
        let network = network(&station)?;
        Ok(Self { station, network, last_peer: AtomicU32::new(0), stopped: AtomicBool::new(false) })
    }

    /// Ends a connection to a peer, and forgets it when it is proven that nothing lands there any more.
    fn end(&self, peer: &ThreadedPeer) -> Result<()> {
        if !peer.end(Instant::now() + FENCE) {
            return Err(unproven(&format!("to {}", peer.name), "pages that it was sent"));
        }
        self.instance().peers.remove(peer.id);
        Ok(())
    }
}

impl<N: Network> Backend for Threaded<N> {
    type Peer = ThreadedPeer;
    type Progress = ();

    fn instance(&self) -> &Instance<ThreadedPeer> {
        &self.station.instance
    }

    fn register(&self, memory: &Memory) -> Result<RegionId> {
        self.station.memory.register(memory)
    }

    fn deregister(&self, region: RegionId) -> Result<()> {
        self.station.memory.deregister(region)
    }

    fn endpoint(&self) -> Result<Vec<u8>> {
        self.network.endpoint()
    }

    fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
        let peers = &self.instance().peers;
        // An older connection under the same name is ended first: most likely it was lost.
        if let Some(old) = peers.all().iter().find(|peer| peer.name == name) {
            self.end(old)?;
        }
        let Connection { mut line, interrupt } =
            self.network.connect(&self.instance().name, name, endpoint)?;
        let id = PeerId(self.last_peer.fetch_add(1, Ordering::Relaxed) + 1);
        let (work, todo) = sync_channel(self.instance().limits.max_submissions as usize);
        let (end, ended) = sync_channel::<()>(0);
        let peer = Arc::new(ThreadedPeer {
            id,
            name: name.to_owned(),
            interrupt,
            work: Mutex::new(Some(work)),
            gone: AtomicBool::new(false),
            ended: Mutex::new(ended),
        });
        let running = peer.clone();
        self.station.thread("send", move |station| {
            running.run(station, &mut *line, &todo);
            drop(end);
        })?;
        if !peers.add(peer.clone(), MAX_PEERS, |_| false) {
            peer.end(Instant::now() + FENCE);
            return Err(Error::new(ErrorCode::NO_RESOURCE, format!("{MAX_PEERS} peers are connected")));
        }
        Ok(id)
    }

    fn disconnect(&self, peer: PeerId) -> Result<()> {
        let peer = self.instance().peers.get(peer).ok_or_else(|| unknown_peer(peer))?;
        // Inbound connections first: once they are cut, nothing of the peer lands here.
        self.station.memory.cut(|name| name == peer.name);
        self.end(&peer)
    }

    fn misfit(&self, _: &ThreadedPeer, writes: &[Write]) -> Option<usize> {
        // The side that owns the targets checks them.
        self.station.memory.misfit(writes)
    }

    fn start(&self, peer: &Arc<ThreadedPeer>, index: u32) -> bool {
        // There is room for every slot of the queue.
        locked(&peer.work).as_ref().is_some_and(|work| work.try_send(index).is_ok())
    }

    fn shutdown(&self, deadline_ms: u64) -> Result<()> {
        if self.stopped.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let deadline = Instant::now() + Duration::from_millis(deadline_ms.min(60_000));
        self.instance().stop();
        self.station.memory.cut(|_| true);
        let mut ended = true;
        for peer in self.instance().peers.all() {
            let proven = peer.end(deadline);
            if !proven {
                (peer.interrupt)(Interrupt::Waiting);
            }
            ended &= proven;
        }
        ended &= self.network.stop();
        let late = || Error::new(ErrorCode::TIMEOUT, "a peer did not answer before the deadline");
        if ended { Ok(()) } else { Err(late()) }
    }
}

impl<N: Network> Drop for Threaded<N> {
    fn drop(&mut self) {
        // For hosts that fail before they can call `shutdown`.
        let _best_effort = self.shutdown(1000);
    }
}
