//! A rank's part of a model's weights, in the memory that its executor computes from.

use std::ops::Range;

use host_kernels::math::Element;

use super::checkpoint::{Checkpoint, Tensor};
use super::config::ModelConfig;
use super::error::LoadError;
use super::shard::Shards;

/// The memory that weights are loaded into.
pub(crate) trait WeightMemory {
    /// A matrix in this memory.
    type Matrix;
    /// A vector in this memory.
    type Vector;

    /// Loads a matrix.
    fn matrix(&self, source: &MatrixSource<'_>) -> Result<Self::Matrix, LoadError>;

    /// Loads a vector.
    fn vector(&self, values: Vec<f32>) -> Result<Self::Vector, LoadError>;
}

/// The use of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Usage {
    /// Its rows are looked up.
    Lookup,
    /// Its rows are looked up, and it is multiplied with.
    Both,
    /// It is multiplied with.
    Product,
    /// It is multiplied with. The upper half of its rows are gates, and the lower half are the ups that the gates scale.
    Gates,
}

/// A matrix that is to be loaded: rows of one tensor or of several, one below the other.
pub(crate) struct MatrixSource<'a> {
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
    /// How its elements are read: as they are stored, or as f32 if its tensors have different types.
    pub element: Element,
    /// The use of the matrix.
    pub usage: Usage,
    name: String,
    placed: Vec<(usize, Range<usize>, Tensor<'a>)>,
}

impl MatrixSource<'_> {
    /// Reads these rows, one after the other, until `bytes` is full.
    pub fn read(&self, rows: Range<usize>, bytes: &mut [u8]) -> Result<(), LoadError> {
        let row = self.inputs * self.element.bytes();
        for (start, wanted, tensor) in &self.placed {
            let (from, to) = (rows.start.max(*start), rows.end.min(start + wanted.len()));
            if from < to {
                let target = &mut bytes[(from - rows.start) * row..(to - rows.start) * row];
                tensor.read_rows(wanted.start + from - start, self.element, target)?;
            }
        }
        Ok(())
    }

    /// The error of a matrix that no memory could hold.
    pub fn too_large(&self) -> LoadError {
        LoadError::Shape {
            file: self.placed[0].2.path().to_owned(),
            tensor: self.name.clone(),
            found: vec![self.outputs, self.inputs],
            expected: vec![self.outputs, self.inputs],
        }
    }
}

/// The output rows that a rank computes of each matrix, and all of the small vectors.
pub(crate) struct Weights<Matrix, Vector> {
    /// Rows of the rank's token ids.
    pub embedding: Matrix,
    pub layers: Vec<Layer<Matrix, Vector>>,
    pub final_norm: Vector,
    /// Absent when the embedding is the output matrix too.
    pub output: Option<Matrix>,
}

/// One transformer layer.
pub(crate) struct Layer<Matrix, Vector> {
    pub attention_norm: Vector,
    /// Queries, then keys, then values, so that one product computes all three.
    pub query_key_value: Matrix,
    pub query_norm: Option<Vector>,
    pub key_norm: Option<Vector>,
    pub attention_output: Matrix,
    /// The norm of attention's output, before it is added.
    pub attended_norm: Option<Vector>,
    pub mlp_norm: Vector,
    /// Gates, then ups.
    pub gate_up: Matrix,
    pub down: Matrix,
    /// The norm of the MLP's output, before it is added.
    pub down_norm: Option<Vector>,
}

/// Rows of a tensor: its name, the rows that it has, and those that are wanted.
type Rows<'a> = (&'a str, usize, Range<usize>);

/// Reads tensors by name, as far as a rank needs them.
pub(crate) struct Loader<'a, M> {
    pub checkpoint: &'a Checkpoint,
    pub memory: &'a M,
}

impl<M: WeightMemory> Loader<'_, M> {
    pub fn load(
        &self,
        config: &ModelConfig,
        shards: &Shards,
    ) -> Result<Weights<M::Matrix, M::Vector>, LoadError> {
        let tokens = |tensor, usage| {
            let rows = (tensor, config.vocabulary, shards.vocabulary[shards.rank].clone());
            self.matrix(&[rows], config.hidden, usage)
        };
        Ok(Weights {
            output: if config.tied { None } else { Some(tokens("lm_head.weight", Usage::Product)?) },
            embedding: tokens(
                "model.embed_tokens.weight",
                if config.tied { Usage::Both } else { Usage::Lookup },
            )?,
            layers: (0..config.layers)
                .map(|index| self.layer(index, config, shards))
                .collect::<Result<_, _>>()?,
            final_norm: self.norm("model.norm.weight", config.hidden, config)?,
        })
    }

    fn layer(
        &self,
        index: usize,
        config: &ModelConfig,
        shards: &Shards,
    ) -> Result<Layer<M::Matrix, M::Vector>, LoadError> {
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
        // `post_attention_layernorm` has two meanings. In models with norms after attention and MLP it is the norm after attention.
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
                Usage::Product,
            )?,
            query_norm: head_norm("self_attn.q_norm")?,
            key_norm: head_norm("self_attn.k_norm")?,
            attention_output: self.matrix(
                &[(&name("self_attn.o_proj"), config.hidden, own_hidden.clone())],
                queries,
                Usage::Product,
            )?,
            attended_norm: attended_norm.map(norm).transpose()?,
            mlp_norm: norm(mlp_norm)?,
            gate_up: self.matrix(
                &[
                    (&gate, config.intermediate, own_intermediate.clone()),
                    (&up, config.intermediate, own_intermediate),
                ],
                config.hidden,
                Usage::Gates,
            )?,
            down: self.matrix(
                &[(&name("mlp.down_proj"), config.hidden, own_hidden)],
                config.intermediate,
                Usage::Product,
            )?,
            down_norm: down_norm.map(norm).transpose()?,
        })
    }

    /// The weight of a norm.
    fn norm(&self, name: &str, length: usize, config: &ModelConfig) -> Result<M::Vector, LoadError> {
        let mut weight = self.checkpoint.tensor(name, &[length])?.read_vector()?;
        if config.norms_from_one {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        self.memory.vector(weight)
    }

    /// Loads rows of matrices of `inputs` columns, one matrix below the other.
    fn matrix(&self, parts: &[Rows<'_>], inputs: usize, usage: Usage) -> Result<M::Matrix, LoadError> {
        let mut placed = Vec::with_capacity(parts.len());
        let mut outputs = 0;
        for (name, rows, wanted) in parts {
            placed.push((outputs, wanted.clone(), self.checkpoint.tensor(name, &[*rows, inputs])?));
            outputs += wanted.len();
        }
        // If the tensors have different types, all are widened to f32, which holds them all.
        let own = placed[0].2.element();
        let same = placed.iter().all(|(_, _, tensor)| tensor.element() == own);
        let element = if same { own } else { Element::F32 };
        let name = parts[0].0.to_owned();
        self.memory.matrix(&MatrixSource { outputs, inputs, element, usage, name, placed })
    }
}
