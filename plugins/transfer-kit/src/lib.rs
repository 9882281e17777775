//! What a transfer backend needs beside its network.
//!
//! A transfer backend moves KV pages into another worker's memory. The trait
//! [`TransferBackend`](host_plugin_api::TransferBackend) is its contract. Much of that contract is the same over every network:
//! a fixed number of submissions, checks of bounds, an event for the host's poller, and the proof, when a connection ends, that
//! nothing of it is in flight any more. This crate has that part. The plugins `shm`, `nixl` and `mooncake` are built on it, and
//! so may others be: it depends on the plugin API and on nothing of the host.
//!
//! ```text
//!   host's threads          this crate                  your backend
//!   ─────────────────       ──────────────────────      ─────────────────────────────
//!   submit            ───►  Frontend ──► Queue    ───►  Backend::start: your threads
//!   poll              ◄───  completions ◄─ finish ◄───  take the slot's Content, write
//!   notifications     ◄───  Notifications         ◄───  what peers did
//!   connect, fences   ───►  Connections           ───►  Transport: open, close, say
//! ```
//!
//! # What a backend brings, and what the kit brings
//!
//! There are three ways to use it.
//!
//! **The hot half alone.** A [`Backend`] says how memory is registered, how peers are met, and what starts a
//! submission. [`Frontend`] makes a `TransferBackend` of it. The kit brings the [`Queue`], the [`Notifications`], all
//! codes and texts of errors, and the life of an [`Instance`] from its name to `CLOSED`. `shm` is of this kind: it has
//! a fence of its own in shared memory. [A small one](#a-small-backend) is further down.
//!
//! **The cold half, too.** Many networks can say that a write failed, but not that nothing of it is in flight. But they
//! can end the endpoint through which it came. For these there is the module [`connections`]: a pair of endpoints for
//! each connection, the messages of two instances about it, fences, deregistrations, deadlines, and reports to the host
//! that a peer is lost. A backend brings a [`Transport`](connections::Transport), which opens, closes and reports. It
//! never decides. The host's threads make requests through a [`LinkedInstance`], and [`wire`] has the bytes. `nixl` and
//! `mooncake` are of this kind: `plugins/nixl/src/agents.rs` is a transport whose calls return at once,
//! `plugins/mooncake/src/transfer/engines.rs` one with threads.
//!
//! **A thread for each peer.** For networks whose calls wait, as those of sockets do, the module [`threaded`] has
//! everything but the bytes on the network: memory that is copied without `unsafe`, peers, threads and fences. A backend
//! brings a [`Network`](threaded::Network) and a [`Line`](threaded::Line). `examples/tcp-transfer` is one, in 300 lines.
//!
//! # Threads
//!
//! The host calls from any thread, and a backend works on its own threads. Methods marked **hot** are called for every submission:
//! they neither block nor allocate. All locks of the kit are held for a few instructions, except for that of a slot's [`Content`],
//! which the backend holds while it works on the slot. [`Connections`] belong to one thread, and never wait.
//!
//! # Settled
//!
//! A submission that ends in success has settled. A failed submission may still be in a network adapter's queue. So
//! [`Queue::finish`] takes the connection whose end will prove that it is not, and [`Queue::settle`] reports that
//! proof. With `Connections`, a backend calls the first, and the kit calls the second.
//!
//! # A small backend
//!
//! It copies between instances of one process, on a thread for each.
//!
//! ```
//! use std::collections::HashMap;
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use std::sync::mpsc::{SyncSender, sync_channel};
//! use std::sync::{Arc, Mutex, RwLock};
//! use std::time::{Duration, Instant};
//!
//! use host_plugin_api::*;
//! use host_transfer_kit::*;
//!
//! /// What an instance's threads share. Every instance is its own endpoint's peer.
//! struct Own {
//!     instance: Instance<Neighbour>,
//!     regions: RwLock<Regions>,
//! }
//!
//! static ALL: Mutex<Option<HashMap<Vec<u8>, Arc<Own>>>> = Mutex::new(None);
//!
//! struct Neighbour {
//!     id: PeerId,
//!     own: Arc<Own>,
//! }
//!
//! impl Peer for Neighbour {
//!     fn id(&self) -> PeerId {
//!         self.id
//!     }
//!
//!     fn is_gone(&self) -> bool {
//!         self.own.instance.is_stopping()
//!     }
//! }
//!
//! struct Copying {
//!     own: Arc<Own>,
//!     endpoint: Vec<u8>,
//!     last_peer: AtomicU32,
//!     work: SyncSender<u32>,
//! }
//!
//! fn open(opening: &Opening) -> Result<Frontend<Copying>> {
//!     let limits = TransferLimits::new(16, 16);
//!     let instance = Instance::new(&opening.name, limits, 64)?;
//!     let own = Arc::new(Own { instance, regions: RwLock::new(Regions::new(false)) });
//!     let (work, todo) = sync_channel::<u32>(limits.max_submissions as usize);
//!     let (mine, broken) = (own.clone(), own.clone());
//!     let copy = move || {
//!         // Ends when `Copying` is dropped.
//!         for index in todo {
//!             let bytes = mine.copy(index);
//!             mine.instance.succeed(index, bytes);
//!             mine.instance.announce();
//!         }
//!     };
//!     start_thread("copying", copy, move || broken.instance.set_broken())?;
//!     let endpoint = random()?.to_vec();
//!     locked(&ALL).get_or_insert_default().insert(endpoint.clone(), own.clone());
//!     Ok(Frontend::new(Copying { own, endpoint, last_peer: AtomicU32::new(0), work }))
//! }
//!
//! impl Own {
//!     fn copy(&self, index: u32) -> u64 {
//!         let content = self.instance.queue.content(index);
//!         let Some(peer) = content.peer() else { return 0 };
//!         let (ours, theirs) = (reading(&self.regions), reading(&peer.own.regions));
//!         let mut bytes = 0;
//!         for write in content.writes(0) {
//!             // What does not fit any more lands nowhere.
//!             let found = (source(ours.alive(), &write), target(theirs.alive(), &write));
//!             let (Some((_, from)), Some((_, to))) = found else { continue };
//!             let length = write.length as usize;
//!             // SAFETY: both ranges lie in registered regions, which the locks keep from being taken back.
//!             unsafe { std::ptr::copy(from as *const u8, to as *mut u8, length) };
//!             bytes += length as u64;
//!         }
//!         let message = content.notification();
//!         if !message.is_empty() {
//!             peer.own.instance.notifications.arrived(&self.instance.name, message);
//!             peer.own.instance.announce();
//!         }
//!         bytes
//!     }
//! }
//!
//! impl Backend for Copying {
//!     type Peer = Neighbour;
//!     type Progress = ();
//!
//!     fn instance(&self) -> &Instance<Neighbour> {
//!         &self.own.instance
//!     }
//!
//!     fn register(&self, memory: &Memory) -> Result<RegionId> {
//!         writing(&self.own.regions).add(memory)
//!     }
//!
//!     fn deregister(&self, region: RegionId) -> Result<()> {
//!         // The lock waits for copies.
//!         let mut regions = writing(&self.own.regions);
//!         if !regions.retire(region) {
//!             return Err(Error::new(ErrorCode::INVALID_ARGUMENT, format!("no region {}", region.0)));
//!         }
//!         regions.remove(region);
//!         Ok(())
//!     }
//!
//!     fn endpoint(&self) -> Result<Vec<u8>> {
//!         Ok(self.endpoint.clone())
//!     }
//!
//!     fn connect(&self, name: &str, endpoint: &[u8]) -> Result<PeerId> {
//!         let own = locked(&ALL).as_ref().and_then(|all| all.get(endpoint).cloned());
//!         let gone = || Error::new(ErrorCode::PEER_LOST, format!("{name} is not in this process"));
//!         let id = PeerId(self.last_peer.fetch_add(1, Ordering::Relaxed) + 1);
//!         let peer = Arc::new(Neighbour { id, own: own.ok_or_else(gone)? });
//!         self.own.instance.peers.add(peer, 64, |_| false);
//!         Ok(id)
//!     }
//!
//!     fn disconnect(&self, peer: PeerId) -> Result<()> {
//!         self.own.instance.peers.get(peer).ok_or_else(|| unknown_peer(peer))?;
//!         self.own.instance.peers.remove(peer);
//!         let deadline = Instant::now() + Duration::from_secs(5);
//!         match self.own.instance.queue.wait_idle(peer, deadline) {
//!             true => Ok(()),
//!             false => Err(unproven("to a neighbour", "pages it may be sent")),
//!         }
//!     }
//!
//!     fn misfit(&self, peer: &Neighbour, writes: &[Write]) -> Option<usize> {
//!         let (ours, theirs) = (reading(&self.own.regions), reading(&peer.own.regions));
//!         let fits = |write: &Write| {
//!             source(ours.alive(), write).is_some() && target(theirs.alive(), write).is_some()
//!         };
//!         writes.iter().position(|write| !fits(write))
//!     }
//!
//!     fn start(&self, _: &Arc<Neighbour>, index: u32) -> bool {
//!         // There is room for every slot of the queue.
//!         self.work.try_send(index).is_ok()
//!     }
//!
//!     fn shutdown(&self, _: u64) -> Result<()> {
//!         self.own.instance.stop();
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let open = |name: &str| open(&Opening { name: name.into(), config: String::new() });
//! let (sender, receiver) = (open("prefill")?, open("decode")?);
//! let (from, to) = ([7u8; 64], [0u8; 64]);
//! let memory = |bytes: &[u8]| Memory {
//!     address: Address::of(bytes),
//!     length: bytes.len() as u64,
//!     kind: MemoryKind::DRAM,
//!     device: 0,
//!     fd: -1,
//!     generation: 1,
//!     fd_offset: 0,
//! };
//! let (source_region, target_region) = (sender.register(&memory(&from))?, receiver.register(&memory(&to))?);
//! let peer = sender.connect("decode", &receiver.endpoint()?)?;
//! let write = Write { source_region, target_region, length: 64, target_generation: 1, ..Write::default() };
//! let notification = [0; NOTIFICATION_BYTES];
//! let submission = Submission { peer, notification_length: 8, tag: Tag(1), notification };
//! assert_eq!(sender.submit(&submission, &[Write { length: 65, ..write }]), ErrorCode::INVALID_ARGUMENT.0);
//! assert_eq!(sender.submit(&submission, &[write]), 0);
//! let mut done = [Completion { tag: Tag(0), bytes: 0, status: 0, reserved: 0 }];
//! while sender.poll(&mut done) == 0 {
//!     std::thread::yield_now();
//! }
//! assert_eq!((done[0].status, done[0].bytes, sender.settled(Tag(1))), (0, 64, 1));
//! assert_eq!(std::hint::black_box(&to), &from);
//! # Ok(())
//! # }
//! ```

mod backend;
pub mod connections;
pub mod environment;
mod guarded;
mod instance;
mod linked;
mod locked;
mod notifications;
mod peer;
mod queue;
mod regions;
mod sync;
mod system;
pub mod threaded;
pub mod wire;

pub use backend::{Backend, Frontend, unknown_peer, unproven};
pub use connections::Connections;
pub use guarded::{GuardedMemory, Writer};
pub use instance::Instance;
pub use linked::{LinkedInstance, Reply, Request, answer};
pub use locked::{locked, reading, writing};
pub use notifications::{Notifications, notification};
pub use peer::{LinkedPeer, Mailbox, Peer, Peers};
pub use queue::{Content, Queue};
pub use regions::{MAX_REGIONS, RegionDescriptor, Regions, source, target};
pub use system::{Event, Random, random, start_thread};
