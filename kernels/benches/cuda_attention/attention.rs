//! Checks and times attention by [`TensorAttention`].

use host_kernels::cuda::Array;
use host_kernels::cuda::batch::{Attention, Rows};
use host_kernels::cuda::tensor::attention::{Partials, Run, TensorAttention};
use host_kernels::cuda::tensor::rows::{NO_POSITION, Projection, TensorRows};
use host_kernels::math::{bf16_from_f32, f32_from_bf16};

use crate::Gpu;
use crate::pool::{LAYERS, ORDERS, Order, Pool, Sizes};
use crate::speed::{capture, seconds};

/// Lengths of the sequences of a test: around blocks, chunks and pages.
const LENGTHS: [usize; 12] = [1, 2, 17, 63, 64, 65, 200, 255, 256, 257, 513, 1100];

/// Query heads, KV heads, elements of a head.
const SHAPES: [[usize; 3]; 9] = [
    [2, 2, 64],
    [4, 2, 64],
    [9, 3, 64],
    [8, 2, 64],
    [5, 1, 64],
    [8, 1, 64],
    [3, 3, 128],
    [8, 2, 128],
    [8, 1, 128],
];

fn sizes(attention: &Attention, order: Order, page_tokens: usize) -> Sizes {
    let &Attention { kv_heads: heads, head_dim, .. } = attention;
    Sizes { order, pages: 0, page_tokens, layers: LAYERS, heads, head_dim }
}

fn attention_of([heads, kv_heads, head_dim]: [usize; 3]) -> Attention {
    Attention {
        heads,
        kv_heads,
        head_dim,
        query_stride: heads * head_dim + 16,
        scale: 1.0 / (head_dim as f32).sqrt(),
    }
}

/// Sequences with everything that attention reads.
struct Prompts {
    attention: Attention,
    lengths: Vec<usize>,
    /// First row of each sequence.
    first: Vec<usize>,
    rows: usize,
    /// `[row][stride]`.
    queries: Vec<u16>,
    /// K and V, `[row][kv_heads][head_dim]`.
    kv: [Vec<u16>; 2],
}

impl Prompts {
    fn new(attention: Attention, lengths: &[usize], seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut random = |count: usize, size: f32| -> Vec<u16> {
            (0..count).map(|_| bf16_from_f32((rng.f32() + rng.f32() - 1.0) * size)).collect()
        };
        let first = lengths
            .iter()
            .scan(0, |rows, length| {
                *rows += length;
                Some(*rows - length)
            })
            .collect();
        let rows = lengths.iter().sum();
        let row = attention.kv_heads * attention.head_dim;
        Self {
            attention,
            lengths: lengths.to_vec(),
            first,
            rows,
            // Large enough that weights differ by many powers of two.
            queries: random(rows * attention.query_stride, 8.0),
            kv: [random(rows * row, 2.0), random(rows * row, 2.0)],
        }
    }

    fn row(&self, kv: usize, sequence: usize, position: usize, head: usize) -> &[u16] {
        let &Attention { kv_heads, head_dim, .. } = &self.attention;
        let at = ((self.first[sequence] + position) * kv_heads + head) * head_dim;
        &self.kv[kv][at..at + head_dim]
    }

    /// A pool with the first `keep(length)` positions of each sequence.
    fn pool(
        &self,
        gpu: &Gpu,
        order: Order,
        page_tokens: usize,
        seed: u64,
        keep: impl Fn(usize) -> usize,
    ) -> Pool {
        let sizes = sizes(&self.attention, order, page_tokens);
        Pool::new(gpu, sizes, &self.lengths, seed, |sequence, kv, position, head| {
            (position < keep(self.lengths[sequence])).then(|| self.row(kv, sequence, position, head))
        })
    }

    /// Runs of each sequence's rows, cut by `cut` (the sequence's length to ascending cuts from 0 to the length).
    fn runs(&self, pool: &Pool, mut cut: impl FnMut(usize) -> Vec<usize>) -> Vec<Run> {
        let mut runs = Vec::new();
        for (sequence, &length) in self.lengths.iter().enumerate() {
            for cuts in cut(length).windows(2) {
                runs.push(Run {
                    first_row: (self.first[sequence] + cuts[0]) as u32,
                    rows: (cuts[1] - cuts[0]) as u32,
                    start: cuts[0] as u32,
                    table: pool.tables[sequence],
                });
            }
        }
        runs
    }

    /// Every row of every sequence.
    fn batch(&self, gpu: &Gpu, pool: &Pool) -> Rows {
        let of = |value: &dyn Fn(usize, usize) -> u32| {
            let rows = |(sequence, &length): (usize, &usize)| -> Vec<u32> {
                (0..length).map(|position| value(sequence, position)).collect()
            };
            self.lengths.iter().enumerate().flat_map(rows).collect::<Vec<_>>()
        };
        Rows {
            rows: self.rows,
            sequences: self.lengths.len(),
            token: gpu.array(&[0]),
            position: gpu.array(&of(&|_, position| position as u32)),
            table: gpu.array(&of(&|sequence, _| pool.tables[sequence])),
            pages: gpu.array(&pool.pages),
        }
    }

    /// Output of one row and head in f64, with the sums of weighted magnitudes of V.
    fn expected(&self, sequence: usize, position: usize, head: usize) -> Vec<(f64, f64)> {
        let &Attention { heads, kv_heads, head_dim, query_stride, scale } = &self.attention;
        let at = (self.first[sequence] + position) * query_stride + head * head_dim;
        let wide = |bits: &u16| f64::from(f32_from_bf16(*bits));
        let query: Vec<f64> = self.queries[at..at + head_dim].iter().map(wide).collect();
        let kv_head = head / (heads / kv_heads);
        let scores: Vec<f64> = (0..=position)
            .map(|seen| {
                let key = self.row(0, sequence, seen, kv_head).iter().map(wide);
                query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() * f64::from(scale)
            })
            .collect();
        let highest = scores.iter().copied().fold(f64::MIN, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - highest).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut sums = vec![(0.0, 0.0); head_dim];
        for (seen, weight) in weights.iter().enumerate() {
            for (sum, value) in sums.iter_mut().zip(self.row(1, sequence, seen, kv_head).iter().map(wide)) {
                sum.0 += weight / total * value;
                sum.1 += weight / total * value.abs();
            }
        }
        sums
    }
}

/// The kernels with the arrays of one test.
struct Test<'a> {
    gpu: &'a Gpu,
    kernels: &'a TensorAttention,
    prompts: &'a Prompts,
    queries: Array<u16>,
    partials: Partials,
}

impl<'a> Test<'a> {
    fn new(gpu: &'a Gpu, kernels: &'a TensorAttention, prompts: &'a Prompts) -> Self {
        let &Attention { heads, head_dim, .. } = &prompts.attention;
        let longest = *prompts.lengths.iter().max().unwrap();
        let partials = Partials::new(&gpu.device, prompts.rows, heads, head_dim, longest).unwrap();
        Self { gpu, kernels, prompts, queries: gpu.array(&prompts.queries), partials }
    }

    fn outputs(&self) -> Array<u16> {
        let &Attention { heads, head_dim, .. } = &self.prompts.attention;
        self.gpu.array(&vec![0xffff; self.prompts.rows * heads * head_dim])
    }

    fn prefill(&self, pool: &Pool, runs: &[Run], outputs: &mut Array<u16>) {
        let attention = &self.prompts.attention;
        let tiles = self.kernels.tiles(attention, runs);
        let pages = self.gpu.array(&pool.pages);
        let count = tiles.len();
        let tiles = self.gpu.array(&tiles);
        let (stream, rows) = (&self.gpu.stream, self.prompts.rows);
        let kernels = self.kernels;
        let view = pool.view();
        kernels
            .prefill(stream, attention, &self.queries, &view, &pages, rows, (&tiles, count), outputs)
            .unwrap();
        stream.synchronize().unwrap();
    }

    fn decode(&mut self, pool: &Pool, batch: &Rows, rows: std::ops::Range<usize>, outputs: &mut Array<u16>) {
        let attention = &self.prompts.attention;
        let longest = *self.prompts.lengths.iter().max().unwrap();
        let (stream, view) = (&self.gpu.stream, pool.view());
        let (queries, partials) = (&self.queries, &mut self.partials);
        self.kernels
            .decode(stream, attention, queries, &view, batch, rows, longest, partials, outputs)
            .unwrap();
    }
}

/// Compares the found rows with the expected rows, for the rows of `rows`.
fn same(
    what: &str,
    prompts: &Prompts,
    found: &[u16],
    expected: &[u16],
    rows: impl Fn(usize, usize) -> bool,
) -> Result<(), String> {
    let &Attention { heads, kv_heads, head_dim, .. } = &prompts.attention;
    for (sequence, &length) in prompts.lengths.iter().enumerate() {
        for position in (0..length).filter(|&position| rows(length, position)) {
            for head in 0..heads {
                let at = ((prompts.first[sequence] + position) * heads + head) * head_dim;
                let (found, expected) = (&found[at..at + head_dim], &expected[at..at + head_dim]);
                if let Some(index) = (0..head_dim).find(|&index| found[index] != expected[index]) {
                    return Err(format!(
                        "{heads} heads, {kv_heads} KV heads of {head_dim}: {what} differs at position {position} of {length}, \
                         head {head}, element {index}: {:#06x}, not {:#06x}",
                        found[index], expected[index]
                    ));
                }
            }
        }
    }
    Ok(())
}

/// The largest error against f64, as a share of the weighted magnitudes of V.
fn error(prompts: &Prompts, found: &[u16]) -> f64 {
    let &Attention { heads, head_dim, .. } = &prompts.attention;
    let mut largest = 0.0_f64;
    for (sequence, &length) in prompts.lengths.iter().enumerate() {
        for position in [0, length / 2, length - 1] {
            for head in 0..heads {
                let at = ((prompts.first[sequence] + position) * heads + head) * head_dim;
                let expected = prompts.expected(sequence, position, head);
                for (&bits, (value, magnitude)) in found[at..at + head_dim].iter().zip(expected) {
                    let off = (f64::from(f32_from_bf16(bits)) - value).abs() / magnitude;
                    // NaN is an error, too.
                    largest = if off <= largest { largest } else { off };
                }
            }
        }
    }
    largest
}

/// The largest allowed error, relative to the weighted magnitudes of V. Rounding weights and outputs to bf16 is off by up to 2^-8
/// each, and the sum of weights is a sum of rounded weights, too. The rest is for f32.
const BOUND: f64 = 2.0 / 256.0 + 1.0 / 4096.0;

/// Stores the last row of each sequence and decodes it, in two launches that follow each other directly. Returns the rows' outputs.
fn step(
    gpu: &Gpu,
    kernels: &TensorAttention,
    partials: &mut Partials,
    prompts: &Prompts,
    seed: u64,
) -> Vec<u16> {
    let Attention { heads, kv_heads, head_dim, query_stride, .. } = prompts.attention;
    let attention = Attention { query_stride: heads * head_dim, ..prompts.attention };
    let pool = prompts.pool(gpu, Order::PageHead, 16, seed, |length| length - 1);
    let rows = prompts.lengths.len();
    let mut qkv = Vec::new();
    for (sequence, &length) in prompts.lengths.iter().enumerate() {
        let at = (prompts.first[sequence] + length - 1) * query_stride;
        qkv.extend(prompts.queries[at..at + heads * head_dim].iter().map(|&bits| f32_from_bf16(bits)));
        for (kv, head) in (0..2).flat_map(|kv| (0..kv_heads).map(move |head| (kv, head))) {
            let row = prompts.row(kv, sequence, length - 1, head);
            qkv.extend(row.iter().map(|&bits| f32_from_bf16(bits)));
        }
    }
    let batch = Rows {
        rows,
        sequences: rows,
        token: gpu.array(&[0]),
        position: gpu.array(&prompts.lengths.iter().map(|&length| length as u32 - 1).collect::<Vec<_>>()),
        table: gpu.array(&pool.tables),
        pages: gpu.array(&pool.pages),
    };
    // Angles of 0 rotate nothing, so that the bits are the prompt's.
    let cosines = gpu.array(&vec![1.0; rows * head_dim / 2]);
    let sines = gpu.array(&vec![0.0; rows * head_dim / 2]);
    let projection =
        Projection { heads, kv_heads, head_dim, cosines: &cosines, sines: &sines, norms: None, epsilon: 0.0 };
    let qkv = gpu.array(&qkv);
    let mut queries = gpu.array(&vec![0; rows * heads * head_dim]);
    let mut outputs = gpu.array(&vec![0; rows * heads * head_dim]);
    let storing = TensorRows::new(&gpu.device).unwrap();
    let (stream, view) = (&gpu.stream, pool.view());
    let longest = *prompts.lengths.iter().max().unwrap();
    storing.rotate_and_store(stream, &qkv, &batch, &projection, &view, &mut queries).unwrap();
    kernels
        .decode(stream, &attention, &queries, &view, &batch, 0..rows, longest, partials, &mut outputs)
        .unwrap();
    gpu.read(&outputs)
}

fn check_shape(gpu: &Gpu, kernels: &TensorAttention, shape: [usize; 3], seed: u64) -> Result<f64, String> {
    let prompts = Prompts::new(attention_of(shape), &LENGTHS, seed);
    let mut test = Test::new(gpu, kernels, &prompts);
    let all = |_: usize, _: usize| true;

    let pool = prompts.pool(gpu, Order::PageHead, 16, seed, |length| length);
    let mut outputs = test.outputs();
    test.prefill(&pool, &prompts.runs(&pool, |length| vec![0, length]), &mut outputs);
    let whole = gpu.read(&outputs);
    let error = error(&prompts, &whole);
    if error > BOUND || error.is_nan() {
        return Err(format!("{shape:?}: off by {error:.5} of the magnitudes, more than {BOUND:.5}"));
    }

    let batch = prompts.batch(gpu, &pool);
    let mut outputs = test.outputs();
    test.decode(&pool, &batch, 0..prompts.rows, &mut outputs);
    same("decode of every row", &prompts, &gpu.read(&outputs), &whole, all)?;

    // The same launch in a graph, captured before the positions are known. Every third row is left out.
    let mut batch = batch;
    let positions = gpu.read(&batch.position);
    batch.position.upload(&gpu.stream, &vec![0; prompts.rows]).unwrap();
    let mut outputs = gpu.array(&whole);
    let graph = capture(gpu, || test.decode(&pool, &batch, 0..prompts.rows, &mut outputs));
    outputs.upload(&gpu.stream, &vec![0xffff; whole.len()]).unwrap();
    let some: Vec<u32> =
        (0..).zip(&positions).map(|(row, &at)| if row % 3 == 2 { NO_POSITION } else { at }).collect();
    batch.position.upload(&gpu.stream, &some).unwrap();
    graph.launch().unwrap();
    let mut found = gpu.read(&outputs);
    let row = shape[0] * shape[2];
    for (index, found) in found.chunks_mut(row).enumerate().skip(2).step_by(3) {
        if found.iter().any(|&bits| bits != 0xffff) {
            return Err(format!("{shape:?}: row {index} has no position and an output"));
        }
        found.copy_from_slice(&whole[index * row..(index + 1) * row]);
    }
    same("decode in a graph", &prompts, &found, &whole, all)?;
    batch.position.upload(&gpu.stream, &positions).unwrap();

    // One row at a time, written into an array that holds the other rows' outputs.
    let mut outputs = gpu.array(&whole);
    for row in (0..prompts.rows).step_by(97) {
        test.decode(&pool, &batch, row..row + 1, &mut outputs);
    }
    same("decode of one row", &prompts, &gpu.read(&outputs), &whole, all)?;

    let mut rng = fastrand::Rng::with_seed(seed);
    let mut outputs = test.outputs();
    let cut = |length: usize| {
        let mut cuts: Vec<usize> = (0..length / 40).map(|_| rng.usize(1..length)).collect();
        cuts.extend([0, length]);
        cuts.sort_unstable();
        cuts.dedup();
        cuts
    };
    test.prefill(&pool, &prompts.runs(&pool, cut), &mut outputs);
    same("a prompt in pieces", &prompts, &gpu.read(&outputs), &whole, all)?;

    // Some sequences decode their last row beside prompts of the others.
    let mut outputs = test.outputs();
    let runs =
        prompts.runs(&pool, |length| if length % 2 == 0 { vec![0, length] } else { vec![0, length - 1] });
    test.prefill(&pool, &runs, &mut outputs);
    for (sequence, _) in prompts.lengths.iter().enumerate().filter(|(_, length)| *length % 2 == 1) {
        let row = prompts.first[sequence] + prompts.lengths[sequence] - 1;
        test.decode(&pool, &batch, row..row + 1, &mut outputs);
    }
    same("a mixed batch", &prompts, &gpu.read(&outputs), &whole, all)?;

    let found = step(gpu, kernels, &mut test.partials, &prompts, seed);
    let mut outputs = whole.clone();
    for (sequence, found) in found.chunks(row).enumerate() {
        let at = (prompts.first[sequence] + prompts.lengths[sequence] - 1) * row;
        outputs[at..at + row].copy_from_slice(found);
    }
    same("decode right after K and V are stored", &prompts, &outputs, &whole, all)?;

    for (order, page_tokens) in ORDERS.into_iter().zip([48, 16, 1]) {
        // The pool has only two thirds of each sequence. Later positions are NaN.
        let keep = |length: usize| length.div_ceil(3) * 2 - 1;
        let pool = prompts.pool(gpu, order, page_tokens, seed + 1, keep);
        let mut outputs = test.outputs();
        test.prefill(&pool, &prompts.runs(&pool, |length| vec![0, keep(length).min(length)]), &mut outputs);
        let kept = |length, position| position < keep(length).min(length);
        same("a part in other pages", &prompts, &gpu.read(&outputs), &whole, kept)?;
        let batch = prompts.batch(gpu, &pool);
        let mut outputs = test.outputs();
        test.decode(&pool, &batch, 0..prompts.rows, &mut outputs);
        same("decode of a part in other pages", &prompts, &gpu.read(&outputs), &whole, kept)?;
    }
    Ok(error)
}

pub fn check(gpu: &Gpu) -> Result<(), String> {
    let mut largest = 0.0_f64;
    let kernels = [64, 128].map(|head_dim| TensorAttention::new(&gpu.device, head_dim).unwrap());
    for (seed, shape) in SHAPES.into_iter().enumerate() {
        let kernels = &kernels[usize::from(shape[2] == 128)];
        largest = largest.max(check_shape(gpu, kernels, shape, seed as u64)?);
    }
    println!(
        "attention: {} shapes, the same bits in all forms, off by up to {largest:.5} of the weighted magnitudes of V \
         (bound {BOUND:.5})",
        SHAPES.len()
    );
    Ok(())
}

const LLAMA_1B: [usize; 3] = [32, 8, 64];
const SMOL_LM: [usize; 3] = [9, 3, 64];
const QWEN3_8B: [usize; 3] = [32, 8, 128];

fn dense(shape: [usize; 3]) -> Attention {
    Attention { query_stride: shape[0] * shape[2], ..attention_of(shape) }
}

/// Pages of `sequences` sequences of `length` positions, in random order.
fn scattered_pages(sequences: usize, length: usize) -> Vec<u32> {
    let mut pages: Vec<u32> = (0..(sequences * length.div_ceil(16)) as u32).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut pages);
    pages
}

/// Random numbers, repeated after 2^20 of them. The data is random because power, and thus clocks, depend on it.
fn noise(gpu: &Gpu, elements: usize) -> Array<u16> {
    let mut rng = fastrand::Rng::with_seed(5);
    let some: Vec<u16> = (0..1 << 20).map(|_| bf16_from_f32((rng.f32() + rng.f32() - 1.0) * 3.0)).collect();
    let array = Array::new(&gpu.device, elements).unwrap();
    for at in (0..elements).step_by(some.len()) {
        let count = some.len().min(elements - at);
        let to = array.address() + 2 * at as u64;
        // SAFETY: both have `count` elements, and the stream is waited for before `some` is dropped.
        unsafe { cudarc::driver::result::memcpy_htod_async(to, &some[..count], gpu.stream.cu_stream()) }
            .unwrap();
    }
    gpu.stream.synchronize().unwrap();
    array
}

fn time_decode(
    gpu: &Gpu,
    kernels: &TensorAttention,
    shape: [usize; 3],
    order: Order,
    sequences: usize,
    length: usize,
) {
    let attention = dense(shape);
    let [heads, kv_heads, head_dim] = shape;
    let bytes = sequences * length * kv_heads * head_dim * 4;
    // Enough layers to exceed the L2 cache, and to make the start of the graph negligible.
    let layers = (200_000_000_usize).div_ceil(bytes).min(40);
    let pages = scattered_pages(sequences, length);
    let sizes = Sizes { pages: pages.len(), layers, ..sizes(&attention, order, 16) };
    let pool = noise(gpu, sizes.elements());
    let queries = noise(gpu, sequences * heads * head_dim);
    let mut outputs = noise(gpu, sequences * heads * head_dim);
    let mut partials = Partials::new(&gpu.device, sequences, heads, head_dim, length).unwrap();
    let batch = Rows {
        rows: sequences,
        sequences,
        token: gpu.array(&[0]),
        position: gpu.array(&vec![length as u32 - 1; sequences]),
        table: gpu.array(&(0..sequences).map(|i| (i * length.div_ceil(16)) as u32).collect::<Vec<_>>()),
        pages: gpu.array(&pages),
    };
    let seconds = seconds(gpu, layers.max(8), |time| {
        let view = sizes.view(pool.address(), time % layers);
        let rows = 0..sequences;
        let stream = &gpu.stream;
        kernels
            .decode(stream, &attention, &queries, &view, &batch, rows, length, &mut partials, &mut outputs)
            .unwrap();
    });
    println!(
        "{:>14} {:>10} {sequences:>9} {length:>9} {:>10.1} us {:>8.0} GB/s",
        format!("{heads}/{kv_heads} x {head_dim}"),
        format!("{order:?}"),
        seconds * 1e6,
        bytes as f64 / seconds / 1e9
    );
}

fn time_prefill(
    gpu: &Gpu,
    kernels: &TensorAttention,
    shape: [usize; 3],
    sequences: usize,
    before: usize,
    rows: usize,
) {
    let attention = dense(shape);
    let [heads, kv_heads, head_dim] = shape;
    let length = before + rows;
    let pages = scattered_pages(sequences, length);
    let sizes = Sizes { pages: pages.len(), layers: 1, ..sizes(&attention, Order::PageHead, 16) };
    let pool = noise(gpu, sizes.elements());
    let all = sequences * rows;
    let queries = noise(gpu, all * heads * head_dim);
    let mut outputs = noise(gpu, all * heads * head_dim);
    let runs: Vec<Run> = (0..sequences)
        .map(|i| Run {
            first_row: (i * rows) as u32,
            rows: rows as u32,
            start: before as u32,
            table: (i * length.div_ceil(16)) as u32,
        })
        .collect();
    let tiles = kernels.tiles(&attention, &runs);
    let count = tiles.len();
    let (tiles, pages) = (gpu.array(&tiles), gpu.array(&pages));
    let view = sizes.view(pool.address(), 0);
    let seconds = seconds(gpu, 4, |_| {
        let tiles = (&tiles, count);
        let stream = &gpu.stream;
        kernels.prefill(stream, &attention, &queries, &view, &pages, all, tiles, &mut outputs).unwrap();
    });
    let pairs = sequences as f64 * (before as f64 * rows as f64 + rows as f64 * (rows as f64 + 1.0) / 2.0);
    println!(
        "{:>14} {sequences:>9} {before:>9} {rows:>9} {:>10.1} us {:>8.0} TFLOP/s",
        format!("{heads}/{kv_heads} x {head_dim}"),
        seconds * 1e6,
        pairs * (4 * heads * head_dim) as f64 / seconds / 1e12
    );
}

pub fn time(gpu: &Gpu) {
    let kernels = [64, 128].map(|head_dim| TensorAttention::new(&gpu.device, head_dim).unwrap());
    let kernels = |shape: [usize; 3]| &kernels[usize::from(shape[2] == 128)];
    println!("decode: heads, order of the pool, sequences, positions of each");
    for (shape, order, sequences, length) in [
        (LLAMA_1B, Order::PageHead, 1, 128),
        (LLAMA_1B, Order::PageHead, 1, 1024),
        (LLAMA_1B, Order::PageHead, 1, 4096),
        (LLAMA_1B, Order::PageHead, 1, 32768),
        (LLAMA_1B, Order::PageHead, 64, 512),
        (LLAMA_1B, Order::PageHead, 32, 1024),
        (LLAMA_1B, Order::PageHead, 32, 4096),
        (LLAMA_1B, Order::Layer, 32, 4096),
        (LLAMA_1B, Order::PageHead, 128, 2048),
        (SMOL_LM, Order::PageHead, 64, 1024),
        (QWEN3_8B, Order::PageHead, 1, 4096),
        (QWEN3_8B, Order::PageHead, 32, 4096),
        (QWEN3_8B, Order::Layer, 32, 4096),
    ] {
        time_decode(gpu, kernels(shape), shape, order, sequences, length);
    }
    println!("prefill: heads, sequences, positions before, rows of each");
    for (shape, sequences, before, rows) in [
        (LLAMA_1B, 1, 0, 1024),
        (LLAMA_1B, 1, 0, 8192),
        (LLAMA_1B, 16, 0, 512),
        (LLAMA_1B, 1, 8192, 2048),
        (SMOL_LM, 8, 0, 1024),
        (QWEN3_8B, 1, 0, 1024),
        (QWEN3_8B, 1, 0, 8192),
        (QWEN3_8B, 1, 8192, 2048),
    ] {
        time_prefill(gpu, kernels(shape), shape, sequences, before, rows);
    }
}
