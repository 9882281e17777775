//! Computes Qwen3, Llama and Gemma-3 models on the CPU. The bits do not depend on how the work is batched.
//!
//! A model is a Hugging Face directory (config.json and safetensors weights) or a GGUF file, whose quantized weights are
//! expanded to `f32` while they are loaded. Everything behind the module `model` is the same for both: the same weights
//! give the same bits. All arithmetic is [`host_kernels::math`]: activations and sums are `f32`, and weights stay as they are
//! stored. K and V are rounded to the pool's type when they are written to the pool. Attention reads them only from there.
//! Therefore logits and KV bytes do not depend on the batch, the chunks of a prompt, page ids and sizes, layout or threads, and
//! KV from another worker gives the same results as KV that was computed here.
//!
//! Ranks share a model by rows of its matrices (the module `shard`). Each output element is computed by one rank, in the
//! same way for any number of ranks. Inputs that a product needs whole are gathered before it, four times per layer. No rank
//! holds more than its part of any matrix.

mod forward;
mod pages;
mod weights;

use std::path::Path;
use std::sync::Arc;

use host_core::{Batch, SequenceOutput};
use host_kernels::math::Math;

use self::forward::{Activations, Model, Wanted};
use self::weights::Packed;
use super::group::Seat;
use super::model::{LoadError, Loader, Opened, Rotation, Shards};
use super::sampling::outputs_from;
use super::window::LayerPlace;
use super::{Constraint, Executor, ExecutorError, KvMemory, LayersDone, ModelShape};

/// Name and version of this math. Raise the version whenever a change alters any bit of KV or logits.
pub const MATH: &str = "cpu-1";

/// How weights are kept in memory. Both give the same bits, since bf16 widens exactly and nothing is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightStorage {
    /// bf16 as bf16, anything else as f32. It takes the least memory and is the fastest, because decode waits for memory.
    #[default]
    AsStored,
    /// Everything as f32.
    F32,
}

/// How to run a model on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads to compute on. 0 is one per core.
    pub threads: usize,
    /// How weights are kept.
    pub weights: WeightStorage,
}

/// Reads a model's shape from its configuration and headers. It also computes the digest of the weights, for which it reads all of
/// them once. A file below the user's cache directory keeps that digest for later starts.
///
/// # Errors
/// When there is neither a Hugging Face directory nor a GGUF file, or [`CpuExecutor`] could not compute its model. Faults that
/// only the tensors show are not found.
pub fn read_shape(model: &Path) -> Result<ModelShape, LoadError> {
    Opened::at(model).map(|opened| opened.shape(MATH))
}

/// An [`Executor`] for one rank, which holds its part of the model.
pub struct CpuExecutor {
    shape: ModelShape,
    model: Model,
    activations: Activations,
    seat: Seat,
    constraint: Option<Arc<dyn Constraint>>,
}

impl CpuExecutor {
    /// Loads a whole model into memory, for a worker of one rank.
    ///
    /// # Errors
    /// When a file cannot be read or parsed, is truncated, lacks a tensor or has one of another shape or type than the
    /// configuration asks for. Also when the model is of a kind that is not computed here.
    pub fn load(model: &Path, options: CpuOptions) -> Result<Self, LoadError> {
        Self::load_rank(model, options, Seat::alone())
    }

    /// Loads the part of a model that one rank computes, and reads no more of the matrices than that.
    ///
    /// # Errors
    /// As [`load`](CpuExecutor::load), and when the model has fewer query heads than there are ranks.
    pub fn load_rank(model: &Path, options: CpuOptions, seat: Seat) -> Result<Self, LoadError> {
        let opened = Opened::at(model)?;
        let shape = opened.shape(MATH);
        let Opened { config, checkpoint, .. } = opened;
        if seat.ranks() > config.heads {
            return Err(LoadError::Ranks {
                directory: model.to_owned(),
                heads: config.heads,
                ranks: seat.ranks(),
            });
        }
        let math = Math::new(options.threads)
            .map_err(|source| LoadError::Threads { threads: options.threads, source })?;
        let shards = Shards::new(&config, seat.ranks(), seat.rank());
        let memory = Packed { math: &math, widen: options.weights == WeightStorage::F32 };
        let weights = Loader { checkpoint: &checkpoint, memory: &memory }.load(&config, &shards)?;
        let rotation = Rotation::new(&config);
        let slides = config.sliding.as_ref().map(|sliding| sliding.slides.clone());
        let places = LayerPlace::of(&slides.unwrap_or_else(|| vec![false; config.layers]));
        let model = Model { config, window: shape.window(), shards, weights, rotation, places, math };
        Ok(Self { shape, model, activations: Activations::default(), seat, constraint: None })
    }

    /// Computes a batch and returns the logits of all its tokens, `[token][vocabulary]`, instead of sampling. Ranks other than 0
    /// return nothing. It is for tests and for scoring text. Memory grows with tokens times vocabulary.
    ///
    /// # Errors
    /// As [`Executor::forward`].
    pub fn forward_logits(&mut self, kv: &mut KvMemory, batch: &Batch) -> Result<&[f32], ExecutorError> {
        let mut turn = self.seat.turn()?;
        let logits = self.model.forward(
            &mut turn,
            kv,
            batch,
            Wanted::All,
            &mut |_layers| {},
            &mut self.activations,
        )?;
        turn.finish();
        Ok(logits)
    }

    /// Bytes of the matrices that this rank holds.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        weights::bytes(&self.model.weights)
    }
}

impl Executor for CpuExecutor {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn constrain(&mut self, constraint: Arc<dyn Constraint>) {
        self.constraint = Some(constraint);
    }

    fn forward_by_layer(
        &mut self,
        kv: &mut KvMemory,
        batch: &Batch,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<Vec<SequenceOutput>, ExecutorError> {
        // This comes first, because the other ranks learn only of failures after it.
        let mut turn = self.seat.turn()?;
        let constraint = self.constraint.as_deref().filter(|_| turn.rank() == 0);
        if let Some(constraint) = constraint {
            constraint.begins(batch);
        }
        let activations = &mut self.activations;
        let logits = self.model.forward(&mut turn, kv, batch, Wanted::Samples, layers_done, activations)?;
        turn.finish();
        if self.seat.rank() > 0 {
            return Ok(Vec::new());
        }
        let vocabulary = self.shape.vocabulary;
        Ok(outputs_from(logits, vocabulary, &batch.sequences, constraint))
    }
}
