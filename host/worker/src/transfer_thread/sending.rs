//! A rank's shares of page writes on their way through its instance of the plugin.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use host_core::Instance;
use host_core::notice::{LaneNotice, MESSAGE_BYTES};
use host_core::scheduler::PageWrite;
use host_core::transfer::Tag;
use host_plugin_api::ErrorCode;
use host_plugin_api::transfer::{
    self as api, Completion, NOTIFICATION_BYTES, PeerId, Submission, TransferBackend, Write,
};

use super::shares::Share;
use super::{BATCH, counted};
use crate::complaints::{Code, Complaints, Failed};
use crate::link::Links;

/// The progress of one page write, which has one or more submissions.
struct WriteProgress {
    left: usize,
    error: Option<String>,
}

/// Page writes that have settled, and how.
pub(super) type Settled = Vec<(Tag, Option<String>)>;

/// The purpose of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// A fragment of a page write.
    WriteProgress(Tag),
    /// A staged piece, by the name that the staging sender gave it.
    Piece(u64),
    /// A message without data. The thread does not wait for its end, because a peer that misses it asks again.
    Message,
}

/// A submission that was queued and has not ended.
#[derive(Clone, Copy, Debug)]
struct Submitted {
    purpose: Purpose,
    peer: PeerId,
    /// The peer and the connection, or `None` for a message.
    over: Option<Connection>,
    cancelled: bool,
    writes: usize,
    bytes: u64,
}

/// A connection to a peer, by the session that its writes name.
pub(super) type Connection = (Instance, u64);

/// Messages that may wait for a plugin that is full. More are dropped: their senders repeat them.
const MESSAGES: usize = 4096;

/// The submissions of one rank.
pub(super) struct Sending {
    links: Arc<Links>,
    backend: Arc<dyn TransferBackend>,
    /// Whether the plugin says exactly which submissions have settled. Otherwise a submission that did not end well is in
    /// flight until its peer is cut off.
    settles: bool,
    max_writes: usize,
    /// Submissions that the plugin has no room for yet.
    waiting: VecDeque<(Purpose, Submission, Vec<Write>)>,
    parts: HashMap<Tag, WriteProgress>,
    last_submission: u64,
    by_submission: HashMap<api::Tag, Submitted>,
    /// Staged pieces whose writes have settled.
    pieces: Vec<(u64, Option<String>)>,
    /// Submissions that ended in an error and may still be in flight.
    unsettled: Vec<(api::Tag, String)>,
    /// Connections that have to be cut off, because nothing else ends submissions that are in flight over them.
    cuts: HashSet<Connection>,
    /// Connections in `cuts` that the scheduler was not told of.
    untold: Vec<Connection>,
    /// The failure of the plugin. Nothing is known of submissions in flight after it, so they never end.
    failed: Option<Failed>,
    /// Workers by the plugin's handle, for messages.
    peers: HashMap<PeerId, Instance>,
    complaints: Complaints,
}

/// The most names of peers that are kept. The plugin does not use a handle again.
const PEERS: usize = 1024;

impl Sending {
    pub(super) fn new(links: Arc<Links>, rank: usize, settles: bool) -> Self {
        let backend = links.ranks()[rank].backend.clone();
        let max_writes = backend.limits().max_writes.max(1) as usize;
        Self {
            links,
            backend,
            settles,
            max_writes,
            waiting: VecDeque::new(),
            parts: HashMap::new(),
            last_submission: 0,
            by_submission: HashMap::new(),
            pieces: Vec::new(),
            unsettled: Vec::new(),
            cuts: HashSet::new(),
            untold: Vec::new(),
            failed: None,
            peers: HashMap::new(),
            complaints: Complaints::default(),
        }
    }

    /// The most writes of one submission.
    pub(super) fn max_writes(&self) -> usize {
        self.max_writes
    }

    /// Whether the plugin is full, or has something unsettled.
    pub(super) fn hurries(&self) -> bool {
        !self.waiting.is_empty() || !self.unsettled.is_empty()
    }

    /// Queues the direct writes of shares of a page write, at least one share. For each staged share,
    /// [`lane_ended`](Self::lane_ended) is to follow.
    pub(super) fn begin(&mut self, write: &PageWrite, rank: usize, shares: &[Share]) {
        let mut left = 0;
        if self.peers.len() > PEERS {
            self.peers.clear();
        }
        for share in shares {
            self.peers.insert(share.peer, write.to);
            let notice = share.notice(write, rank, share.fragments(self.max_writes));
            let first = share.staged.len();
            for (index, writes) in share.direct(self.max_writes).enumerate() {
                let fragment = u32::try_from(first + index).unwrap_or(u32::MAX);
                let notice = LaneNotice { fragment, ..notice };
                let over = Some((write.to, write.session));
                self.queue(
                    Purpose::WriteProgress(write.tag),
                    share.peer,
                    over,
                    notice.encode(),
                    writes.to_vec(),
                );
                left += 1;
            }
            left += usize::from(!share.staged.is_empty());
        }
        self.parts.insert(write.tag, WriteProgress { left, error: None });
    }

    fn queue(
        &mut self,
        purpose: Purpose,
        peer: PeerId,
        over: Option<Connection>,
        notification: [u8; MESSAGE_BYTES],
        writes: Vec<Write>,
    ) {
        self.last_submission += 1;
        let tag = api::Tag(self.last_submission);
        let submission =
            Submission { peer, notification_length: NOTIFICATION_BYTES as u32, tag, notification };
        let bytes = writes.iter().map(|write| u64::from(write.length)).sum();
        let submitted = Submitted { purpose, peer, over, cancelled: false, writes: writes.len(), bytes };
        self.by_submission.insert(tag, submitted);
        match purpose {
            // A message goes first, because a peer waits for it and it is small.
            Purpose::Message => self.waiting.push_front((purpose, submission, writes)),
            Purpose::WriteProgress(_) | Purpose::Piece(_) => {
                self.waiting.push_back((purpose, submission, writes))
            }
        }
    }

    /// Sends a message without data, unless too many wait already.
    pub(super) fn say(&mut self, peer: PeerId, message: [u8; MESSAGE_BYTES]) {
        if self.waiting.len() < MESSAGES {
            self.queue(Purpose::Message, peer, None, message, Vec::new());
        }
    }

    /// Queues the write of a staged piece. [`settled_pieces`](Self::settled_pieces) says when it has settled.
    pub(super) fn piece(
        &mut self,
        id: u64,
        peer: PeerId,
        over: Connection,
        notice: [u8; MESSAGE_BYTES],
        write: Write,
    ) {
        self.queue(Purpose::Piece(id), peer, Some(over), notice, vec![write]);
    }

    /// Records a piece that could not be queued.
    pub(super) fn piece_failed(&mut self, id: u64, error: String) {
        self.pieces.push((id, Some(error)));
    }

    /// Cancels the write of a piece. It does not start if it has not begun.
    pub(super) fn cancel_piece(&mut self, id: u64) {
        let settled = self.drop_all(Purpose::Piece(id));
        debug_assert!(settled.is_empty());
    }

    /// Takes the staged pieces whose writes have settled, and how they have.
    pub(super) fn settled_pieces(&mut self) -> Vec<(u64, Option<String>)> {
        std::mem::take(&mut self.pieces)
    }

    /// Records that nothing of a staged share, or of a direct fragment, is in flight any more. Returns the page write if it
    /// has settled with it.
    pub(super) fn lane_ended(&mut self, tag: Tag, error: Option<String>) -> Option<(Tag, Option<String>)> {
        let part = self.parts.get_mut(&tag)?;
        part.left -= 1;
        part.error = part.error.take().or(error);
        if part.left > 0 {
            return None;
        }
        self.parts.remove(&tag).map(|part| (tag, part.error))
    }

    /// Gives the plugin as many submissions as it has room for. Returns whether any left the queue.
    pub(super) fn submit(&mut self) -> (bool, Settled) {
        let (mut busy, mut settled) = (false, Vec::new());
        while self.failed.is_none()
            && let Some((purpose, submission, writes)) = self.waiting.front()
        {
            let status = self.backend.submit(submission, writes);
            if status == ErrorCode::WOULD_BLOCK.0 {
                break;
            }
            busy = true;
            if status == 0 {
                let counters = self.links.counters();
                let way = match purpose {
                    Purpose::Piece(_) => &counters.staged,
                    Purpose::WriteProgress(_) | Purpose::Message => &counters.direct,
                };
                way.count(writes);
                self.waiting.pop_front();
            } else if status == ErrorCode::PANICKED.0 {
                self.fail("submit", status);
                self.waiting.pop_front();
            } else if let Some((_, submission, writes)) = self.waiting.pop_front() {
                let peer = self.name_of(submission.peer);
                let error = format!(
                    "submit refused {} writes to the peer {peer} with {}",
                    writes.len(),
                    Code(status)
                );
                let plugin = self.links.plugin_name();
                self.complaints.tell("refused", || {
                    format!("plugin {plugin:?}: {error}; the transfer counts as failed, and its request is tried again")
                });
                settled.extend(self.ended(submission.tag, Some(error)));
            }
        }
        (busy, settled)
    }

    /// Cancels the direct writes of a page write: no more of them start.
    pub(super) fn cancel(&mut self, tag: Tag) -> Settled {
        self.drop_all(Purpose::WriteProgress(tag))
    }

    fn drop_all(&mut self, purpose: Purpose) -> Settled {
        // Parts of the room that were sent so far are of no use to a later attempt.
        let (dropped, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|(other, _, _)| *other == purpose);
        self.waiting = kept;
        let mut settled = Vec::new();
        for (_, submission, _) in dropped {
            settled.extend(self.ended(submission.tag, Some("cancelled".into())));
        }
        for (submission, other) in &mut self.by_submission {
            if other.purpose == purpose {
                other.cancelled = true;
                // A submission that has just completed cannot be cancelled any more, which is as good.
                let late = self.backend.cancel(*submission);
                if late == ErrorCode::PANICKED.0 {
                    self.failed =
                        self.failed.or(Some(Failed { method: "cancel", code: ErrorCode::PANICKED }));
                }
            }
        }
        settled
    }

    fn fail(&mut self, method: &'static str, code: i32) {
        self.failed = self.failed.or(Some(Failed { method, code: ErrorCode(code) }));
    }

    /// The name of the worker behind a plugin's handle.
    fn name_of(&self, peer: PeerId) -> String {
        self.peers.get(&peer).map_or_else(|| format!("with the handle {}", peer.0), ToString::to_string)
    }

    /// Takes completions, and returns whether there were any.
    ///
    /// # Errors
    /// The failure of the plugin.
    pub(super) fn poll(&mut self) -> Result<(bool, Settled), Failed> {
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        let blank = Completion { tag: api::Tag(0), bytes: 0, status: 0, reserved: 0 };
        let mut completions = [blank; BATCH];
        let count = counted("poll", self.backend.poll(&mut completions))?;
        let mut settled = Vec::new();
        for completion in &completions[..count] {
            settled.extend(self.completed(completion));
        }
        // A failed submission counts as ended only when the plugin says that nothing of it is in flight, or its peer is cut off.
        for (submission, error) in std::mem::take(&mut self.unsettled) {
            match self.has_settled(submission) {
                1 => settled.extend(self.ended(submission, Some(error))),
                code if code == ErrorCode::PANICKED.0 => self.fail("settled", code),
                answer => {
                    if answer != 0 {
                        let plugin = self.links.plugin_name();
                        self.complaints.tell("settled", || {
                            let (tag, answer) = (submission.0, Code(answer));
                            format!("plugin {plugin:?}: settled answered {answer} for submission {tag}, which counts as in flight")
                        });
                    }
                    self.unsettled.push((submission, error));
                }
            }
        }
        Ok((count > 0, settled))
    }

    /// 1 if nothing of a submission is in flight any more. Otherwise 0, or the code with which the plugin failed to
    /// answer.
    fn has_settled(&mut self, submission: api::Tag) -> i32 {
        if self.settles {
            return self.backend.settled(submission);
        }
        let Some(of) = self.by_submission.get(&submission) else { return 1 };
        // A message that fails changes no memory.
        let Some(over) = of.over else { return 1 };
        if self.links.is_cut_off(over, of.peer) {
            self.cuts.remove(&over);
            return 1;
        }
        if self.cuts.insert(over) {
            self.untold.push(over);
        }
        0
    }

    /// Connections that have to be cut off, each once.
    pub(super) fn take_untold(&mut self) -> Vec<Connection> {
        std::mem::take(&mut self.untold)
    }

    /// Handles a completion: the plugin says that a submission has ended.
    fn completed(&mut self, completion: &Completion) -> Option<(Tag, Option<String>)> {
        let (tag, plugin) = (completion.tag, self.links.plugin_name());
        let Some(of) = self.by_submission.get(&tag).copied() else {
            self.complaints.tell("unknown", || {
                format!(
                    "plugin {plugin:?}: poll tells the end of submission {}, which is not in flight; the entry is dropped",
                    tag.0
                )
            });
            return None;
        };
        if completion.status == 0 && of.cancelled && !self.settles {
            // The room ended early, so its submission counts as in flight until the peer is cut off.
            self.unsettled.push((tag, "cancelled".to_owned()));
        } else if completion.status != 0 {
            self.unsettled.push((tag, ErrorCode(completion.status).name().to_owned()));
        } else if completion.bytes != of.bytes {
            let (peer, told) = (self.name_of(of.peer), completion.bytes);
            let error = format!(
                "poll says that submission {} to the peer {peer} wrote {told} bytes, and its {} writes have {}",
                tag.0, of.writes, of.bytes
            );
            let plugin = self.links.plugin_name();
            self.complaints.tell("bytes", || {
                format!("plugin {plugin:?}: {error}; the transfer counts as failed, and its request is tried again")
            });
            self.unsettled.push((tag, error));
        } else {
            return self.ended(tag, None);
        }
        None
    }

    fn ended(&mut self, submission: api::Tag, error: Option<String>) -> Option<(Tag, Option<String>)> {
        match self.by_submission.remove(&submission)?.purpose {
            Purpose::WriteProgress(tag) => self.lane_ended(tag, error),
            Purpose::Piece(id) => {
                self.pieces.push((id, error));
                None
            }
            Purpose::Message => None,
        }
    }
}
