//! The forward pass of the Qwen3 and Llama families.

use host_core::{Batch, Dtype, Sequence};
use host_kernels::math::{AttentionShape, Element, Heads, Math, QueryRows, RopeFrequencies};

use super::config::ModelConfig;
use super::pages::{self, PagedRows};
use super::weights::{Layer, Weights};
use crate::executor::{ExecutorError, KvMemory, LayersDone};

/// A model that can be computed.
pub(super) struct Model {
    pub config: ModelConfig,
    pub weights: Weights,
    pub rope: RopeFrequencies,
    pub math: Math,
}

/// Activations, kept between calls so that their memory is faulted in once. As large as the largest batch so far.
#[derive(Default)]
pub(super) struct Activations {
    residual: Vec<f32>,
    normed: Vec<f32>,
    query_key_value: Vec<f32>,
    attended: Vec<f32>,
    added: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    cosines: Vec<f32>,
    sines: Vec<f32>,
    logits: Vec<f32>,
}

/// Which rows' logits are wanted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The last row of every sequence that samples.
    Samples,
    /// Every row.
    All,
}

impl Model {
    /// Computes a batch; the logits of the wanted rows, in order, lie in what is returned.
    pub fn forward<'a>(
        &self,
        kv: &mut KvMemory,
        batch: &Batch,
        wanted: Wanted,
        layers_done: &mut LayersDone<'_>,
        activations: &'a mut Activations,
    ) -> Result<&'a [f32], ExecutorError> {
        self.check(kv, batch)?;
        self.math.run(|| self.compute(kv, &batch.sequences, wanted, layers_done, activations));
        Ok(&activations.logits)
    }

    fn compute(
        &self,
        kv: &mut KvMemory,
        sequences: &[Sequence],
        wanted: Wanted,
        layers_done: &mut LayersDone<'_>,
        a: &mut Activations,
    ) {
        let config = &self.config;
        let hidden = config.hidden;
        let rows: usize = sequences.iter().map(|sequence| sequence.tokens.len()).sum();
        let heads = config.heads * config.head_dim;
        let width = heads + 2 * config.kv_heads * config.head_dim;
        let pairs = self.rope.pairs();
        a.residual.resize(rows * hidden, 0.0);
        a.normed.resize(rows * hidden, 0.0);
        a.added.resize(rows * hidden, 0.0);
        a.query_key_value.resize(rows * width, 0.0);
        a.attended.resize(rows * heads, 0.0);
        a.gate_up.resize(rows * 2 * config.intermediate, 0.0);
        a.gated.resize(rows * config.intermediate, 0.0);
        a.cosines.resize(rows * pairs, 0.0);
        a.sines.resize(rows * pairs, 0.0);
        let places = sequences.iter().flat_map(|s| s.tokens.iter().zip(s.start as usize..));
        for (row, (token, position)) in places.enumerate() {
            self.weights.embedding.row(*token as usize, &mut a.residual[row * hidden..][..hidden]);
            let angles = row * pairs..(row + 1) * pairs;
            self.rope.angles(position, &mut a.cosines[angles.clone()], &mut a.sines[angles]);
        }
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.keys_and_values(kv, sequences, index, layer, rows, a);
            layers_done(index + 1);
            self.attention(kv, sequences, index, layer, rows, a);
            self.math.rms_norm(&a.residual, &layer.mlp_norm, config.norm_epsilon, &mut a.normed);
            self.math.linear(&a.normed, rows, &layer.gate_up, &mut a.gate_up);
            self.math.gated_silu(&a.gate_up, config.intermediate, &mut a.gated);
            self.math.linear(&a.gated, rows, &layer.down, &mut a.added);
            self.math.add(&mut a.residual, &a.added);
        }
        self.output(sequences, wanted, a);
    }

    /// Queries, keys and values of a layer; the latter two go to the pool.
    fn keys_and_values(
        &self,
        kv: &mut KvMemory,
        sequences: &[Sequence],
        index: usize,
        layer: &Layer,
        rows: usize,
        a: &mut Activations,
    ) {
        let config = &self.config;
        let (head_dim, epsilon) = (config.head_dim, config.norm_epsilon);
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let width = queries + 2 * keys;
        self.math.rms_norm(&a.residual, &layer.attention_norm, epsilon, &mut a.normed);
        self.math.linear(&a.normed, rows, &layer.query_key_value, &mut a.query_key_value);
        let query_heads = Heads { stride: width, offset: 0, heads: config.heads, head_dim };
        let key_heads = Heads { offset: queries, heads: config.kv_heads, ..query_heads };
        for (heads, norm) in [(query_heads, &layer.query_norm), (key_heads, &layer.key_norm)] {
            let norm = norm.as_deref().map(|weight| (weight, epsilon));
            self.math.rotate_heads(&mut a.query_key_value, heads, norm, &a.cosines, &a.sines);
        }
        // All new K and V go to the pool, in its type, before anything is read from it: a position attends to its own
        // chunk exactly as it will to one that came from elsewhere.
        let places =
            sequences.iter().flat_map(|s| (s.start as usize..s.end()).map(move |position| (s, position)));
        for (row, (sequence, position)) in a.query_key_value.chunks_exact(width).zip(places) {
            let (k, v) = row[queries..].split_at(keys);
            pages::write(kv, &sequence.pages, index, 0, position, k);
            pages::write(kv, &sequence.pages, index, 1, position, v);
        }
    }

    fn attention(
        &self,
        kv: &KvMemory,
        sequences: &[Sequence],
        index: usize,
        layer: &Layer,
        rows: usize,
        a: &mut Activations,
    ) {
        let config = &self.config;
        let width = (config.heads + 2 * config.kv_heads) * config.head_dim;
        let paged: Vec<PagedRows<'_>> =
            sequences.iter().map(|sequence| PagedRows { kv, pages: &sequence.pages, layer: index }).collect();
        let mut row = 0;
        let parts: Vec<QueryRows<'_>> = sequences
            .iter()
            .zip(&paged)
            .map(|(sequence, kv)| {
                let rows = sequence.tokens.len();
                row += rows;
                QueryRows { row: row - rows, rows, position: sequence.start as usize, kv }
            })
            .collect();
        let shape = AttentionShape {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            element: match kv.layout().shape.dtype {
                Dtype::F32 => Element::F32,
                Dtype::Bf16 => Element::Bf16,
            },
            query_stride: width,
        };
        self.math.attention(shape, &a.query_key_value, &parts, &mut a.attended);
        self.math.linear(&a.attended, rows, &layer.attention_output, &mut a.added);
        self.math.add(&mut a.residual, &a.added);
    }

    /// Final norm and logits of the wanted rows.
    fn output(&self, sequences: &[Sequence], wanted: Wanted, a: &mut Activations) {
        let hidden = self.config.hidden;
        let mut rows = 0;
        let mut end = 0;
        a.normed.clear();
        for sequence in sequences {
            end += sequence.tokens.len();
            let first = match (wanted, sequence.sample) {
                (Wanted::All, _) => end - sequence.tokens.len(),
                (Wanted::Samples, Some(_)) => end - 1,
                (Wanted::Samples, None) => end,
            };
            rows += end - first;
            a.normed.extend_from_slice(&a.residual[first * hidden..end * hidden]);
        }
        a.added.resize(rows * hidden, 0.0);
        a.logits.resize(rows * self.config.vocabulary, 0.0);
        self.math.rms_norm(&a.normed, &self.weights.final_norm, self.config.norm_epsilon, &mut a.added);
        let output = self.weights.output.as_ref().unwrap_or(&self.weights.embedding);
        self.math.linear(&a.added, rows, output, &mut a.logits);
    }

    /// Refuses what cannot be computed, before anything is written.
    fn check(&self, kv: &KvMemory, batch: &Batch) -> Result<(), ExecutorError> {
        let config = &self.config;
        let shape = kv.layout().shape;
        let (pool, model) =
            ((shape.layers, shape.heads, shape.head_dim), (config.layers, config.kv_heads, config.head_dim));
        if pool != model {
            return Err(ExecutorError(format!(
                "the KV pool has (layers, heads, head dim) {pool:?}, the model {model:?}"
            )));
        }
        for sequence in &batch.sequences {
            let refuse = |why: String| Err(ExecutorError(format!("room {}: {why}", sequence.room)));
            let end = sequence.end();
            if sequence.tokens.is_empty() {
                return refuse("no tokens to compute".to_owned());
            }
            if end > config.max_positions {
                return refuse(format!("{end} positions, the model has {}", config.max_positions));
            }
            if sequence.pages.len() < shape.pages_for(end) {
                return refuse(format!(
                    "{} pages of {} tokens for {end} positions",
                    sequence.pages.len(),
                    shape.page_tokens
                ));
            }
            if let Some(page) = sequence.pages.iter().find(|page| page.0 as usize >= shape.pages) {
                return refuse(format!("page {} of a pool of {}", page.0, shape.pages));
            }
            if let Some(token) = sequence.tokens.iter().find(|token| **token as usize >= config.vocabulary) {
                return refuse(format!("token {token} of a vocabulary of {}", config.vocabulary));
            }
        }
        Ok(())
    }
}
