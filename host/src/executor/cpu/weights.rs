//! A model's weights in memory.

use host_kernels::math::{Math, PackError, Panels};

use super::checkpoint::Checkpoint;
use super::config::ModelConfig;
use super::error::LoadError;

/// All weights; matrices are packed for the product.
pub(super) struct Weights {
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
    pub mlp_norm: Vec<f32>,
    /// Gates, then ups.
    pub gate_up: Panels,
    pub down: Panels,
}

/// Reads tensors by name and packs them.
pub(super) struct Loader<'a> {
    pub math: &'a Math,
    pub checkpoint: &'a Checkpoint,
    /// Widen bf16 to f32 in memory.
    pub widen: bool,
}

impl Loader<'_> {
    pub fn load(&self, config: &ModelConfig) -> Result<Weights, LoadError> {
        let vocabulary = config.vocabulary;
        let output = match config.tied {
            true => None,
            false => Some(self.matrix(&[("lm_head.weight", vocabulary)], config.hidden)?),
        };
        Ok(Weights {
            embedding: self.matrix(&[("model.embed_tokens.weight", vocabulary)], config.hidden)?,
            layers: (0..config.layers).map(|index| self.layer(index, config)).collect::<Result<_, _>>()?,
            final_norm: self.vector("model.norm.weight", config.hidden)?,
            output,
        })
    }

    fn layer(&self, index: usize, config: &ModelConfig) -> Result<Layer, LoadError> {
        let name = |tensor: &str| format!("model.layers.{index}.{tensor}.weight");
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let head_norm = |tensor: &str| match config.head_norms {
            true => self.vector(&name(tensor), config.head_dim).map(Some),
            false => Ok(None),
        };
        let (q, k, v) = (name("self_attn.q_proj"), name("self_attn.k_proj"), name("self_attn.v_proj"));
        let (gate, up) = (name("mlp.gate_proj"), name("mlp.up_proj"));
        Ok(Layer {
            attention_norm: self.vector(&name("input_layernorm"), config.hidden)?,
            query_key_value: self.matrix(&[(&q, queries), (&k, keys), (&v, keys)], config.hidden)?,
            query_norm: head_norm("self_attn.q_norm")?,
            key_norm: head_norm("self_attn.k_norm")?,
            attention_output: self.matrix(&[(&name("self_attn.o_proj"), config.hidden)], queries)?,
            mlp_norm: self.vector(&name("post_attention_layernorm"), config.hidden)?,
            gate_up: self
                .matrix(&[(&gate, config.intermediate), (&up, config.intermediate)], config.hidden)?,
            down: self.matrix(&[(&name("mlp.down_proj"), config.hidden)], config.intermediate)?,
        })
    }

    fn vector(&self, name: &str, length: usize) -> Result<Vec<f32>, LoadError> {
        self.checkpoint.tensor(name, &[length])?.read_vector()
    }

    /// Packs matrices of `inputs` columns, given with their rows, below one another.
    fn matrix(&self, parts: &[(&str, usize)], inputs: usize) -> Result<Panels, LoadError> {
        let mut placed = Vec::with_capacity(parts.len());
        let mut outputs = 0;
        for &(name, rows) in parts {
            placed.push((outputs, rows, self.checkpoint.tensor(name, &[rows, inputs])?));
            outputs += rows;
        }
        let element = placed[0].2.element;
        for ((name, _), (_, _, tensor)) in parts.iter().zip(&placed) {
            if tensor.element != element {
                return Err(LoadError::ElementType {
                    file: tensor.path().to_owned(),
                    tensor: (*name).to_owned(),
                    found: format!("{:?}", tensor.element),
                    expected: format!("{element:?}, that of {}", parts[0].0),
                });
            }
        }
        let row = inputs * element.bytes();
        let packed = Panels::pack(self.math, outputs, inputs, element, self.widen, |range, bytes| {
            for (start, rows, tensor) in &placed {
                let (from, to) = (range.start.max(*start), range.end.min(start + rows));
                if from < to {
                    let target = &mut bytes[(from - range.start) * row..(to - range.start) * row];
                    tensor.read_rows(from - start, target)?;
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
