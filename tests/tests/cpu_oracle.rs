//! The CPU executor computes what an independent implementation, candle-transformers, computes from the same files.
//!
//! `cargo test -p host-tests --features oracle`

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{llama, qwen3};
use host::executor::KvMemory;
use host::executor::cpu::{CpuExecutor, CpuOptions};
use host_core::layout::KvOrder;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sequence};
use host_tests::model::{Family, TinyModel};
use serde_json::{Value, json};

/// Greedy steps after the prompt.
const STEPS: usize = 32;
/// Largest difference of a logit. Measured: 2e-5 to 8e-5, where logits have a root mean square of about 1.5.
const TOLERANCE: f32 = 2e-4;

/// Takes tokens and the position of the first, gives the last one's logits; keeps its own KV.
type Oracle = Box<dyn FnMut(&[u32], usize) -> Vec<f32>>;

fn variables(directory: &Path) -> VarBuilder<'static> {
    let files = [directory.join("model.safetensors")];
    // SAFETY: nobody changes the file while it is mapped.
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
    }
}

fn likeliest(logits: &[f32]) -> u32 {
    (0..).zip(logits).max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0
}

/// Compares a prompt in one piece, and then greedy steps; returns the largest difference of a logit.
fn compare(model: &TinyModel, rope_scaling: Option<Value>, prompt: usize) -> f32 {
    let directory = tempfile::tempdir().unwrap();
    model.write(directory.path()).unwrap();
    if let Some(scaling) = rope_scaling {
        let path = directory.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        config["rope_scaling"] = scaling;
        std::fs::write(&path, config.to_string()).unwrap();
    }
    let mut oracle = oracle(model.family, directory.path());
    let mut executor = CpuExecutor::load(directory.path(), CpuOptions::default()).unwrap();
    let (heads, layers, head_dim) = (model.kv_heads, model.layers, model.head_dim);
    let shape = KvShape {
        pages: 32,
        heads,
        layers,
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
            sample: None,
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
        compare(&TinyModel { seed, tied, ..TinyModel::default() }, None, 203);
    }
    compare(&TinyModel { seed: 3, ..TinyModel::small() }, None, 100);
}

#[test]
fn llama_matches_candle() {
    let llama = TinyModel { family: Family::Llama, ..TinyModel::default() };
    for (seed, tied) in [(4, false), (5, true)] {
        compare(&TinyModel { seed, tied, ..llama.clone() }, None, 203);
    }
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    });
    compare(&TinyModel { seed: 6, ..llama }, Some(scaling), 203);
}
