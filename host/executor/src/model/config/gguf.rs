//! The configuration of a model, from the metadata of a GGUF file.
//!
//! Absent keys mean what they mean in llama.cpp. Unknown keys of the architecture are refused, because they would change what is
//! computed.

use std::path::Path;

use host_core::Dtype;
use host_gguf::{Array, Error, Gguf, Kind, Metadata, TensorInfo, Value};
use host_kernels::math::{Gate, RopeScaling};

use super::{HEAD_DIM_UNIT, HIDDEN_UNIT, ModelConfig, Rope, SlidingLayers, most};
use crate::model::LoadError;

/// The tensor with the divisors of rotary frequencies. Llama 3.1 and later have it in place of keys.
pub(crate) const ROPE_DIVISORS: &str = "rope_freqs.weight";
/// The embedding, whose rows are the vocabulary.
const EMBEDDING: &str = "token_embd.weight";
/// If no key names the sliding layers of a Gemma-3, all layers slide except every sixth.
const PATTERN: usize = 6;
/// Number of layers of the Gemma-3 of 27 billion parameters, which scales its queries differently.
const LAYERS_OF_27B: usize = 62;

/// Keys of an architecture that are read.
const KEYS: [&str; 17] = [
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
];
/// Further keys that are read for Gemma-3.
const GEMMA3_KEYS: [&str; 4] = [
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "final_logit_softcapping",
    "rope.freq_base_swa",
];
/// Keys that are ignored: the origin of the weights, and parameters that only the scaling called yarn uses.
const IDLE_KEYS: [&str; 3] =
    ["rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"];

/// The supported values of `general.architecture`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    Llama,
    Qwen3,
    Gemma3,
}

impl Architecture {
    const ALL: [Self; 3] = [Self::Llama, Self::Qwen3, Self::Gemma3];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }
}

/// The configuration of the model in a GGUF file.
///
/// KV is f32 if all matrices are f32, and bf16 otherwise: quantized files are made of bf16 models, whose config.json asks for
/// bf16.
pub(crate) fn read(file: &Path, gguf: &Gguf) -> Result<(Architecture, ModelConfig), LoadError> {
    let metadata = gguf.metadata();
    let plain = Reader { file, gguf, metadata, architecture: Architecture::Llama };
    plain.only("general.type", "model", |value| *value == Value::Text("model".into()))?;
    let named = plain.with(metadata.text("general.architecture"))?;
    let architecture = Architecture::ALL.into_iter().find(|known| Some(known.name()) == named);
    let Some(architecture) = architecture else {
        let supported = Architecture::ALL.map(Architecture::name).join(", ");
        return Err(plain.unsupported("general.architecture", &supported));
    };
    let config = Reader { architecture, ..plain }.config()?;
    Ok((architecture, config))
}

#[derive(Clone, Copy)]
struct Reader<'a> {
    file: &'a Path,
    gguf: &'a Gguf,
    metadata: &'a Metadata,
    architecture: Architecture,
}

impl Reader<'_> {
    fn config(&self) -> Result<ModelConfig, LoadError> {
        self.only_known_keys()?;
        self.only(&self.key("attention.causal"), "true", |value| *value == Value::Bool(true))?;
        for key in ["expert_count", "expert_used_count"] {
            self.only(&self.key(key), "models without experts", |value| value.to_string() == "0")?;
        }
        let gemma3 = self.architecture == Architecture::Gemma3;
        let hidden = self.size("embedding_length", None, most::HIDDEN)?;
        let heads = self.size("attention.head_count", None, most::HEADS)?;
        let kv_heads = self.size("attention.head_count_kv", Some(heads), most::HEADS)?;
        let head_dim = self.size("attention.key_length", Some((hidden / heads).max(1)), most::HEAD_DIM)?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of the {heads} heads of queries");
            return Err(self.wrong("attention.head_count_kv", &expected));
        }
        let same = format!("{head_dim}, the dimensions of a head");
        for key in ["attention.value_length", "rope.dimension_count"] {
            if self.size(key, Some(head_dim), most::HEAD_DIM)? != head_dim {
                return Err(self.unsupported(&self.key(key), &same));
            }
        }
        if !head_dim.is_multiple_of(HEAD_DIM_UNIT) {
            return Err(self.unsupported(&self.key("attention.key_length"), "multiples of 16"));
        }
        if !hidden.is_multiple_of(HIDDEN_UNIT) {
            return Err(self.unsupported(&self.key("embedding_length"), "multiples of 8"));
        }
        let layers = self.size("block_count", None, most::LAYERS)?;
        let rope = Rope { theta: self.number("rope.freq_base", Some(10_000.0))?, scaling: self.scaling()? };
        let common = ModelConfig {
            hidden,
            layers,
            heads,
            kv_heads,
            head_dim,
            intermediate: self.size("feed_forward_length", None, most::INTERMEDIATE)?,
            vocabulary: self.vocabulary(hidden)?,
            max_positions: self.size("context_length", None, most::POSITIONS)?,
            norm_epsilon: self.number("attention.layer_norm_rms_epsilon", None)? as f32,
            rope,
            rope_divisors: self.rope_divisors(rope, head_dim)?,
            sliding: None,
            score_scale: 1.0 / (head_dim as f32).sqrt(),
            embedding_scale: None,
            gate: Gate::Silu,
            tied: self.gguf.tensor("output.weight").is_none(),
            head_norms: self.architecture != Architecture::Llama,
            // llama.cpp's converter adds the 1 to the weights of Gemma-3's norms.
            norms_from_one: false,
            output_norms: gemma3,
            kv_dtype: if self.gguf.tensors().iter().all(is_wide) { Dtype::F32 } else { Dtype::Bf16 },
        };
        if gemma3 { self.gemma3(common) } else { Ok(common) }
    }

    /// The configuration of a Gemma-3, from the values that it has in common with other models.
    fn gemma3(&self, common: ModelConfig) -> Result<ModelConfig, LoadError> {
        let softcap = self.key("final_logit_softcapping");
        self.only(&softcap, "no soft capping", |value| matches!(value, Value::F32(cap) if *cap == 0.0))?;
        let theta = self.number("rope.freq_base_swa", Some(10_000.0))?;
        let window = self.key("attention.sliding_window");
        let sliding = match self.with(self.metadata.unsigned(&window))? {
            None | Some(0) => None,
            Some(_) => {
                let window = self.size("attention.sliding_window", None, most::WINDOW)?;
                let slides = self.sliding_layers(common.layers)?;
                let rope = Rope { theta, scaling: RopeScaling::None };
                slides.contains(&true).then_some(SlidingLayers { window, slides, rope })
            }
        };
        // As in llama.cpp: scores are scaled by the dimension of a head. In the largest model they are scaled by the width of the
        // residual stream divided by the number of heads.
        let scaled_by = match common.layers {
            LAYERS_OF_27B => common.hidden / common.heads,
            _ => common.head_dim,
        };
        Ok(ModelConfig {
            sliding,
            embedding_scale: Some((common.hidden as f32).sqrt()),
            score_scale: 1.0 / (scaled_by as f32).sqrt(),
            gate: Gate::GeluTanh,
            ..common
        })
    }

    /// Which layers slide: those whose flag is set, or, if the key is a number n, all except every n-th.
    fn sliding_layers(&self, layers: usize) -> Result<Vec<bool>, LoadError> {
        let name = "attention.sliding_window_pattern";
        let key = self.key(name);
        let slides: Vec<bool> = match self.metadata.get(&key) {
            Some(Value::Array(Array::Bool(flags))) if flags.len() == layers => flags.clone(),
            Some(Value::Array(_)) => {
                return Err(
                    self.wrong(name, &format!("a number, or true or false for each of {layers} layers"))
                );
            }
            _ => {
                let pattern = self.size(name, Some(PATTERN), most::LAYERS)?;
                (1..=layers).map(|layer| !layer.is_multiple_of(pattern)).collect()
            }
        };
        if slides.contains(&false) {
            return Ok(slides);
        }
        let key = if self.metadata.get(&key).is_some() { key } else { self.key("block_count") };
        Err(self.unsupported(&key, "models of which at least one layer has full attention"))
    }

    /// The rows of the embedding, which `vocab_size` must not contradict.
    fn vocabulary(&self, hidden: usize) -> Result<usize, LoadError> {
        let Some(tensor) = self.gguf.tensor(EMBEDDING) else {
            return Err(LoadError::MissingTensor {
                file: self.file.to_owned(),
                tensor: EMBEDDING.to_owned(),
            });
        };
        let rows = usize::try_from(tensor.rows()).unwrap_or(usize::MAX);
        let expected = self.size("vocab_size", Some(rows.clamp(1, most::VOCABULARY)), most::VOCABULARY)?;
        if rows == expected {
            return Ok(rows);
        }
        Err(LoadError::Shape {
            file: self.file.to_owned(),
            tensor: EMBEDDING.to_owned(),
            found: tensor.dimensions().iter().rev().map(|size| *size as usize).collect(),
            expected: vec![expected, hidden],
        })
    }

    fn scaling(&self) -> Result<RopeScaling, LoadError> {
        let kind = self.key("rope.scaling.type");
        let factor = match self.metadata.number(&self.key("rope.scaling.factor")) {
            // llama.cpp writes 0 for no scaling.
            Ok(Some(0.0)) => None,
            _ => Some(self.number("rope.scaling.factor", Some(1.0))?),
        };
        match (self.with(self.metadata.text(&kind))?, factor) {
            (None | Some("linear"), Some(factor)) if factor != 1.0 => Ok(RopeScaling::Linear(factor)),
            (None | Some("none" | "linear"), _) => Ok(RopeScaling::None),
            _ => Err(self.unsupported(&kind, "\"none\" and \"linear\"")),
        }
    }

    /// The divisors of rotary frequencies, from a tensor of their own.
    fn rope_divisors(&self, rope: Rope, head_dim: usize) -> Result<Option<Vec<f32>>, LoadError> {
        let Some(tensor) = self.gguf.tensor(ROPE_DIVISORS) else { return Ok(None) };
        let refused = |found: String, supported: &str| LoadError::Unsupported {
            file: self.file.to_owned(),
            key: format!("tensor {ROPE_DIVISORS}"),
            found,
            supported: supported.to_owned(),
        };
        if self.architecture != Architecture::Llama || rope.scaling != RopeScaling::None {
            let found = format!("there, in a {} model", self.architecture.name());
            return Err(refused(found, "it in llama models without rope.scaling.factor"));
        }
        if tensor.dimensions() != [head_dim as u64 / 2] || tensor.kind() != Kind::F32 {
            let found = format!("of type {} and shape {:?}", tensor.kind().name(), tensor.dimensions());
            return Err(refused(found, &format!("F32, a divisor for each of {} pairs", head_dim / 2)));
        }
        let mut divisors = vec![0.0; head_dim / 2];
        self.with(self.gguf.read_rows(tensor, 0, &mut divisors))?;
        match divisors.iter().find(|divisor| !(divisor.is_finite() && **divisor > 0.0)) {
            Some(divisor) => Err(refused(format!("with {divisor} in it"), "divisors above 0")),
            None => Ok(Some(divisors)),
        }
    }

    fn only_known_keys(&self) -> Result<(), LoadError> {
        let own =
            |key: &&str| key.strip_prefix(self.architecture.name()).is_some_and(|key| key.starts_with('.'));
        let gemma3: &[_] = if self.architecture == Architecture::Gemma3 { &GEMMA3_KEYS } else { &[] };
        let known: Vec<String> =
            KEYS.iter().chain(gemma3).chain(&IDLE_KEYS).map(|name| self.key(name)).collect();
        match self
            .metadata
            .iter()
            .map(|(key, _)| key)
            .filter(own)
            .find(|key| !known.iter().any(|known| known == key))
        {
            Some(key) => {
                Err(self.unsupported(key, &format!("{} models without it", self.architecture.name())))
            }
            None => Ok(()),
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name())
    }

    /// A positive whole number, or a list that repeats it for each layer.
    fn size(&self, name: &str, default: Option<usize>, limit: usize) -> Result<usize, LoadError> {
        let key = self.key(name);
        let expected = format!("a whole number from 1 to {limit}");
        let found = match self.metadata.get(&key) {
            Some(Value::Array(_)) => {
                let numbers = self.with(self.metadata.integers(&key))?.unwrap_or_default();
                let first = numbers.first().copied();
                match first.and_then(|first| u64::try_from(first).ok()) {
                    Some(number) if numbers.iter().all(|other| Some(*other) == first) => Some(number),
                    _ => return Err(self.unsupported(&key, "layers that are all alike")),
                }
            }
            _ => self.with(self.metadata.unsigned(&key))?,
        };
        match (found.map(usize::try_from), default) {
            (Some(Ok(size)), _) if (1..=limit).contains(&size) => Ok(size),
            (None, Some(default)) => Ok(default),
            _ => Err(self.wrong(name, &expected)),
        }
    }

    /// A positive number.
    fn number(&self, name: &str, default: Option<f64>) -> Result<f64, LoadError> {
        match (self.with(self.metadata.number(&self.key(name)))?, default) {
            (Some(number), _) if number > 0.0 && number.is_finite() => Ok(number),
            (None, Some(default)) => Ok(default),
            _ => Err(self.wrong(name, "a number above 0")),
        }
    }

    /// Refuses a feature unless it is absent or `fine`.
    fn only(&self, key: &str, supported: &str, fine: impl Fn(&Value) -> bool) -> Result<(), LoadError> {
        if self.metadata.get(key).is_none_or(fine) { Ok(()) } else { Err(self.unsupported(key, supported)) }
    }

    fn wrong(&self, name: &str, expected: &str) -> LoadError {
        let (key, expected) = (self.key(name), expected.to_owned());
        LoadError::Config { file: self.file.to_owned(), found: self.found(&key), key, expected }
    }

    fn unsupported(&self, key: &str, supported: &str) -> LoadError {
        let (file, supported) = (self.file.to_owned(), supported.to_owned());
        LoadError::Unsupported { file, key: key.to_owned(), found: self.found(key), supported }
    }

    fn found(&self, key: &str) -> String {
        self.metadata.get(key).map_or_else(|| "absent".to_owned(), Value::to_string)
    }

    /// The value that was read, or the error with the file's name.
    fn with<T>(&self, read: Result<T, Error>) -> Result<T, LoadError> {
        read.map_err(|source| LoadError::Gguf { file: self.file.to_owned(), source })
    }
}

/// Whether a tensor is f32, or no matrix. Vectors pass, because they are always f32.
fn is_wide(tensor: &TensorInfo) -> bool {
    tensor.kind() == Kind::F32 || tensor.dimensions().len() == 1
}
