//! A model on tensor cores: weights and activations in bf16, sums in f32.
//!
//! A decode step has the same launches for every batch with the same number of rows, so they are captured in a graph once and
//! launched together.

mod graphs;

use std::sync::Arc;

use host_core::{Batch, KvLayout, Sequence};
use host_kernels::cuda::batch::{Attention, KvView};
use host_kernels::cuda::tensor::attention::{CHUNK, Partials, Run, TensorAttention};
use host_kernels::cuda::tensor::linear::{Output, TensorLinear, TensorMatrix};
use host_kernels::cuda::tensor::rows::{ARGMAX_PARTS, Projection, TensorRows};
use host_kernels::cuda::{Array, CudaError, CudaStream, Device, Mark, Pinned, WaitsFor};
use host_kernels::math::{Element, Gate, bf16_from_f32};

use self::graphs::{Graphs, Key};
use super::arrays::{BatchArrays, BatchMemory};
use super::{checked_pool, view};
use crate::model::{
    Layer, LoadError, Loader, MatrixSource, ModelConfig, Opened, Rotation, Shards, Usage, WeightMemory,
    Weights,
};
use crate::{ExecutorError, KvMemory, LayersDone};

type Vector = Array<f32>;

/// Most rows of a batch of single tokens that is launched as a graph.
const GRAPH_ROWS: usize = 256;
/// The limit on the positions that rows of a graph see is a multiple of this number.
const GRAPH_POSITIONS: usize = 4 * CHUNK;

/// A matrix on the device, in the forms in which it is used.
pub(super) struct Placed {
    /// Row by row, if rows are looked up.
    rows: Option<Array<u16>>,
    /// Packed for products.
    packed: Option<TensorMatrix>,
}

/// A model, ready to compute batches.
pub(super) struct TensorModel {
    config: ModelConfig,
    shards: Shards,
    weights: Weights<Placed, Vector>,
    rotation: Rotation,
    kernels: Kernels,
    batch: BatchMemory,
    activations: Activations,
    graphs: Graphs,
}

struct Kernels {
    stream: Arc<CudaStream>,
    linear: TensorLinear,
    rows: TensorRows,
    attention: TensorAttention,
}

/// Activations on the device, kept between batches. They are as large as the largest batch so far.
struct Activations {
    residual: Vector,
    normed: Array<u16>,
    query_key_value: Vector,
    queries: Array<u16>,
    attended: Array<u16>,
    gated: Array<u16>,
    logits: Vector,
    /// The logits that are copied to the host.
    read_logits: Pinned<f32>,
    /// The likeliest tokens of parts of the vocabulary.
    parts: Array<u64>,
    likeliest: Pinned<u32>,
    tiles: Array<Run>,
    partials: Partials,
    /// The chunks that `partials` has room for.
    partial_chunks: usize,
}

/// How attention divides a batch.
struct Plan {
    /// Rows that are the only row of their sequence. They come first in the batch.
    single: usize,
    /// An upper limit on the positions that one of these rows sees.
    positions: usize,
    /// Tiles of the other rows.
    tiles: usize,
}

/// The result of a batch.
pub(super) enum BatchResult<'a> {
    /// The likeliest token of each wanted row.
    Likeliest(&'a [u32]),
    /// The logits of each wanted row.
    Logits(&'a [f32]),
}

/// Whether the kernels support a model's sizes.
pub(super) fn fits(config: &ModelConfig) -> bool {
    let width = (config.heads + 2 * config.kv_heads) * config.head_dim;
    [64, 128].contains(&config.head_dim)
        && config.heads / config.kv_heads <= 16
        && config.gate == Gate::Silu
        && [config.hidden, width, config.vocabulary, 2 * config.intermediate]
            .iter()
            .all(|size| size % 16 == 0)
        && config.intermediate.is_multiple_of(8)
        && config.hidden <= 16384
}

/// Copies weights to the device in bf16, packed for the products.
struct Packing<'a> {
    device: &'a Arc<Device>,
    kernels: &'a Kernels,
}

impl WeightMemory for Packing<'_> {
    type Matrix = Placed;
    type Vector = Vector;

    fn matrix(&self, source: &MatrixSource<'_>) -> Result<Placed, LoadError> {
        let elements = source.outputs.checked_mul(source.inputs).ok_or_else(|| source.too_large())?;
        let bytes = elements.checked_mul(source.element.bytes()).ok_or_else(|| source.too_large())?;
        let mut stored = vec![0; bytes];
        source.read(0..source.outputs, &mut stored)?;
        let stream = &self.kernels.stream;
        let mut rows = Array::new(self.device, elements)?;
        rows.upload(stream, &narrow(&stored, source.element))?;
        drop(stored);
        let pack = |gated| self.kernels.linear.pack(stream, &rows, source.outputs, source.inputs, gated);
        let packed = match source.usage {
            Usage::Lookup => None,
            Usage::Both | Usage::Product => Some(pack(false)?),
            Usage::Gates => Some(pack(true)?),
        };
        let looked_up = matches!(source.usage, Usage::Lookup | Usage::Both);
        // After the packing, the rows may be freed.
        self.device.wait(stream)?;
        Ok(Placed { rows: looked_up.then_some(rows), packed })
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vector, LoadError> {
        let mut vector = Array::new(self.device, values.len())?;
        vector.upload(&self.kernels.stream, &values)?;
        Ok(vector)
    }
}

/// Elements as bf16. Elements of other types are rounded.
fn narrow(stored: &[u8], element: Element) -> Vec<u16> {
    if element == Element::Bf16 {
        return stored.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
    }
    let mut wide = vec![0.0; stored.len() / element.bytes()];
    element.widen(stored, &mut wide);
    wide.into_iter().map(bf16_from_f32).collect()
}

impl Placed {
    fn rows(&self) -> Result<&Array<u16>, ExecutorError> {
        self.rows.as_ref().ok_or_else(|| ExecutorError::Failed("a matrix without rows to look up".to_owned()))
    }

    fn packed(&self) -> Result<&TensorMatrix, ExecutorError> {
        self.packed
            .as_ref()
            .ok_or_else(|| ExecutorError::Failed("a matrix that is not packed for products".to_owned()))
    }
}

impl TensorModel {
    pub fn load(device: &Arc<Device>, opened: Opened, shards: Shards) -> Result<Self, LoadError> {
        let Opened { config, checkpoint, .. } = opened;
        let kernels = Kernels {
            stream: device.stream()?,
            linear: TensorLinear::new(device)?,
            rows: TensorRows::new(device)?,
            attention: TensorAttention::new(device, config.head_dim)?,
        };
        let memory = Packing { device, kernels: &kernels };
        let weights = Loader { checkpoint: &checkpoint, memory: &memory }.load(&config, &shards)?;
        Ok(Self {
            rotation: Rotation::new(&config),
            batch: BatchMemory::new(device)?,
            activations: Activations::new(device, config.head_dim)?,
            graphs: Graphs::default(),
            config,
            shards,
            weights,
            kernels,
        })
    }

    /// Computes a batch. Returns the logits of each sequence's last `wanted` rows, or with `likeliest` their likeliest tokens.
    /// Reports layers as the batch asks for it. A recorded step reports no layers, because it has few rows.
    pub fn forward(
        &mut self,
        kv: &mut KvMemory,
        batch: &Batch,
        wanted: impl Fn(&Sequence) -> usize,
        likeliest: bool,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<BatchResult<'_>, ExecutorError> {
        // Other streams use the pool after this call, so it also waits for launches before an error or a panic.
        let end = WaitsFor::new(self.activations.residual.device(), &self.kernels.stream);
        let computed = self.compute(kv, batch, wanted, likeliest, layers_done);
        end.wait()?;
        let (a, rows) = (&self.activations, computed?);
        // SAFETY: the stream was waited for, and nothing else writes the results.
        Ok(unsafe {
            match likeliest {
                true => BatchResult::Likeliest(&a.likeliest.elements()[..rows]),
                false => BatchResult::Logits(&a.read_logits.elements()[..rows * self.config.vocabulary]),
            }
        })
    }

    /// As [`forward`](Self::forward), without waiting for the end. Returns the number of wanted rows.
    fn compute(
        &mut self,
        kv: &KvMemory,
        batch: &Batch,
        wanted: impl Fn(&Sequence) -> usize,
        likeliest: bool,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<usize, ExecutorError> {
        let pool = checked_pool(&self.config, &self.shards, kv, batch)?;
        let sequences = &batch.sequences;
        // Sequences with one row come first: they use the attention of decode.
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_by_key(|index| sequences[*index].tokens.len() > 1);
        let arrays = self.batch.lay_out(&self.kernels.stream, sequences, &order, &self.rotation, wanted)?;
        let plan = self.plan(sequences, &order)?;
        self.activations.reserve(&self.config, &arrays, &plan, likeliest)?;
        let layout = *kv.layout();
        let key = Key {
            rows: arrays.rows.rows,
            outputs: arrays.outputs,
            positions: plan.positions,
            likeliest,
            layout,
            words: arrays.words.next_power_of_two(),
            addresses: self.activations.addresses([
                pool,
                arrays.source.address(),
                arrays.rows.token.address(),
            ]),
        };
        let Self { config, shards, weights, kernels, activations, graphs, .. } = self;
        let mut step = Step { config, shards, weights, kernels, activations, arrays: &arrays, plan: &plan };
        if plan.tiles == 0 && arrays.rows.rows <= GRAPH_ROWS {
            graphs.run(&kernels.stream, key, || {
                step.launch(pool, &layout, likeliest, 0)?;
                Ok(())
            })?;
        } else {
            // All launches are enqueued here, long before the device has done the first of them.
            for (layers, mark) in step.launch(pool, &layout, likeliest, batch.layer_group as usize)? {
                mark.wait()?;
                layers_done(layers);
            }
        }
        Ok(arrays.outputs)
    }

    /// Plans the attention of these sequences in this order, and copies its tiles to the device.
    fn plan(&mut self, sequences: &[Sequence], order: &[usize]) -> Result<Plan, ExecutorError> {
        let attention = attention(&self.config);
        let placed = || order.iter().map(|index| &sequences[*index]);
        let single = placed().take_while(|sequence| sequence.tokens.len() == 1).count();
        let seen = placed().take(single).map(Sequence::end).max().unwrap_or(0);
        let (mut first_row, mut table) = (0, 0);
        let mut runs = Vec::new();
        for (index, sequence) in placed().enumerate() {
            let rows = sequence.tokens.len() as u32;
            if index >= single {
                runs.push(Run { first_row, rows, start: sequence.start, table });
            }
            first_row += rows;
            table += sequence.pages.len() as u32;
        }
        let tiles = self.kernels.attention.tiles(&attention, &runs);
        if !tiles.is_empty() {
            self.activations.tiles.reserve(tiles.len())?;
            self.activations.tiles.upload(&self.kernels.stream, &tiles)?;
        }
        Ok(Plan { single, positions: seen.next_multiple_of(GRAPH_POSITIONS), tiles: tiles.len() })
    }
}

/// Sizes of attention.
fn attention(config: &ModelConfig) -> Attention {
    Attention {
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        query_stride: config.heads * config.head_dim,
        scale: config.score_scale,
    }
}

impl Activations {
    fn new(device: &Arc<Device>, head_dim: usize) -> Result<Self, CudaError> {
        Ok(Self {
            residual: Array::new(device, 1)?,
            normed: Array::new(device, 1)?,
            query_key_value: Array::new(device, 1)?,
            queries: Array::new(device, 1)?,
            attended: Array::new(device, 1)?,
            gated: Array::new(device, 1)?,
            logits: Array::new(device, 1)?,
            parts: Array::new(device, 1)?,
            likeliest: Pinned::new(device, GRAPH_ROWS)?,
            read_logits: Pinned::new(device, 1)?,
            tiles: Array::new(device, 1)?,
            partials: Partials::new(device, 1, 1, head_dim, 1)?,
            partial_chunks: 1,
        })
    }

    /// The addresses of all arrays that launches name, with `others` in front.
    fn addresses(&self, others: [u64; 3]) -> Vec<u64> {
        let floats = [&self.residual, &self.query_key_value, &self.logits].map(Array::address);
        let halves = [&self.normed, &self.queries, &self.attended, &self.gated].map(Array::address);
        let rest = [
            self.parts.address(),
            self.likeliest.array().address(),
            self.read_logits.array().address(),
            self.partial_chunks as u64,
        ];
        others.into_iter().chain(floats).chain(halves).chain(rest).collect()
    }

    /// Makes room for a batch.
    fn reserve(
        &mut self,
        config: &ModelConfig,
        arrays: &BatchArrays,
        plan: &Plan,
        likeliest: bool,
    ) -> Result<(), CudaError> {
        let (rows, outputs) = (arrays.rows.rows, arrays.outputs);
        let queries = config.heads * config.head_dim;
        self.residual.reserve(rows * config.hidden)?;
        self.normed.reserve(rows.max(outputs) * config.hidden)?;
        self.query_key_value.reserve(rows * (queries + 2 * config.kv_heads * config.head_dim))?;
        self.queries.reserve(rows * queries)?;
        self.attended.reserve(rows * queries)?;
        self.gated.reserve(rows * config.intermediate)?;
        self.logits.reserve(outputs * config.vocabulary)?;
        self.parts.reserve(outputs * ARGMAX_PARTS)?;
        self.likeliest.reserve(outputs)?;
        if !likeliest {
            self.read_logits.reserve(outputs * config.vocabulary)?;
        }
        let chunks = plan.single * config.heads * plan.positions.div_ceil(CHUNK);
        if chunks > self.partial_chunks {
            let chunks = chunks.next_power_of_two();
            let device = self.residual.device();
            self.partials = Partials::new(device, chunks, 1, config.head_dim, CHUNK)?;
            self.partial_chunks = chunks;
        }
        Ok(())
    }
}

/// All that a batch's launches need.
struct Step<'a> {
    config: &'a ModelConfig,
    shards: &'a Shards,
    weights: &'a Weights<Placed, Vector>,
    kernels: &'a Kernels,
    activations: &'a mut Activations,
    arrays: &'a BatchArrays,
    plan: &'a Plan,
}

impl Step<'_> {
    /// Enqueues everything from the embedding to logits or likeliest tokens. Returns a mark behind every `group` layers, with the
    /// number of layers up to there. There is no mark behind the last layer, and none if `group` is 0.
    fn launch(
        &mut self,
        pool: u64,
        layout: &KvLayout,
        likeliest: bool,
        group: usize,
    ) -> Result<Vec<(usize, Mark)>, ExecutorError> {
        let Self { config, kernels, weights, arrays, .. } = *self;
        debug_assert_eq!(self.shards.vocabulary.len(), 1, "one rank has the whole model");
        // The length is rounded up, so that the launch is the same for batches of other lengths.
        let words = arrays.words.next_power_of_two().min(arrays.all.len()).min(arrays.source.len());
        let target = &mut arrays.all.part(0, arrays.all.len());
        kernels.rows.copy_words(&kernels.stream, &arrays.source, target, words)?;
        kernels.rows.embed(
            &kernels.stream,
            &arrays.rows.token,
            arrays.rows.rows,
            weights.embedding.rows()?,
            [config.vocabulary, config.hidden],
            &mut self.activations.residual,
        )?;
        let mut marks = Vec::new();
        for (index, layer) in weights.layers.iter().enumerate() {
            self.attention(layer, &view(layout, pool, index))?;
            let layers = index + 1;
            if group > 0 && layers.is_multiple_of(group) && layers < weights.layers.len() {
                marks.push((layers, Mark::behind(&kernels.stream)?));
            }
            self.mlp(layer)?;
        }
        self.output(likeliest)?;
        Ok(marks)
    }

    /// Computes a layer's attention, and adds it to the residual stream.
    fn attention(&mut self, layer: &Layer<Placed, Vector>, view: &KvView) -> Result<(), ExecutorError> {
        let Self { config, kernels, arrays, plan, .. } = *self;
        let Kernels { stream, linear, rows: kernels, attention: attends } = kernels;
        let a = &mut *self.activations;
        let (rows, hidden) = (arrays.rows.rows, config.hidden);
        let queries = config.heads * config.head_dim;
        let width = queries + 2 * config.kv_heads * config.head_dim;
        let epsilon = config.norm_epsilon;
        kernels.rms_norm(
            stream,
            &a.residual,
            None,
            rows,
            &layer.attention_norm,
            hidden,
            epsilon,
            &mut a.normed,
        )?;
        let product = Output::Store(&mut a.query_key_value);
        linear.run(stream, &a.normed, rows, layer.query_key_value.packed()?, product, width)?;
        let projection = Projection {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            cosines: &arrays.cosines,
            sines: &arrays.sines,
            norms: layer.query_norm.as_ref().zip(layer.key_norm.as_ref()).map(|(query, key)| [query, key]),
            epsilon,
        };
        kernels.rotate_and_store(
            stream,
            &a.query_key_value,
            &arrays.rows,
            &projection,
            view,
            &mut a.queries,
        )?;
        let shape = attention(config);
        if plan.single > 0 {
            attends.decode(
                stream,
                &shape,
                &a.queries,
                view,
                &arrays.rows,
                0..plan.single,
                plan.positions,
                &mut a.partials,
                &mut a.attended,
            )?;
        }
        if plan.tiles > 0 {
            let (pages, tiles) = (&arrays.rows.pages, (&a.tiles, plan.tiles));
            attends.prefill(stream, &shape, &a.queries, view, pages, rows, tiles, &mut a.attended)?;
        }
        let sum = Output::Add(&mut a.residual);
        Ok(linear.run(stream, &a.attended, rows, layer.attention_output.packed()?, sum, hidden)?)
    }

    /// Computes a layer's MLP, and adds it to the residual stream.
    fn mlp(&mut self, layer: &Layer<Placed, Vector>) -> Result<(), ExecutorError> {
        let Self { config, kernels, arrays, .. } = *self;
        let Kernels { stream, linear, rows: kernels, .. } = kernels;
        let a = &mut *self.activations;
        let (rows, hidden, epsilon) = (arrays.rows.rows, config.hidden, config.norm_epsilon);
        kernels.rms_norm(stream, &a.residual, None, rows, &layer.mlp_norm, hidden, epsilon, &mut a.normed)?;
        let gated = Output::Gated(&mut a.gated);
        linear.run(stream, &a.normed, rows, layer.gate_up.packed()?, gated, config.intermediate)?;
        let sum = Output::Add(&mut a.residual);
        Ok(linear.run(stream, &a.gated, rows, layer.down.packed()?, sum, hidden)?)
    }

    /// Computes the final norm and the logits of the wanted rows, and with `likeliest` their likeliest tokens.
    fn output(&mut self, likeliest: bool) -> Result<(), ExecutorError> {
        let Self { config, kernels, weights, arrays, .. } = *self;
        let Kernels { stream, linear, rows: kernels, .. } = kernels;
        let a = &mut *self.activations;
        let (rows, hidden) = (arrays.outputs, config.hidden);
        if rows == 0 {
            return Ok(());
        }
        let (wanted, norm) = (Some(&arrays.wanted), &weights.final_norm);
        kernels.rms_norm(
            stream,
            &a.residual,
            wanted,
            rows,
            norm,
            hidden,
            config.norm_epsilon,
            &mut a.normed,
        )?;
        let output = weights.output.as_ref().unwrap_or(&weights.embedding).packed()?;
        linear.run(stream, &a.normed, rows, output, Output::Store(&mut a.logits), config.vocabulary)?;
        if !likeliest {
            let length = rows * config.vocabulary;
            a.read_logits.array().copy_from(stream, &a.logits, length)?;
        } else {
            kernels.argmax(
                stream,
                &a.logits,
                rows,
                config.vocabulary,
                &mut a.parts,
                &mut a.likeliest.array(),
            )?;
        }
        Ok(())
    }
}
