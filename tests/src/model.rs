//! Small models in Hugging Face format, made up from a seed: the same seed gives the same bytes.
//!
//! Weights are random, so the text is nonsense, but it is varied nonsense: scales are chosen such that greedy decoding
//! keeps moving, and the rows of special tokens are kept small, so that a sequence hardly ever ends by itself.

mod gguf;
mod tokenizer;
mod weights;

use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

pub use crate::stored::Stored;
pub use tokenizer::SPECIAL_TOKENS;

/// The architecture that config.json names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `Qwen3ForCausalLM`: queries and keys are normed per head.
    Qwen3,
    /// `LlamaForCausalLM`.
    Llama,
    /// `Gemma3ForCausalLM`: most layers see the newest positions only.
    Gemma3,
}

/// Sizes of a made-up model. The default is the tiny one of the tests.
#[derive(Clone, Debug)]
pub struct TinyModel {
    /// The architecture.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Transformer layers.
    pub layers: usize,
    /// Positions that a sliding layer of [`Family::Gemma3`] sees, the newest included.
    pub window: usize,
    /// In [`Family::Gemma3`] every so many-th layer sees all positions. The others slide.
    pub pattern: usize,
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Longest sequence.
    pub max_positions: usize,
    /// Token ids, at least as many as the tokenizer has ([`TinyModel::vocabulary`] says how many come out).
    pub vocabulary: usize,
    /// Whether the embedding is the output matrix too.
    pub tied: bool,
    /// Element type of the file.
    pub stored: Stored,
    /// Number of weight files. Above 1 they get an index.
    pub shards: usize,
    /// Seed of the weights.
    pub seed: u64,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            family: Family::Qwen3,
            hidden: 64,
            layers: 4,
            window: 20,
            pattern: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            intermediate: 128,
            max_positions: 4096,
            vocabulary: 0,
            tied: false,
            stored: Stored::Bf16,
            shards: 1,
            seed: 0,
        }
    }
}

/// Writes the tiny Qwen3 of this seed into `directory`, which is made if needed.
///
/// # Errors
/// When a file cannot be written.
pub fn tiny_qwen3(directory: &Path, seed: u64) -> io::Result<()> {
    TinyModel { seed, ..TinyModel::default() }.write(directory)
}

/// Writes the tiny Gemma-3 of this seed into `directory`, which is made if needed.
///
/// # Errors
/// When a file cannot be written.
pub fn tiny_gemma3(directory: &Path, seed: u64) -> io::Result<()> {
    TinyModel { seed, ..TinyModel::gemma3() }.write(directory)
}

impl TinyModel {
    /// A tiny Gemma-3: two layers that see everything and five that see the 20 newest positions.
    #[must_use]
    pub fn gemma3() -> Self {
        Self { family: Family::Gemma3, layers: 7, tied: true, ..Self::default() }
    }

    /// The size for which the tests' figures for small models were measured.
    #[must_use]
    pub fn small() -> Self {
        let sizes = Self { hidden: 256, layers: 4, heads: 8, kv_heads: 4, head_dim: 32, ..Self::default() };
        Self { intermediate: 768, vocabulary: 1000, ..sizes }
    }

    /// About 160 million parameters, for benchmarks.
    #[must_use]
    pub fn big() -> Self {
        let sizes =
            Self { hidden: 1024, layers: 12, heads: 16, kv_heads: 8, head_dim: 64, ..Self::default() };
        Self { intermediate: 3072, vocabulary: 8192, ..sizes }
    }

    /// Token ids of the written model.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocabulary.max(tokenizer::size())
    }

    /// Writes config.json, weights, tokenizer.json, tokenizer_config.json and generation_config.json into
    /// `directory`, which is made if needed.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        fs::create_dir_all(directory)?;
        let write = |name: &str, value: &Value| {
            fs::write(directory.join(name), serde_json::to_string_pretty(value).map_err(io::Error::other)?)
        };
        let [end_of_text, _, end_of_turn] = tokenizer::special_ids();
        write("config.json", &self.config(end_of_turn))?;
        write("tokenizer.json", &tokenizer::json())?;
        write("tokenizer_config.json", &tokenizer_config())?;
        write(
            "generation_config.json",
            &json!({ "eos_token_id": [end_of_turn, end_of_text], "do_sample": false }),
        )?;
        weights::write(self, directory)
    }

    fn config(&self, end_of_turn: usize) -> Value {
        let (architecture, kind) = match self.family {
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Gemma3 => ("Gemma3ForCausalLM", "gemma3_text"),
        };
        let mut config = json!({
            "architectures": [architecture],
            "model_type": kind,
            "attention_bias": false,
            "attention_dropout": 0.0,
            "eos_token_id": end_of_turn,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "max_position_embeddings": self.max_positions,
            "max_window_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "rms_norm_eps": 1e-6,
            "rope_scaling": null,
            "rope_theta": 10000.0,
            "sliding_window": null,
            "tie_word_embeddings": self.tied,
            "torch_dtype": match self.stored { Stored::Bf16 => "bfloat16", Stored::F32 => "float32", Stored::F16 => "float16" },
            "use_cache": true,
            "use_sliding_window": false,
            "vocab_size": self.vocabulary(),
        });
        if self.family == Family::Gemma3 {
            config["hidden_activation"] = json!("gelu_pytorch_tanh");
            config["attn_logit_softcapping"] = json!(null);
            config["final_logit_softcapping"] = json!(null);
            config["query_pre_attn_scalar"] = json!(self.head_dim);
            config["rope_theta"] = json!(1_000_000.0);
            config["rope_local_base_freq"] = json!(10_000.0);
            config["sliding_window"] = json!(self.window);
            config["sliding_window_pattern"] = json!(self.pattern);
            for other in ["hidden_act", "max_window_layers", "use_sliding_window"] {
                config.as_object_mut().map(|config| config.remove(other));
            }
        }
        config
    }
}

fn tokenizer_config() -> Value {
    let turn = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n";
    let prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    json!({
        "add_prefix_space": false,
        "chat_template": format!("{{% for message in messages %}}{turn}{{% endfor %}}{prompt}"),
        "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
}
