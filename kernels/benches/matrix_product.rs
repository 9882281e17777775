//! Measures the speed of the matrix product with F32 and with BF16 weights, for each instruction set of this CPU, on the matrices
//! of SmolLM2-135M and two of a 1B model.
//!
//! `cargo bench -p host-kernels --bench matrix_product [-- THREADS]`. The variants take turns. A figure is the median of
//! [`ROUNDS`], a ratio is the median of the rounds' ratios. On one thread, the default, the time is the thread's CPU time, so that
//! programs on the same cores count less. On more threads it is elapsed time. Plain Rust is left out.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]
#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::time::Duration;

use host_kernels::math::{Element, Instructions, Math, Panels, bf16_from_f32};
use rustix::time::{ClockId, clock_gettime};

const ROUNDS: usize = 9;
/// Outputs and inputs.
const SIZES: [(usize, usize); 6] =
    [(960, 576), (576, 576), (3072, 576), (576, 1536), (8192, 2048), (2048, 8192)];
/// The benchmark goes round matrices of one size that have up to this many bytes together (at most 30), so that caches hold as
/// little of them as in a model.
const MODEL: usize = 192 << 20;
/// Time of one figure of one round.
const ROUND: Duration = Duration::from_millis(15);

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let threads = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(1);
    let mut available = Instructions::available();
    available.pop();
    let maths: Vec<Math> = available.iter().map(|i| Math::with(*i, threads).unwrap()).collect();
    println!(
        "GFLOP/s on {threads} threads; the ratios are to F32 weights, and to F32 weights of the last set"
    );
    print!("{:>10} {:>4}", "matrix", "rows");
    for instructions in &available {
        print!(" {instructions:>9} f32     bf16  of f32");
    }
    println!("  of last");
    for (outputs, inputs) in SIZES {
        measure(&maths, outputs, inputs);
    }
}

fn measure(maths: &[Math], outputs: usize, inputs: usize) {
    let pack = |widen| {
        let fill = |rows: std::ops::Range<usize>, bytes: &mut [u8]| {
            for (i, target) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let value = ((i * 7919 + rows.start) % 1000) as f32 / 1000.0 - 0.5;
                *target = bf16_from_f32(value).to_le_bytes();
            }
            Ok::<(), String>(())
        };
        Panels::pack(&maths[0], outputs, inputs, Element::Bf16, widen, fill).unwrap()
    };
    let copies = (MODEL / (outputs * inputs * 4)).clamp(1, 30);
    let stored: Vec<[Panels; 2]> = (0..copies).map(|_| [pack(true), pack(false)]).collect();
    for rows in [1, 8, 32, 128, 512] {
        let x: Vec<f32> = (0..rows * inputs).map(|i| ((i * 31) % 101) as f32 / 101.0 - 0.5).collect();
        let mut y = vec![0.0; rows * outputs];
        let mut speeds = vec![Vec::new(); maths.len() * 2];
        for _ in 0..ROUNDS {
            for (index, speeds) in speeds.iter_mut().enumerate() {
                let mut products = 0;
                let start = now(&maths[0]);
                let mut spent = Duration::ZERO;
                while spent < ROUND {
                    maths[index / 2].linear(&x, rows, &stored[products % copies][index % 2], &mut y);
                    products += 1;
                    spent = now(&maths[0]) - start;
                }
                std::hint::black_box(&mut y);
                let operations = 2.0 * (products * rows * outputs * inputs) as f64;
                speeds.push(operations / spent.as_secs_f64() / 1e9);
            }
        }
        let ratio = |a: &[f64], b: &[f64]| median(a.iter().zip(b).map(|(a, b)| a / b).collect());
        print!("{:>10} {rows:>4}", format!("{outputs}x{inputs}"));
        for [wide, narrow] in speeds.as_chunks::<2>().0 {
            print!(
                " {:>13.1} {:>8.1} {:>7.2}",
                median(wide.clone()),
                median(narrow.clone()),
                ratio(narrow, wide)
            );
        }
        println!("  {:>7.2}", ratio(&speeds[0], &speeds[speeds.len() - 2]));
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The CPU time of this thread, or elapsed time if several threads run.
fn now(math: &Math) -> Duration {
    let clock = if math.threads() == 1 { ClockId::ThreadCPUTime } else { ClockId::Monotonic };
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
