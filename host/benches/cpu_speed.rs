//! Tokens per second of the CPU executor on made-up models: `cargo bench -p host --bench cpu_speed [-- small|big [threads]]`.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::time::{Duration, Instant};

use host::executor::cpu::{CpuExecutor, CpuOptions};
use host::executor::{Executor, KvMemory};
use host_core::layout::KvOrder;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Sequence};
use host_tests::model::TinyModel;

const GREEDY: Sampling = Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None };
/// Pages per sequence: 1024 positions.
const PAGES: u32 = 64;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let threads = arguments.get(1).map_or(Ok(0), |threads| threads.parse())?;
    for (name, model) in [("small", TinyModel::small()), ("big", TinyModel::big())] {
        if arguments.first().is_none_or(|wanted| wanted == name) {
            measure(name, &model, threads)?;
        }
    }
    Ok(())
}

fn measure(name: &str, model: &TinyModel, threads: usize) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    model.write(directory.path())?;
    let start = Instant::now();
    let mut executor = CpuExecutor::load(directory.path(), CpuOptions { threads, ..CpuOptions::default() })?;
    println!("{name}: loaded in {:.2?}", start.elapsed());
    let shape = KvShape {
        pages: 32 * PAGES as usize,
        heads: model.kv_heads,
        layers: model.layers,
        page_tokens: 16,
        head_dim: model.head_dim,
        value_dim: model.head_dim,
        dtype: Dtype::Bf16,
    };
    let mut kv = KvMemory::new(KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim))?;
    let mut run = |count: u32, start: u32, tokens: u32| -> anyhow::Result<Duration> {
        let sequences = (0..count).map(|i| Sequence {
            room: Room(u64::from(i)),
            tokens: (0..tokens).map(|t| (t * 31 + i * 7 + start) % 500).collect(),
            start,
            pages: (i * PAGES..(i + 1) * PAGES).map(PageId).collect(),
            sample: Some(GREEDY),
        });
        let batch = Batch { id: 1, sequences: sequences.collect(), layer_group: 0 };
        let begin = Instant::now();
        executor.forward(&mut kv, &batch)?;
        Ok(begin.elapsed())
    };
    for sequence in [1, 32] {
        run(sequence, 0, 512)?;
    }
    let best = |times: &mut dyn Iterator<Item = anyhow::Result<Duration>>| -> anyhow::Result<f64> {
        let times = times.collect::<anyhow::Result<Vec<_>>>()?;
        Ok(times.iter().min().map_or(f64::NAN, Duration::as_secs_f64))
    };
    let prefill = best(&mut (0..5).map(|_| run(1, 0, 512)))?;
    println!("{name}: prefill of 512 tokens {:.0} tokens/s", 512.0 / prefill);
    for batch in [1, 8, 32] {
        let step = best(&mut (0..50).map(|step| run(batch, 512 + step, 1)))?;
        println!("{name}: decode at batch {batch} {:.0} tokens/s", f64::from(batch) / step);
    }
    Ok(())
}
