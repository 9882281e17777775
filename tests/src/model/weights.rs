//! Made-up weights, as safetensors files.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Family, Stored, TinyModel, tokenizer};

/// Scale of queries and keys: attention picks few positions, so that the next token depends on the whole context.
const SHARP: f32 = 1.4;

/// Standard deviation of the embedding: small beside what the layers add, so that tokens hardly repeat themselves.
const EMBEDDING: f32 = 0.6;

/// The same in Gemma-3, whose embedding is the output matrix too: a token must not predict itself.
const GEMMA_EMBEDDING: f32 = 0.1;

/// Name, shape and distribution of a tensor.
pub(super) struct Tensor {
    pub name: String,
    pub shape: Vec<usize>,
    deviation: f32,
    mean: f32,
}

pub(super) fn write(model: &TinyModel, directory: &Path) -> io::Result<()> {
    let tensors = tensors(model);
    if model.shards <= 1 {
        return write_file(model, &directory.join("model.safetensors"), &tensors.iter().collect::<Vec<_>>());
    }
    let mut placed = Map::new();
    for shard in 0..model.shards {
        let name = format!("model-{:05}-of-{:05}.safetensors", shard + 1, model.shards);
        let mine: Vec<_> = tensors.iter().skip(shard).step_by(model.shards).collect();
        for tensor in &mine {
            placed.insert(tensor.name.clone(), json!(name));
        }
        write_file(model, &directory.join(name), &mine)?;
    }
    let index = json!({ "metadata": {}, "weight_map": placed });
    fs::write(directory.join("model.safetensors.index.json"), index.to_string())
}

pub(super) fn tensors(model: &TinyModel) -> Vec<Tensor> {
    let (hidden, inner) = (model.hidden, model.intermediate);
    let (queries, keys) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let gemma3 = model.family == Family::Gemma3;
    let mut tensors = Vec::new();
    // Inputs of standard deviation 1 give outputs of standard deviation `gain`.
    let mut matrix = |name: String, outputs: usize, inputs: usize, gain: f32| {
        let deviation = gain / (inputs as f32).sqrt();
        tensors.push(Tensor { name, shape: vec![outputs, inputs], deviation, mean: 0.0 });
    };
    matrix(
        "model.embed_tokens.weight".to_owned(),
        model.vocabulary(),
        hidden,
        // Gemma-3 multiplies rows of the embedding by the root of their length.
        if gemma3 { GEMMA_EMBEDDING } else { (hidden as f32).sqrt() * EMBEDDING },
    );
    if !model.tied {
        matrix("lm_head.weight".to_owned(), model.vocabulary(), hidden, 1.5);
    }
    for layer in 0..model.layers {
        let name = |tensor: &str| format!("model.layers.{layer}.{tensor}.weight");
        matrix(name("self_attn.q_proj"), queries, hidden, SHARP);
        matrix(name("self_attn.k_proj"), keys, hidden, SHARP);
        matrix(name("self_attn.v_proj"), keys, hidden, 1.0);
        matrix(name("self_attn.o_proj"), hidden, queries, 2.0);
        matrix(name("mlp.gate_proj"), inner, hidden, 1.5);
        matrix(name("mlp.up_proj"), inner, hidden, 1.5);
        matrix(name("mlp.down_proj"), hidden, inner, 1.0);
    }
    let mut norm = |name: String, length: usize, mean: f32| {
        let mean = if gemma3 { mean - 1.0 } else { mean };
        tensors.push(Tensor { name, shape: vec![length], deviation: 0.2, mean });
    };
    for layer in 0..model.layers {
        norm(format!("model.layers.{layer}.input_layernorm.weight"), hidden, 1.0);
        norm(format!("model.layers.{layer}.post_attention_layernorm.weight"), hidden, 1.0);
        if gemma3 {
            norm(format!("model.layers.{layer}.pre_feedforward_layernorm.weight"), hidden, 1.0);
            norm(format!("model.layers.{layer}.post_feedforward_layernorm.weight"), hidden, 1.0);
        }
        if model.family != Family::Llama {
            norm(format!("model.layers.{layer}.self_attn.q_norm.weight"), model.head_dim, SHARP);
            norm(format!("model.layers.{layer}.self_attn.k_norm.weight"), model.head_dim, SHARP);
        }
    }
    // Gemma-3's embedding is the output matrix too. It is small, so a large norm keeps logits from being small.
    let last = if gemma3 { 1.5 / GEMMA_EMBEDDING } else { 1.0 };
    norm("model.norm.weight".to_owned(), hidden, last);
    tensors
}

fn write_file(model: &TinyModel, path: &Path, tensors: &[&Tensor]) -> io::Result<()> {
    let (kind, bytes) = match model.stored {
        Stored::Bf16 => ("BF16", 2),
        Stored::F16 => ("F16", 2),
        Stored::F32 => ("F32", 4),
    };
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut end = 0;
    for tensor in tensors {
        let start = end;
        end += tensor.shape.iter().product::<usize>() * bytes;
        let entry = json!({ "dtype": kind, "shape": tensor.shape, "data_offsets": [start, end] });
        header.insert(tensor.name.clone(), entry);
    }
    let mut header = Value::Object(header).to_string();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for tensor in tensors {
        write_tensor(model, tensor, &mut file)?;
    }
    file.flush()
}

fn write_tensor(model: &TinyModel, tensor: &Tensor, file: &mut impl Write) -> io::Result<()> {
    let mut bytes = Vec::new();
    values(model, tensor).try_for_each(|value| {
        bytes.clear();
        model.stored.append(value, &mut bytes);
        file.write_all(&bytes)
    })
}

/// The elements of a tensor, row by row. The model's type holds each of them exactly.
pub(super) fn values<'a>(model: &'a TinyModel, tensor: &'a Tensor) -> impl Iterator<Item = f32> + 'a {
    // Each tensor has a stream of its own, so that its values do not depend on the order in the file.
    let mut random = tensor.name.bytes().fold(Random(model.seed), |random, byte| {
        Random(random.0.rotate_left(9) ^ u64::from(byte).wrapping_mul(0x9e37_79b9_7f4a_7c15))
    });
    let width = tensor.shape.last().copied().unwrap_or(1);
    let special = tokenizer::special_ids();
    (0..tensor.shape.iter().product()).map(move |index| {
        let quiet = tensor.shape[0] == model.vocabulary() && special.contains(&(index / width));
        let scale = tensor.deviation * if quiet { 0.05 } else { 1.0 };
        let bf16 = Stored::Bf16.rounded(random.normal() * scale + tensor.mean);
        model.stored.rounded(bf16)
    })
}

/// The least normal number of half precision. Smaller ones are multiples of 2^-24.
const LEAST_HALF: f32 = 1.0 / 16_384.0;

impl Stored {
    /// The nearest value that the type holds, and of two the even one. Only for weights: values near the ends of the range are
    /// not handled.
    pub(crate) fn rounded(self, value: f32) -> f32 {
        let bits = value.to_bits();
        let without = |lost: u32| {
            let half = (1 << (lost - 1)) - 1 + ((bits >> lost) & 1);
            f32::from_bits((bits + half) >> lost << lost)
        };
        match self {
            Self::F32 => value,
            Self::Bf16 => without(16),
            Self::F16 if value.abs() < LEAST_HALF => (value * 16_777_216.0).round_ties_even() / 16_777_216.0,
            Self::F16 => without(13),
        }
    }

    /// Appends a value that the type holds, little-endian.
    pub(crate) fn append(self, value: f32, bytes: &mut Vec<u8>) {
        let bits = value.to_bits();
        match self {
            Self::F32 => bytes.extend(bits.to_le_bytes()),
            Self::Bf16 => bytes.extend(((bits >> 16) as u16).to_le_bytes()),
            Self::F16 => {
                let (sign, size) = ((bits >> 16) as u16 & 0x8000, value.abs());
                let half = match size < LEAST_HALF {
                    true => (size * 16_777_216.0) as u16,
                    false => ((size.to_bits() >> 13) - (112 << 10)) as u16,
                };
                bytes.extend((sign | half).to_le_bytes());
            }
        }
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Roughly normal with variance 1: the sum of four 16-bit uniforms, which needs no library's logarithm.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: f32 = (0..4).map(|i| (bits >> (16 * i) & 0xffff) as f32 / 65536.0).sum();
        (sum - 2.0) * 3f32.sqrt()
    }
}
