//! The operations and bytes that a model takes, from its shape.

use serde::{Deserialize, Serialize};

/// A number type of weights or of KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 1 byte.
    Fp8,
}

impl Dtype {
    /// Bytes of one number.
    #[must_use]
    pub fn bytes(self) -> f64 {
        match self {
            Dtype::F32 => 4.0,
            Dtype::Bf16 => 2.0,
            Dtype::Fp8 => 1.0,
        }
    }
}

/// Layers that see the newest tokens only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sliding {
    /// How many, beside [`Model::layers`].
    pub layers: u32,
    /// Tokens that they see, the newest included.
    pub tokens: u32,
}

/// The shape of a transformer with grouped-query attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Weights that every token is multiplied with: without the embedding, with the head.
    pub parameters: f64,
    /// Layers that see all tokens.
    pub layers: u32,
    /// Query heads of a layer.
    pub heads: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Numbers in one head's key.
    pub head_dim: u32,
    /// Sliding layers, if there are any.
    #[serde(default)]
    pub sliding: Option<Sliding>,
}

const fn dense(parameters: f64, layers: u32, heads: u32, kv_heads: u32, head_dim: u32) -> Model {
    Model { parameters, layers, heads, kv_heads, head_dim, sliding: None }
}

impl Model {
    /// Models by name. Shapes are those of the published configurations. Qwen3-32B has 31.2 billion weights beside its
    /// embedding, and a head of 151,936 × 5,120.
    pub const PRESETS: [(&'static str, Model); 4] = [
        ("qwen3-32b", dense(32.0e9, 64, 64, 8, 128)),
        ("qwen3-8b", dense(7.6e9, 36, 32, 8, 128)),
        ("qwen3-0.6b", dense(0.6e9, 28, 16, 8, 128)),
        ("smollm2-135m", dense(0.135e9, 30, 9, 3, 64)),
    ];

    /// Bytes of one token's KV in the layers that see all tokens: a key and a value for each KV head.
    #[must_use]
    pub fn kv_bytes(&self, dtype: Dtype) -> f64 {
        2.0 * f64::from(self.layers) * f64::from(self.kv_heads) * f64::from(self.head_dim) * dtype.bytes()
    }

    /// Operations of the dense layers for so many tokens: a multiplication and an addition for each weight.
    #[must_use]
    pub fn dense_flops(&self, tokens: f64) -> f64 {
        2.0 * self.parameters * tokens
    }

    /// Operations of causal attention for `tokens` new positions behind `start` others. Each pair of a position and a
    /// position that it sees takes two operations for the score and two for the sum, for each number of each query
    /// head.
    #[must_use]
    pub fn attention_flops(&self, start: f64, tokens: f64) -> f64 {
        let pairs = tokens * start + tokens * (tokens + 1.0) / 2.0;
        let sliding = self.sliding.map_or(0.0, |Sliding { layers, tokens: window }| {
            // The first positions see all before them, and the others a whole window.
            let window = f64::from(window);
            let short = (window - start).clamp(0.0, tokens);
            f64::from(layers) * (short * start + short * (short + 1.0) / 2.0 + (tokens - short) * window)
        });
        4.0 * f64::from(self.heads) * f64::from(self.head_dim) * (f64::from(self.layers) * pairs + sliding)
    }

    /// Tokens whose KV, in the layers that see all tokens, is as much as what `tokens` new positions behind `start` others read.
    /// Sliding layers read what the first of the new positions sees, and all behind it.
    #[must_use]
    pub fn tokens_read(&self, start: f64, tokens: f64) -> f64 {
        let sliding = self.sliding.map_or(0.0, |Sliding { layers, tokens: window }| {
            let seen = (start + tokens).min(tokens + f64::from(window) - 1.0);
            f64::from(layers) / f64::from(self.layers) * seen
        });
        start + tokens + sliding
    }

    /// Bytes of the weights that one pass reads.
    #[must_use]
    pub fn weight_bytes(&self, dtype: Dtype) -> f64 {
        self.parameters * dtype.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_of_qwen3_32b_has_128_kib_of_fp8_kv() {
        let (_, model) = Model::PRESETS[0];
        assert_eq!(model.kv_bytes(Dtype::Fp8), 131_072.0);
        assert_eq!(model.kv_bytes(Dtype::Bf16), 262_144.0);
    }

    #[test]
    fn a_prompt_in_two_chunks_takes_the_operations_of_one_pass() {
        let (_, model) = Model::PRESETS[0];
        let whole = model.attention_flops(0.0, 1000.0);
        let parts = model.attention_flops(0.0, 300.0) + model.attention_flops(300.0, 700.0);
        assert!((whole - parts).abs() < whole * 1e-12, "{whole} and {parts}");
    }

    #[test]
    fn sliding_layers_compute_and_read_a_window() {
        let sliding = Model { sliding: Some(Sliding { layers: 3, tokens: 100 }), ..dense(1.0, 1, 1, 1, 1) };
        let counted = |start: u32, tokens: u32| {
            let seen = (start..start + tokens).map(|position| f64::from(position + 1));
            seen.map(|all| 4.0 * (all + 3.0 * all.min(100.0))).sum::<f64>()
        };
        for (start, tokens) in [(0, 50), (0, 100), (0, 1_000), (60, 70), (99, 1), (100, 1), (5_000, 1_000)] {
            assert_eq!(sliding.attention_flops(f64::from(start), f64::from(tokens)), counted(start, tokens));
        }
        // One position reads a window. A chunk of 500 reads 500 and the 99 before it.
        for (start, tokens, read) in
            [(39.0, 1.0, 160.0), (999.0, 1.0, 1_300.0), (500.0, 500.0, 1_000.0 + 3.0 * 599.0)]
        {
            assert_eq!(sliding.tokens_read(start, tokens), read);
        }
    }
}
