//! Computes Qwen3 and Llama models on the CPU, bit for bit the same however the work is batched.
//!
//! A model is a Hugging Face directory: config.json and safetensors weights. All arithmetic is
//! [`host_kernels::math`]: activations and sums are `f32`, weights stay as they are stored, and K and V are rounded to
//! the pool's type when they are written there, which is the only place attention reads them from. Logits and KV bytes
//! therefore do not depend on the batch, the chunks of a prompt, page ids and sizes, layout or threads, and KV that came
//! from another worker is as good as our own.

mod checkpoint;
mod config;
mod error;
mod forward;
mod identity;
mod pages;
mod weights;

use std::path::Path;

use host_core::{Batch, SequenceOutput};
use host_kernels::math::{Math, RopeFrequencies};

use self::checkpoint::Checkpoint;
use self::config::ModelConfig;
pub use self::error::LoadError;
use self::forward::{Activations, Model, Wanted};
use self::weights::Loader;
use super::sampling::sample;
use super::{Executor, ExecutorError, KvMemory, LayersDone, ModelShape};

/// Name and version of this math. To be raised whenever a change alters any bit of KV or logits.
pub const MATH: &str = "cpu-1";

/// How weights are kept in memory. Both give the same bits, since bf16 widens exactly and nothing is rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightStorage {
    /// bf16 as bf16, anything else as f32: least memory, and fastest, because decoding waits for memory.
    #[default]
    AsStored,
    /// Everything as f32.
    F32,
}

/// How to run a model on the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads to compute on; 0 is one per core.
    pub threads: usize,
    /// How weights are kept.
    pub weights: WeightStorage,
}

/// Reads what the host must know of a model: configuration, headers and samples of the weights, at most 1 MiB of data per
/// weight file.
///
/// # Errors
/// When the directory holds no model that [`CpuExecutor`] could compute, as far as that shows without its tensors.
pub fn read_shape(directory: &Path) -> Result<ModelShape, LoadError> {
    open(directory).map(|(_, _, shape)| shape)
}

fn open(directory: &Path) -> Result<(ModelConfig, Checkpoint, ModelShape), LoadError> {
    let (bytes, config) = config::read(directory)?;
    let checkpoint = Checkpoint::open(directory)?;
    let shape = ModelShape {
        layers: config.layers,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        vocabulary: config.vocabulary,
        max_positions: config.max_positions,
        kv_dtype: config.kv_dtype,
        weights: identity::digest(&bytes, &checkpoint)?,
        math: MATH.to_owned(),
    };
    Ok((config, checkpoint, shape))
}

/// An [`Executor`] for one rank that holds the whole model.
pub struct CpuExecutor {
    shape: ModelShape,
    model: Model,
    activations: Activations,
}

impl CpuExecutor {
    /// Loads a model into memory.
    ///
    /// # Errors
    /// When a file cannot be read or parsed, is truncated, lacks a tensor or has one of another shape or type than
    /// config.json asks for; and when the model is of a kind that is not computed here.
    pub fn load(directory: &Path, options: CpuOptions) -> Result<Self, LoadError> {
        let (config, checkpoint, shape) = open(directory)?;
        let math = Math::new(options.threads)
            .map_err(|source| LoadError::Threads { threads: options.threads, source })?;
        let loader =
            Loader { math: &math, checkpoint: &checkpoint, widen: options.weights == WeightStorage::F32 };
        let weights = loader.load(&config)?;
        let rope = RopeFrequencies::new(config.head_dim, config.rope_theta, config.rope_scaling);
        Ok(Self { shape, model: Model { config, weights, rope, math }, activations: Activations::default() })
    }

    /// Computes a batch and returns the logits of all its tokens, `[token][vocabulary]`, instead of sampling. For tests
    /// and for scoring text; memory grows with tokens times vocabulary.
    ///
    /// # Errors
    /// As [`Executor::forward`].
    pub fn forward_logits(&mut self, kv: &mut KvMemory, batch: &Batch) -> Result<&[f32], ExecutorError> {
        self.model.forward(kv, batch, Wanted::All, &mut |_layers| {}, &mut self.activations)
    }
}

impl Executor for CpuExecutor {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn forward_by_layer(
        &mut self,
        kv: &mut KvMemory,
        batch: &Batch,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<Vec<SequenceOutput>, ExecutorError> {
        let logits = self.model.forward(kv, batch, Wanted::Samples, layers_done, &mut self.activations)?;
        let mut rows = logits.chunks_exact(self.shape.vocabulary);
        let output = |sequence: &host_core::Sequence| {
            let row = sequence.sample.and_then(|sampling| rows.next().map(|row| (sampling, row)));
            let sampled = row.map(|(sampling, row)| sample(row, &sampling, sequence.end() as u64));
            SequenceOutput { room: sequence.room, sampled }
        };
        Ok(batch.sequences.iter().map(output).collect())
    }
}
