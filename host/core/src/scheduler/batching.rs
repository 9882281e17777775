//! Continuous batching with chunked prefill.

use std::collections::BTreeMap;

use super::ending::Ending;
use super::job::Job;
use super::pace::Load;
use super::stage::Stage;
use super::{Action, Scheduler};
use crate::batch::{Batch, Sampled, SequenceOutput, Undrawn};
use crate::ids::{Room, Time};
use crate::request::{Failure, FailureCode, FinishReason, Usage};

/// Most tokens of a batch that are scored. The logits of all of them are in memory at once: some hundred kilobytes for each.
pub(super) const MOST_SCORED: usize = 128;
/// The same for a batch that decodes: to score a token takes about as long as to draw one.
const MOST_SCORED_BESIDE: usize = 16;

impl Scheduler {
    /// Builds the next batch if none is being computed: every sequence that decodes, then prompt chunks in order of
    /// urgency and arrival while tokens are left. If pages are short, it drops drafts, frees spare pages, shortens
    /// chunks, gives up saves, and at last preempts requests.
    pub(super) fn build_batch(&mut self, now: Time, actions: &mut Vec<Action>) {
        if self.computing {
            return;
        }
        let mut most = self.config.chunk_tokens as usize;
        let mut give_up = false;
        let mut drafts = self.draft();
        let plan = loop {
            let plan = self.plan_batch(now, most, &drafts);
            if self.grow(&plan, give_up) {
                break plan;
            }
            // No request gives up pages for a draft.
            if !drafts.is_empty() {
                drafts.clear();
                continue;
            }
            if self.release_spares() {
                continue;
            }
            if let Some(shortest) = self.cache.shortest_chunk(give_up).filter(|shortest| most > *shortest) {
                most = (most / 2).max(shortest);
                continue;
            }
            if !give_up {
                give_up = true;
                continue;
            }
            if !self.preempt_one(now) {
                // Transfers under way or the quarantine have the missing pages. Both come to an end.
                self.pace.interrupted();
                return;
            }
            (most, give_up) = (self.config.chunk_tokens as usize, false);
        };
        let mut sequences = Vec::with_capacity(plan.len());
        let mut load = Load::default();
        let mut prompts = 0;
        for (room, end) in plan {
            let Some(job) = self.jobs.get_mut(&room) else { continue };
            let draft = drafts.get(&room).map_or(&[][..], Vec::as_slice);
            sequences.push(self.cache.sequence(&job.tokens(), &job.kv, end, draft));
            match end - draft.len() - job.kv.computed() {
                1 => load.sequences += 1,
                more => prompts += more,
            }
            load.tokens += draft.len();
            load.context += end;
            job.set_in_batch(Some(end));
            self.turns.serve(job.turn);
        }
        load.tokens += prompts;
        if sequences.is_empty() {
            // The requests that waited for this step have ended meanwhile.
            self.pace.interrupted();
            return;
        }
        self.computing = true;
        if sequences.iter().any(|sequence| sequence.scored.is_some()) {
            // Its time says nothing about steps that only compute and draw.
            self.pace.interrupted();
        } else {
            self.step = (prompts > 0).then_some((now, prompts));
            self.pace.begins(now, load);
        }
        self.last_batch += 1;
        let layer_group = self.finest_group(&sequences);
        actions.push(Action::Run(Batch { id: self.last_batch, sequences, layer_group }));
    }

    /// The rooms that are computed next, each with the position up to which it is computed: at most `most` tokens of prompts,
    /// and answers with their drafts.
    fn plan_batch(&self, now: Time, most: usize, drafts: &BTreeMap<Room, Vec<u32>>) -> Vec<(Room, usize)> {
        let decodes = |room: &&Room| self.jobs.get(*room).is_some_and(|job| job.uncomputed() == 1);
        let mut prompts: Vec<&Room> = self.running.iter().filter(|room| !decodes(room)).collect();
        if self.has_urgencies() {
            let most_urgent = self.most_urgent_priority(prompts.iter().copied());
            prompts.sort_by_cached_key(|room| self.jobs.get(*room).map(|job| job.urgency(now, most_urgent)));
        }
        let order = self.running.iter().filter(decodes).chain(prompts);
        let mut plan = Vec::new();
        let mut chunk_left = most;
        let mut scored_left = MOST_SCORED;
        let mut beside = Load::default();
        for room in order {
            if plan.len() >= self.config.max_batch as usize {
                break;
            }
            let Some(job) = self.jobs.get(room) else { continue };
            let missing = job.uncomputed();
            if missing == 1 {
                beside.sequences += 1;
                beside.context += job.known();
            } else if beside.sequences > 0 && beside.tokens == 0 {
                chunk_left = chunk_left.min(self.chunk_beside(&beside));
                scored_left = scored_left.min(MOST_SCORED_BESIDE);
            }
            let draft = drafts.get(room).map_or(0, Vec::len);
            let count = if missing == 1 { 1 + draft } else { missing.min(chunk_left) };
            if count == 0 {
                break;
            }
            let count = match job.request.scores {
                Some(_) if scored_left == 0 => continue,
                Some(_) => count.min(scored_left),
                None => count,
            };
            if job.request.scores.is_some() {
                scored_left -= count;
            }
            if missing > 1 {
                chunk_left -= count;
                beside.tokens += count;
            }
            plan.push((*room, job.kv.computed() + count));
        }
        plan
    }

    pub(super) fn batch_done(&mut self, now: Time, outputs: &[SequenceOutput], actions: &mut Vec<Action>) {
        self.stats.batches += 1;
        if let Some((since, tokens)) = self.step.take() {
            self.cache.learn_computing(tokens, now.since(since));
        }
        let mut ends = self.batch_left(actions);
        for output in outputs {
            // Rooms that ended while the batch ran are not in `ends` any more.
            if let Some(end) = ends.remove(&output.room) {
                self.sequence_done(now, output, end, actions);
            }
        }
        // An executor that leaves sequences unanswered has failed for them.
        for room in ends.into_keys() {
            let text = "the executor gave no answer for this sequence";
            self.fail(now, room, Failure::new(FailureCode::Executor, text), actions);
        }
        self.keep_pace(now);
    }

    /// Learns from the step that has ended.
    fn keep_pace(&mut self, now: Time) {
        let running = || self.running.iter().filter_map(|room| self.jobs.get(room));
        let decodes = running().any(|job| !job.answer.tokens.is_empty());
        let chunks = self.config.role.mixes_steps() || running().any(|job| job.uncomputed() > 1);
        let context: usize = running().map(Job::known).sum();
        let each = context.div_ceil(self.running.len().max(1));
        self.pace.ended(now, decodes);
        self.pace.adjust(each, if chunks { self.config.page_tokens as usize } else { 0 });
    }

    pub(super) fn batch_failed(&mut self, now: Time, message: &str, actions: &mut Vec<Action>) {
        self.pace.interrupted();
        for room in self.batch_left(actions).into_keys() {
            let text = format!("the model could not be computed: {message}");
            self.fail(now, room, Failure::new(FailureCode::Executor, text), actions);
        }
    }

    /// Ends the batch, which no longer touches any page. Returns its rooms that still exist, each with the position up
    /// to which it was computed.
    fn batch_left(&mut self, actions: &mut Vec<Action>) -> BTreeMap<Room, usize> {
        assert!(self.computing, "a batch was answered that was not asked for");
        self.computing = false;
        let cleared = self.cache.batch_ended();
        self.finish_clearing(cleared, actions);
        let mut ends = BTreeMap::new();
        // Requests of the batch that still exist are all in the list of running ones.
        for room in &self.running {
            let Some(job) = self.jobs.get_mut(room) else { continue };
            if let Some(end) = job.stage().in_batch() {
                job.set_in_batch(None);
                ends.insert(*room, end);
            }
        }
        ends
    }

    fn sequence_done(&mut self, now: Time, output: &SequenceOutput, end: usize, actions: &mut Vec<Action>) {
        let room = output.room;
        let Some(job) = self.jobs.get_mut(&room) else { return };
        let (prompt, known, begun) = (job.request.prompt.len(), job.known(), !job.answer.tokens.is_empty());
        let (before, complete) = (job.kv.computed(), job.answer.complete);
        let scored = job.request.scores.map(|_top| end.min(prompt - 1).saturating_sub(before));
        let drafted = end.saturating_sub(known);
        let drawn = &output.sampled[..job.taken(&output.sampled, drafted)];
        // From the first drafted token on that was not drawn, the KV is wrong.
        let mut end = end.min(known + drawn.len().saturating_sub(1));
        let late = self.config.may_draw_late() && output.undrawn == Some(Undrawn::Late);
        let nothing_yet = late && drawn.is_empty() && end == known;
        if nothing_yet {
            // The last known token counts as not computed: the next batch draws behind it.
            end = known - 1;
        }
        self.stats.late_draws += u64::from(late);
        job.kv.has_computed(end);
        // The first positions were computed for the window alone, the next ones had been computed before a preemption.
        let known_from = before.max(end.min(job.kv.recompute().end));
        let recomputed = end.min(job.computed_before).saturating_sub(known_from);
        let new = end - known_from - recomputed;
        self.stats.window_recomputed_tokens += (known_from - before) as u64;
        self.stats.recomputed_tokens += recomputed as u64;
        if known_from + recomputed >= prompt {
            self.stats.decode_tokens += new as u64;
        } else {
            self.stats.prefill_tokens += new as u64;
        }
        // For a preempted request that had begun its answer this was done before.
        if end >= prompt && !begun {
            self.prompt_ready(room, actions);
        }
        if drafted > 0 {
            let right = drawn.len().saturating_sub(1);
            // A late draw says nothing about the rest of the guess.
            self.learn_draft(room, drafted, right, late);
            if let Some(job) = self.jobs.get_mut(&room) {
                self.cache.trim(&mut job.kv, end.max(known));
            }
        }
        self.keep_computed(room, before);
        if let Some(wanted) = scored {
            return self.scored(now, room, (before, wanted), &output.scored, actions);
        }
        if drawn.is_empty() && end == known {
            let text = "the executor drew no token where one was asked for";
            let failure = match &output.undrawn {
                Some(Undrawn::Refused(reason)) => Failure::new(FailureCode::Invalid, reason.clone()),
                Some(Undrawn::Failed(reason)) => Failure::new(FailureCode::Executor, reason.clone()),
                Some(Undrawn::Late) | None => Failure::new(FailureCode::Executor, text),
            };
            return self.fail(now, room, failure, actions);
        }
        if nothing_yet && complete {
            return self.finish(now, room, FinishReason::Stop, actions);
        }
        for sampled in drawn {
            self.drawn(now, room, sampled, actions);
        }
        self.push_pages(room, actions);
    }

    /// Takes over the log probabilities of `wanted` tokens of a prompt, those behind position `before`, and ends the request behind
    /// the last one.
    fn scored(
        &mut self,
        now: Time,
        room: Room,
        (before, wanted): (usize, usize),
        tokens: &[Sampled],
        actions: &mut Vec<Action>,
    ) {
        if tokens.len() != wanted {
            let text = "the executor gave no log probabilities where they were asked for";
            return self.fail(now, room, Failure::new(FailureCode::Executor, text), actions);
        }
        if wanted > 0 {
            let first = u32::try_from(before + 1).unwrap_or(u32::MAX);
            actions.push(Action::EmitScores { room, first, tokens: tokens.to_vec() });
        }
        if self.jobs.get(&room).is_some_and(|job| job.uncomputed() == 0) {
            self.finish(now, room, FinishReason::Length, actions);
        }
    }

    /// Reports that a prompt's KV is complete: once for each request, before its first token.
    pub(super) fn prompt_ready(&mut self, room: Room, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get(&room) else { return };
        let prompt = job.request.prompt.len();
        let covered = prompt.div_ceil(self.config.page_tokens as usize);
        let pages = job.kv.pages(0..covered).to_vec();
        let tokens = u32::try_from(prompt).unwrap_or(u32::MAX);
        let (cached_tokens, transferred_pages) = (job.origin.cached, job.origin.transferred_pages);
        let offload_tokens = job.origin.offloaded();
        let told =
            Action::PromptReady { room, tokens, pages, cached_tokens, offload_tokens, transferred_pages };
        actions.push(told);
        self.count_origin(room);
    }

    /// Takes over a drawn token: answers the client, and ends the request if it was the last.
    pub(super) fn drawn(&mut self, now: Time, room: Room, sampled: &Sampled, actions: &mut Vec<Action>) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        if job.answer.complete {
            return self.finish(now, room, FinishReason::Stop, actions);
        }
        if let Some(last) = job.answer.last_drawn.replace(now) {
            self.stats.between_tokens.add(now.since(last));
        }
        job.answer.tokens.push(sampled.token);
        if job.outgoing.is_some() {
            job.answer.first = Some(sampled.clone());
            job.enter(Stage::Inflight);
            self.running.retain(|other| *other != room);
            self.transfer_moved(now, room);
            return;
        }
        let stop = job.is_stop(sampled.token);
        let full = job.answer.tokens.len() >= job.request.max_new_tokens as usize;
        if !stop {
            actions.push(Action::Emit { room, token: sampled.clone() });
        }
        if stop || full {
            let reason = if stop { FinishReason::Stop } else { FinishReason::Length };
            self.finish(now, room, reason, actions);
        }
    }

    /// Ends an answer of which the client wants no more. Does nothing before the first token. If a batch computes the next
    /// token, the request ends after that batch, and the token is dropped.
    pub(super) fn end_answer(&mut self, now: Time, room: Room, actions: &mut Vec<Action>) {
        let begun = |job: &&mut Job| job.outgoing.is_none() && !job.answer.tokens.is_empty();
        let Some(job) = self.jobs.get_mut(&room).filter(begun) else { return };
        match job.stage().in_batch() {
            Some(_) => job.answer.complete = true,
            None => self.finish(now, room, FinishReason::Stop, actions),
        }
    }

    pub(super) fn finish(&mut self, now: Time, room: Room, reason: FinishReason, actions: &mut Vec<Action>) {
        self.keep(room);
        let Some(job) = self.jobs.remove(&room) else { return };
        let usage = Usage {
            prompt_tokens: u32::try_from(job.request.prompt.len()).unwrap_or(u32::MAX),
            output_tokens: u32::try_from(job.answer.tokens.len()).unwrap_or(u32::MAX),
            cached_tokens: job.origin.cached,
            offload_tokens: job.origin.offloaded(),
            transferred_pages: job.origin.transferred_pages,
        };
        self.stats.finished += 1;
        actions.push(Action::Finish { room, reason, usage });
        self.retire(now, room, job, Ending::Complete, actions);
    }
}
