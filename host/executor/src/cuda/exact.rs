//! A rank's part of a model in exact math: the forward pass of the CPU executor, step by step, on a device.

use std::sync::Arc;

use host_core::{Batch, Sequence};
use host_kernels::cuda::batch::{Attention, KvView};
use host_kernels::cuda::exact::{Exact, Matrix};
use host_kernels::cuda::{Array, CudaError, CudaStream, Device, WaitsFor};
use host_kernels::math::Heads;

use super::arrays::{BatchArrays, BatchMemory};
use super::{checked_pool, view};
use crate::group::Turn;
use crate::model::{
    Layer, LoadError, Loader, MatrixSource, ModelConfig, Opened, Rotation, Shards, WeightMemory, Weights,
};
use crate::{ExecutorError, KvMemory};

type Vector = Array<f32>;

/// A rank's part of a model, ready to compute batches.
pub(super) struct ExactModel {
    config: ModelConfig,
    shards: Shards,
    weights: Weights<Matrix, Vector>,
    rotation: Rotation,
    math: Exact,
    batch: BatchMemory,
    activations: Activations,
    logits: Vec<f32>,
}

/// Activations on the device, kept between batches. They are as large as the largest batch so far.
struct Activations {
    residual: Vector,
    normed: Vector,
    query_key_value: Vector,
    attended: Gathered,
    added: Gathered,
    gate_up: Vector,
    gated: Gathered,
    logits: Gathered,
}

/// Rows of which every rank computes some columns.
struct Gathered {
    mine: Vector,
    whole: Vector,
    /// Copies of `mine` and `whole` on the host, where ranks exchange them.
    own: Vec<f32>,
    all: Vec<f32>,
}

impl Gathered {
    fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let array = || Array::new(device, 1);
        Ok(Self { mine: array()?, whole: array()?, own: Vec::new(), all: Vec::new() })
    }

    /// Makes room for this rank's columns and returns it.
    fn mine(&mut self, rows: usize, columns: usize) -> Result<&mut Vector, CudaError> {
        self.mine.reserve(rows * columns)?;
        Ok(&mut self.mine)
    }

    /// Puts the ranks' columns side by side, on every rank.
    fn gather(
        &mut self,
        turn: &mut Turn<'_>,
        stream: &CudaStream,
        rows: usize,
        columns: &[std::ops::Range<usize>],
    ) -> Result<&Vector, ExecutorError> {
        if turn.ranks() == 1 {
            return Ok(&self.mine);
        }
        self.own.resize(rows * columns[turn.rank()].len(), 0.0);
        self.mine.download(stream, &mut self.own)?;
        turn.gather_columns(&mut self.own, columns, &mut self.all)?;
        self.whole.reserve(self.all.len())?;
        self.whole.upload(stream, &self.all)?;
        Ok(&self.whole)
    }
}

impl Activations {
    fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let array = || Array::new(device, 1);
        Ok(Self {
            residual: array()?,
            normed: array()?,
            query_key_value: array()?,
            attended: Gathered::new(device)?,
            added: Gathered::new(device)?,
            gate_up: array()?,
            gated: Gathered::new(device)?,
            logits: Gathered::new(device)?,
        })
    }
}

/// Copies weights to the device as they are stored.
struct OnDevice<'a> {
    device: &'a Arc<Device>,
    math: &'a Exact,
}

impl WeightMemory for OnDevice<'_> {
    type Matrix = Matrix;
    type Vector = Vector;

    fn matrix(&self, source: &MatrixSource<'_>) -> Result<Matrix, LoadError> {
        let bytes = source
            .outputs
            .checked_mul(source.inputs)
            .and_then(|elements| elements.checked_mul(source.element.bytes()))
            .ok_or_else(|| source.too_large())?;
        let mut rows = vec![0; bytes];
        source.read(0..source.outputs, &mut rows)?;
        Ok(self.math.upload_matrix(&rows, source.element, source.outputs, source.inputs)?)
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vector, LoadError> {
        let mut vector = Array::new(self.device, values.len())?;
        vector.upload(self.math.stream(), &values)?;
        Ok(vector)
    }
}

impl ExactModel {
    pub fn load(device: &Arc<Device>, opened: Opened, shards: Shards) -> Result<Self, LoadError> {
        let Opened { config, checkpoint, .. } = opened;
        let math = Exact::new(device, device.stream()?)?;
        let memory = OnDevice { device, math: &math };
        let weights = Loader { checkpoint: &checkpoint, memory: &memory }.load(&config, &shards)?;
        Ok(Self {
            rotation: Rotation::new(&config),
            batch: BatchMemory::new(device)?,
            activations: Activations::new(device)?,
            logits: Vec::new(),
            config,
            shards,
            weights,
            math,
        })
    }

    /// Computes a batch together with the other ranks. Rank 0 gets the logits of each sequence's last `wanted` rows, in order. The
    /// other ranks get nothing.
    pub fn forward(
        &mut self,
        turn: &mut Turn<'_>,
        kv: &mut KvMemory,
        batch: &Batch,
        wanted: impl Fn(&Sequence) -> usize,
    ) -> Result<&[f32], ExecutorError> {
        // Other streams use the pool after this call, so it always waits for its stream. That includes batches that read no logits,
        // and launches before an error or a panic.
        let end = WaitsFor::new(self.activations.residual.device(), self.math.stream());
        let computed = self.compute(turn, kv, batch, wanted);
        end.wait()?;
        computed?;
        Ok(if turn.rank() == 0 { &self.logits } else { &[] })
    }

    /// As [`forward`](Self::forward), without waiting for the end.
    fn compute(
        &mut self,
        turn: &mut Turn<'_>,
        kv: &KvMemory,
        batch: &Batch,
        wanted: impl Fn(&Sequence) -> usize,
    ) -> Result<(), ExecutorError> {
        let pool = checked_pool(&self.config, &self.shards, kv, batch)?;
        let order: Vec<usize> = (0..batch.sequences.len()).collect();
        let (stream, sequences) = (self.math.stream(), &batch.sequences);
        let mut arrays = self.batch.lay_out(stream, sequences, &order, &self.rotation, wanted)?;
        arrays.all.copy_from(self.math.stream(), &arrays.source, arrays.words)?;
        self.embed(turn, &batch.sequences, &arrays)?;
        for index in 0..self.config.layers {
            self.attention(turn, &arrays, &view(kv.layout(), pool, index), index)?;
            self.mlp(turn, arrays.rows.rows, index)?;
        }
        self.output(turn, &arrays)
    }

    /// Looks up the tokens' rows of the embedding, each from the rank that holds it.
    fn embed(
        &mut self,
        turn: &mut Turn<'_>,
        sequences: &[Sequence],
        arrays: &BatchArrays,
    ) -> Result<(), ExecutorError> {
        let (hidden, rows) = (self.config.hidden, arrays.rows.rows);
        let own = &self.shards.vocabulary[self.shards.rank];
        let a = &mut self.activations;
        a.residual.reserve(rows * hidden)?;
        self.math.embed(&self.weights.embedding, &arrays.rows, own.start as u32, &mut a.residual)?;
        if turn.ranks() == 1 {
            return Ok(());
        }
        let stream = self.math.stream();
        let Gathered { own, all, .. } = &mut a.added;
        own.resize(rows * hidden, 0.0);
        a.residual.download(stream, own)?;
        all.resize(rows * hidden, 0.0);
        let tokens = || sequences.iter().flat_map(|sequence| &sequence.tokens).map(|token| *token as usize);
        let shards = &self.shards;
        turn.each_ranks_floats(own, |rank, held| {
            let rows = tokens().zip(held.chunks_exact(hidden).zip(all.chunks_exact_mut(hidden)));
            for (_, (held, target)) in rows.filter(|(token, _)| shards.token_holder(*token) == rank) {
                target.copy_from_slice(held);
            }
        })?;
        Ok(a.residual.upload(stream, all)?)
    }

    /// Computes a layer's attention, and adds it to the residual stream.
    fn attention(
        &mut self,
        turn: &mut Turn<'_>,
        arrays: &BatchArrays,
        kv: &KvView,
        index: usize,
    ) -> Result<(), ExecutorError> {
        let Self { config, shards, math, .. } = self;
        let layer: &Layer<Matrix, Vector> = &self.weights.layers[index];
        let rows = arrays.rows.rows;
        let (head_dim, epsilon) = (config.head_dim, config.norm_epsilon);
        let queries = shards.attended[shards.rank].len();
        let kv_heads = shards.kv_heads.len();
        let keys = kv_heads * head_dim;
        let width = queries + 2 * keys;
        let a = &mut self.activations;
        a.normed.reserve(rows * config.hidden)?;
        a.query_key_value.reserve(rows * width)?;
        math.rms_norm(&a.residual, rows, &layer.attention_norm, epsilon, &mut a.normed)?;
        math.linear(&a.normed, rows, &layer.query_key_value, &mut a.query_key_value)?;
        let query_heads = Heads { stride: width, offset: 0, heads: queries / head_dim, head_dim };
        let key_heads = Heads { offset: queries, heads: kv_heads, ..query_heads };
        for (heads, norm) in [(query_heads, &layer.query_norm), (key_heads, &layer.key_norm)] {
            let norm = norm.as_ref().map(|weight| (weight, epsilon));
            math.rotate_heads(&mut a.query_key_value, rows, heads, norm, &arrays.cosines, &arrays.sines)?;
        }
        let first = [queries, queries + keys];
        math.write_kv(&a.query_key_value, &arrays.rows, width, first, kv_heads, head_dim, kv)?;
        let shape = Attention {
            heads: queries / head_dim,
            kv_heads,
            head_dim,
            query_stride: width,
            scale: config.score_scale,
        };
        math.attention(shape, &a.query_key_value, &arrays.rows, kv, a.attended.mine(rows, queries)?)?;
        let attended = a.attended.gather(turn, math.stream(), rows, &shards.attended)?;
        let hidden = shards.hidden[shards.rank].len();
        math.linear(attended, rows, &layer.attention_output, a.added.mine(rows, hidden)?)?;
        let added = a.added.gather(turn, math.stream(), rows, &shards.hidden)?;
        Ok(math.add(&mut a.residual, added, rows * config.hidden)?)
    }

    /// Computes a layer's MLP, and adds it to the residual stream.
    fn mlp(&mut self, turn: &mut Turn<'_>, rows: usize, index: usize) -> Result<(), ExecutorError> {
        let Self { config, shards, math, .. } = self;
        let layer = &self.weights.layers[index];
        let (gates, hidden) = (shards.intermediate[shards.rank].len(), shards.hidden[shards.rank].len());
        let a = &mut self.activations;
        math.rms_norm(&a.residual, rows, &layer.mlp_norm, config.norm_epsilon, &mut a.normed)?;
        a.gate_up.reserve(rows * 2 * gates)?;
        math.linear(&a.normed, rows, &layer.gate_up, &mut a.gate_up)?;
        math.gated(config.gate, &a.gate_up, rows, gates, a.gated.mine(rows, gates)?)?;
        let gated = a.gated.gather(turn, math.stream(), rows, &shards.intermediate)?;
        math.linear(gated, rows, &layer.down, a.added.mine(rows, hidden)?)?;
        let added = a.added.gather(turn, math.stream(), rows, &shards.hidden)?;
        Ok(math.add(&mut a.residual, added, rows * config.hidden)?)
    }

    /// Computes the final norm and the logits of the wanted rows. Rank 0 gets the logits.
    fn output(&mut self, turn: &mut Turn<'_>, arrays: &BatchArrays) -> Result<(), ExecutorError> {
        let Self { config, shards, math, .. } = self;
        let (hidden, rows) = (config.hidden, arrays.outputs);
        let a = &mut self.activations;
        let vocabulary = shards.vocabulary[shards.rank].len();
        a.normed.reserve(rows * hidden)?;
        math.select(&a.residual, &arrays.wanted, rows, hidden, &mut a.normed)?;
        let normed = a.added.mine(rows, hidden)?;
        math.rms_norm(&a.normed, rows, &self.weights.final_norm, config.norm_epsilon, normed)?;
        let output = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
        let logits = a.logits.mine(rows, vocabulary)?;
        math.linear(normed, rows, output, logits)?;
        self.logits.resize(rows * vocabulary, 0.0);
        logits.download(math.stream(), &mut self.logits)?;
        turn.gather_columns_on_rank_0(&mut self.logits, &shards.vocabulary, &mut a.logits.all)?;
        // On rank 0 the gathered logits are in `all`.
        std::mem::swap(&mut self.logits, &mut a.logits.all);
        Ok(())
    }
}
