//! Measures attention in prefill and in decode, for each instruction set of this CPU and each element of the KV pool, with
//! the heads of SmolLM2-135M and of a 1B model.
//!
//! `cargo bench -p host-kernels --bench attention [-- THREADS]`. It prints microseconds of one layer, the median of [`ROUNDS`] in
//! which the variants take turns. On one thread, the default, the time is the thread's CPU time. On more threads it is elapsed
//! time.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]
#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::time::Duration;

use host_kernels::math::{AttentionShape, Element, Instructions, KvRows, Math, QueryRows, bf16_from_f32};
use rustix::time::{ClockId, clock_gettime};

const ROUNDS: usize = 15;
const ELEMENTS: [Element; 2] = [Element::F32, Element::Bf16];

/// K and V, `[position][head][dim]`.
struct Dense {
    keys: Vec<u8>,
    values: Vec<u8>,
    heads: usize,
    row: usize,
}

impl KvRows for Dense {
    fn rows<'a>(&'a self, head: usize, first: usize, keys: &mut [&'a [u8]], values: &mut [&'a [u8]]) {
        for (i, (key, value)) in keys.iter_mut().zip(values).enumerate() {
            let at = ((first + i) * self.heads + head) * self.row;
            *key = &self.keys[at..at + self.row];
            *value = &self.values[at..at + self.row];
        }
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let threads = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(1);
    let mut available = Instructions::available();
    available.pop();
    let maths: Vec<Math> = available.iter().map(|i| Math::with(*i, threads).unwrap()).collect();
    print!("{:>10} {:>4} {:>4}", "heads", "rows", "of");
    for instructions in &available {
        print!(" {instructions:>9} f32     bf16");
    }
    println!();
    for (heads, kv_heads) in [(9, 3), (32, 8)] {
        for (rows, tokens) in [(512, 512), (512, 2048), (1, 512), (1, 2048)] {
            measure(&maths, heads, kv_heads, rows, tokens);
        }
    }
}

fn measure(maths: &[Math], heads: usize, kv_heads: usize, rows: usize, tokens: usize) {
    let head_dim = 64;
    let query_stride = (heads + 2 * kv_heads) * head_dim;
    let numbers =
        |step: usize, count: usize| (0..count).map(move |i| ((i * step) % 1009) as f32 / 1009.0 - 0.5);
    let queries: Vec<f32> = numbers(31, rows * query_stride).collect();
    let stored = |step, element| -> Vec<u8> {
        let numbers = numbers(step, tokens * kv_heads * head_dim);
        match element {
            Element::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
            _ => numbers.flat_map(|value| bf16_from_f32(value).to_le_bytes()).collect(),
        }
    };
    let pools = ELEMENTS.map(|element| Dense {
        keys: stored(37, element),
        values: stored(41, element),
        heads: kv_heads,
        row: head_dim * element.bytes(),
    });
    let mut out = vec![0.0; rows * heads * head_dim];
    let mut times = vec![Vec::new(); maths.len() * 2];
    let calls = if rows == 1 { 100 } else { 1 };
    for _ in 0..ROUNDS {
        for (index, times) in times.iter_mut().enumerate() {
            let (math, kv, element) = (&maths[index / 2], &pools[index % 2], ELEMENTS[index % 2]);
            let shape = AttentionShape {
                heads,
                kv_heads,
                head_dim,
                element,
                query_stride,
                scale: 0.125,
                window: None,
            };
            let start = now(math);
            for _ in 0..calls {
                let sequence = QueryRows { row: 0, rows, position: tokens - rows, first: 0, kv };
                math.attention(shape, &queries, &[sequence], &mut out);
            }
            times.push((now(math) - start).as_secs_f64() * 1e6 / f64::from(calls));
            std::hint::black_box(&mut out);
        }
    }
    print!("{:>10} {rows:>4} {tokens:>4}", format!("{heads}/{kv_heads}"));
    for mut times in times {
        times.sort_by(f64::total_cmp);
        print!(" {:>13.0}", times[ROUNDS / 2]);
    }
    println!();
}

/// The CPU time of this thread, or elapsed time if several threads run.
fn now(math: &Math) -> Duration {
    let clock = if math.threads() == 1 { ClockId::ThreadCPUTime } else { ClockId::Monotonic };
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
