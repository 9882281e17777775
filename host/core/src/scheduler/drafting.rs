//! Drafts in a worker's steps: which requests guess, how far, and what becomes of it.
//!
//! A step that computes no prompt has guesses behind the answers that it goes on with. Where prompts are computed the step is busy with them, and guesses would only make it longer. The pages for guesses
//! come from what is free or cached: no request is preempted for them, and those that a step did not need are given back after it.

use std::collections::BTreeMap;

use super::Scheduler;
use super::job::Job;
use super::pace::Load;
use crate::ids::Room;

/// Tokens that are taken into the requests' indexes in one step at most, so that prompts that end at once delay no step.
const INDEXED_AT_ONCE: usize = 4096;
/// Guesses of a step at most, unless one request may guess more. Each has a row of logits.
const MOST_IN_STEP: usize = 128;

impl Scheduler {
    /// Guesses for the next step, by request.
    pub(super) fn draft(&mut self) -> BTreeMap<Room, Vec<u32>> {
        let mut drafts = BTreeMap::new();
        let most = self.config.draft_tokens as usize;
        // What a state has taken in cannot be taken out of it.
        let keeps_state = self.config.window.is_some_and(|window| window.keeps_state());
        if most == 0 || keeps_state || self.config.role.sends_kv() {
            return drafts;
        }
        let in_step = &self.running[..self.running.len().min(self.config.max_batch as usize)];
        let jobs = || in_step.iter().filter_map(|room| self.jobs.get(room));
        if jobs().any(|job| job.uncomputed() != 1) {
            return drafts;
        }
        let load = Load { sequences: in_step.len(), tokens: 0, context: jobs().map(Job::known).sum() };
        // At least one: what a token costs is learned from steps that have some.
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

    /// A step has verified a request's guess, or as much of it as was not too `late`.
    pub(super) fn learn_draft(&mut self, room: Room, drafted: usize, right: usize, late: bool) {
        let Some(job) = self.jobs.get_mut(&room) else { return };
        if right > 0 || !late {
            job.drafter.learn(drafted, right, self.config.draft_tokens as usize);
        }
        self.stats.drafted_tokens += (if late { right } else { drafted }) as u64;
        self.stats.drafts_right += right as u64;
    }
}
