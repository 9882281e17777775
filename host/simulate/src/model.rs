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

/// The shape of a transformer with grouped-query attention.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// Weights that every token is multiplied with: without the embedding, with the head.
    pub parameters: f64,
    /// Layers.
    pub layers: u32,
    /// Query heads of a layer.
    pub heads: u32,
    /// KV heads of a layer.
    pub kv_heads: u32,
    /// Numbers in one head's key.
    pub head_dim: u32,
}

impl Model {
    /// Models by name. Shapes are those of the published configurations. Qwen3-32B has 31.2 billion weights beside its
    /// embedding, and a head of 151,936 × 5,120.
    pub const PRESETS: [(&'static str, Model); 3] = [
        ("qwen3-32b", Model { parameters: 32.0e9, layers: 64, heads: 64, kv_heads: 8, head_dim: 128 }),
        ("qwen3-0.6b", Model { parameters: 0.6e9, layers: 28, heads: 16, kv_heads: 8, head_dim: 128 }),
        ("smollm2-135m", Model { parameters: 0.135e9, layers: 30, heads: 9, kv_heads: 3, head_dim: 64 }),
    ];

    /// Bytes of one token's KV over all layers: a key and a value for each KV head.
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
        4.0 * f64::from(self.layers) * f64::from(self.heads) * f64::from(self.head_dim) * pairs
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
}
