//! Drafts in a worker's steps: which requests guess, how far, and what they learn from the result.
//!
//! A step that computes no prompt has guesses behind its answers. A step that computes prompts is busy with them, and guesses would
//! only make it longer. Pages for guesses are free or cached ones: no request is preempted for them. Pages that a step did not need
//! are given back after it.

use std::collections::BTreeMap;

use super::Scheduler;
use super::job::Job;
use super::pace::Load;
use crate::ids::Room;

/// Most tokens that one step adds to the requests' indexes, so that prompts that end at the same time do not delay a
/// step.
const INDEXED_AT_ONCE: usize = 4096;
/// Most guessed tokens of a step, unless one request alone may guess more. Each takes a row of logits.
const MOST_IN_STEP: usize = 128;

impl Scheduler {
    /// Guesses for the next step, by request.
    pub(super) fn draft(&mut self) -> BTreeMap<Room, Vec<u32>> {
        let mut drafts = BTreeMap::new();
        let most = self.config.draft_tokens as usize;
        if most == 0 || !self.cache.may_be_cut() || !self.config.role.draws_whole_answers() {
            return drafts;
        }
        let in_step = &self.running[..self.running.len().min(self.config.max_batch as usize)];
        let jobs = || in_step.iter().filter_map(|room| self.jobs.get(room));
        if jobs().any(|job| job.uncomputed() != 1) {
            return drafts;
        }
        let load = Load { sequences: in_step.len(), tokens: 0, context: jobs().map(Job::known).sum() };
        // At least one, because the cost of a guessed token is learned from steps that have some.
        let room = self.pace.tokens_beside(&load).map_or(usize::MAX, |room| room.max(1));
        let mut left = room.min((self.config.chunk_tokens as usize / 8).min(MOST_IN_STEP).max(most));
        let mut unindexed = INDEXED_AT_ONCE;
        for room in in_step {
            let Some(job) = self.jobs.get_mut(room) else { continue };
            if job.answer.tokens.is_empty() || job.answer.complete {
                continue;
            }
            let Job { request, answer, drafter, .. } = job;
            let prompt = &request.prompt;
            // A step draws one token more than it drafts.
            let wanted = (request.max_new_tokens as usize).saturating_sub(answer.tokens.len() + 1);
            let at = |position: usize| match position.checked_sub(prompt.len()) {
                None => prompt[position],
                Some(drawn) => answer.tokens[drawn],
            };
            let known = prompt.len() + answer.tokens.len();
            let draft = drafter.guess(known, most.min(wanted).min(left), at, &mut unindexed);
            left -= draft.len();
            if !draft.is_empty() {
                drafts.insert(*room, draft);
            }
        }
        drafts
    }

    /// Learns from the guess of a request that a step has verified. With `late` a draw came too late, so the rest of
    /// the guess is not verified.
    pub(super) fn learn_draft(&mut self, room: Room, drafted: usize, right: usize, late: bool) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        if right > 0 || !late {
            job.drafter.learn(drafted, right, self.config.draft_tokens as usize);
        }
        self.stats.drafted_tokens += (if late { right } else { drafted }) as u64;
        self.stats.drafts_right += right as u64;
    }
}
