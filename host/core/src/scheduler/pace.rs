//! Keeping the time between two tokens under a target.
//!
//! How long a step takes is learned ([`step_model`]) from what lies between the ends of two of them: computing, and
//! everything around it that decoding requests wait for. Two things follow from it: how many may decode at once, and
//! how many tokens of longer pieces (prompts, recomputation) go into a step that also decodes.
//!
//! The target holds for the mean. A step longer than the target is followed by fewer admissions and never by leaving
//! sequences out of steps: with `n` of them and a step of `a + b·n`, taking turns `m` at a time makes each wait
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

/// What is known of the pace, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PaceStats {
    /// Requests that may decode at once, or 0 without a target.
    pub limit: u32,
    /// Whether not even one sequence at a time stays under the target.
    pub out_of_reach: bool,
    /// What the last step was expected to take.
    pub predicted: Duration,
    /// Expected time of any step.
    pub fixed: Duration,
    /// Expected time per sequence that decodes.
    pub sequence: Duration,
    /// Expected time per 1000 tokens of longer pieces.
    pub thousand_tokens: Duration,
    /// Expected time per 1000 positions of context, over all sequences.
    pub thousand_context: Duration,
    /// Time from the end of a step, or its beginning if no request waited, to its end.
    pub steps: Histogram,
}

/// The controller.
#[derive(Debug)]
pub(super) struct Pace {
    /// Seconds.
    target: Option<f64>,
    model: StepModel,
    /// By the model alone.
    limit: usize,
    most: usize,
    /// The step being computed, and since when a request waits for it.
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

    /// Requests that may decode at once, if that is limited. At most a quarter more than was tried lately: a cost that
    /// grows faster than the model knows shows before it hurts.
    pub(super) fn limit(&self) -> Option<usize> {
        self.target.map(|_| self.limit.min(self.model.largest_seen() * 5 / 4 + 1).min(self.most))
    }

    /// Tokens of longer pieces that fit beside decoding requests, if that is limited.
    pub(super) fn tokens_beside(&self, load: &Load) -> Option<usize> {
        let target = self.target?;
        let [_, _, token, _] = self.model.cost();
        let room = (target - self.model.predict(load)).max(0.0);
        Some(if token > 0.0 { (room / token) as usize } else { 0 })
    }

    /// A step begins.
    pub(super) fn begins(&mut self, now: Time, load: Load) {
        self.predicted = self.model.predict(&load);
        self.step = Some((self.waiting_since.take().unwrap_or(now), load));
    }

    /// A step could not be computed, or nothing can be. What lies between is no step's time.
    pub(super) fn interrupted(&mut self) {
        self.step = None;
        self.waiting_since = None;
    }

    /// A step has ended. `request_waits` says whether a request that decodes waits for the next one.
    pub(super) fn ended(&mut self, now: Time, request_waits: bool) {
        let Some((since, load)) = self.step.take() else { return };
        self.steps.add(now.since(since));
        self.waiting_since = request_waits.then_some(now);
        if self.target.is_some() {
            self.model.learn(load, now.since(since).as_secs_f64());
        }
    }

    /// Sets the limit for requests with so much context each, when so many tokens are to fit beside them.
    pub(super) fn adjust(&mut self, context_each: usize, tokens: usize) {
        let Some(target) = self.target else { return };
        if self.model.steps() == 0 {
            return;
        }
        let [fixed, sequence, token, context] = self.model.cost();
        let fixed = fixed + token * tokens as f64;
        let each = sequence + context * context_each as f64;
        // Infinite when sequences cost nothing. Casts take that, and less than nothing, to the ends of the range.
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
