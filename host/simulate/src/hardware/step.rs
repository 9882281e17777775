//! How long an executor takes for a batch: the roofline of Williams, Waterman and Patterson (2009).
//!
//! ```text
//! step = overhead + max( (dense + attention operations) / (peak · efficiency),
//!                        (weights + KV that is read)    / (bandwidth · efficiency) )
//! ```
//!
//! A cluster file may give measured times of steps instead ([`MeasuredStep`]).
//!
//! Every sequence reads its own KV. KV that several sequences share is read for each of them, as FlashAttention and
//! FlashInfer do without cascades.

use std::time::Duration;

use host_core::Batch;

use super::seconds;
use crate::cluster::MeasuredStep;
use crate::machine::Machine;
use crate::model::{Dtype, Model};

/// How long the steps of one worker take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepCost {
    /// By the work and the machine.
    Roofline(Roofline),
    /// As measured.
    Measured(MeasuredStep),
}

impl StepCost {
    /// The time of a batch, from its beginning to its results.
    #[must_use]
    pub fn takes(&self, batch: &Batch) -> Duration {
        match self {
            StepCost::Roofline(roofline) => roofline.takes(batch),
            StepCost::Measured(step) => step.takes(batch),
        }
    }
}

impl MeasuredStep {
    /// The time of a batch. Sequences of one token continue answers, and the others compute prompts.
    fn takes(&self, batch: &Batch) -> Duration {
        let tokens = batch.sequences.iter().map(|sequence| sequence.tokens.len());
        let (answers, prompts): (Vec<usize>, Vec<usize>) = tokens.partition(|tokens| *tokens == 1);
        let prompts = prompts.iter().sum::<usize>() as f64 * self.prompt_token_us;
        seconds((self.base_us + prompts + answers.len() as f64 * self.sequence_us) / 1e6)
    }
}

/// The constants of one worker's steps by the roofline, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Roofline {
    model: Model,
    /// Per operation.
    operation: f64,
    /// Reading all weights once.
    weights: f64,
    /// Reading one token's KV.
    token: f64,
    /// Every step, whatever its batch.
    fixed: f64,
}

impl Roofline {
    /// The steps of a model with weights of this number type, and so many bytes of KV a token, on so many of these devices. Tensor
    /// parallelism divides all work over them.
    #[must_use]
    pub fn new(model: &Model, weights: Dtype, kv_bytes: f64, machine: &Machine, devices: f64) -> Self {
        // FP8 multiplies at twice the rate. KV in FP8 does not change the number type in which attention computes.
        let rate = if weights == Dtype::Fp8 { 2.0 } else { 1.0 };
        let bandwidth = machine.bandwidth * machine.bandwidth_efficiency * devices;
        Self {
            model: *model,
            operation: 1.0 / (machine.flops * rate * machine.compute_efficiency * devices),
            weights: model.weight_bytes(weights) / bandwidth,
            token: kv_bytes / bandwidth,
            fixed: machine.step_seconds,
        }
    }

    /// The time of a batch, from its beginning to its results.
    #[must_use]
    pub fn takes(&self, batch: &Batch) -> Duration {
        let (mut operations, mut context) = (0.0, 0.0);
        for sequence in &batch.sequences {
            let (start, tokens) = (f64::from(sequence.start), sequence.tokens.len() as f64);
            operations += self.model.dense_flops(tokens) + self.model.attention_flops(start, tokens);
            context += self.model.tokens_read(start, tokens);
        }
        let computing = operations * self.operation;
        let reading = self.weights + context * self.token;
        seconds(self.fixed + computing.max(reading))
    }
}

#[cfg(test)]
mod tests {
    use host_core::Room;
    use host_core::batch::Sequence;
    use host_core::window::WindowPages;

    use super::*;

    fn batch(parts: &[(u32, usize)]) -> Batch {
        let sequences = parts.iter().map(|(start, tokens)| Sequence {
            room: Room(1),
            tokens: vec![0; *tokens],
            start: *start,
            pages: Vec::new(),
            window: WindowPages::default(),
            recompute: 0..0,
            drafted: 0,
            sample: None,
            scored: None,
        });
        Batch { id: 1, sequences: sequences.collect(), layer_group: 0 }
    }

    fn cost() -> Roofline {
        let machine = Machine { bandwidth_efficiency: 1.0, step_seconds: 0.0, ..Machine::PRESETS[0].1 };
        let model = Model::PRESETS[0].1;
        Roofline::new(&model, Dtype::Bf16, model.kv_bytes(Dtype::Fp8), &machine, 2.0)
    }

    #[test]
    fn answers_take_what_reading_weights_and_contexts_takes() {
        // 64 GB and 37 contexts of 55,000 tokens of 128 KiB, at 16 TB/s.
        let bytes = 64e9 + 37.0 * 55_000.0 * 131_072.0;
        let seconds = cost().takes(&batch(&[(54_999, 1); 37])).as_secs_f64();
        assert!((seconds - bytes / 16e12).abs() < 1e-6, "{seconds}");
    }

    #[test]
    fn prompts_take_what_their_operations_take() {
        // 8,192 tokens behind none: 2 · 32e9 each, and attention over half a square, at half of 4.5 PFLOP/s.
        let dense = 2.0 * 32.0e9 * 8192.0;
        let attention = 4.0 * 64.0 * 64.0 * 128.0 * 8192.0 * 8193.0 / 2.0;
        let seconds = cost().takes(&batch(&[(0, 8192)])).as_secs_f64();
        assert!((seconds - (dense + attention) / 2.25e15).abs() < 1e-6, "{seconds}");
    }
    #[test]
    fn measured_steps_take_their_base_and_what_each_prompt_token_and_each_answer_adds() {
        let step = MeasuredStep { base_us: 5_000.0, prompt_token_us: 50.0, sequence_us: 200.0 };
        let cost = StepCost::Measured(step);
        assert_eq!(cost.takes(&batch(&[(9, 1), (70, 1)])), Duration::from_micros(5_400));
        assert_eq!(cost.takes(&batch(&[(9, 1), (0, 100)])), Duration::from_micros(10_200));
    }
}
