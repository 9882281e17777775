//! A rank's shares of page writes on their way through its instance of the plugin.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use host_core::aux_row::AUX_ROW_BYTES;
use host_core::notice::LaneNotice;
use host_core::scheduler::PageWrite;
use host_core::transfer::{Lane, Tag, plan_lane};
use host_plugin_api::ErrorCode;
use host_plugin_api::transfer::{
    self as api, Completion, NOTIFICATION_BYTES, PeerId, Submission, TransferBackend, Write,
};

use super::{BATCH, counted};
use crate::worker::lane_sums;
use crate::worker::link::{Link, Links};

/// What one of our ranks sends of a write to one of the peer's.
pub(super) struct Share {
    pub peer: PeerId,
    pub target: usize,
    pub writes: Vec<Write>,
    /// Digest of the pages in it.
    pub sum: u64,
}

/// Plans and digests what a rank sends of a write. Its last part is complete on rank 0 only when the aux row, which
/// travels from rank 0 to rank 0, is behind it.
///
/// # Errors
/// What is wrong with the link or the write.
pub(super) fn shares(
    links: &Links,
    link: &Link,
    rank: usize,
    write: &PageWrite,
    page_integrity: bool,
) -> Result<Vec<Share>, String> {
    let own = &links.ranks()[rank];
    let layers = write.layers.start as usize..write.layers.end as usize;
    let mut shares = Vec::new();
    for lane in link.lanes.iter().filter(|lane| lane.source == rank) {
        if write.source.is_empty() && (lane.source, lane.target) != (0, 0) {
            continue;
        }
        let peer = link.connection(rank, lane.target);
        let peer = peer.ok_or_else(|| format!("the connection to worker {} is being cut off", write.to))?;
        let theirs = &link.ranks[lane.target];
        let planned = Lane { source: own.share(), target: theirs.share, heads: lane.heads.clone() };
        let pieces = plan_lane(&planned, &write.source, &write.target, layers.clone())
            .map_err(|error| error.to_string())?;
        let pages = (write.first_page as usize..).zip(write.source.iter().copied());
        let sum = match page_integrity {
            true => lane_sums::of(&own.kv, pages, layers.clone(), lane.heads.clone()),
            false => 0,
        };
        let mut writes: Vec<Write> = pieces
            .iter()
            .map(|piece| Write {
                source_region: own.kv_region.0,
                target_region: theirs.kv_region,
                source_offset: piece.source as u64,
                target_offset: piece.target as u64,
                length: piece.length as u32,
                target_generation: theirs.kv_generation,
            })
            .collect();
        if let (Some((row, own_slot, peer_slot)), Some(region), 0) = (&write.aux, own.aux_region, lane.target)
        {
            if *peer_slot >= theirs.aux_rows {
                return Err(format!("decode named aux row {peer_slot}, but has {}", theirs.aux_rows));
            }
            links.aux().write(*own_slot as usize * AUX_ROW_BYTES, &row.encode());
            writes.push(Write {
                source_region: region.0,
                target_region: theirs.aux_region,
                source_offset: u64::from(*own_slot) * AUX_ROW_BYTES as u64,
                target_offset: u64::from(*peer_slot) * AUX_ROW_BYTES as u64,
                length: AUX_ROW_BYTES as u32,
                target_generation: theirs.aux_generation,
            });
        }
        shares.push(Share { peer, target: lane.target, writes, sum });
    }
    Ok(shares)
}

/// One page write's way through the plugin, as one or more submissions.
struct Part {
    left: usize,
    error: Option<String>,
}

/// Page writes that have settled, and how.
pub(super) type Settled = Vec<(Tag, Option<String>)>;

/// See the module.
pub(super) struct Sending {
    links: Arc<Links>,
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
}

impl Sending {
    pub(super) fn new(links: Arc<Links>, rank: usize) -> Self {
        let backend = links.ranks()[rank].backend.clone();
        let max_writes = backend.limits().max_writes.max(1) as usize;
        Self {
            links,
            backend,
            max_writes,
            waiting: VecDeque::new(),
            parts: HashMap::new(),
            last_submission: 0,
            by_submission: HashMap::new(),
            unsettled: Vec::new(),
        }
    }

    /// Whether the plugin is full, or has something unsettled.
    pub(super) fn hurries(&self) -> bool {
        !self.waiting.is_empty() || !self.unsettled.is_empty()
    }

    /// Queues shares of a write, at least one.
    pub(super) fn begin(&mut self, write: &PageWrite, rank: usize, shares: Vec<Share>) {
        let byte = |rank: usize| u8::try_from(rank).unwrap_or(u8::MAX);
        let before = self.waiting.len();
        for Share { peer, target, writes, sum } in shares {
            let fragments = writes.len().div_ceil(self.max_writes).max(1);
            for fragment in 0..fragments {
                let from = fragment * self.max_writes;
                let piece = writes[from..writes.len().min(from + self.max_writes)].to_vec();
                let lane = LaneNotice {
                    notice: write.notice,
                    fragment: u32::try_from(fragment).unwrap_or(u32::MAX),
                    fragments: u32::try_from(fragments).unwrap_or(u32::MAX),
                    sum,
                    alone: write.source.is_empty(),
                    source: byte(rank),
                    target: byte(target),
                };
                self.last_submission += 1;
                let tag = api::Tag(self.last_submission);
                let notification = lane.encode();
                let submission =
                    Submission { peer, notification_length: NOTIFICATION_BYTES as u32, tag, notification };
                self.by_submission.insert(tag, write.tag);
                self.waiting.push_back((write.tag, submission, piece));
            }
        }
        self.parts.insert(write.tag, Part { left: self.waiting.len() - before, error: None });
    }

    /// Hands to the plugin what it has room for; whether that was anything.
    pub(super) fn submit(&mut self) -> (bool, Settled) {
        let (mut busy, mut settled) = (false, Vec::new());
        while let Some((_, submission, writes)) = self.waiting.front() {
            let status = self.backend.submit(submission, writes);
            if status == ErrorCode::WOULD_BLOCK.0 {
                break;
            }
            busy = true;
            if status == 0 {
                self.links.counters().direct.count(writes);
                self.waiting.pop_front();
            } else if let Some((_, submission, _)) = self.waiting.pop_front() {
                let error = format!("the plugin refused the writes: {}", ErrorCode(status).name());
                settled.extend(self.ended(submission.tag, Some(error)));
            }
        }
        (busy, settled)
    }

    /// Starts nothing more of a page write.
    pub(super) fn cancel(&mut self, tag: Tag) -> Settled {
        // What was sent of the room so far is of no use to a later attempt.
        let (dropped, kept): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.waiting).into_iter().partition(|(part, _, _)| *part == tag);
        self.waiting = kept;
        let mut settled = Vec::new();
        for (_, submission, _) in dropped {
            settled.extend(self.ended(submission.tag, Some("cancelled".into())));
        }
        for (submission, part) in &self.by_submission {
            if *part == tag {
                // A submission that has just completed cannot be cancelled any more, which is as good.
                let _late = self.backend.cancel(*submission);
            }
        }
        settled
    }

    /// Takes completions; whether there were any.
    ///
    /// # Errors
    /// The plugin's code when it has failed.
    pub(super) fn poll(&mut self) -> Result<(bool, Settled), ErrorCode> {
        let blank = Completion { tag: api::Tag(0), bytes: 0, status: 0, reserved: 0 };
        let mut completions = [blank; BATCH];
        let count = counted(self.backend.poll(&mut completions))?;
        let mut settled = Vec::new();
        for completion in &completions[..count] {
            if completion.status == 0 {
                settled.extend(self.ended(completion.tag, None));
            } else if let Some(tag) = self.by_submission.get(&completion.tag) {
                if let Some(part) = self.parts.get_mut(tag) {
                    part.error = Some(ErrorCode(completion.status).name().to_owned());
                }
                self.unsettled.push(completion.tag);
            }
        }
        // A failed submission counts as ended only when the plugin says that nothing of it is in flight.
        for submission in std::mem::take(&mut self.unsettled) {
            match self.backend.settled(submission) {
                1 => settled.extend(self.ended(submission, None)),
                _ => self.unsettled.push(submission),
            }
        }
        Ok((count > 0, settled))
    }

    fn ended(&mut self, submission: api::Tag, error: Option<String>) -> Option<(Tag, Option<String>)> {
        let tag = self.by_submission.remove(&submission)?;
        let part = self.parts.get_mut(&tag)?;
        part.left -= 1;
        part.error = part.error.take().or(error);
        if part.left > 0 {
            return None;
        }
        self.parts.remove(&tag).map(|part| (tag, part.error))
    }
}
