//! The thread between the scheduler and the transfer plugin.
//!
//! It turns page writes into batches of plugin writes, digests what it sends and what arrived, and reports what has
//! settled. It waits on two descriptors: its own inbox and the plugin's events.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use host_core::aux_row::AUX_ROW_BYTES;
use host_core::integrity::Found;
use host_core::notice::{NOTICE_BYTES, Notice};
use host_core::scheduler::PageWrite;
use host_core::transfer::{Tag, plan_layers};
use host_core::{Event, Instance, PageId, Room};
use host_plugin_api::ErrorCode;
use host_plugin_api::transfer::{
    self as api, Completion, NOTIFICATION_BYTES, Notification, NotificationKind, Submission, TransferBackend,
    Write,
};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use tokio::sync::mpsc;

use super::link::Links;
use super::sent_digests::{self, SentDigests};
use super::{Alive, Input};
use crate::executor::KvMemory;

/// Sleep while the plugin has no descriptor to wait on, is full, or has something unsettled.
const SHORT_WAIT: Duration = Duration::from_millis(1);
/// Sleep otherwise; a lost wake-up costs this much.
const LONG_WAIT: Duration = Duration::from_millis(500);
/// Completions and notifications taken per call.
const BATCH: usize = 64;
/// Arrived parts that wait for their other fragments; the oldest is forgotten beyond that.
const PARTIAL_NOTICES: usize = 4096;

/// What the scheduler asks for.
#[derive(Debug)]
pub(super) enum Command {
    Write(PageWrite),
    Cancel(Tag),
    Verify { room: Room, attempt: u32, pages: Vec<PageId>, aux_slot: u32 },
    Stop,
}

/// Commands on their way. Holds at most what the scheduler's running requests can ask for.
pub(super) struct Inbox(Arc<InboxState>);

struct InboxState {
    commands: Mutex<VecDeque<Command>>,
    wake: OwnedFd,
}

impl Inbox {
    pub(super) fn push(&self, command: Command) {
        self.0.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
        // A full counter is a wake-up that is already there.
        let _full = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes()).is_err();
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.push(Command::Stop);
    }
}

pub(super) struct Start {
    /// First, so that this thread's end is told before those that follow from it.
    #[expect(dead_code, reason = "held for its drop")]
    pub alive: Alive,
    pub links: Arc<Links>,
    pub kv: KvMemory,
    pub inputs: mpsc::Sender<Input>,
    pub page_integrity: bool,
}

pub(super) fn start(start: Start) -> anyhow::Result<(Inbox, JoinHandle<()>)> {
    let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let inbox = Arc::new(InboxState { commands: Mutex::new(VecDeque::new()), wake });
    let Some(backend) = start.links.backend().cloned() else {
        anyhow::bail!("a transfer thread needs a transfer plugin");
    };
    let state = inbox.clone();
    let thread = std::thread::Builder::new().name("transfer".into()).spawn(move || {
        let max_writes = backend.limits().max_writes.max(1) as usize;
        let thread = Thread {
            start,
            backend,
            max_writes,
            waiting: VecDeque::new(),
            parts: HashMap::new(),
            last_submission: 0,
            by_submission: HashMap::new(),
            unsettled: Vec::new(),
            sent: SentDigests::default(),
            partial: VecDeque::new(),
        };
        thread.run(&state);
    })?;
    Ok((Inbox(inbox), thread))
}

/// How many entries a plugin filled in, or what is wrong with it.
fn counted(answer: i32) -> Result<usize, ErrorCode> {
    usize::try_from(answer).map(|count| count.min(BATCH)).map_err(|_negative| ErrorCode(answer))
}

/// One page write's way through the plugin, as one or more submissions.
struct Part {
    left: u32,
    error: Option<String>,
}

struct Thread {
    start: Start,
    backend: Arc<dyn TransferBackend>,
    max_writes: usize,
    /// Submissions that the plugin has no room for yet.
    waiting: VecDeque<(Tag, Submission, Vec<Write>)>,
    parts: HashMap<Tag, Part>,
    last_submission: u64,
    /// Which page write a submission belongs to.
    by_submission: HashMap<api::Tag, Tag>,
    /// Submissions that ended in an error and may still be in flight.
    unsettled: Vec<api::Tag>,
    sent: SentDigests,
    partial: VecDeque<((Room, u32, u32), u32)>,
}

impl Thread {
    fn run(mut self, inbox: &InboxState) {
        loop {
            let commands =
                std::mem::take(&mut *inbox.commands.lock().unwrap_or_else(PoisonError::into_inner));
            let mut busy = !commands.is_empty();
            for command in commands {
                match command {
                    Command::Write(write) => self.begin(write),
                    Command::Cancel(tag) => self.cancel(tag),
                    Command::Verify { room, attempt, pages, aux_slot } => {
                        self.verify(room, attempt, &pages, aux_slot);
                    }
                    Command::Stop => return,
                }
            }
            busy |= self.submit_waiting();
            match (self.take_completions(), self.take_notifications()) {
                (Ok(completed), Ok(notified)) => busy |= completed || notified,
                (Err(code), _) | (_, Err(code)) => {
                    // Nothing can be known of what is in flight any more; only a new process can go on.
                    tracing::error!(code = code.name(), "the transfer plugin has failed");
                    return;
                }
            }
            self.settle();
            if !busy {
                self.wait(inbox);
            }
        }
    }

    fn report(&self, event: Event) {
        if self.start.inputs.blocking_send(Input::Event(event)).is_err() {
            tracing::debug!("the scheduler has stopped; a transfer event was dropped");
        }
    }

    fn wait(&self, inbox: &InboxState) {
        let fd = self.backend.event_fd();
        let hurry = fd < 0 || !self.waiting.is_empty() || !self.unsettled.is_empty();
        let wait = if hurry { SHORT_WAIT } else { LONG_WAIT };
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

    /// Digests, plans and queues one page write.
    fn begin(&mut self, write: PageWrite) {
        let tag = write.tag;
        match self.describe(&write) {
            Ok((peer, writes)) => {
                let fragments = writes.len().div_ceil(self.max_writes).max(1);
                self.parts.insert(tag, Part { left: fragments as u32, error: None });
                for index in 0..fragments {
                    let from = index * self.max_writes;
                    let piece = writes[from..writes.len().min(from + self.max_writes)].to_vec();
                    let submission = self.submission(peer, &write, index as u32, fragments as u32);
                    self.by_submission.insert(submission.tag, tag);
                    self.waiting.push_back((tag, submission, piece));
                }
            }
            Err(error) => self.report(Event::Written { tag, error: Some(error) }),
        }
    }

    fn submission(
        &mut self,
        peer: api::PeerId,
        write: &PageWrite,
        fragment: u32,
        fragments: u32,
    ) -> Submission {
        let mut notification = [0; NOTIFICATION_BYTES];
        notification[..NOTICE_BYTES].copy_from_slice(&write.notice.encode());
        notification[NOTICE_BYTES..NOTICE_BYTES + 4].copy_from_slice(&fragment.to_le_bytes());
        notification[NOTICE_BYTES + 4..NOTICE_BYTES + 8].copy_from_slice(&fragments.to_le_bytes());
        self.last_submission += 1;
        let tag = api::Tag(self.last_submission);
        Submission { peer, notification_length: NOTICE_BYTES as u32 + 8, tag, notification }
    }

    /// The peer's handle, and the writes that the plugin is asked for.
    fn describe(&mut self, write: &PageWrite) -> Result<(api::PeerId, Vec<Write>), String> {
        let links = self.start.links.clone();
        let link = links.get(write.to).ok_or_else(|| format!("worker {} is not connected", write.to))?;
        if link.session != write.session {
            // The scheduler has not heard of the connection that is in use, and may never: its own is gone.
            let lost = Event::PeerLost { peer: write.to, session: write.session, fenced: true };
            self.report(lost);
            return Err(format!("the connection to worker {} was replaced", write.to));
        }
        let (kv_region, aux_region) = links.regions().ok_or("there is no transfer plugin")?;
        let layers = write.layers.start as usize..write.layers.end as usize;
        let pieces = plan_layers(links.layout(), &link.layout, &write.source, &write.target, layers)
            .map_err(|error| error.to_string())?;
        let mut writes: Vec<Write> = pieces
            .iter()
            .map(|piece| Write {
                source_region: kv_region.0,
                target_region: link.kv_region,
                source_offset: piece.source as u64,
                target_offset: piece.target as u64,
                length: piece.length as u32,
                target_generation: link.kv_generation,
            })
            .collect();
        if self.start.page_integrity {
            self.sent.add(&self.start.kv, write);
        }
        if let Some((row, own_slot, peer_slot)) = &write.aux {
            if *peer_slot >= link.aux_rows {
                return Err(format!("decode named aux row {peer_slot}, but has {}", link.aux_rows));
            }
            let mut row = row.clone();
            let (room, attempt) = (write.notice.room, write.notice.attempt);
            row.digest = if self.start.page_integrity { self.sent.take(room, attempt) } else { 0 };
            links.aux().write(*own_slot as usize * AUX_ROW_BYTES, &row.encode());
            writes.push(Write {
                source_region: aux_region.0,
                target_region: link.aux_region,
                source_offset: u64::from(*own_slot) * AUX_ROW_BYTES as u64,
                target_offset: u64::from(*peer_slot) * AUX_ROW_BYTES as u64,
                length: AUX_ROW_BYTES as u32,
                target_generation: link.aux_generation,
            });
        }
        Ok((link.peer, writes))
    }

    fn submit_waiting(&mut self) -> bool {
        let mut busy = false;
        while let Some((_, submission, writes)) = self.waiting.front() {
            let status = self.backend.submit(submission, writes);
            if status == ErrorCode::WOULD_BLOCK.0 {
                break;
            }
            busy = true;
            if let Some((_, submission, _)) = self.waiting.pop_front()
                && status != 0
            {
                let error = format!("the plugin refused the writes: {}", ErrorCode(status).name());
                self.ended(submission.tag, Some(error));
            }
        }
        busy
    }

    fn cancel(&mut self, tag: Tag) {
        // What was sent of the room so far is of no use to a later attempt.
        let (dropped, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|(part, _, _)| *part == tag);
        self.waiting = kept;
        for (_, submission, _) in dropped {
            self.ended(submission.tag, Some("cancelled".into()));
        }
        for (submission, part) in &self.by_submission {
            if *part == tag {
                // A submission that has just completed cannot be cancelled any more, which is as good.
                let _late = self.backend.cancel(*submission);
            }
        }
    }

    fn take_completions(&mut self) -> Result<bool, ErrorCode> {
        let blank = Completion { tag: api::Tag(0), bytes: 0, status: 0, reserved: 0 };
        let mut completions = [blank; BATCH];
        let count = counted(self.backend.poll(&mut completions))?;
        for completion in &completions[..count] {
            if completion.status == 0 {
                self.ended(completion.tag, None);
            } else if let Some(tag) = self.by_submission.get(&completion.tag) {
                if let Some(part) = self.parts.get_mut(tag) {
                    part.error = Some(ErrorCode(completion.status).name().to_owned());
                }
                self.unsettled.push(completion.tag);
            }
        }
        Ok(count > 0)
    }

    /// A failed submission counts as ended only when the plugin says that nothing of it is in flight.
    fn settle(&mut self) {
        for submission in std::mem::take(&mut self.unsettled) {
            match self.backend.settled(submission) {
                1 => self.ended(submission, None),
                _ => self.unsettled.push(submission),
            }
        }
    }

    fn ended(&mut self, submission: api::Tag, error: Option<String>) {
        let Some(tag) = self.by_submission.remove(&submission) else { return };
        let Some(part) = self.parts.get_mut(&tag) else { return };
        part.left -= 1;
        part.error = part.error.take().or(error);
        if part.left == 0
            && let Some(part) = self.parts.remove(&tag)
        {
            self.report(Event::Written { tag, error: part.error });
        }
    }

    fn take_notifications(&mut self) -> Result<bool, ErrorCode> {
        let blank = Notification {
            kind: NotificationKind(0),
            length: 0,
            peer_name_length: 0,
            reserved: 0,
            payload: [0; NOTIFICATION_BYTES],
            peer_name: [0; 64],
        };
        let mut notifications = [blank; BATCH];
        let count = counted(self.backend.notifications(&mut notifications))?;
        for notification in &notifications[..count] {
            match notification.kind {
                NotificationKind::ARRIVED => self.arrived(notification),
                NotificationKind::PEER_LOST => self.peer_lost(notification),
                _ => {}
            }
        }
        Ok(count > 0)
    }

    fn arrived(&mut self, notification: &Notification) {
        let length = (notification.length as usize).min(NOTIFICATION_BYTES);
        let payload = &notification.payload[..length];
        let word = |at: usize| {
            payload.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(1, u32::from_le_bytes)
        };
        let Some(notice) = payload.get(..NOTICE_BYTES).and_then(Notice::decode) else {
            tracing::warn!(length, "a peer sent a notification that is not a notice");
            return;
        };
        let fragments = word(NOTICE_BYTES + 4);
        if fragments > 1 {
            let key = (notice.room, notice.attempt, notice.sequence);
            match self.partial.iter_mut().find(|(other, _)| *other == key) {
                Some((_, arrived)) => *arrived += 1,
                None => self.partial.push_back((key, 1)),
            }
            if self.partial.len() > PARTIAL_NOTICES {
                self.partial.pop_front();
            }
            let whole =
                self.partial.iter().position(|(other, arrived)| *other == key && *arrived == fragments);
            let Some(whole) = whole else { return };
            self.partial.remove(whole);
        }
        self.report(Event::Arrived(notice));
    }

    fn peer_lost(&self, notification: &Notification) {
        let length = (notification.peer_name_length as usize).min(notification.peer_name.len());
        let name = std::str::from_utf8(&notification.peer_name[..length]).unwrap_or_default();
        let Ok(instance) = u64::from_str_radix(name, 16) else { return };
        let peer = Instance(instance);
        tracing::warn!(%peer, "the transfer plugin says that a peer is gone");
        // Without a link, whoever took it away has told the scheduler.
        let Some(session) = self.start.links.get(peer).map(|link| link.session) else { return };
        // The peer is proven gone; this only returns the plugin's handle.
        let fenced = match self.start.links.fence(peer, session) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%peer, %error, "the connection to a lost peer could not be closed yet");
                false
            }
        };
        self.report(Event::PeerLost { peer, session, fenced });
    }

    fn verify(&self, room: Room, attempt: u32, pages: &[PageId], aux_slot: u32) {
        let mut aux_row = [0; AUX_ROW_BYTES];
        self.start.links.aux().read(aux_slot as usize * AUX_ROW_BYTES, &mut aux_row);
        let digest = self.start.page_integrity.then(|| sent_digests::whole(&self.start.kv, pages));
        self.report(Event::Verified { room, attempt, found: Box::new(Found { aux_row, digest }) });
    }
}
