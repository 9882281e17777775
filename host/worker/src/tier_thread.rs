//! The threads of the offload tiers: copies between the ranks' pools and host memory, and the plugins that store pages.
//!
//! They carry [`TierAction`]s out for all ranks of the worker. A page has ended when it has ended on every rank, so ranks
//! need not agree on anything. Host memory lies page by page in the order head, layer, K/V, token, dimension, whatever
//! the pool's layout is. A storage tier holds one object per page and KV head of the model, so workers of any number of
//! ranks share objects. A head that several ranks hold is written by the first of them and read by all.
//!
//! One thread makes copies, one after the other. Each storage tier has a thread of its own, which alone calls the plugin.
//! A plugin that blocks in a call that must not block delays its own pages and nothing else.

mod host_memory;
mod mailbox;
mod objects;
pub mod seal;
mod store;
mod traffic;

use std::sync::{Arc, mpsc as queue};
use std::thread::JoinHandle;
use std::time::Duration;

use host_core::Event;
use host_core::PageId;
use host_core::hierarchy::{Direction, HostSlot, PageEnd, TierAction, TierEvent, TierTag};
use host_core::layout::KvShape;
use host_executor::KvMemory;
use host_memory::HostMemory;
use host_plugin_api::StorageTier;
use host_plugins::Running;
use tokio::sync::mpsc;

use super::alive::Alive;
use super::channels::Input;
use mailbox::Mailbox;
use store::{Next, Store};
pub(super) use traffic::Traffic;

/// Sleep while the thread has to look at a plugin again that has no descriptor to wait on.
const SHORT_WAIT: Duration = Duration::from_millis(1);
/// Sleep otherwise. A lost wake-up costs this much.
const LONG_WAIT: Duration = Duration::from_millis(500);

/// The offload tiers of a worker.
pub struct OffloadTiers {
    /// The storage plugins' names and instances, in the order in which the core numbers them.
    pub tiers: Vec<(String, Arc<dyn StorageTier>)>,
}

impl OffloadTiers {
    /// The alignment of objects' addresses and lengths that suits all tiers, or `None` without storage.
    #[must_use]
    pub fn alignment(&self) -> Option<u64> {
        self.tiers.iter().map(|(_, tier)| tier.limits().alignment).max()
    }
}

/// Bytes that one page takes in the host memory of a rank with this shape. `alignment` is that of its storage tiers, if there is
/// any.
#[must_use]
pub fn slot_bytes(shape: &KvShape, alignment: Option<usize>) -> usize {
    shape.heads * host_memory::head_bytes(shape, alignment)
}

/// Bytes of a value in storage: one KV head of a page of this shape, and its seal, as a multiple of `alignment`.
pub(super) fn value_bytes(shape: &KvShape, alignment: usize) -> usize {
    host_memory::head_bytes(shape, Some(alignment))
}

/// The channels to all tier threads.
pub(super) struct Inbox {
    copies: queue::Sender<Copy>,
    stores: Vec<Arc<Mailbox>>,
}

impl Inbox {
    pub(super) fn push(&self, action: TierAction) {
        match action {
            TierAction::Copy { tag, direction, pages } => {
                // The end of the thread is reported by itself, and ends the worker.
                let _gone = self.copies.send(Copy { tag, direction, pages }).is_err();
            }
            TierAction::Query { tier, .. }
            | TierAction::Read { tier, .. }
            | TierAction::Write { tier, .. }
            | TierAction::Cancel { tier, .. } => self.stores[tier].push(action),
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.stores.iter().for_each(|store| store.close());
    }
}

/// [`TierAction::Copy`].
struct Copy {
    tag: TierTag,
    direction: Direction,
    pages: Vec<(PageId, HostSlot)>,
}

pub(super) struct Start<'a> {
    pub offload: OffloadTiers,
    /// Slots of host memory.
    pub slots: u32,
    /// The ranks' pools.
    pub pools: Vec<KvMemory>,
    /// KV heads of the model.
    pub kv_heads: usize,
    pub inputs: mpsc::Sender<Input>,
    /// Makes the [`Alive`] that each thread holds.
    pub alive: &'a dyn Fn(&'static str) -> Alive,
}

/// The threads that were started, and the channels to them.
pub(super) struct Started {
    pub inbox: Inbox,
    pub copies: JoinHandle<()>,
    pub tiers: Vec<RunningTier>,
    /// Bytes between the pools and host memory.
    pub copied: Arc<Traffic>,
    /// Bytes between host memory and each tier.
    pub stored: Vec<Arc<Traffic>>,
}

/// A storage tier with the thread that calls it.
pub(super) struct RunningTier {
    name: String,
    tier: Arc<dyn StorageTier>,
    memory: Arc<HostMemory>,
    thread: JoinHandle<()>,
}

impl RunningTier {
    /// Adds this tier to the plugins that are to be stopped. Its thread ends when the inbox is gone. A thread that is
    /// inside the plugin does not end, and is left behind with the plugin.
    pub(super) fn stops_with(self, running: &mut Running) {
        let Self { name, tier, memory, thread } = self;
        running.opened(&name, move |milliseconds| {
            if thread.join().is_err() {
                tracing::error!("the thread of a storage tier had panicked");
            }
            let stopped = tier.shutdown(milliseconds);
            if stopped.is_err() {
                // The plugin may still access the memory. If it were dropped, it would be asked to stop once more.
                std::mem::forget((tier, memory));
            }
            stopped
        });
    }
}

pub(super) fn start(start: Start<'_>) -> anyhow::Result<Started> {
    let Start { offload, slots, pools, kv_heads, inputs, alive } = start;
    if let Some(pool) = pools.first() {
        offload.fit(&pool.layout().shape)?;
    }
    let alignment = offload.alignment().map(usize::try_from).transpose()?;
    let memory = Arc::new(HostMemory::new(&pools, slots as usize, kv_heads, alignment)?);
    let stores: anyhow::Result<Vec<Store>> =
        offload.tiers.iter().map(|(name, tier)| Store::open(name, tier.clone(), &memory)).collect();
    let stores = stores?;
    let stored = stores.iter().map(Store::traffic).collect();
    let copied = Arc::new(Traffic::default());
    let (send, copies) = queue::channel();
    let mut inbox = Inbox { copies: send, stores: Vec::new() };
    let copier = CopyThread {
        alive: alive("copies"),
        memory: memory.clone(),
        traffic: copied.clone(),
        inputs: inputs.clone(),
    };
    let copies = std::thread::Builder::new().name("copies".into()).spawn(move || copier.run(&copies))?;
    let mut tiers = Vec::new();
    for ((name, tier), store) in offload.tiers.into_iter().zip(stores) {
        let mailbox = Arc::new(Mailbox::new()?);
        inbox.stores.push(mailbox.clone());
        let caller =
            StorageThread { alive: alive("storage"), store, memory: memory.clone(), inputs: inputs.clone() };
        let thread = std::thread::Builder::new().name("storage".into());
        let thread = thread.spawn(move || caller.run(&mailbox))?;
        tiers.push(RunningTier { name, tier, memory: memory.clone(), thread });
    }
    Ok(Started { inbox, copies, tiers, copied, stored })
}

fn tell(inputs: &mpsc::Sender<Input>, event: TierEvent) -> Result<(), ()> {
    inputs.blocking_send(Input::Event(Event::Tier(event))).map_err(|_stopped| ())
}

/// The thread that copies pages.
struct CopyThread {
    /// The first field, so that this thread's end is reported before the ends of other threads that follow from it.
    #[expect(dead_code, reason = "held for its drop")]
    alive: Alive,
    memory: Arc<HostMemory>,
    traffic: Arc<Traffic>,
    inputs: mpsc::Sender<Input>,
}

impl CopyThread {
    fn run(self, copies: &queue::Receiver<Copy>) {
        for Copy { tag, direction, pages } in copies {
            let loads = direction == Direction::Load;
            let end = match self.memory.copy(loads, &pages) {
                Ok(()) => {
                    let bytes = self.memory.page_bytes() * pages.len();
                    match loads {
                        true => self.traffic.came_up(bytes),
                        false => self.traffic.went_down(bytes),
                    }
                    PageEnd::Done
                }
                Err(error) => {
                    tracing::error!(%error, "pages could not be copied between the pool and host memory");
                    PageEnd::Failed
                }
            };
            let pages = (0..).zip(&pages).map(|(place, _)| (place, end)).collect();
            if tell(&self.inputs, TierEvent::Ended { tag, pages }).is_err() {
                return;
            }
        }
    }
}

/// The thread that calls one plugin.
struct StorageThread {
    /// The first field, as in [`CopyThread`].
    #[expect(dead_code, reason = "held for its drop")]
    alive: Alive,
    store: Store,
    memory: Arc<HostMemory>,
    inputs: mpsc::Sender<Input>,
}

impl StorageThread {
    fn run(mut self, mailbox: &Mailbox) {
        let mut events = Vec::new();
        while let Some(actions) = mailbox.take() {
            for action in actions {
                self.store.begin(action, &self.memory, &mut events);
            }
            let next = self.store.turn(&self.memory, &mut events);
            if events.drain(..).try_for_each(|event| tell(&self.inputs, event)).is_err() {
                return;
            }
            match next {
                Next::Turn => {}
                Next::Look => mailbox.sleep(self.store.event_fd(), SHORT_WAIT),
                Next::Sleep => mailbox.sleep(self.store.event_fd(), LONG_WAIT),
            }
        }
    }
}
