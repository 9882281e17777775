//! Checks that the exact math on a GPU gives the CPU's bits, and times its launches.
//!
//!     NVRTC=FOLDER cargo bench -p host-kernels --bench cuda_exact
//!
//! or, on another machine than the one that built it, the program alone with `--bench`. First every function is compared bit
//! for bit with the CPU's over many shapes, including those of real models. The program panics if one differs. `-- check`
//! leaves out the times, which are the best of several rounds of launches between two events.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]

#[path = "../tests/cuda_exact/compare.rs"]
mod compare;

use std::path::PathBuf;
use std::time::Instant;

use compare::{Batch, Both, Numbers};
use cudarc::driver::sys::CUevent_flags;
use host_kernels::cuda::batch::{Attention, KvView, Rows};
use host_kernels::cuda::exact::Exact;
use host_kernels::cuda::{Array, CudaError, Device};
use host_kernels::math::{Element, Heads, Math};

const ELEMENTS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];
const ROUNDS: usize = 5;

fn main() {
    let nvrtc = std::env::var_os("NVRTC").map(PathBuf::from);
    let device = Device::open(0, nvrtc.as_deref()).unwrap();
    let begun = Instant::now();
    let exact = Exact::new(&device, device.stream().unwrap()).unwrap();
    println!("compiled and loaded in {:.0} ms", begun.elapsed().as_secs_f64() * 1e3);
    let both = Both { device, exact, math: Math::new(0).unwrap() };
    compare_all(&both);
    if !std::env::args().any(|argument| argument == "check") {
        measure(&both);
    }
}

fn compare_all(both: &Both) {
    let mut random = fastrand::Rng::with_seed(1);
    let mut cases = 0;
    for seed in 0..40 {
        let wild = [0, 3, 90][seed as usize % 3];
        let numbers = |share: u8| Numbers::new(seed, wild / share);
        for element in ELEMENTS {
            let held = random.usize(1..40);
            let sizes = [random.usize(1..20), held, random.usize(1..300)];
            both.embed(numbers(1), element, sizes, random.u32(..50));
            let inputs = if seed % 2 == 0 { random.usize(1..300) } else { 8 * random.usize(1..60) };
            both.linear(numbers(30), element, [random.usize(1..40), random.usize(1..200), inputs]);
        }
        both.rms_norm(numbers(30), random.usize(1..40), 8 * random.usize(1..600));
        let (heads, head_dim, offset) = (random.usize(1..40), 16 * random.usize(1..9), random.usize(..40));
        let heads = Heads { stride: offset + heads * head_dim + random.usize(..40), offset, heads, head_dim };
        both.rotate_heads(numbers(30), random.usize(1..20), heads, seed % 2 == 0);
        both.gated(numbers(1), random.usize(1..20), random.usize(1..3000));
        both.add_and_select(numbers(1), random.usize(1..20), random.usize(1..3000));
        both.argmax(numbers(1), random.usize(1..80), random.usize(1..6000));
        let kv_heads = random.usize(1..4);
        let batch = Batch {
            sequences: (0..random.usize(1..5)).map(|_| [random.usize(..300), random.usize(1..40)]).collect(),
            page_tokens: random.usize(1..40),
            heads: kv_heads * random.usize(1..5),
            kv_heads,
            head_dim: 8 * random.usize(1..17),
            bf16: seed % 2 == 0,
            heads_first: random.bool(),
        };
        both.attention(numbers(90), &batch);
        cases += 12;
    }
    for element in ELEMENTS {
        both.linear(Numbers::new(7, 0), element, [1, 2048, 4096]);
        both.linear(Numbers::new(8, 0), element, [100, 1024, 2048]);
    }
    both.rms_norm(Numbers::new(9, 0), 300, 4096);
    both.argmax(Numbers::new(10, 0), 5, 151_936);
    let long = Batch {
        sequences: vec![[4000, 1], [700, 30]],
        page_tokens: 64,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        bf16: true,
        heads_first: true,
    };
    both.attention(Numbers::new(11, 0), &long);
    both.attention(Numbers::new(12, 0), &Batch { bf16: false, heads_first: false, ..long });
    println!("{} comparisons: the same bits", cases + 10);
}

/// Microseconds of one call, the best of several rounds.
fn time(both: &Both, calls: usize, mut work: impl FnMut() -> Result<(), CudaError>) -> f64 {
    let stream = both.exact.stream();
    work().unwrap();
    let event = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
    let round = |_| {
        let from = event();
        (0..calls).for_each(|_| work().unwrap());
        let to = event();
        stream.synchronize().unwrap();
        f64::from(from.elapsed_ms(&to).unwrap()) * 1e3 / calls as f64
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

fn measure(both: &Both) {
    let exact = &both.exact;
    for element in [Element::F32, Element::Bf16] {
        let (outputs, inputs) = (12_288, 4096);
        let weight =
            exact.upload_matrix(&vec![0; outputs * inputs * element.bytes()], element, outputs, inputs);
        let weight = weight.unwrap();
        for rows in [1, 8, 64, 512] {
            let x = both.array(&vec![0.0_f32; rows * inputs]);
            let mut y = Array::new(&both.device, rows * outputs).unwrap();
            let us = time(both, 3, || exact.linear(&x, rows, &weight, &mut y));
            let (flops, bytes) = (2.0 * (rows * outputs * inputs) as f64, weight.bytes.len() as f64);
            println!(
                "linear {element:?} {rows} x {inputs} x {outputs}: {us:.0} us, {:.2} TFLOPS, {:.2} TB/s of weights",
                flops / us / 1e6,
                bytes / us / 1e6
            );
        }
    }
    let x = both.array(&vec![0.5_f32; 512 * 4096]);
    let (weight, mut y) = (both.array(&[1.0_f32; 4096]), both.array(&vec![0.0_f32; 512 * 4096]));
    for rows in [1, 512] {
        let us = time(both, 20, || exact.rms_norm(&x, rows, &weight, 1e-6, &mut y));
        println!("rms_norm {rows} x 4096: {us:.1} us");
    }
    let mut places = Array::new(&both.device, 8).unwrap();
    println!("argmax 8 x 151936: {:.1} us", time(both, 20, || exact.argmax(&x, 8, 151_936, &mut places)));
    for (sequences, rows, positions) in [(1, 1, 8192), (32, 1, 2048), (1, 512, 512)] {
        let (heads, kv_heads, head_dim, page_tokens) = (32, 8, 128, 64);
        let pages = sequences * positions / page_tokens;
        let side = kv_heads * page_tokens * head_dim * 2;
        let pool = both.array(&vec![0_u8; pages * 2 * side]);
        let kv = KvView {
            start: [pool.address(), pool.address() + (page_tokens * head_dim * 2) as u64],
            page: [2 * side as u64; 2],
            head: [(2 * page_tokens * head_dim * 2) as u64; 2],
            token: [(head_dim * 2) as u64; 2],
            page_tokens: page_tokens as u32,
            element: 2,
        };
        let all = sequences * rows;
        let numbers = |number: &dyn Fn(usize) -> usize| {
            both.array(&(0..all).map(|row| number(row) as u32).collect::<Vec<_>>())
        };
        let batch = Rows {
            rows: all,
            sequences,
            token: numbers(&|_| 0),
            position: numbers(&|row| positions - rows + row % rows),
            table: numbers(&|row| row / rows * (positions / page_tokens)),
            pages: both.array(&(0..pages as u32).collect::<Vec<_>>()),
        };
        let queries = both.array(&vec![0.5_f32; all * heads * head_dim]);
        let mut out = Array::new(&both.device, queries.len()).unwrap();
        let shape = Attention { heads, kv_heads, head_dim, query_stride: heads * head_dim, scale: 0.1 };
        let us = time(both, 2, || exact.attention(shape, &queries, &batch, &kv, &mut out));
        println!("attention {sequences} x {rows} rows at the end of {positions} positions: {us:.0} us");
    }
}
