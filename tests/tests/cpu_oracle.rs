//! Compares the CPU executor with an independent implementation, candle-transformers, on the same files.
//!
//! `cargo test -p host-tests --features oracle`

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{gemma3, llama, qwen3};
use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sequence};
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::{Executor, KvMemory};
use host_tests::model::{Family, TinyModel};
use serde_json::{Value, json};

/// Greedy steps after the prompt.
const STEPS: usize = 32;
/// Largest difference of a logit. Measured: 2e-5 to 8e-5, where logits have a root mean square of about 1.5.
const TOLERANCE: f32 = 2e-4;

/// The reference: takes tokens and the position of the first, and returns the last one's logits. It keeps its own KV.
type Oracle = Box<dyn FnMut(&[u32], usize) -> Vec<f32>>;

fn variables(directory: &Path) -> VarBuilder<'static> {
    let files = [directory.join("model.safetensors")];
    // SAFETY: the tests change no file while it is mapped.
    unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu) }.unwrap()
}

fn input(tokens: &[u32]) -> Tensor {
    Tensor::new(tokens, &Device::Cpu).unwrap().unsqueeze(0).unwrap()
}

fn output(logits: &Tensor) -> Vec<f32> {
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

fn oracle(family: Family, directory: &Path) -> Oracle {
    let config = std::fs::read(directory.join("config.json")).unwrap();
    match family {
        Family::Qwen3 => {
            let config: qwen3::Config = serde_json::from_slice(&config).unwrap();
            let mut model = qwen3::ModelForCausalLM::new(&config, variables(directory)).unwrap();
            Box::new(move |tokens, start| output(&model.forward(&input(tokens), start).unwrap()))
        }
        Family::Llama => {
            let config: llama::LlamaConfig = serde_json::from_slice(&config).unwrap();
            let config = config.into_config(false);
            let model = llama::Llama::load(variables(directory), &config).unwrap();
            let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu).unwrap();
            Box::new(move |tokens, start| output(&model.forward(&input(tokens), start, &mut cache).unwrap()))
        }
        Family::Gemma3 => gemma3(&serde_json::from_slice(&config).unwrap(), directory),
    }
}

/// Candle's Gemma-3, corrected to the definition of transformers: the mask lets position q see position k when
/// `k > q - sliding_window`, which makes `sliding_window` positions, its own included.
///
/// When candle gets one token at a time, it keeps this number of positions. Its mask for several tokens lets one more through
/// (`k + sliding_window >= q`), so a prompt in one piece needs a window that is smaller by one. Its cache is then too short to go
/// on. So a prompt is computed both ways, which have to agree. With several KV heads only one way is possible: several tokens of
/// several heads are not contiguous enough for candle's cache. Candle always scales scores by `head_dim`, so another
/// `query_pre_attn_scalar` goes into the norm of the queries.
fn gemma3(config: &gemma3::Config, directory: &Path) -> Oracle {
    let mut tensors =
        candle_core::safetensors::load(directory.join("model.safetensors"), &Device::Cpu).unwrap();
    let factor = (config.head_dim as f64 / config.query_pre_attn_scalar as f64).sqrt();
    for (_, norm) in tensors.iter_mut().filter(|(name, _)| name.ends_with("q_norm.weight")) {
        let weight = norm.to_dtype(DType::F32).unwrap();
        *norm = ((weight + 1.0).unwrap().affine(factor, -1.0)).unwrap();
    }
    let load = |config: &gemma3::Config| {
        let variables = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
        gemma3::Model::new(false, config, variables).unwrap()
    };
    let mut at_once = load(&gemma3::Config { sliding_window: config.sliding_window - 1, ..config.clone() });
    let mut one_by_one = load(config);
    let kv_heads = config.num_key_value_heads;
    Box::new(move |tokens, start| {
        let mut last = Vec::new();
        for (position, token) in (start..).zip(tokens) {
            last = output(&one_by_one.forward(&input(&[*token]), position).unwrap());
        }
        if start == 0 && kv_heads == 1 {
            let whole = output(&at_once.forward(&input(tokens), 0).unwrap());
            let delta = whole.iter().zip(&last).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(delta < TOLERANCE, "candle differs from itself by {delta}");
        }
        last
    })
}

fn likeliest(logits: &[f32]) -> u32 {
    (0..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
}

/// Compares a prompt in one piece, and then greedy steps. Returns the largest difference of a logit. `changes` are made to
/// config.json.
fn compare(model: &TinyModel, changes: &[(&str, Value)], prompt: usize) -> f32 {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path()).unwrap();
    let path = directory.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    changes.iter().for_each(|(key, value)| config[key] = value.clone());
    std::fs::write(&path, config.to_string()).unwrap();
    let mut oracle = oracle(model.family, directory.path());
    let mut executor = CpuExecutor::load(directory.path(), CpuOptions::default()).unwrap();
    let (heads, head_dim) = (model.kv_heads, model.head_dim);
    let parts = executor.shape().window_parts() as u32;
    let shape = KvShape {
        pages: 32 * (1 + parts as usize),
        heads,
        layers: executor.shape().page_layers(),
        page_tokens: 16,
        head_dim,
        value_dim: head_dim,
        dtype: Dtype::F32,
    };
    let mut kv = KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim)).unwrap();
    let mut tokens: Vec<u32> = (0..prompt as u32).map(|i| i * 7919 % 500).collect();
    let mut start = 0;
    let mut largest: f32 = 0.0;
    for step in 0..=STEPS {
        let expected = oracle(&tokens[start..], start);
        let sequence = Sequence {
            room: Room(1),
            tokens: tokens[start..].to_vec(),
            start: start as u32,
            pages: (0..32).rev().map(PageId).collect(),
            window: WindowPages { first: 0, pages: (32..32 * (1 + parts)).map(PageId).collect() },
            recompute: 0..0,
            drafted: 0,
            sample: None,
            scored: None,
        };
        let found = executor
            .forward_logits(&mut kv, &Batch { id: 1, sequences: vec![sequence], layer_group: 0 })
            .unwrap();
        let found = &found[found.len() - expected.len()..];
        let delta = found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(delta < TOLERANCE, "step {step}: logits differ by {delta}");
        assert_eq!(likeliest(found), likeliest(&expected), "step {step}");
        largest = largest.max(delta);
        start = tokens.len();
        tokens.push(likeliest(&expected));
    }
    println!("{:?}, tied {}: largest difference {largest:e}", model.family, model.tied);
    largest
}

#[test]
fn qwen3_matches_candle() {
    for (seed, tied) in [(1, false), (2, true)] {
        compare(&TinyModel { seed, tied, ..TinyModel::default() }, &[], 203);
    }
    compare(&TinyModel { seed: 3, ..TinyModel::small() }, &[], 100);
}

#[test]
fn llama_matches_candle() {
    let llama = TinyModel { family: Family::Llama, ..TinyModel::default() };
    for (seed, tied) in [(4, false), (5, true)] {
        compare(&TinyModel { seed, tied, ..llama.clone() }, &[], 203);
    }
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    });
    compare(&TinyModel { seed: 6, ..llama }, &[("rope_scaling", scaling)], 203);
}

#[test]
fn gemma3_matches_candle() {
    let gemma3 = TinyModel::gemma3();
    for (seed, prompt) in (7..).zip([1, gemma3.window - 1, gemma3.window, gemma3.window + 1, 203]) {
        for kv_heads in [1, 2] {
            compare(&TinyModel { seed, kv_heads, ..gemma3.clone() }, &[], prompt);
        }
    }
    for (seed, layers, pattern, window) in [(12, 6, 6, 33), (13, 5, 2, 2), (14, 4, 4, 1000), (15, 2, 1, 20)] {
        compare(&TinyModel { seed, layers, pattern, window, ..gemma3.clone() }, &[], 100);
    }
    compare(&gemma3, &[("query_pre_attn_scalar", json!(7)), ("rope_local_base_freq", json!(500.0))], 203);
}
