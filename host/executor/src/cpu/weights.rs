//! A rank's part of a model's weights, in memory.

use std::ops::Range;

use host_kernels::math::{Element, Math, PackError, Panels};

use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::error::LoadError;
use super::shard::Shards;

/// The output rows that a rank computes of each matrix, packed for the product, and all of the small vectors.
pub(super) struct Weights {
    /// Rows of the rank's token ids.
    pub embedding: Panels,
    pub layers: Vec<Layer>,
    pub final_norm: Vec<f32>,
    /// Absent when the embedding is the output matrix too.
    pub output: Option<Panels>,
}

/// One transformer layer.
pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    /// Queries, then keys, then values, so that one product computes all three.
    pub query_key_value: Panels,
    pub query_norm: Option<Vec<f32>>,
    pub key_norm: Option<Vec<f32>>,
    pub attention_output: Panels,
    /// Of what attention gives, before it is added.
    pub attended_norm: Option<Vec<f32>>,
    pub mlp_norm: Vec<f32>,
    /// Gates, then ups.
    pub gate_up: Panels,
    pub down: Panels,
    /// Of what the MLP gives, before it is added.
    pub down_norm: Option<Vec<f32>>,
}

impl Weights {
    /// Bytes of the matrices.
    pub fn bytes(&self) -> usize {
        let layer = |layer: &Layer| {
            let Layer { query_key_value, attention_output, gate_up, down, .. } = layer;
            [query_key_value, attention_output, gate_up, down].map(Panels::bytes).iter().sum::<usize>()
        };
        self.embedding.bytes()
            + self.output.as_ref().map_or(0, Panels::bytes)
            + self.layers.iter().map(layer).sum::<usize>()
    }
}

/// Rows of a tensor: its name, the rows that it has, and those that are wanted.
type Rows<'a> = (&'a str, usize, Range<usize>);

/// Reads tensors by name, as far as a rank needs them, and packs them.
pub(super) struct Loader<'a> {
    pub math: &'a Math,
    pub checkpoint: &'a Checkpoint,
    /// Widen bf16 to f32 in memory.
    pub widen: bool,
}

impl Loader<'_> {
    pub fn load(&self, config: &ModelConfig, shards: &Shards) -> Result<Weights, LoadError> {
        let tokens = |tensor| {
            let rows = (tensor, config.vocabulary, shards.vocabulary[shards.rank].clone());
            self.matrix(&[rows], config.hidden)
        };
        Ok(Weights {
            output: if config.tied { None } else { Some(tokens("lm_head.weight")?) },
            embedding: tokens("model.embed_tokens.weight")?,
            layers: (0..config.layers)
                .map(|index| self.layer(index, config, shards))
                .collect::<Result<_, _>>()?,
            final_norm: self.norm("model.norm.weight", config.hidden, config)?,
        })
    }

    fn layer(&self, index: usize, config: &ModelConfig, shards: &Shards) -> Result<Layer, LoadError> {
        let name = |tensor: &str| format!("model.layers.{index}.{tensor}.weight");
        let head_dim = config.head_dim;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let own_queries = shards.attended[shards.rank].clone();
        let own_keys = shards.kv_heads.start * head_dim..shards.kv_heads.end * head_dim;
        let own_hidden = shards.hidden[shards.rank].clone();
        let own_intermediate = shards.intermediate[shards.rank].clone();
        let head_norm = |tensor: &str| match config.head_norms {
            true => self.norm(&name(tensor), head_dim, config).map(Some),
            false => Ok(None),
        };
        let norm = |tensor: &str| self.norm(&name(tensor), config.hidden, config);
        // The same name, and two meanings: models with norms after attention and MLP have it for the former.
        let (attended_norm, mlp_norm, down_norm) = match config.output_norms {
            true => (
                Some("post_attention_layernorm"),
                "pre_feedforward_layernorm",
                Some("post_feedforward_layernorm"),
            ),
            false => (None, "post_attention_layernorm", None),
        };
        let (q, k, v) = (name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj"));
        let (gate, up) = (name("mlp.gate_proj"), name("mlp.up_proj"));
        Ok(Layer {
            attention_norm: norm("input_layernorm")?,
            query_key_value: self.matrix(
                &[(&q, queries, own_queries), (&k, keys, own_keys.clone()), (&v, keys, own_keys)],
                config.hidden,
            )?,
            query_norm: head_norm("self_attn.q_norm")?,
            key_norm: head_norm("self_attn.k_norm")?,
            attention_output: self
                .matrix(&[(&name("self_attn.o_proj"), config.hidden, own_hidden.clone())], queries)?,
            attended_norm: attended_norm.map(norm).transpose()?,
            mlp_norm: norm(mlp_norm)?,
            gate_up: self.matrix(
                &[
                    (&gate, config.intermediate, own_intermediate.clone()),
                    (&up, config.intermediate, own_intermediate),
                ],
                config.hidden,
            )?,
            down: self.matrix(&[(&name("mlp.down_proj"), config.hidden, own_hidden)], config.intermediate)?,
            down_norm: down_norm.map(norm).transpose()?,
        })
    }

    /// The weight of a norm.
    fn norm(&self, name: &str, length: usize, config: &ModelConfig) -> Result<Vec<f32>, LoadError> {
        let mut weight = self.checkpoint.tensor(name, &[length])?.read_vector()?;
        if config.norms_from_one {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        Ok(weight)
    }

    /// Packs rows of matrices of `inputs` columns below one another.
    fn matrix(&self, parts: &[Rows<'_>], inputs: usize) -> Result<Panels, LoadError> {
        let mut placed = Vec::with_capacity(parts.len());
        let mut outputs = 0;
        for (name, rows, wanted) in parts {
            placed.push((outputs, wanted.clone(), self.checkpoint.tensor(name, &[*rows, inputs])?));
            outputs += wanted.len();
        }
        // Of several types, all are widened to the one that holds them all.
        let own = placed[0].2.element();
        let same = placed.iter().all(|(_, _, tensor)| tensor.element() == own);
        let element = if same { own } else { Element::F32 };
        let row = inputs * element.bytes();
        let packed = Panels::pack(self.math, outputs, inputs, element, self.widen, |range, bytes| {
            for (start, wanted, tensor) in &placed {
                let (from, to) = (range.start.max(*start), range.end.min(start + wanted.len()));
                if from < to {
                    let target = &mut bytes[(from - range.start) * row..(to - range.start) * row];
                    tensor.read_rows(wanted.start + from - start, element, target)?;
                }
            }
            Ok(())
        });
        packed.map_err(|error| match error {
            PackError::Read(error) => error,
            PackError::TooLarge => LoadError::Shape {
                file: placed[0].2.path().to_owned(),
                tensor: parts[0].0.to_owned(),
                found: vec![outputs, inputs],
                expected: vec![outputs, inputs],
            },
        })
    }
}
