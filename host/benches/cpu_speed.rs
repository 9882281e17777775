//! Tokens per second of the CPU executor on made-up models: `cargo bench -p host --bench cpu_speed [-- NAME [threads [ranks]]]`.
//! `small` and `big` are kept in BF16. `smollm2` has the layers of SmolLM2-135M, with weights and KV in BF16 and in F32.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::path::Path;
use std::time::{Duration, Instant};

use host_core::heads::rank_heads;
use host_core::layout::KvOrder;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Sequence};
use host_executor::cpu::{CpuExecutor, CpuOptions};
use host_executor::group::{Seat, seats};
use host_executor::{Executor, KvMemory};
use host_tests::model::{Family, Stored, TinyModel};

const GREEDY: Sampling = Sampling::GREEDY;
/// Pages per sequence: 1024 positions.
const PAGES: u32 = 64;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let threads = arguments.get(1).map_or(Ok(0), |threads| threads.parse())?;
    let ranks = arguments.get(2).map_or(Ok(1), |ranks| ranks.parse())?;
    let models = [
        ("small", TinyModel::small()),
        ("big", TinyModel::big()),
        ("smollm2", smollm2(Stored::Bf16)),
        ("smollm2", smollm2(Stored::F32)),
    ];
    for (name, model) in models {
        if arguments.first().is_none_or(|wanted| wanted == name) {
            measure(&format!("{name} {:?}", model.stored), &model, threads, ranks)?;
        }
    }
    Ok(())
}

/// The layers of SmolLM2-135M. Its vocabulary of 49,152 is reduced, so that the file is written quickly.
fn smollm2(stored: Stored) -> TinyModel {
    let sizes =
        TinyModel { hidden: 576, layers: 30, heads: 9, kv_heads: 3, head_dim: 64, ..TinyModel::default() };
    TinyModel { family: Family::Llama, intermediate: 1536, vocabulary: 8192, tied: true, stored, ..sizes }
}

/// One rank: its executor and its pool.
struct Rank {
    executor: CpuExecutor,
    kv: KvMemory,
}

/// The ranks of a worker, each with its part of the threads.
fn load(directory: &Path, model: &TinyModel, threads: usize, ranks: usize) -> anyhow::Result<Vec<Rank>> {
    let all = if threads == 0 { std::thread::available_parallelism()?.get() } else { threads };
    let rank = |(rank, seat): (usize, Seat)| {
        let threads = (all * (rank + 1) / ranks - all * rank / ranks).max(1);
        let options = CpuOptions { threads, ..CpuOptions::default() };
        let executor = CpuExecutor::load_rank(directory, options, seat)?;
        let heads = rank_heads(model.kv_heads, ranks, rank);
        let shape = KvShape {
            pages: 32 * PAGES as usize,
            heads: heads.len(),
            layers: model.layers,
            page_tokens: 16,
            head_dim: model.head_dim,
            value_dim: model.head_dim,
            dtype: match model.stored {
                Stored::Bf16 | Stored::F16 => Dtype::Bf16,
                Stored::F32 => Dtype::F32,
            },
        };
        let layout = KvLayout::new(shape, KvOrder::PageHeadLayerKvTokenDim);
        Ok(Rank { executor, kv: KvMemory::for_heads(layout, heads.start)? })
    };
    seats(ranks).into_iter().enumerate().map(rank).collect()
}

/// Computes a batch on all ranks.
fn forward(worker: &mut [Rank], batch: &Batch) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let ranks = worker.iter_mut();
        let threads: Vec<_> =
            ranks.map(|rank| scope.spawn(|| rank.executor.forward(&mut rank.kv, batch).map(drop))).collect();
        for thread in threads {
            thread.join().map_err(|_panic| anyhow::anyhow!("a rank panicked"))??;
        }
        Ok(())
    })
}

fn measure(name: &str, model: &TinyModel, threads: usize, ranks: usize) -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    model.write(directory.path())?;
    let start = Instant::now();
    let mut worker = load(directory.path(), model, threads, ranks)?;
    let bytes: Vec<usize> = worker.iter().map(|rank| rank.executor.weight_bytes() >> 20).collect();
    println!("{name}: loaded in {:.2?}, {bytes:?} MiB of matrices", start.elapsed());
    let mut run = |count: u32, start: u32, tokens: u32| -> anyhow::Result<Duration> {
        let sequences = (0..count).map(|i| Sequence {
            room: Room(u64::from(i)),
            tokens: (0..tokens).map(|t| (t * 31 + i * 7 + start) % 500).collect(),
            start,
            pages: (i * PAGES..(i + 1) * PAGES).map(PageId).collect(),
            window: host_core::window::WindowPages::default(),
            recompute: 0..0,
            drafted: 0,
            sample: Some(GREEDY.into()),
            scored: None,
        });
        let batch = Batch { id: 1, sequences: sequences.collect(), layer_group: 0 };
        let begin = Instant::now();
        forward(&mut worker, &batch)?;
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
