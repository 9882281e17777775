//! Measures how fast a GPU computes a model of the shape of Llama-3.2-1B, beside the limits of its memory and its tensor cores.
//!
//!     cargo bench -p host-executor --bench cuda_speed
//!
//! `NVRTC` names NVRTC's library or a folder with it. A prefill figure is the best of several. Decode shows the best and the median
//! of several steps. A step is measured on the CPU's clock, from the call to the tokens. The bound of a step is the time to read
//! every byte of the matrices and of its KV once, at the memory's peak rate. The bound of a prompt is the time of its
//! multiplications at the peak rate of the tensor cores for dense bf16.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a bench that fails")]
#![allow(clippy::disallowed_methods, reason = "measures time")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use host_core::layout::KvOrder;
use host_core::window::WindowPages;
use host_core::{Batch, Dtype, KvLayout, KvShape, PageId, Room, Sampling, Sequence};
use host_executor::cuda::{CudaExecutor, CudaMath, CudaOptions};
use host_executor::group::Seat;
use host_executor::{Executor, KvMemory};
use host_kernels::cuda::Device;
use host_tests::model::{Family, TinyModel};

const PAGE_TOKENS: usize = 16;
/// Rows of a batch.
const MOST_ROWS: usize = 16_384;
/// Peak rate of the tensor cores of an H100 or H200 (SXM), in multiply-adds per second.
const TENSOR: f64 = 989e12 / 2.0;

fn llama_1b() -> TinyModel {
    let sizes = TinyModel {
        family: Family::Llama,
        hidden: 2048,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        ..TinyModel::default()
    };
    TinyModel {
        head_dim: 64,
        intermediate: 8192,
        vocabulary: 128_256,
        max_positions: 16_384,
        tied: true,
        ..sizes
    }
}

struct Bench {
    executor: CudaExecutor,
    kv: KvMemory,
    pages_each: usize,
    matrix_elements: f64,
    kv_bytes: f64,
    /// Peak rate of the GPU's memory, in bytes per second.
    memory_rate: f64,
}

impl Bench {
    fn new(model: &Path, shape: &TinyModel, pages: usize) -> Self {
        let nvrtc = std::env::var_os("NVRTC").map(PathBuf::from);
        let options = CudaOptions { nvrtc, math: CudaMath::Tensor, ..CudaOptions::default() };
        let memory_rate = Device::open(0, options.nvrtc.as_deref()).unwrap().memory_rate().unwrap();
        println!("peak of the memory: {:.0} GB/s", memory_rate / 1e9);
        let start = Instant::now();
        let executor = CudaExecutor::load_rank(model, &options, Seat::alone()).unwrap();
        println!("loaded in {:.1} s, math {}", start.elapsed().as_secs_f64(), executor.shape().math);
        let of = executor.shape().clone();
        let kv_shape = KvShape {
            pages,
            heads: of.kv_heads,
            layers: of.layers,
            page_tokens: PAGE_TOKENS,
            head_dim: of.head_dim,
            value_dim: of.head_dim,
            dtype: Dtype::Bf16,
        };
        let kv = executor.pool(KvLayout::new(kv_shape, KvOrder::PageHeadLayerKvTokenDim), 0).unwrap();
        let (queries, keys) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        let layer = shape.hidden * (2 * queries + 2 * keys + 3 * shape.intermediate);
        let matrix_elements = (shape.layers * layer + shape.hidden * shape.vocabulary()) as f64;
        let kv_bytes = (kv_shape.page_bytes() / PAGE_TOKENS) as f64;
        Self { executor, kv, pages_each: 0, matrix_elements, kv_bytes, memory_rate }
    }

    fn sequence(&self, index: usize, tokens: Vec<u32>, start: usize) -> Sequence {
        let pages = self.pages_each;
        Sequence {
            room: Room(index as u64),
            tokens,
            start: start as u32,
            pages: (0..pages).map(|page| PageId((index * pages + page) as u32)).collect(),
            window: WindowPages::default(),
            recompute: 0..0,
            drafted: 0,
            sample: Some(Sampling::GREEDY.into()),
            scored: None,
        }
    }

    fn run(&mut self, sequences: Vec<Sequence>) -> (f64, Vec<u32>) {
        let batch = Batch { id: 1, sequences, layer_group: 0 };
        let start = Instant::now();
        let outputs = self.executor.forward(&mut self.kv, &batch).unwrap();
        let elapsed = start.elapsed().as_secs_f64();
        (elapsed, outputs.iter().map(|output| output.sampled[0].token).collect())
    }

    /// Measures the prefill of `sequences` prompts of `prompt` tokens, then decode steps. Prints both.
    fn measure(&mut self, sequences: usize, prompt: usize, shape: &TinyModel) {
        const STEPS: usize = 60;
        self.pages_each = (prompt + STEPS).div_ceil(PAGE_TOKENS);
        let tokens =
            |index: usize| (0..prompt).map(|i| ((i * 7919 + index * 104_729) % 100_000) as u32).collect();
        let mut best = f64::MAX;
        let mut drawn = Vec::new();
        for _ in 0..4 {
            drawn.clear();
            let mut elapsed = 0.0;
            let indices: Vec<usize> = (0..sequences).collect();
            for some in indices.chunks((MOST_ROWS / prompt).max(1)) {
                let batch = some.iter().map(|index| self.sequence(*index, tokens(*index), 0)).collect();
                let (took, tokens) = self.run(batch);
                elapsed += took;
                drawn.extend(tokens);
            }
            best = best.min(elapsed);
        }
        let rows = (sequences * prompt) as f64;
        // The output matrix multiplies one row of each prompt.
        let outputs = (shape.hidden * shape.vocabulary()) as f64;
        let dense = rows * (self.matrix_elements - outputs) + sequences as f64 * outputs;
        let scores = rows * prompt as f64 * (shape.layers * shape.heads * shape.head_dim) as f64;
        let rate = (dense + scores) / best;
        println!(
            "prefill {sequences:>3} x {prompt:>5}: {:>9.2} ms, {:>8.0} tokens/s, {:>4.0} TFLOP/s, {:.2} of the peak",
            best * 1e3,
            rows / best,
            2.0 * rate / 1e12,
            rate / TENSOR
        );
        let mut times = Vec::new();
        for step in 0..STEPS {
            let all =
                (0..sequences).map(|index| self.sequence(index, vec![drawn[index]], prompt + step)).collect();
            let (elapsed, tokens) = self.run(all);
            times.push(elapsed);
            drawn = tokens;
        }
        times.sort_by(f64::total_cmp);
        let seen = (prompt + STEPS / 2) as f64;
        let bytes = self.matrix_elements * 2.0 + sequences as f64 * seen * self.kv_bytes;
        let (best, median) = (times[0], times[STEPS / 2]);
        println!(
            "decode  {sequences:>3} x {prompt:>5}: {:>9.1} us best, {:.1} median, {:>6.0} tokens/s, {:.2} of the bound ({:.1} us)",
            best * 1e6,
            median * 1e6,
            sequences as f64 / median,
            bytes / self.memory_rate / median,
            bytes / self.memory_rate * 1e6
        );
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let shape = llama_1b();
    let made_up = tempfile::tempdir().unwrap();
    let start = Instant::now();
    shape.write(made_up.path()).unwrap();
    println!("made a model up in {:.1} s", start.elapsed().as_secs_f64());
    let mut bench = Bench::new(made_up.path(), &shape, 8192);
    for (sequences, prompt) in [(1, 128), (1, 2048), (1, 8192), (8, 1024), (32, 1024), (32, 3072), (64, 512)]
    {
        bench.measure(sequences, prompt, &shape);
    }
    ExitCode::SUCCESS
}
