//! What config.json says about a model.

use std::path::{Path, PathBuf};

use host_core::Dtype;
use host_kernels::math::RopeScaling;
use serde_json::Value;

use super::error::LoadError;

/// Architectures that [`super::CpuExecutor`] computes, as config.json names them.
const ARCHITECTURES: [&str; 2] = ["Qwen3ForCausalLM", "LlamaForCausalLM"];
/// Most bytes of a configuration file.
const MAX_CONFIG: u64 = 1 << 20;

/// Sizes and constants of a model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ModelConfig {
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub intermediate: usize,
    pub vocabulary: usize,
    pub max_positions: usize,
    pub norm_epsilon: f32,
    pub rope_theta: f64,
    pub rope_scaling: RopeScaling,
    /// The output matrix is the embedding.
    pub tied: bool,
    /// Queries and keys are normed per head (Qwen3).
    pub head_norms: bool,
    pub kv_dtype: Dtype,
}

/// config.json as bytes, and what it says.
pub(super) fn read(directory: &Path) -> Result<(Vec<u8>, ModelConfig), LoadError> {
    let file = directory.join("config.json");
    let read = |source| LoadError::Read { file: file.clone(), source };
    let length = std::fs::metadata(&file).map_err(read)?.len();
    if length > MAX_CONFIG {
        let reason = format!("{length} bytes, at most {MAX_CONFIG} are read");
        return Err(LoadError::Parse { file, reason });
    }
    let bytes = std::fs::read(&file).map_err(read)?;
    let value: Value = serde_json::from_slice(&bytes)
        .map_err(|error| LoadError::Parse { file: file.clone(), reason: error.to_string() })?;
    let config = Reader { file, value: &value }.config()?;
    Ok((bytes, config))
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
        self.only("hidden_act", "silu", |value| value == "silu")?;
        for key in ["attention_bias", "mlp_bias", "use_sliding_window"] {
            self.only(key, "false", |value| value == false)?;
        }
        self.only("quantization_config", "unquantized weights", |_| false)?;
        let hidden = self.size("hidden_size", None, 1 << 17)?;
        let heads = self.size("num_attention_heads", None, 1 << 10)?;
        let kv_heads = self.size("num_key_value_heads", Some(heads), 1 << 10)?;
        let head_dim = self.size("head_dim", Some((hidden / heads).max(1)), 1 << 10)?;
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads {heads}");
            return Err(self.wrong("num_key_value_heads", &kv_heads.into(), &expected));
        }
        if !head_dim.is_multiple_of(16) {
            return Err(self.unsupported("head_dim", &head_dim.into(), "multiples of 16"));
        }
        if !hidden.is_multiple_of(8) {
            return Err(self.unsupported("hidden_size", &hidden.into(), "multiples of 8"));
        }
        let (rope_theta, rope_scaling) = self.rope()?;
        let stored = ["dtype", "torch_dtype"].iter().find_map(|key| self.value[key].as_str());
        Ok(ModelConfig {
            hidden,
            layers: self.size("num_hidden_layers", None, 1 << 12)?,
            heads,
            kv_heads,
            head_dim,
            intermediate: self.size("intermediate_size", None, 1 << 20)?,
            vocabulary: self.size("vocab_size", None, 1 << 24)?,
            max_positions: self.size("max_position_embeddings", None, u32::MAX as usize)?,
            norm_epsilon: self.number(self.value, "rms_norm_eps", Some(1e-6))? as f32,
            rope_theta,
            rope_scaling,
            tied: self.value["tie_word_embeddings"].as_bool().unwrap_or(false),
            head_norms: architecture == "Qwen3ForCausalLM",
            kv_dtype: if stored == Some("float32") { Dtype::F32 } else { Dtype::Bf16 },
        })
    }

    /// Theta and scaling, from `rope_theta` and `rope_scaling`, or from `rope_parameters`, which has both.
    fn rope(&self) -> Result<(f64, RopeScaling), LoadError> {
        let parameters = &self.value["rope_parameters"];
        let theta = match parameters.get("rope_theta") {
            Some(_) => self.number(parameters, "rope_theta", None)?,
            None => self.number(self.value, "rope_theta", Some(10_000.0))?,
        };
        let scaling = if parameters.is_object() { parameters } else { &self.value["rope_scaling"] };
        let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
        let scaling = match kind {
            None if scaling.is_null() || scaling.is_object() => RopeScaling::None,
            Some("default") => RopeScaling::None,
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
                    "no scaling, \"default\" and \"llama3\"",
                ));
            }
        };
        Ok((theta, scaling))
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
    fn parse(changes: Value) -> ModelConfig {
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
        assert_eq!((config.rope_theta, config.rope_scaling), (10_000.0, RopeScaling::None));
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
            old.rope_scaling,
            RopeScaling::Llama3 { factor: 8.0, original_positions: 8192.0, .. }
        ));
        assert_eq!(old, parse(json!({ "rope_parameters": both })));
        let plain = parse(json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e6 } }));
        assert_eq!(plain, parse(json!({ "rope_theta": 1e6, "rope_scaling": null })));
    }
}
