//! The threads between the scheduler and the transfer plugin, one for each rank. Each rank has its own instance of the
//! plugin.
//!
//! Each turns its rank's share of page writes into batches of plugin writes, digests the pages that it sends and the
//! pages that arrived, and reports writes that have settled. [`host_core::rank_barrier`] combines the reports of all
//! ranks into one. A thread waits on two descriptors: its own inbox and the plugin's events.

mod receiving;
mod sending;
mod shares;
mod staging;

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use host_core::heads::HeadLane;
use host_core::rank_barrier::Report;
use host_core::scheduler::{PageWrite, RoomOpening};
use host_core::transfer::{StagingPolicy, Tag};
use host_core::{Event, PageId, Room};
use host_kernels::copy::Copier;
use host_plugin_api::ErrorCode;
use host_plugin_api::transfer::TransferBackend;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc;

use super::alive::Alive;
use super::channels::Input;
use super::clock::Clock;
use super::complaints::Failed;
use super::link::{Links, Rank};
use sending::Sending;
use staging::RankStaging;

/// Sleep while the plugin has no descriptor to wait on, is full, or has something unsettled.
const SHORT_WAIT: Duration = Duration::from_millis(1);
/// Sleep otherwise. A lost wake-up costs this much.
const LONG_WAIT: Duration = Duration::from_millis(500);
/// Completions and notifications taken per call.
const BATCH: usize = 64;

/// A command of the scheduler to every rank.
#[derive(Clone, Debug)]
pub(super) enum Command {
    /// Write the rank's share. [`Report::Settled`] answers, also when the rank has no share.
    Write(Arc<PageWrite>),
    /// Do not start fragments of a write that have not started.
    Cancel(Tag),
    /// Open a room: its parts may arrive.
    OpenRoom(Arc<RoomOpening>),
    /// Copy nothing more into a room's pages. [`Report::Closed`] answers.
    CloseRoom(Room),
    /// Forget a room: nothing of it is in flight any more.
    ForgetRoom(Room),
    /// Digest the rank's heads. [`Report::Checked`] answers.
    Verify(Arc<Verification>),
    Stop,
}

/// Pages to be verified.
#[derive(Debug)]
pub(super) struct Verification {
    pub room: Room,
    pub attempt: u32,
    pub pages: Vec<PageId>,
    pub aux_slot: u32,
    /// The lanes that brought them.
    pub lanes: Vec<HeadLane>,
}

/// Commands that wait for the thread. The scheduler's running requests bound their number.
pub(super) struct Inbox(Arc<InboxState>);

struct InboxState {
    commands: Mutex<VecDeque<Command>>,
    wake: OwnedFd,
}

impl Inbox {
    pub(super) fn push(&self, command: Command) {
        self.0.commands.lock().push_back(command);
        // A write fails when the counter is full, and then the thread wakes up anyway.
        let _full = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes()).is_err();
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.push(Command::Stop);
    }
}

pub(super) struct Start {
    /// The first field, so that this thread's end is reported before the ends of other threads that follow from it.
    #[expect(dead_code, reason = "held for its drop")]
    pub alive: Alive,
    pub rank: usize,
    pub links: Arc<Links>,
    pub inputs: mpsc::Sender<Input>,
    pub page_integrity: bool,
    /// Whether the plugin says exactly which writes have settled.
    pub settles: bool,
    /// When pages go through staging memory.
    pub policy: StagingPolicy,
    /// Threads of copies between pools in host memory and staging memory, the same for all ranks.
    pub copier: Arc<Copier>,
}

pub(super) fn start(start: Start) -> anyhow::Result<(Inbox, JoinHandle<()>)> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let inbox = Arc::new(InboxState { commands: Mutex::new(VecDeque::new()), wake });
    let rank = start.rank;
    let Some(own) = start.links.ranks().get(rank) else {
        anyhow::bail!("rank {rank} has no instance of a transfer plugin");
    };
    let backend = own.backend.clone();
    let copier = own.kv.copier(&start.copier)?;
    let state = inbox.clone();
    let clock = Clock::start();
    let thread = std::thread::Builder::new().name(format!("transfer-{rank}")).spawn(move || {
        let sending = Sending::new(start.links.clone(), rank, start.settles);
        let staging = RankStaging::new(&start.links.ranks()[rank], clock, copier);
        Thread { start, backend, sending, staging }.run(&state);
    })?;
    Ok((Inbox(inbox), thread))
}

/// The number of entries that a method of the plugin filled in, or its failure.
fn counted(method: &'static str, answer: i32) -> Result<usize, Failed> {
    let failed = |_negative| Failed { method, code: ErrorCode(answer) };
    usize::try_from(answer).map(|count| count.min(BATCH)).map_err(failed)
}

struct Thread {
    start: Start,
    backend: Arc<dyn TransferBackend>,
    sending: Sending,
    staging: RankStaging,
}

impl Thread {
    fn run(mut self, inbox: &InboxState) {
        loop {
            // Taken before the inbox is read. A room of these notifications was opened before they were sent, so its
            // command is there by then.
            let notifications = self.take_notifications();
            let commands = std::mem::take(&mut *inbox.commands.lock());
            let mut busy = !commands.is_empty();
            for command in commands {
                match command {
                    Command::Write(write) => self.write(&write),
                    Command::Cancel(tag) => {
                        let settled = self.sending.cancel(tag);
                        self.settled(settled);
                        self.cancel_staged(tag);
                    }
                    Command::OpenRoom(opening) => self.open_room(&opening),
                    Command::ForgetRoom(room) => self.forget_room(room),
                    Command::CloseRoom(room) => self.close_room(room),
                    Command::Verify(verification) => {
                        if let Err(error) = self.verify(&verification) {
                            // Only a new process can recover from this.
                            tracing::error!(
                                error,
                                rank = self.start.rank,
                                "pages cannot be read back, so this worker ends: its supervisor starts it again"
                            );
                            return;
                        }
                    }
                    Command::Stop => return,
                }
            }
            let submitted = self.sending_hand_over();
            match (self.sending.poll(), notifications) {
                (Ok((completed, settled)), Ok(notifications)) => {
                    self.settled(settled);
                    self.cut_off();
                    busy |= submitted || completed || !notifications.is_empty();
                    notifications.iter().for_each(|notification| self.notified(notification));
                }
                (_, Err(failed)) | (Err(failed), _) => {
                    // Only a new process can recover from this.
                    let (plugin, rank) = (self.start.links.plugin_name(), self.start.rank);
                    let what = failed.told(|| self.backend.endpoint().err());
                    tracing::error!(
                        "plugin {plugin:?}: {what} on rank {rank}; nothing is known any more of what is in flight, so this \
                         worker ends: its peers cut it off, and its supervisor starts it again"
                    );
                    return;
                }
            }
            busy |= self.turn_staging();
            if !busy {
                self.wait(inbox);
            }
        }
    }

    /// Gives the plugin as many submissions as it has room for. Returns whether any left the queue.
    fn sending_hand_over(&mut self) -> bool {
        let (submitted, settled) = self.sending.submit();
        self.settled(settled);
        submitted
    }

    /// Reports the peers that must be cut off, because nothing else ends submissions to them.
    fn cut_off(&mut self) {
        for (peer, session) in self.sending.take_untold() {
            self.staging_lost(peer, session);
            self.tell(Input::Event(Event::PeerLost { peer, session, fenced: false }));
        }
    }

    fn own(&self) -> &Rank {
        &self.start.links.ranks()[self.start.rank]
    }

    fn tell(&self, input: Input) {
        if self.start.inputs.blocking_send(input).is_err() {
            tracing::debug!("the scheduler has stopped; a transfer event was dropped");
        }
    }

    fn report(&self, report: Report) {
        self.tell(Input::Transfer(report));
    }

    fn settled(&self, settled: Vec<(Tag, Option<String>)>) {
        for (tag, error) in settled {
            self.report(Report::Settled { rank: self.start.rank, tag, error });
        }
    }

    /// Queues the rank's share of a write.
    fn write(&mut self, write: &Arc<PageWrite>) {
        let (rank, links) = (self.start.rank, self.start.links.clone());
        let Some(link) = links.get(write.to) else {
            let error = format!("worker {} is not connected", write.to);
            return self.settled(vec![(write.tag, Some(error))]);
        };
        if link.session != write.session {
            // The connection that the scheduler names is gone. It has not heard of the one in use, and may never.
            self.tell(Input::Event(Event::PeerLost { peer: write.to, session: write.session, fenced: true }));
            let error = format!("the connection to worker {} was replaced", write.to);
            return self.settled(vec![(write.tag, Some(error))]);
        }
        let policy = &self.start.policy;
        let shares = shares::shares(&links, &link, rank, write, policy, self.start.page_integrity);
        match shares {
            Ok(shares) if shares.is_empty() => self.settled(vec![(write.tag, None)]),
            Ok(shares) => {
                self.sending.begin(write, rank, &shares);
                self.stage(write, &link, &shares);
            }
            Err(error) => self.settled(vec![(write.tag, Some(error))]),
        }
    }

    fn wait(&self, inbox: &InboxState) {
        let fd = self.backend.event_fd();
        let wait = if fd < 0 || self.sending.hurries() { SHORT_WAIT } else { LONG_WAIT };
        let wait = self.staging.patience().map_or(wait, |patience| patience.min(wait));
        let timeout = rustix::event::Timespec {
            tv_sec: wait.as_secs().try_into().unwrap_or(0),
            tv_nsec: wait.subsec_nanos().into(),
        };
        let mut fds = vec![PollFd::new(&inbox.wake, PollFlags::IN)];
        if fd >= 0 {
            // SAFETY: the plugin owns the descriptor and keeps it open while its instance lives, which we hold.
            let plugin = unsafe { BorrowedFd::borrow_raw(fd) };
            fds.push(PollFd::from_borrowed_fd(plugin, PollFlags::IN));
        }
        if poll(&mut fds, Some(&timeout)).is_ok() {
            let mut count = [0; 8];
            let _empty = rustix::io::read(inbox.wake.as_fd(), &mut count).is_err();
        }
    }
}

#[cfg(test)]
mod tests;
