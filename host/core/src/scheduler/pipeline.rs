//! Sending a room's pages while its prompt is still computed: whole pages behind each batch, and groups of layers of the
//! pages that the batch completes while later layers are computed.
//!
//! For each attempt prefill keeps a cursor, the number of pages that are sent or that decode holds, and what it has
//! begun of the pages behind it:
//!
//! ```text
//!             LayersDone l: layers of cursor..end            LayersDone m: layers l..m
//!   nothing begun ─────────────────────────────► begun(end, l) ─────────────────► begun(end, m)
//!         ▲                                           │
//!         └────── batch done: remaining layers, ──────┘
//!                 cursor = end
//! ```
//!
//! Neither moves back, so every (page, layer) is sent once in an attempt. The last part, with the aux row, goes when the
//! prompt is computed, behind everything else, so decode counts parts as if there were no layers.

use std::ops::Range;

use super::job::{Begun, Job};
use super::stage::Stage;
use super::{Action, PageWrite, Role, Scheduler};
use crate::aux_row::AuxRow;
use crate::batch::Sequence;
use crate::ids::Room;
use crate::notice::Notice;
use crate::transfer::Tag;

impl Job {
    /// Pages that are whole once the first `computed` positions are, the prompt's last page included when it is all.
    fn whole_pages(&self, computed: usize, page_tokens: usize) -> usize {
        let prompt = self.request.prompt.len();
        if computed >= prompt { prompt.div_ceil(page_tokens) } else { computed / page_tokens }
    }

    /// Pages that the batch being computed completes, if layers of them may be sent before it ends. Only a first attempt
    /// does that; later ones are for what is computed already.
    fn completing(&self, page_tokens: usize) -> Option<Range<usize>> {
        let (end, outgoing) = (self.in_batch?, self.outgoing.as_ref()?);
        let end = self.whole_pages(end, page_tokens);
        (outgoing.attempt == 1 && !outgoing.complete && end > outgoing.cursor).then_some(outgoing.cursor..end)
    }
}

impl Scheduler {
    /// After how many layers news of a batch is wanted, 0 for none: what the sequence with the smallest groups needs.
    pub(super) fn finest_group(&self, sequences: &[Sequence]) -> u32 {
        // Layers of the model are not those of a page where some slide.
        if self.config.role != Role::Prefill || self.config.window.is_some() {
            return 0;
        }
        let groups = sequences.iter().filter_map(|sequence| {
            let pages = self.jobs.get(&sequence.room)?.completing(self.config.page_tokens as usize)?;
            self.config.layer_groups.group(pages.len())
        });
        groups.min().unwrap_or(0)
    }

    /// Sends the finished layers of pages that the batch completes. The last layers go when the batch is done.
    pub(super) fn layers_done(&mut self, batch: u64, layers: u32, actions: &mut Vec<Action>) {
        let rule = self.config.layer_groups;
        if self.config.role != Role::Prefill || batch != self.last_batch || layers >= rule.layers() {
            return;
        }
        let page_tokens = self.config.page_tokens as usize;
        let ready = |(room, job): (&Room, &Job)| {
            let pages = job.completing(page_tokens)?;
            let begun = job.outgoing.as_ref()?.begun.map_or(0, |begun| begun.layers);
            let group = rule.group(pages.len())?;
            (layers >= begun + group).then_some((*room, pages, begun))
        };
        let ready: Vec<(Room, Range<usize>, u32)> = self.jobs.iter().filter_map(ready).collect();
        for (room, pages, begun) in ready {
            let end = pages.end;
            self.send_part(room, pages, begun..layers, actions);
            if let Some(outgoing) = self.jobs.get_mut(&room).and_then(|job| job.outgoing.as_mut()) {
                outgoing.begun = Some(Begun { end, layers });
            }
            self.stats.layer_parts_sent += 1;
        }
    }

    /// Sends what is computed and not sent: whole pages while computing, and everything with the aux row at the end.
    ///
    /// The cursor starts at what decode holds and never moves back within an attempt; a part without pages is sent
    /// only if it is the last.
    pub(super) fn push_pages(&mut self, room: Room, actions: &mut Vec<Action>) {
        let page_tokens = self.config.page_tokens as usize;
        let all = self.config.layer_groups.layers();
        let Some(job) = self.jobs.get_mut(&room) else { return };
        // One that lacks a part of its window gives its pages up: nobody may be reading them.
        if self.config.window.is_some() && matches!(*job.stage, Stage::Loading(_)) {
            return;
        }
        let last = *job.stage == Stage::Inflight;
        // What is computed again for the window alone is there already.
        let end = job.whole_pages(job.computed.max(job.again.end), page_tokens);
        let computing = job.in_batch.is_some();
        let Some(outgoing) = &mut job.outgoing else { return };
        // Another attempt may ask for some pages only.
        let end = end.min(outgoing.end(page_tokens));
        // What was begun is completed when its batch is, and before anything behind it.
        if outgoing.complete || (computing && outgoing.begun.is_some()) || (end <= outgoing.cursor && !last) {
            return;
        }
        // Another attempt's writes read the same aux row and write the same pages: they settle first.
        if outgoing.attempt > 1 && outgoing.sequence == 0 && !outgoing.tags.is_empty() {
            return;
        }
        let cursor = outgoing.cursor;
        let layers = outgoing.begun.take().map_or(0, |begun| {
            assert!(begun.end == end, "{room:?} began pages {cursor}..{} and computed {end}", begun.end);
            begun.layers
        });
        self.send_part(room, cursor..end.max(cursor), layers..all, actions);
    }

    /// Sends some layers of some pages as the room's next part; with the pages' last layers the cursor moves, and with the
    /// prompt's last page goes the aux row.
    fn send_part(&mut self, room: Room, pages: Range<usize>, layers: Range<u32>, actions: &mut Vec<Action>) {
        let page_tokens = self.config.page_tokens as usize;
        let completes = layers.end == self.config.layer_groups.layers();
        let Some(job) = self.jobs.get(&room) else { return };
        let last = completes && *job.stage == Stage::Inflight;
        // Decode gets the window once, and behind everything else.
        let window = if last { self.window_tail(job) } else { Vec::new() };
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let (Some(aux), Some(outgoing)) = (job.aux, &mut job.outgoing) else { return };
        let prefix_pages = outgoing.reserve.decode_prefix_len as usize / page_tokens;
        let wanted = outgoing.reserve.window.clone();
        let window = if last && !wanted.is_empty() { &window[..] } else { &[] };
        let source = [&job.table[pages.clone()], window].concat();
        let first_page = u32::try_from(pages.start - prefix_pages).unwrap_or(u32::MAX);
        let target = &outgoing.reserve.pages[pages.start - prefix_pages..pages.end - prefix_pages];
        let target = [target, if last { &wanted[..] } else { &[] }].concat();
        self.last_tag += 1;
        let tag = Tag(self.last_tag);
        let aux = last.then(|| job.first.clone()).flatten().map(|first| {
            let row = AuxRow {
                room,
                attempt: outgoing.attempt,
                prompt_tokens: outgoing.reserve.prompt_tokens,
                cached_tokens: job.cached_tokens,
                pages: u32::try_from(outgoing.reserve.pages.len() + wanted.len()).unwrap_or(u32::MAX),
                first,
            };
            (row, aux, outgoing.reserve.aux_slot)
        });
        let completed = if completes { u32::try_from(source.len()).unwrap_or(u32::MAX) } else { 0 };
        let (attempt, sequence) = (outgoing.attempt, outgoing.sequence);
        let notice = Notice { room, attempt, sequence, pages: completed, last };
        if completes {
            outgoing.cursor = pages.end;
        }
        outgoing.sequence += 1;
        outgoing.complete = last;
        outgoing.tags.insert(tag);
        self.stats.pages_sent += u64::from(completed);
        let (to, session) = (outgoing.peer, outgoing.session);
        let write = PageWrite { tag, to, session, notice, source, target, first_page, layers, aux };
        actions.push(Action::Write(write));
    }
}
