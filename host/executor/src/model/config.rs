//! The configuration of a model, from config.json or from the metadata of a GGUF file.

mod gemma3;
mod gguf;

use std::path::{Path, PathBuf};

use host_core::Dtype;
use host_kernels::math::{Gate, RopeScaling};
use serde_json::Value;

pub(crate) use self::gguf::{Architecture, ROPE_DIVISORS, read as read_gguf};
use super::error::LoadError;
use crate::Sliding;

/// Architectures that [`super::CpuExecutor`] computes, as config.json names them.
const ARCHITECTURES: [&str; 3] = ["Qwen3ForCausalLM", "LlamaForCausalLM", GEMMA3];
/// Text models of the Gemma-3 family.
const GEMMA3: &str = "Gemma3ForCausalLM";
/// Most bytes of a configuration file.
const MAX_CONFIG: u64 = 1 << 20;

/// The dimension of a head must be a multiple of this.
const HEAD_DIM_UNIT: usize = 16;
/// The width of the residual stream must be a multiple of this.
const HIDDEN_UNIT: usize = 8;

/// Largest sizes that are accepted.
mod most {
    pub const HIDDEN: usize = 1 << 17;
    pub const HEADS: usize = 1 << 10;
    pub const HEAD_DIM: usize = 1 << 10;
    pub const LAYERS: usize = 1 << 12;
    pub const INTERMEDIATE: usize = 1 << 20;
    pub const VOCABULARY: usize = 1 << 24;
    pub const POSITIONS: usize = u32::MAX as usize;
    pub const WINDOW: usize = 1 << 30;
}

/// Sizes and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ModelConfig {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocabulary: usize,
    pub max_positions: usize,
    pub norm_epsilon: f32,
    /// Frequencies of the layers that see all positions.
    pub rope: Rope,
    /// Further divisors of these frequencies, one per pair of a head's dimensions.
    pub rope_divisors: Option<Vec<f32>>,
    /// The layers that see the newest positions only, if there are any.
    pub sliding: Option<SlidingLayers>,
    /// The factor by which attention scores are multiplied.
    pub score_scale: f32,
    /// The factor by which rows of the embedding are multiplied.
    pub embedding_scale: Option<f32>,
    pub gate: Gate,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// Whether queries and keys are normed per head.
    pub head_norms: bool,
    /// Whether weights of norms are stored minus 1.
    pub norms_from_one: bool,
    /// Whether the outputs of attention and MLP are normed before they are added.
    pub output_norms: bool,
    pub kv_dtype: Dtype,
}

/// Rotary frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// Layers that see the newest positions only.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SlidingLayers {
    /// Positions that they see, the newest included.
    pub window: usize,
    /// For each layer of the model, whether it slides. At least one layer does not.
    pub slides: Vec<bool>,
    pub rope: Rope,
}

impl ModelConfig {
    /// How many layers slide, and how far they see.
    pub fn sliding(&self) -> Option<Sliding> {
        let layers = |sliding: &SlidingLayers| sliding.slides.iter().filter(|slides| **slides).count();
        self.sliding.as_ref().map(|sliding| Sliding { layers: layers(sliding), window: sliding.window })
    }
}

/// Reads config.json. Returns its bytes and the configuration.
pub(crate) fn read(directory: &Path) -> Result<(Vec<u8>, ModelConfig), LoadError> {
    let file = directory.join("config.json");
    let read = |source| LoadError::Read { file: file.clone(), source };
    let bytes = host_ownership::read_up_to(&file, MAX_CONFIG).map_err(read)?;
    let config = parse(file, &bytes)?;
    Ok((bytes, config))
}

/// Parses the bytes of a config.json.
pub(crate) fn parse(file: PathBuf, bytes: &[u8]) -> Result<ModelConfig, LoadError> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|error| LoadError::Parse { file: file.clone(), reason: error.to_string() })?;
    Reader { file, value: &value }.config()
}

struct Reader<'a> {
    file: PathBuf,
    value: &'a Value,
}

impl Reader<'_> {
    fn config(&self) -> Result<ModelConfig, LoadError> {
        let architecture = self.value["architectures"][0].as_str().unwrap_or_default();
        if !ARCHITECTURES.contains(&architecture) {
            return Err(self.unsupported(
                "architectures",
                &self.value["architectures"],
                &ARCHITECTURES.join(", "),
            ));
        }
        let gemma3 = architecture == GEMMA3;
        if gemma3 {
            self.only_gemma3()?;
        } else {
            self.only("hidden_act", "silu", |value| value == "silu")?;
            for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
                self.only(key, "false", |value| value == false)?;
            }
        }
        self.only("quantization_config", "unquantized weights", |_| false)?;
        let hidden = self.size("hidden_size", None, most::HIDDEN)?;
        let heads = self.size("num_attention_heads", None, most::HEADS)?;
        let kv_heads = self.size("num_key_value_heads", Some(heads), most::HEADS)?;
        let usual = if gemma3 { 256 } else { (hidden / heads).max(1) };
        let head_dim = self.size("head_dim", Some(usual), most::HEAD_DIM)?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads {heads}");
            return Err(self.wrong("num_key_value_heads", &kv_heads.into(), &expected));
        }
        if !head_dim.is_multiple_of(HEAD_DIM_UNIT) {
            return Err(self.unsupported("head_dim", &head_dim.into(), "multiples of 16"));
        }
        if !hidden.is_multiple_of(HIDDEN_UNIT) {
            return Err(self.unsupported("hidden_size", &hidden.into(), "multiples of 8"));
        }
        let stored = ["dtype", "torch_dtype"].iter().find_map(|key| self.value[key].as_str());
        let common = ModelConfig {
            hidden,
            layers: self.size("num_hidden_layers", None, most::LAYERS)?,
            heads,
            kv_heads,
            head_dim,
            intermediate: self.size("intermediate_size", None, most::INTERMEDIATE)?,
            vocabulary: self.size("vocab_size", None, most::VOCABULARY)?,
            max_positions: self.size("max_position_embeddings", None, most::POSITIONS)?,
            norm_epsilon: self.number(self.value, "rms_norm_eps", Some(1e-6))? as f32,
            rope: self.rope(if gemma3 { 1_000_000.0 } else { 10_000.0 })?,
            rope_divisors: None,
            sliding: None,
            score_scale: 1.0 / (head_dim as f32).sqrt(),
            embedding_scale: None,
            gate: Gate::Silu,
            tied: self.value["tie_word_embeddings"].as_bool().unwrap_or(false),
            head_norms: architecture == "Qwen3ForCausalLM",
            norms_from_one: false,
            output_norms: false,
            kv_dtype: if stored == Some("float32") { Dtype::F32 } else { Dtype::Bf16 },
        };
        if gemma3 { self.gemma3(common) } else { Ok(common) }
    }

    /// Theta and scaling, from `rope_theta` and `rope_scaling`, or from `rope_parameters`, which has both.
    fn rope(&self, theta: f64) -> Result<Rope, LoadError> {
        let parameters = &self.value["rope_parameters"];
        let theta = self.number(self.value, "rope_theta", Some(theta))?;
        if parameters.is_object() {
            return self.rope_in(parameters, theta);
        }
        Ok(Rope { theta, scaling: self.rope_scaling(&self.value["rope_scaling"])? })
    }

    /// Theta and scaling from one object.
    fn rope_in(&self, parameters: &Value, theta: f64) -> Result<Rope, LoadError> {
        let theta = self.number(parameters, "rope_theta", Some(theta))?;
        Ok(Rope { theta, scaling: self.rope_scaling(parameters)? })
    }

    fn rope_scaling(&self, scaling: &Value) -> Result<RopeScaling, LoadError> {
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
        Ok(match kind {
            None if scaling.is_null() || scaling.is_object() => RopeScaling::None,
            Some("default") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear(self.number(scaling, "factor", None)?),
            Some("llama3") => RopeScaling::Llama3 {
                factor: self.number(scaling, "factor", None)?,
                low: self.number(scaling, "low_freq_factor", None)?,
                high: self.number(scaling, "high_freq_factor", None)?,
                original_positions: self.number(scaling, "original_max_position_embeddings", None)?,
            },
            _ => {
                return Err(self.unsupported(
                    "rope_scaling",
                    scaling,
                    "no scaling, \"default\", \"linear\" and \"llama3\"",
                ));
            }
        })
    }

    /// A positive whole number.
    fn size(&self, key: &str, default: Option<usize>, limit: usize) -> Result<usize, LoadError> {
        let value = &self.value[key];
        match (value.as_u64().and_then(|size| usize::try_from(size).ok()), default) {
            (Some(size), _) if (1..=limit).contains(&size) => Ok(size),
            (None, Some(default)) if value.is_null() => Ok(default),
            _ => Err(self.wrong(key, value, &format!("a whole number from 1 to {limit}"))),
        }
    }

    /// A positive number.
    fn number(&self, object: &Value, key: &str, default: Option<f64>) -> Result<f64, LoadError> {
        let value = &object[key];
        match (value.as_f64(), default) {
            (Some(number), _) if number > 0.0 && number.is_finite() => Ok(number),
            (None, Some(default)) if value.is_null() => Ok(default),
            _ => Err(self.wrong(key, value, "a number above 0")),
        }
    }

    /// Refuses a feature unless it is absent or `fine`.
    fn only(&self, key: &str, supported: &str, fine: impl Fn(&Value) -> bool) -> Result<(), LoadError> {
        let value = &self.value[key];
        if value.is_null() || fine(value) { Ok(()) } else { Err(self.unsupported(key, value, supported)) }
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> LoadError {
        let found = if value.is_null() { "absent".to_owned() } else { value.to_string() };
        LoadError::Config {
            file: self.file.clone(),
            key: key.to_owned(),
            found,
            expected: expected.to_owned(),
        }
    }

    fn unsupported(&self, key: &str, value: &Value, supported: &str) -> LoadError {
        let found = if value.is_null() { "absent".to_owned() } else { value.to_string() };
        let supported = supported.to_owned();
        LoadError::Unsupported { file: self.file.clone(), key: key.to_owned(), found, supported }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A small model's configuration, with `changes` on top.
    pub fn parse(changes: Value) -> ModelConfig {
        let mut config = json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 512,
        });
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("config.json"), config.to_string()).unwrap();
        read(directory.path()).unwrap().1
    }

    #[test]
    fn absent_keys_mean_what_they_mean_in_transformers() {
        let config = parse(json!({ "head_dim": null }));
        assert_eq!((config.head_dim, config.kv_heads, config.tied), (16, 4, false));
        assert_eq!(config.rope, Rope { theta: 10_000.0, scaling: RopeScaling::None });
        assert_eq!((config.norm_epsilon, config.head_norms), (1e-6, false));
    }

    #[test]
    fn rope_is_read_from_the_old_and_the_new_keys() {
        let llama3 = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        });
        let mut both = llama3.clone();
        both["rope_theta"] = json!(500_000);
        let old = parse(json!({ "rope_theta": 500_000, "rope_scaling": llama3 }));
        assert!(matches!(
            old.rope.scaling,
            RopeScaling::Llama3 { factor: 8.0, original_positions: 8192.0, .. }
        ));
        assert_eq!(old, parse(json!({ "rope_parameters": both })));
        let linear = parse(json!({ "rope_scaling": { "type": "linear", "factor": 4.0 } }));
        assert_eq!(linear.rope.scaling, RopeScaling::Linear(4.0));
        let plain = parse(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 } }));
        assert_eq!(plain, parse(json!({ "rope_theta": 1e6, "rope_scaling": null })));
    }
}
