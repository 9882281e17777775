//! The forward pass of the Qwen3, Llama and Gemma-3 families.

use host_core::window::WindowShape;
use host_core::{Batch, Dtype, Sequence};
use host_kernels::math::{AttentionShape, Element, Heads, Math, QueryRows};

use super::pages::{self, PagedRows};
use super::weights::{PackedLayer, PackedWeights};
use crate::group::{Broken, Turn};
use crate::model::{Angles, ModelConfig, Rotation, Shards};
use crate::window::{self, LayerPages, LayerPlace};
use crate::{ExecutorError, KvMemory, LayersDone};

/// One rank's part of a model, ready to compute batches.
pub(super) struct Model {
    pub config: ModelConfig,
    pub shards: Shards,
    pub weights: PackedWeights,
    pub rotation: Rotation,
    /// The shape of the window parts of token pages, if some layers slide.
    pub window: Option<WindowShape>,
    /// Where each layer's KV lies.
    pub places: Vec<LayerPlace>,
    pub math: Math,
}

/// Activations, kept between calls so that their memory is faulted in once. As large as the largest batch so far.
#[derive(Default)]
pub(super) struct Activations {
    residual: Vec<f32>,
    normed: Vec<f32>,
    query_key_value: Vec<f32>,
    attended: Gathered,
    added: Gathered,
    gate_up: Vec<f32>,
    gated: Gathered,
    angles: Angles,
    logits: Gathered,
}

/// Rows of which every rank computes some columns.
#[derive(Default)]
struct Gathered {
    mine: Vec<f32>,
    whole: Vec<f32>,
}

impl Gathered {
    /// Makes room for this rank's columns and returns it.
    fn mine(&mut self, rows: usize, columns: usize) -> &mut [f32] {
        self.mine.resize(rows * columns, 0.0);
        &mut self.mine
    }
}

/// Which rows' logits are wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The rows that sequences draw from.
    Samples,
    /// Every row.
    All,
}

impl Model {
    /// Computes a batch together with the other ranks. Rank 0 gets the logits of the wanted rows, in order. The other ranks get
    /// nothing.
    pub fn forward<'a>(
        &self,
        turn: &mut Turn<'_>,
        kv: &mut KvMemory,
        batch: &Batch,
        wanted: Wanted,
        layers_done: &mut LayersDone<'_>,
        activations: &'a mut Activations,
    ) -> Result<&'a [f32], ExecutorError> {
        self.check(kv, batch)?;
        self.math.run(|| self.compute(turn, kv, &batch.sequences, wanted, layers_done, activations))?;
        Ok(if self.shards.rank == 0 { &activations.logits.whole } else { &[] })
    }

    fn compute(
        &self,
        turn: &mut Turn<'_>,
        kv: &mut KvMemory,
        sequences: &[Sequence],
        wanted: Wanted,
        layers_done: &mut LayersDone<'_>,
        a: &mut Activations,
    ) -> Result<(), Broken> {
        let Self { config, shards, .. } = self;
        let rank = shards.rank;
        let rows: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        if let Some(shape) = self.window {
            sequences
                .iter()
                .for_each(|sequence| window::empty_unused(kv, sequence, shape, shape.layers as usize));
        }
        let gates = shards.intermediate[rank].len();
        let hidden = shards.hidden[rank].len();
        a.normed.resize(rows * config.hidden, 0.0);
        a.query_key_value.resize(rows * self.width(), 0.0);
        a.gate_up.resize(rows * 2 * gates, 0.0);
        self.rotation.angles(sequences.iter().flat_map(|s| s.start as usize..s.end()), rows, &mut a.angles);
        self.embed(turn, sequences, rows, a)?;
        if let Some(scale) = config.embedding_scale {
            self.math.scale(&mut a.residual, scale);
        }
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.keys_and_values(kv, sequences, index, layer, rows, a);
            layers_done(index + 1);
            self.attention(kv, sequences, index, rows, a);
            turn.gather_columns(&mut a.attended.mine, &shards.attended, &mut a.attended.whole)?;
            let added = a.added.mine(rows, hidden);
            self.math.linear(&a.attended.whole, rows, &layer.attention_output, added);
            turn.gather_columns(&mut a.added.mine, &shards.hidden, &mut a.added.whole)?;
            self.add(layer.attended_norm.as_deref(), a);
            self.math.rms_norm(&a.residual, &layer.mlp_norm, config.norm_epsilon, &mut a.normed);
            self.math.linear(&a.normed, rows, &layer.gate_up, &mut a.gate_up);
            let gated = a.gated.mine(rows, gates);
            if gates > 0 {
                self.math.gated(config.gate, &a.gate_up, gates, gated);
            }
            turn.gather_columns(&mut a.gated.mine, &shards.intermediate, &mut a.gated.whole)?;
            self.math.linear(&a.gated.whole, rows, &layer.down, a.added.mine(rows, hidden));
            turn.gather_columns(&mut a.added.mine, &shards.hidden, &mut a.added.whole)?;
            self.add(layer.down_norm.as_deref(), a);
        }
        self.output(turn, sequences, wanted, a)
    }

    /// Adds the output of attention or MLP to the residual stream. The output is normed first if the model has such norms.
    fn add(&self, norm: Option<&[f32]>, a: &mut Activations) {
        let added = match norm {
            Some(weight) => {
                self.math.rms_norm(&a.added.whole, weight, self.config.norm_epsilon, &mut a.normed);
                &a.normed
            }
            None => &a.added.whole,
        };
        self.math.add(&mut a.residual, added);
    }

    /// Layers of a page of the pool.
    fn page_layers(&self) -> usize {
        self.places.iter().filter(|place| matches!(place, LayerPlace::Full { .. })).count()
    }

    /// Where a sequence's KV of a layer lies.
    fn pages<'a>(&self, sequence: &'a Sequence, layer: usize) -> LayerPages<'a> {
        LayerPages::new(sequence, self.places[layer], self.window.map_or(1, |window| window.parts as usize))
    }

    /// Elements of a row of this rank's queries, keys and values.
    fn width(&self) -> usize {
        self.shards.attended[self.shards.rank].len() + 2 * self.shards.kv_heads.len() * self.config.head_dim
    }

    /// Looks up the tokens' rows of the embedding, each from the rank that holds it.
    fn embed(
        &self,
        turn: &mut Turn<'_>,
        sequences: &[Sequence],
        rows: usize,
        a: &mut Activations,
    ) -> Result<(), Broken> {
        let (shards, hidden) = (&self.shards, self.config.hidden);
        let own = &shards.vocabulary[shards.rank];
        let tokens = || sequences.iter().flat_map(|sequence| &sequence.tokens).map(|token| *token as usize);
        let held = tokens().filter(|token| own.contains(token));
        let mine = a.added.mine(held.clone().count(), hidden);
        for (token, row) in held.zip(mine.chunks_exact_mut(hidden)) {
            self.weights.embedding.row(token - own.start, row);
        }
        a.residual.resize(rows * hidden, 0.0);
        turn.each_ranks_floats(&a.added.mine, |rank, held| {
            let mut held = held.chunks_exact(hidden);
            let wanted = tokens().zip(a.residual.chunks_exact_mut(hidden));
            for (_, target) in wanted.filter(|(token, _)| shards.token_holder(*token) == rank) {
                if let Some(row) = held.next() {
                    target.copy_from_slice(row);
                }
            }
        })
    }

    /// Computes queries, keys and values of a layer. Keys and values go to the pool.
    fn keys_and_values(
        &self,
        kv: &mut KvMemory,
        sequences: &[Sequence],
        index: usize,
        layer: &PackedLayer,
        rows: usize,
        a: &mut Activations,
    ) {
        let config = &self.config;
        let (head_dim, epsilon) = (config.head_dim, config.norm_epsilon);
        let queries = self.shards.attended[self.shards.rank].len();
        let kv_heads = self.shards.kv_heads.len();
        let (keys, width) = (kv_heads * head_dim, self.width());
        self.math.rms_norm(&a.residual, &layer.attention_norm, epsilon, &mut a.normed);
        self.math.linear(&a.normed, rows, &layer.query_key_value, &mut a.query_key_value);
        let query_heads = Heads { stride: width, offset: 0, heads: queries / head_dim, head_dim };
        let key_heads = Heads { offset: queries, heads: kv_heads, ..query_heads };
        for (heads, norm) in [(query_heads, &layer.query_norm), (key_heads, &layer.key_norm)] {
            let norm = norm.as_deref().map(|weight| (weight, epsilon));
            let (cosines, sines) = a.angles.of(self.places[index]);
            self.math.rotate_heads(&mut a.query_key_value, heads, norm, cosines, sines);
        }
        // All new K and V go to the pool, in its type, before attention reads from it. So a position attends to its own chunk
        // exactly as to a chunk that came from elsewhere. If a layer does not write a position that is computed again,
        // attention uses the K and V that the pool has, not the new ones.
        let places =
            sequences.iter().flat_map(|s| (s.start as usize..s.end()).map(move |position| (s, position)));
        for (row, (sequence, position)) in a.query_key_value.chunks_exact(width).zip(places) {
            if !window::writes(sequence, self.places[index], position) {
                continue;
            }
            let (k, v) = row[queries..].split_at(keys);
            let pages = self.pages(sequence, index);
            pages::write(kv, pages, 0, position, k);
            pages::write(kv, pages, 1, position, v);
        }
    }

    /// Computes the attention of this rank's query heads.
    fn attention(
        &self,
        kv: &KvMemory,
        sequences: &[Sequence],
        index: usize,
        rows: usize,
        a: &mut Activations,
    ) {
        let head_dim = self.config.head_dim;
        let queries = self.shards.attended[self.shards.rank].len();
        let paged: Vec<PagedRows<'_>> =
            sequences.iter().map(|sequence| PagedRows { kv, pages: self.pages(sequence, index) }).collect();
        let mut row = 0;
        let parts: Vec<QueryRows<'_>> = sequences
            .iter()
            .zip(&paged)
            .map(|(sequence, kv)| {
                let rows = sequence.tokens.len();
                row += rows;
                let first = window::first_seen(sequence, self.places[index]);
                QueryRows { row: row - rows, rows, position: sequence.start as usize, first, kv }
            })
            .collect();
        let shape = AttentionShape {
            heads: queries / head_dim,
            kv_heads: self.shards.kv_heads.len(),
            head_dim,
            element: match kv.layout().shape.dtype {
                Dtype::F32 => Element::F32,
                Dtype::Bf16 => Element::Bf16,
            },
            query_stride: self.width(),
            scale: self.config.score_scale,
            window: match self.places[index] {
                LayerPlace::Full { .. } => None,
                LayerPlace::Sliding { .. } => self.window.map(|window| window.tokens as usize),
            },
        };
        self.math.attention(shape, &a.query_key_value, &parts, a.attended.mine(rows, queries));
    }

    /// Computes the final norm and the logits of the wanted rows. Rank 0 gets the logits.
    fn output(
        &self,
        turn: &mut Turn<'_>,
        sequences: &[Sequence],
        wanted: Wanted,
        a: &mut Activations,
    ) -> Result<(), Broken> {
        let hidden = self.config.hidden;
        let mut rows = 0;
        let mut end = 0;
        a.normed.clear();
        for sequence in sequences {
            end += sequence.tokens.len();
            let first = match wanted {
                Wanted::All => end - sequence.tokens.len(),
                Wanted::Samples => end - sequence.wanted_rows(),
            };
            rows += end - first;
            a.normed.extend_from_slice(&a.residual[first * hidden..end * hidden]);
        }
        let normed = a.added.mine(rows, hidden);
        self.math.rms_norm(&a.normed, &self.weights.final_norm, self.config.norm_epsilon, normed);
        let output = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
        let vocabulary = &self.shards.vocabulary;
        self.math.linear(normed, rows, output, a.logits.mine(rows, vocabulary[self.shards.rank].len()));
        turn.gather_columns_on_rank_0(&mut a.logits.mine, vocabulary, &mut a.logits.whole)
    }

    /// Refuses a batch that cannot be computed, before anything is written.
    fn check(&self, kv: &KvMemory, batch: &Batch) -> Result<(), ExecutorError> {
        kv.expect_host()?;
        let config = &self.config;
        let shape = kv.layout().shape;
        let heads = self.shards.kv_heads.clone();
        let (pool, model) =
            ((shape.layers, kv.heads(), shape.head_dim), (self.page_layers(), heads, config.head_dim));
        if pool != model {
            return Err(ExecutorError::Failed(format!(
                "the KV pool has (layers, heads, head dim) {pool:?}, this rank of the model {model:?}"
            )));
        }
        for sequence in &batch.sequences {
            let refuse = |why: String| Err(ExecutorError::Failed(format!("room {}: {why}", sequence.room)));
            window::check_tokens(sequence, config.max_positions, config.vocabulary).or_else(refuse)?;
            window::check(sequence, &shape, self.window).or_else(refuse)?;
        }
        Ok(())
    }
}
