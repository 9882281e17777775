//! One request on its way through a worker.

use super::stage::{CurrentStage, Stage, Waiting};
use crate::batch::Sampled;
use crate::cache::{Holding, Tokens};
use crate::draft::Drafter;
use crate::hand_over::{Incoming, Outgoing, Reclaiming};
use crate::ids::Time;
use crate::request::Request;

/// A request and everything the worker holds for it.
#[derive(Debug)]
pub(super) struct Job {
    pub request: Request,
    pub submitted: Time,
    /// The job's turn among the requests of all [clients](super::turns).
    pub turn: u64,
    /// The job's place among all requests, in order of arrival.
    pub place: u64,
    /// Private, so that other code can neither assign it nor borrow it mutably. It changes only through [`Job::enter`] and the
    /// methods beside it.
    stage: CurrentStage,
    /// The pages that the job holds.
    pub kv: Holding,
    pub aux: Option<u32>,
    pub answer: Answer,
    /// On prefill workers: the transfer to decode, once decode has asked for it.
    pub outgoing: Option<Outgoing>,
    pub origin: Origin,
    /// Positions that had KV before the job was preempted. They are computed for the second time.
    pub computed_before: usize,
    /// Guesses the job's next tokens.
    pub drafter: Drafter,
}

/// The part of an answer that was drawn so far.
#[derive(Debug, Default)]
pub(super) struct Answer {
    /// Tokens drawn, a stop token included.
    pub tokens: Vec<u32>,
    /// The first token as it was drawn: for the aux row, or kept back while ready.
    pub first: Option<Sampled>,
    /// Whether the client wants no more tokens.
    pub complete: bool,
    /// When the last token was drawn.
    pub last_drawn: Option<Time>,
}

/// Where the KV of a prompt came from, in tokens, for usage and counters.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Origin {
    /// Tokens whose KV was not computed for this request.
    pub cached: u32,
    /// Tokens that were cached here when the job was first admitted, in L1 or in the offload tiers.
    pub promised: u32,
    /// Promised tokens that were in L1.
    pub in_l1: u32,
    /// Pages that a transfer brought.
    pub transferred_pages: u32,
}

impl Origin {
    /// Tokens that came from the offload tiers.
    pub(super) fn offloaded(&self) -> u32 {
        self.promised - self.promised.min(self.in_l1)
    }
}

impl Job {
    pub(super) fn new(mut request: Request, submitted: Time, turn: u64, place: u64) -> Self {
        Self {
            kv: Holding::new(std::mem::take(&mut request.names)),
            request,
            submitted,
            turn,
            place,
            stage: CurrentStage::queued(),
            aux: None,
            answer: Answer::default(),
            outgoing: None,
            origin: Origin::default(),
            computed_before: 0,
            drafter: Drafter::default(),
        }
    }

    /// The job's stage.
    pub(super) fn stage(&self) -> &Stage {
        &self.stage
    }

    /// Moves the job to its next stage, see [`CurrentStage::enter`].
    pub(super) fn enter(&mut self, next: Stage) {
        self.stage.enter(next);
    }

    /// See [`CurrentStage::waiting_mut`].
    pub(super) fn waiting_mut(&mut self) -> Option<&mut Waiting> {
        self.stage.waiting_mut()
    }

    /// See [`CurrentStage::set_in_batch`].
    pub(super) fn set_in_batch(&mut self, until: Option<usize>) {
        self.stage.set_in_batch(until);
    }

    /// See [`CurrentStage::transfer`].
    pub(super) fn transfer(&mut self) -> Option<&mut Incoming> {
        self.stage.transfer()
    }

    /// See [`CurrentStage::received`].
    pub(super) fn received(&mut self) -> Option<&mut Incoming> {
        self.stage.received()
    }

    /// See [`CurrentStage::reclaiming`].
    pub(super) fn reclaiming(&mut self) -> Option<&mut Reclaiming> {
        self.stage.reclaiming()
    }

    /// The tokens whose KV the job holds or wants.
    pub(super) fn tokens(&self) -> Tokens<'_> {
        Tokens {
            request: &self.request,
            output: &self.answer.tokens,
            resumes: self.stage.is_preempted(),
            computed_before: self.computed_before,
        }
    }

    /// The same tokens, and the pages that the job holds.
    pub(super) fn holding(&mut self) -> (Tokens<'_>, &mut Holding) {
        let resumes = self.stage.is_preempted();
        let computed_before = self.computed_before;
        let tokens = Tokens { request: &self.request, output: &self.answer.tokens, resumes, computed_before };
        (tokens, &mut self.kv)
    }

    /// Whether the job has continued, or is to continue, after a preemption.
    pub(super) fn was_preempted(&self) -> bool {
        self.computed_before > 0
    }

    /// Tokens known so far.
    pub(super) fn known(&self) -> usize {
        self.request.prompt.len() + self.answer.tokens.len()
    }

    /// Tokens that are known and have no KV.
    pub(super) fn uncomputed(&self) -> usize {
        self.known() - self.kv.computed()
    }

    /// Whether this token ends the answer.
    pub(super) fn is_stop(&self, token: u32) -> bool {
        !self.request.ignore_stop && self.request.stop_tokens.contains(&token)
    }

    /// How many of the drawn tokens belong to the answer, if `drafted` tokens were drafted: those up to the token that
    /// ends it.
    pub(super) fn taken(&self, drawn: &[Sampled], drafted: usize) -> usize {
        let left = (self.request.max_new_tokens as usize).saturating_sub(self.answer.tokens.len());
        let most = if self.answer.complete { 1 } else { left.min(drafted + 1).max(1) };
        let drawn = &drawn[..drawn.len().min(most)];
        drawn.iter().position(|drawn| self.is_stop(drawn.token)).map_or(drawn.len(), |last| last + 1)
    }

    /// Whether a batch or a transfer of ours may be reading the job's pages.
    pub(super) fn is_read(&self) -> bool {
        self.stage.in_batch().is_some()
            || self.outgoing.as_ref().is_some_and(|outgoing| !outgoing.tags.is_empty())
    }

    /// Takes note of how much of the prompt was cached at admission.
    pub(super) fn begin_with(&mut self, cached: usize) {
        let cached = u32::try_from(cached).unwrap_or(u32::MAX);
        (self.origin.cached, self.origin.promised, self.origin.in_l1) = (cached, cached, cached);
    }

    /// Corrects how much of the prompt is cached or restored.
    pub(super) fn has_cached(&mut self, tokens: usize) {
        self.origin.cached = u32::try_from(tokens).unwrap_or(u32::MAX);
        self.origin.promised = self.origin.cached;
    }
}
