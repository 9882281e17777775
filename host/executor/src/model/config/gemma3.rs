//! The parts of config.json that are different in a Gemma-3 text model.
//!
//! Layers alternate between attention to all positions and to the newest `sliding_window` positions. These include the position
//! itself, as in transformers, whose mask lets position q see position k when `k > q - sliding_window`.

use host_kernels::math::{Gate, RopeScaling};
use serde_json::Value;

use super::{ModelConfig, Reader, Rope, SlidingLayers, most};
use crate::model::LoadError;

/// If config.json does not name the sliding layers, all layers slide except every sixth.
const PATTERN: usize = 6;

impl Reader<'_> {
    /// Refuses features that Gemma-3 text models do not have, although other models of the family do.
    pub(super) fn only_gemma3(&self) -> Result<(), LoadError> {
        self.only("model_type", "gemma3_text", |value| value == "gemma3_text")?;
        self.only("hidden_activation", "gelu_pytorch_tanh", |value| value == "gelu_pytorch_tanh")?;
        self.only("attention_bias", "false", |value| value == false)?;
        self.only("use_bidirectional_attention", "false", |value| value == false)?;
        for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
            self.only(key, "no soft capping", |_| false)?;
        }
        for key in ["global_head_dim", "num_global_key_value_heads"] {
            self.only(key, "layers that all have the same heads", |_| false)?;
        }
        Ok(())
    }

    /// The configuration of a Gemma-3 text model, from the values that it has in common with other models.
    pub(super) fn gemma3(&self, common: ModelConfig) -> Result<ModelConfig, LoadError> {
        let scalar = self.number(self.value, "query_pre_attn_scalar", Some(256.0))? as f32;
        let window = self.size("sliding_window", Some(4096), most::WINDOW)?;
        let slides = self.sliding_layers(common.layers)?;
        let per_layer = &self.value["rope_parameters"];
        let old_local = self.number(self.value, "rope_local_base_freq", Some(10_000.0))?;
        let (rope, local) = match per_layer.get("full_attention") {
            Some(full) => (
                self.rope_in(full, common.rope.theta)?,
                self.rope_in(&per_layer["sliding_attention"], old_local)?,
            ),
            None => (common.rope, Rope { theta: old_local, scaling: RopeScaling::None }),
        };
        Ok(ModelConfig {
            rope,
            sliding: slides.contains(&true).then_some(SlidingLayers { window, slides, rope: local }),
            tied: self.value["tie_word_embeddings"].as_bool().unwrap_or(true),
            head_norms: true,
            norms_from_one: true,
            output_norms: true,
            // The scale is f32, as all activations here are. Implementations that compute in bf16 round it to bf16.
            embedding_scale: Some((common.hidden as f32).sqrt()),
            score_scale: 1.0 / scalar.sqrt(),
            gate: Gate::GeluTanh,
            ..common
        })
    }

    /// Which layers slide: those that `layer_types` names, or all except every `sliding_window_pattern`-th.
    fn sliding_layers(&self, layers: usize) -> Result<Vec<bool>, LoadError> {
        let types = &self.value["layer_types"];
        let slides: Vec<bool> = if types.is_null() {
            let new = "_sliding_window_pattern";
            let key = if self.value[new].is_null() { "sliding_window_pattern" } else { new };
            let pattern = self.size(key, Some(PATTERN), 1 << 12)?;
            (1..=layers).map(|layer| layer % pattern != 0).collect()
        } else {
            let read = |kind: &Value| match kind.as_str() {
                Some("sliding_attention") => Some(true),
                Some("full_attention") => Some(false),
                _ => None,
            };
            let read: Option<Vec<bool>> = types.as_array().and_then(|types| types.iter().map(read).collect());
            read.filter(|slides| slides.len() == layers).ok_or_else(|| {
                let expected =
                    format!("\"sliding_attention\" or \"full_attention\" for each of {layers} layers");
                self.wrong("layer_types", types, &expected)
            })?
        };
        if !slides.contains(&false) {
            let supported = "models of which at least one layer has full attention";
            let (key, found) = match types {
                Value::Null => ("num_hidden_layers", &self.value["num_hidden_layers"]),
                types => ("layer_types", types),
            };
            return Err(self.unsupported(key, found, supported));
        }
        Ok(slides)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::tests::parse;
    use super::*;
    use crate::Sliding;

    fn gemma3(mut changes: Value) -> ModelConfig {
        changes["architectures"] = json!(["Gemma3ForCausalLM"]);
        parse(changes)
    }

    #[test]
    fn absent_keys_mean_what_they_mean_in_transformers() {
        let config = gemma3(json!({ "num_hidden_layers": 13, "num_key_value_heads": 2 }));
        assert_eq!((config.head_dim, config.tied, config.head_norms), (256, true, true));
        assert_eq!((config.score_scale, config.embedding_scale), (1.0 / 16.0, Some(8.0)));
        assert_eq!(config.rope, Rope { theta: 1e6, scaling: RopeScaling::None });
        let sliding = config.sliding.clone().unwrap();
        assert_eq!(sliding.rope, Rope { theta: 1e4, scaling: RopeScaling::None });
        assert_eq!(config.sliding(), Some(Sliding { layers: 11, window: 4096 }));
        assert_eq!((0..13).filter(|layer| !sliding.slides[*layer]).collect::<Vec<_>>(), [5, 11]);
    }

    #[test]
    fn layers_are_read_from_the_old_and_the_new_keys() {
        let (sliding, full) = ("sliding_attention", "full_attention");
        let old = gemma3(json!({ "num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 9 }));
        let new = json!({
            "num_hidden_layers": 4, "layer_types": [sliding, full, sliding, full], "sliding_window": 9,
            "_sliding_window_pattern": 6, "sliding_window_pattern": 6,
        });
        assert_eq!(old, gemma3(new));
        let other = json!({ "num_hidden_layers": 4, "_sliding_window_pattern": 2, "sliding_window": 9 });
        assert_eq!(old, gemma3(other));
        let none = gemma3(json!({ "num_hidden_layers": 2, "layer_types": [full, full] }));
        assert_eq!((none.sliding(), none.sliding), (None, None));
    }

    #[test]
    fn frequencies_are_read_from_the_old_and_the_new_keys() {
        let layers = json!({ "num_hidden_layers": 6 });
        let with = |more: Value| {
            let mut config = layers.clone();
            config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            gemma3(config)
        };
        let old = with(json!({
            "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": { "rope_type": "linear", "factor": 8.0 },
        }));
        assert_eq!(old.rope, Rope { theta: 5e5, scaling: RopeScaling::Linear(8.0) });
        let sliding = old.sliding.clone().unwrap();
        assert_eq!(
            sliding.rope,
            Rope { theta: 2e4, scaling: RopeScaling::None },
            "the scaling is not for these"
        );
        let new = with(json!({ "rope_parameters": {
            "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 5e5 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 2e4 },
        } }));
        assert_eq!(old, new);
    }
}
