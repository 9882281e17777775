//! Answers prompts greedily with the CPU executor and compares with the answers of another program.
//!
//! ```text
//! node tests/node/greedy.mjs FOLDER WIDE.gguf 32 < prompts.json > answers.json
//! cargo run --release -p host --example greedy -- MODEL f32|bf16 < answers.json
//! ```
//!
//! MODEL is a Hugging Face directory or a GGUF file, the second word the type of KV. Ends with a failure if an answer differs.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use host::executor::cpu::{CpuExecutor, CpuOptions};
use host::executor::{Executor, KvMemory, ModelShape};
use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Sequence};
use serde::Deserialize;

const PAGE_TOKENS: usize = 16;
const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None };

#[derive(Deserialize)]
struct Answered {
    prompt: Vec<u32>,
    answer: Vec<u32>,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, dtype] = &arguments[..] else { anyhow::bail!("usage: greedy MODEL f32|bf16 < answers.json") };
    let dtype: Dtype = dtype.parse().map_err(anyhow::Error::msg)?;
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text)?;
    let answered: Vec<Answered> = serde_json::from_str(&text)?;
    let mut executor = CpuExecutor::load(Path::new(model), CpuOptions::default())?;
    let mut same = 0;
    for (index, Answered { prompt, answer }) in answered.iter().enumerate() {
        let found = generate(&mut executor, dtype, prompt, answer.len())?;
        let agreed = found.iter().zip(answer).take_while(|(found, answer)| found == answer).count();
        println!("prompt {index}: {} tokens, {agreed} of {} agree", prompt.len(), answer.len());
        same += usize::from(agreed == answer.len());
    }
    println!("{same} of {} answers are the same", answered.len());
    Ok(if same == answered.len() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Tokens that follow the prompt. The whole prompt is one step, and then each token is.
fn generate(
    executor: &mut CpuExecutor,
    dtype: Dtype,
    prompt: &[u32],
    count: usize,
) -> anyhow::Result<Vec<u32>> {
    let length = prompt.len() + count;
    let pages = length.div_ceil(PAGE_TOKENS);
    let mut kv = pool(executor.shape(), dtype, pages)?;
    let all = u32::try_from(kv.layout().shape.pages)?;
    let full = u32::try_from(pages)?;
    let window = WindowPages { first: 0, pages: (full..all).map(PageId).collect() };
    let pages: Vec<PageId> = (0..full).map(PageId).collect();
    let mut tokens = prompt.to_vec();
    let mut done = 0;
    for id in 0..count as u64 {
        let sequence = Sequence {
            room: Room(1),
            tokens: tokens[done..].to_vec(),
            start: u32::try_from(done)?,
            pages: pages.clone(),
            window: window.clone(),
            again: 0..0,
            sample: Some(GREEDY),
        };
        done = tokens.len();
        let batch = Batch { id, sequences: vec![sequence], layer_group: 0 };
        let outputs = executor.forward(&mut kv, &batch)?;
        let sampled = outputs.first().and_then(|output| output.sampled.as_ref());
        tokens.push(sampled.context("nothing was sampled")?.token);
    }
    Ok(tokens.split_off(prompt.len()))
}

/// A pool of so many pages, and of as many window parts as go with them.
fn pool(shape: &ModelShape, dtype: Dtype, pages: usize) -> anyhow::Result<KvMemory> {
    let window = shape.window().map_or(0, |window| window.parts as usize);
    let layout = KvShape {
        pages: pages * (1 + window),
        heads: shape.kv_heads,
        layers: shape.page_layers(),
        page_tokens: PAGE_TOKENS,
        head_dim: shape.head_dim,
        value_dim: shape.head_dim,
        dtype,
    };
    Ok(KvMemory::new(KvLayout::new(layout, KvOrder::PageHeadLayerKvTokenDim))?)
}
