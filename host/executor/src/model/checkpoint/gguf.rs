//! Weights of a GGUF file.
//!
//! Quantized rows are expanded to f32 while they are read, a few rows at a time.

use std::path::{Path, PathBuf};

use host_gguf::{Gguf, Kind, TensorInfo};
use host_kernels::math::Element;

use super::write_floats;
use crate::model::LoadError;
use crate::model::config::{Architecture, ModelConfig, ROPE_DIVISORS};

/// Names outside of layers: Hugging Face's, and GGUF's.
const WHOLE: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];

/// Names within a layer, of every model.
const LAYER: [(&str, &str); 8] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Names of the norms of queries and keys.
const HEAD_NORMS: [(&str, &str); 2] =
    [("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm")];

/// The norm before the MLP, in models without norms after attention and MLP.
const PLAIN_NORMS: [(&str, &str); 1] = [("post_attention_layernorm", "ffn_norm")];

/// The norms around the MLP, in models that have them.
const OUTPUT_NORMS: [(&str, &str); 3] = [
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// A GGUF file, as the weights of a model.
pub(crate) struct GgufWeights {
    pub path: PathBuf,
    pub gguf: Gguf,
    /// Elements of a head, in files that keep the rows of queries and keys in the order of interleaved rotation.
    interleaved: Option<usize>,
    /// Names of the tensors of a layer: Hugging Face's, and GGUF's.
    layer: Vec<(&'static str, &'static str)>,
}

/// A tensor whose shape has been checked.
pub(super) struct Rows<'a> {
    weights: &'a GgufWeights,
    tensor: &'a TensorInfo,
    pub element: Element,
    /// Elements of one row.
    pub width: usize,
    /// As [`GgufWeights::interleaved`], for matrices of queries and keys.
    interleaved: Option<usize>,
}

impl GgufWeights {
    /// The weights of a model of this configuration. A file with tensors that such a model does not have is refused: they would
    /// change what is computed.
    pub fn new(
        path: &Path,
        gguf: Gguf,
        architecture: Architecture,
        config: &ModelConfig,
    ) -> Result<Self, LoadError> {
        let norms: &[_] = if config.output_norms { &OUTPUT_NORMS } else { &PLAIN_NORMS };
        let heads: &[_] = if config.head_norms { &HEAD_NORMS } else { &[] };
        let layer = [&LAYER, norms, heads].concat();
        // llama.cpp's converter reorders these rows for Llama only.
        let interleaved = (architecture == Architecture::Llama).then_some(config.head_dim);
        let weights = Self { path: path.to_owned(), gguf, interleaved, layer };
        let known = |name: &str| {
            let whole = WHOLE.iter().any(|(_, known)| *known == name);
            whole
                || weights.is_of_layer(name, config.layers)
                || config.rope_divisors.is_some() && name == ROPE_DIVISORS
        };
        match weights.gguf.tensors().iter().find(|tensor| !known(tensor.name())) {
            Some(tensor) => Err(LoadError::UnknownTensor {
                file: weights.path,
                tensor: tensor.name().to_owned(),
                architecture: architecture.name(),
            }),
            None => Ok(weights),
        }
    }

    /// Whether a layer has a tensor of this name.
    fn is_of_layer(&self, name: &str, layers: usize) -> bool {
        let parts = name.strip_prefix("blk.").and_then(|name| name.strip_suffix(".weight"));
        let Some((index, part)) = parts.and_then(|name| name.split_once('.')) else { return false };
        let index = index.parse().ok().filter(|number: &usize| number.to_string() == index);
        index.is_some_and(|index| index < layers) && self.layer.iter().any(|(_, known)| *known == part)
    }

    /// GGUF's name for a tensor.
    fn name(&self, name: &str) -> Option<String> {
        if let Some((_, whole)) = WHOLE.iter().find(|(known, _)| *known == name) {
            return Some((*whole).to_owned());
        }
        let parts = name.strip_prefix("model.layers.").and_then(|name| name.strip_suffix(".weight"));
        let (index, part) = parts?.split_once('.')?;
        let (_, part) = self.layer.iter().find(|(known, _)| *known == part)?;
        Some(format!("blk.{index}.{part}.weight"))
    }

    pub(super) fn tensor(&self, name: &str, shape: &[usize]) -> Result<Rows<'_>, LoadError> {
        let rotated =
            name.ends_with(".self_attn.q_proj.weight") || name.ends_with(".self_attn.k_proj.weight");
        let name = self.name(name).unwrap_or_else(|| name.to_owned());
        let Some(tensor) = self.gguf.tensor(&name) else {
            return Err(LoadError::MissingTensor { file: self.path.clone(), tensor: name });
        };
        let found: Vec<usize> = tensor
            .dimensions()
            .iter()
            .rev()
            .map(|size| usize::try_from(*size).unwrap_or(usize::MAX))
            .collect();
        if found != shape {
            return Err(LoadError::Shape {
                file: self.path.clone(),
                tensor: name,
                found,
                expected: shape.to_owned(),
            });
        }
        Ok(Rows {
            weights: self,
            tensor,
            element: stored_element(tensor.kind()).unwrap_or(Element::F32),
            width: shape.last().copied().unwrap_or(1),
            interleaved: self.interleaved.filter(|_| rotated),
        })
    }
}

/// The type of elements that are stored one by one.
fn stored_element(kind: Kind) -> Option<Element> {
    match kind {
        Kind::F32 => Some(Element::F32),
        Kind::F16 => Some(Element::F16),
        Kind::Bf16 => Some(Element::Bf16),
        _ => None,
    }
}

impl Rows<'_> {
    /// The file that holds them.
    pub fn path(&self) -> &Path {
        &self.weights.path
    }

    /// Reads rows from `first` on as `element` until `bytes` is full.
    pub fn read(&self, first: usize, bytes: &mut [u8]) -> Result<(), LoadError> {
        let Some(head_dim) = self.interleaved else { return self.read_stored(first, bytes) };
        let row = (self.width * self.element.bytes()).max(1);
        for (index, bytes) in bytes.chunks_exact_mut(row).enumerate() {
            self.read_stored(interleaved_row(first + index, head_dim), bytes)?;
        }
        Ok(())
    }

    /// Reads rows in the order of the file.
    fn read_stored(&self, first: usize, bytes: &mut [u8]) -> Result<(), LoadError> {
        let (gguf, first) = (&self.weights.gguf, first as u64);
        let read = match stored_element(self.tensor.kind()) {
            Some(_) => gguf.read_raw_rows(self.tensor, first, bytes),
            None => {
                let mut expanded = vec![0.0; bytes.len() / Element::F32.bytes()];
                let read = gguf.read_rows(self.tensor, first, &mut expanded);
                write_floats(&expanded, bytes);
                read
            }
        };
        read.map_err(|source| LoadError::Gguf { file: self.weights.path.clone(), source })
    }
}

/// The index of a row of queries or keys in a file that is ordered for interleaved rotation. In such a file the two rows of each
/// rotated pair follow each other. In Hugging Face's order, the first rows of all pairs of a head come first, then the second rows.
fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, within, pairs) = (row / head_dim, row % head_dim, head_dim / 2);
    head * head_dim + within % pairs * 2 + within / pairs
}
