//! The same models as GGUF files, by the rules of llama.cpp's converter.

use super::{Family, Stored, TinyModel, weights};
use crate::gguf::GgufFile;

impl Stored {
    /// The number of the type in GGUF files.
    pub(crate) fn gguf_kind(self) -> u32 {
        match self {
            Stored::F32 => 0,
            Stored::F16 => 1,
            Stored::Bf16 => 30,
        }
    }
}

impl TinyModel {
    /// The model of [`TinyModel::write`], with the same values, as llama.cpp's converter writes it: with other names, rows of
    /// Llama's queries and keys in the order of interleaved rotation, 1 added to Gemma's norms, and vectors as f32. It has no
    /// tokenizer.
    #[must_use]
    pub fn gguf(&self) -> GgufFile {
        let mut file = GgufFile::default();
        self.describe(&mut file);
        for tensor in weights::tensors(self) {
            let mut values: Vec<f32> = weights::values(self, &tensor).collect();
            let dimensions: Vec<u64> = tensor.shape.iter().rev().map(|size| *size as u64).collect();
            let vector = dimensions.len() == 1;
            if vector && self.family == Family::Gemma3 {
                values.iter_mut().for_each(|value| *value += 1.0);
            }
            let rotated = tensor.name.contains("q_proj") || tensor.name.contains("k_proj");
            if rotated && self.family == Family::Llama {
                values = interleaved(&values, self.head_dim, tensor.shape[1]);
            }
            let stored = if vector { Stored::F32 } else { self.stored };
            let mut data = Vec::new();
            values.into_iter().for_each(|value| stored.append(value, &mut data));
            file.tensor(&self.gguf_name(&tensor.name), &dimensions, stored.gguf_kind(), data);
        }
        file
    }

    fn describe(&self, file: &mut GgufFile) {
        let architecture = match self.family {
            Family::Qwen3 => "qwen3",
            Family::Llama => "llama",
            Family::Gemma3 => "gemma3",
        };
        file.text("general.architecture", architecture).text("general.type", "model");
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", self.max_positions),
            ("embedding_length", self.hidden),
            ("feed_forward_length", self.intermediate),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
        ] {
            file.u32(&format!("{architecture}.{key}"), u32::try_from(value).expect("sizes are small"));
        }
        file.f32(&format!("{architecture}.attention.layer_norm_rms_epsilon"), 1e-6);
        let gemma3 = self.family == Family::Gemma3;
        file.f32(&format!("{architecture}.rope.freq_base"), if gemma3 { 1e6 } else { 1e4 });
        if self.family == Family::Llama {
            let vocabulary = u32::try_from(self.vocabulary()).expect("sizes are small");
            let head_dim = u32::try_from(self.head_dim).expect("sizes are small");
            file.u32("llama.vocab_size", vocabulary).u32("llama.rope.dimension_count", head_dim);
        }
        if gemma3 {
            let window = u32::try_from(self.window).expect("sizes are small");
            let pattern = u32::try_from(self.pattern).expect("sizes are small");
            file.u32("gemma3.attention.sliding_window", window);
            file.u32("gemma3.attention.sliding_window_pattern", pattern);
        }
    }

    fn gguf_name(&self, name: &str) -> String {
        let gemma3 = self.family == Family::Gemma3;
        let name = name.replace("model.layers.", "blk.");
        [
            ("model.embed_tokens", "token_embd"),
            ("model.norm", "output_norm"),
            ("lm_head", "output"),
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", if gemma3 { "post_attention_norm" } else { "ffn_norm" }),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("self_attn.q_norm", "attn_q_norm"),
            ("self_attn.k_norm", "attn_k_norm"),
            ("self_attn.q_proj", "attn_q"),
            ("self_attn.k_proj", "attn_k"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
            ("mlp.gate_proj", "ffn_gate"),
            ("mlp.up_proj", "ffn_up"),
            ("mlp.down_proj", "ffn_down"),
        ]
        .iter()
        .fold(name, |name, (from, to)| name.replace(from, to))
    }
}

/// Permutes rows as the converter's `permute` does: `reshape(heads, 2, head_dim / 2, width).swapaxes(1, 2)`.
fn interleaved(values: &[f32], head_dim: usize, width: usize) -> Vec<f32> {
    let mut permuted = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_dim * width) {
        for pair in 0..head_dim / 2 {
            for half in 0..2 {
                let row = half * (head_dim / 2) + pair;
                permuted.extend_from_slice(&head[row * width..(row + 1) * width]);
            }
        }
    }
    permuted
}
