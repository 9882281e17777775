//! Keeping the time between two tokens under a target.
//!
//! The time of a step is learned ([`step_model`]) from the time between the ends of two steps: computing, and
//! everything around it that decoding requests wait for. Two limits follow from it: how many requests may decode at
//! once, and how many tokens of prompts (and of their recomputation) go into a step that also decodes.
//!
//! The target holds for the mean. After a step that is longer than the target, fewer requests are admitted. No sequence
//! is left out of steps for it: with `n` of them and a step of `a + b·n`, taking turns `m` at a time makes each wait
//! `(a + b·m)·n/m`, which is longer for every `m < n`. For the same reason no request is preempted for the target's
//! sake.
//!
//! One sequence may always decode, however long its steps take.

mod step_model;

use std::time::Duration;

use crate::histogram::Histogram;
use crate::ids::Time;
use step_model::StepModel;

pub(super) use step_model::Load;

/// The limit rises only when its steps are expected to stay this far below the target, so that it does not flap.
const MARGIN: f64 = 0.98;
/// Steps before a target is said to be out of reach.
const STEPS_TO_JUDGE: u64 = 32;

/// The state of the pace, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaceStats {
    /// Requests that may decode at once, or 0 without a target.
    pub limit: u32,
    /// Whether not even one sequence at a time stays under the target.
    pub out_of_reach: bool,
    /// Expected time of the last step.
    pub predicted: Duration,
    /// Expected fixed time of every step.
    pub fixed: Duration,
    /// Expected time per sequence that decodes.
    pub sequence: Duration,
    /// Expected time per 1000 tokens of prompts.
    pub thousand_tokens: Duration,
    /// Expected time per 1000 positions of context, over all sequences.
    pub thousand_context: Duration,
    /// Times of steps. A time counts from the end of the step before, or from the step's own beginning if no request
    /// waited.
    pub steps: Histogram,
}

/// The controller.
#[derive(Debug)]
pub(super) struct Pace {
    /// Seconds.
    target: Option<f64>,
    model: StepModel,
    /// Requests that may decode at once, by the model alone.
    limit: usize,
    most: usize,
    /// Load of the step being computed, and since when a request waits for it.
    step: Option<(Time, Load)>,
    /// When the last step ended, if it left a request that decodes.
    waiting_since: Option<Time>,
    predicted: f64,
    out_of_reach: bool,
    steps: Histogram,
}

impl Pace {
    pub(super) fn new(target: Option<Duration>, most: usize) -> Self {
        Self {
            target: target.map(|target| target.as_secs_f64()),
            model: StepModel::default(),
            limit: 1,
            most,
            step: None,
            waiting_since: None,
            predicted: 0.0,
            out_of_reach: false,
            steps: Histogram::default(),
        }
    }

    /// Whether there is a target.
    pub(super) fn is_set(&self) -> bool {
        self.target.is_some()
    }

    /// Requests that may decode at once, if that is limited. At most about a quarter more than in recent steps, so that
    /// a cost that grows faster than the model knows shows early.
    pub(super) fn limit(&self) -> Option<usize> {
        self.target.map(|_| self.limit.min(self.model.largest_seen() * 5 / 4 + 1).min(self.most))
    }

    /// Tokens of prompts that fit beside decoding requests, if that is limited.
    pub(super) fn tokens_beside(&self, load: &Load) -> Option<usize> {
        let target = self.target?;
        let [_, _, token, _] = self.model.cost();
        let room = (target - self.model.predict(load)).max(0.0);
        Some(if token > 0.0 { (room / token) as usize } else { 0 })
    }

    /// Takes note that a step begins.
    pub(super) fn begins(&mut self, now: Time, load: Load) {
        self.predicted = self.model.predict(&load);
        self.step = Some((self.waiting_since.take().unwrap_or(now), load));
    }

    /// Takes note that a step could not be computed, or that nothing can be. The time until the next step is not
    /// learned.
    pub(super) fn interrupted(&mut self) {
        self.step = None;
        self.waiting_since = None;
    }

    /// Learns from a step that has ended. `request_waits` says whether a request that decodes waits for the next one.
    pub(super) fn ended(&mut self, now: Time, request_waits: bool) {
        let Some((since, load)) = self.step.take() else { return };
        self.steps.add(now.since(since));
        self.waiting_since = request_waits.then_some(now);
        if self.target.is_some() {
            self.model.learn(load, now.since(since).as_secs_f64());
        }
    }

    /// Sets the limit, for requests with `context_each` positions each, so that `tokens` tokens of prompts fit
    /// beside them.
    pub(super) fn adjust(&mut self, context_each: usize, tokens: usize) {
        let Some(target) = self.target else { return };
        if self.model.steps() == 0 {
            return;
        }
        let [fixed, sequence, token, context] = self.model.cost();
        let fixed = fixed + token * tokens as f64;
        let each = sequence + context * context_each as f64;
        // Infinite if sequences cost nothing, negative if the fixed time is over the target. The cast saturates in both
        // cases.
        let within = |target: f64| ((target - fixed) / each) as usize;
        let (most, comfortable) = (within(target), within(MARGIN * target));
        if most < self.limit {
            self.limit = most;
        } else if comfortable > self.limit {
            self.limit = comfortable;
        }
        self.limit = self.limit.clamp(1, self.most);
        let one = fixed + each;
        if self.model.steps() >= STEPS_TO_JUDGE {
            let bound = if self.out_of_reach { 0.95 * target } else { target };
            self.out_of_reach = one > bound;
        }
    }

    pub(super) fn stats(&self) -> PaceStats {
        let [fixed, sequence, token, context] = self.model.cost();
        let time = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        PaceStats {
            limit: self.limit().map_or(0, |limit| u32::try_from(limit).unwrap_or(u32::MAX)),
            out_of_reach: self.out_of_reach,
            predicted: time(self.predicted),
            fixed: time(fixed),
            sequence: time(sequence),
            thousand_tokens: time(1e3 * token),
            thousand_context: time(1e3 * context),
            steps: self.steps,
        }
    }
}
