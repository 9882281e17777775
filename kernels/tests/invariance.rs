//! Every kernel gives the same bits for any instruction set, number of threads, number of rows and placement.

#![allow(clippy::unwrap_used, reason = "what fails here is the test")]

use host_kernels::math::{
    AttentionShape, Element, Gate, Heads, Instructions, KvRows, Math, Panels, QueryRows, RopeFrequencies,
    RopeScaling, bf16_from_f32, exp, f32_from_bf16,
};

/// Numbers in [-1, 1).
struct Numbers(fastrand::Rng);

impl Numbers {
    fn seeded(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    fn next(&mut self) -> f32 {
        self.0.f32() * 2.0 - 1.0
    }

    fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// All ways of computing that must give the same bits: all instructions of this CPU, on one thread and on several.
fn all_maths() -> Vec<(String, Math)> {
    let maths = Instructions::available().into_iter().flat_map(|instructions| {
        [1, 2, 3, 4].map(|threads| {
            (format!("{instructions}, {threads} threads"), Math::with(instructions, threads).unwrap())
        })
    });
    maths.collect()
}

#[test]
fn the_best_instructions_come_first_and_plain_rust_last() {
    let available: Vec<String> = Instructions::available().iter().map(ToString::to_string).collect();
    let best_first = ["AVX-512", "AVX2", "portable"];
    let places: Vec<_> =
        available.iter().map(|name| best_first.iter().position(|best| best == name).unwrap()).collect();
    assert!(places.is_sorted(), "{available:?}");
    assert_eq!(available.last().unwrap(), "portable");
    #[cfg(target_arch = "x86_64")]
    {
        assert_eq!(available.contains(&"AVX2".to_owned()), is_x86_feature_detected!("avx2"), "{available:?}");
        let avx512 = is_x86_feature_detected!("avx512f");
        assert_eq!(available.contains(&"AVX-512".to_owned()), avx512, "{available:?}");
    }
}

#[test]
fn linear_is_one_chain_of_fused_multiply_adds_whatever_the_rows_and_threads() {
    let maths = all_maths();
    for (outputs, inputs) in [(1, 8), (3, 1), (16, 16), (37, 40), (33, 17), (64, 301), (119, 257), (200, 520)]
    {
        let mut numbers = Numbers::seeded(outputs as u64);
        let weight: Vec<f32> =
            numbers.take(outputs * inputs).iter().map(|&w| f32_from_bf16(bf16_from_f32(w))).collect();
        for rows in (1..=20).chain([27, 28, 29, 32, 43, 200]) {
            let x = numbers.take(rows * inputs);
            let mut expected = vec![0.0f32; rows * outputs];
            for m in 0..rows {
                for n in 0..outputs {
                    expected[m * outputs + n] = (0..inputs)
                        .fold(0.0, |sum, k| x[m * inputs + k].mul_add(weight[n * inputs + k], sum));
                }
            }
            for (name, math) in &maths {
                let bf16 = Panels::pack(math, outputs, inputs, Element::Bf16, false, |range, bytes| {
                    let rows = &weight[range.start * inputs..range.end * inputs];
                    for (target, value) in bytes.as_chunks_mut::<2>().0.iter_mut().zip(rows) {
                        *target = bf16_from_f32(*value).to_le_bytes();
                    }
                    Ok::<(), String>(())
                })
                .unwrap();
                let wide = Panels::from_rows(math, outputs, inputs, &weight);
                for (kind, panels) in [("bf16", &bf16), ("f32", &wide)] {
                    let mut y = vec![f32::NAN; rows * outputs];
                    math.linear(&x, rows, panels, &mut y);
                    assert_eq!(bits(&y), bits(&expected), "{rows}x{inputs}x{outputs}, {kind}, {name}");
                }
            }
        }
    }
}

#[test]
fn packed_rows_read_back_as_they_were() {
    let math = Math::new(2).unwrap();
    let weight = Numbers::seeded(5).take(37 * 24);
    let panels = Panels::from_rows(&math, 37, 24, &weight);
    for output in 0..37 {
        let mut row = vec![0.0; 24];
        panels.row(output, &mut row);
        assert_eq!(row, weight[output * 24..][..24]);
    }
}

#[test]
fn row_kernels_agree_over_instruction_sets_threads_and_rows() {
    let maths = all_maths();
    let (rows, heads, head_dim) = (40, 9, 48);
    let width = heads * head_dim;
    let mut numbers = Numbers::seeded(9);
    let (x, weight) = (numbers.take(rows * width), numbers.take(width));
    let rope = RopeFrequencies::new(head_dim, 10_000.0, RopeScaling::None);
    let (mut cosines, mut sines) = (vec![0.0; rows * head_dim / 2], vec![0.0; rows * head_dim / 2]);
    for row in 0..rows {
        let at = row * head_dim / 2..(row + 1) * head_dim / 2;
        rope.angles(1000 + row, &mut cosines[at.clone()], &mut sines[at]);
    }
    let compute = |math: &Math, range: std::ops::Range<usize>| {
        let x = &x[range.start * width..range.end * width];
        let mut normed = vec![0.0; x.len()];
        math.rms_norm(x, &weight, 1e-6, &mut normed);
        let mut rotated = x.to_vec();
        let shape = Heads { stride: width, offset: head_dim, heads: heads - 1, head_dim };
        let angles = range.start * head_dim / 2..range.end * head_dim / 2;
        let norm = Some((&weight[..head_dim], 1e-6));
        math.rotate_heads(&mut rotated, shape, norm, &cosines[angles.clone()], &sines[angles]);
        let gated = [Gate::Silu, Gate::GeluTanh].map(|gate| {
            let mut gated = vec![0.0; x.len() / 2];
            math.gated(gate, x, width / 2, &mut gated);
            bits(&gated)
        });
        (bits(&normed), bits(&rotated), gated)
    };
    let expected = compute(&maths[0].1, 0..rows);
    for (name, math) in &maths {
        assert!(compute(math, 0..rows) == expected, "{name}");
        for row in 0..rows {
            let (normed, rotated, gated) = compute(math, row..row + 1);
            assert_eq!(normed, expected.0[row * width..][..width], "norm of row {row}, {name}");
            assert_eq!(rotated, expected.1[row * width..][..width], "rotation of row {row}, {name}");
            for (gated, expected) in gated.iter().zip(&expected.2) {
                assert_eq!(gated, &expected[row * width / 2..][..width / 2], "gate of row {row}, {name}");
            }
        }
    }
}

/// K and V of one sequence, `[position][head][dim]`.
struct Dense {
    keys: Vec<u8>,
    values: Vec<u8>,
    heads: usize,
    row: usize,
}

/// K and V from a position on. Earlier rows are not available.
struct From<'a> {
    dense: &'a Dense,
    oldest: usize,
}

impl KvRows for From<'_> {
    fn rows<'a>(&'a self, head: usize, first: usize, keys: &mut [&'a [u8]], values: &mut [&'a [u8]]) {
        assert!(first >= self.oldest, "position {first} is gone, {} is the first", self.oldest);
        self.dense.rows(head, first, keys, values);
    }
}

impl Dense {
    fn rows<'a>(&'a self, head: usize, first: usize, keys: &mut [&'a [u8]], values: &mut [&'a [u8]]) {
        for (i, (key, value)) in keys.iter_mut().zip(values).enumerate() {
            let at = ((first + i) * self.heads + head) * self.row;
            *key = &self.keys[at..at + self.row];
            *value = &self.values[at..at + self.row];
        }
    }
}

/// Adds eight lanes up by the fixed tree.
fn tree([a, b, c, d, e, f, g, h]: [f32; 8]) -> f32 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Attention of one query as the documentation of `Math::attention` defines it, step by step, over positions with their K and V.
fn attention_by_definition(
    query: &[f32],
    rows: impl Iterator<Item = (usize, Vec<f32>, Vec<f32>)>,
    scale: f32,
) -> Vec<f32> {
    let rows: Vec<_> = rows.collect();
    let (mut maximum, mut sum, mut weighted) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; query.len()]);
    for block in rows.chunk_by(|(a, ..), (b, ..)| a / 16 == b / 16) {
        let mut weights = [f32::NEG_INFINITY; 16];
        for (position, key, _) in block {
            let mut lanes = [0.0f32; 8];
            for (i, (query, key)) in query.iter().zip(key).enumerate() {
                lanes[i % 8] = query.mul_add(*key, lanes[i % 8]);
            }
            weights[position % 16] = tree(lanes) * scale;
        }
        let before = maximum;
        maximum = weights.iter().fold(maximum, |maximum, weight| weight.max(maximum));
        weights = weights.map(|weight| exp(weight - maximum));
        let correction = exp(before - maximum);
        sum = sum.mul_add(correction, tree(std::array::from_fn(|i| weights[i] + weights[i + 8])));
        for (dimension, weighted) in weighted.iter_mut().enumerate() {
            *weighted *= correction;
            for (position, _, value) in block {
                *weighted = weights[position % 16].mul_add(value[dimension], *weighted);
            }
        }
    }
    weighted.iter().map(|weighted| weighted * (1.0 / sum)).collect()
}

#[test]
fn attention_agrees_over_instruction_sets_threads_and_cuts_and_is_attention() {
    let maths = all_maths();
    for (heads, kv_heads, head_dim) in [(4, 2, 16), (3, 3, 40), (8, 1, 64), (3, 1, 136)] {
        let tokens = 75;
        let mut numbers = Numbers::seeded(head_dim as u64);
        let stored = |values: Vec<f32>| values.iter().flat_map(|v| bf16_from_f32(*v).to_le_bytes()).collect();
        let dense = Dense {
            keys: stored(numbers.take(tokens * kv_heads * head_dim)),
            values: stored(numbers.take(tokens * kv_heads * head_dim)),
            heads: kv_heads,
            row: head_dim * 2,
        };
        let stride = heads * head_dim + 24;
        let queries: Vec<f32> = numbers.take(tokens * stride).iter().map(|q| q * 4.0).collect();
        for window in [None, Some(1), Some(2), Some(15), Some(16), Some(17), Some(40), Some(75), Some(1000)] {
            let shape = AttentionShape {
                heads,
                kv_heads,
                head_dim,
                element: Element::Bf16,
                query_stride: stride,
                scale: 0.2,
                window,
            };
            let oldest = |position: usize| window.map_or(0, |window| (position + 1).saturating_sub(window));
            // One call over rows that are cut at `cut` and passed as two separate sequences. The second sequence has no K and V
            // that its first row does not see.
            let compute = |math: &Math, cut: usize| {
                let mut out = vec![f32::NAN; tokens * heads * head_dim];
                let kv = [0, oldest(cut)].map(|oldest| From { dense: &dense, oldest });
                let parts = [
                    QueryRows { row: 0, rows: cut, position: 0, first: 0, kv: &kv[0] },
                    QueryRows { row: cut, rows: tokens - cut, position: cut, first: 0, kv: &kv[1] },
                ];
                math.attention(shape, &queries, &parts, &mut out);
                out
            };
            let expected = compute(&maths[0].1, 0);
            for (name, math) in &maths {
                for cut in [0, 1, 15, 16, 17, 50, 74] {
                    let found = compute(math, cut);
                    assert!(bits(&found) == bits(&expected), "cut at {cut}, {name}, window {window:?}");
                }
            }
            let widened = |bytes: &[u8]| {
                let mut wide = vec![0.0; bytes.len() / 2];
                Element::Bf16.widen(bytes, &mut wide);
                wide.into_iter().map(f64::from).collect::<Vec<_>>()
            };
            let (keys, values) = (widened(&dense.keys), widened(&dense.values));
            for (position, head) in
                (0..tokens).flat_map(|position| (0..heads).map(move |head| (position, head)))
            {
                let query = &queries[position * stride + head * head_dim..][..head_dim];
                let at = |other: usize| (other * kv_heads + head * kv_heads / heads) * head_dim;
                let seen =
                    || (0..=position).filter(|other| window.is_none_or(|window| position - other < window));
                let weights: Vec<f64> = seen()
                    .map(|other| {
                        let products = query.iter().zip(&keys[at(other)..]).map(|(q, k)| f64::from(*q) * k);
                        (products.sum::<f64>() * 0.2).exp()
                    })
                    .collect();
                let row = |values: &[f64], other: usize| -> Vec<f32> {
                    values[at(other)..][..head_dim].iter().map(|value| *value as f32).collect()
                };
                let rows = seen().map(|other| (other, row(&keys, other), row(&values, other)));
                let by_definition = attention_by_definition(query, rows, 0.2);
                assert_eq!(
                    bits(&by_definition),
                    bits(&expected[(position * heads + head) * head_dim..][..head_dim]),
                    "position {position}, {window:?}, heads of {head_dim}"
                );
                for dim in 0..head_dim {
                    let weighted =
                        seen().zip(&weights).map(|(other, weight)| weight * values[at(other) + dim]);
                    let exact = weighted.sum::<f64>() / weights.iter().sum::<f64>();
                    let found = f64::from(expected[(position * heads + head) * head_dim + dim]);
                    assert!(
                        (exact - found).abs() < 2e-6,
                        "position {position}, {window:?}: {found} for {exact}"
                    );
                }
            }
        }
    }
}

#[test]
fn gates_are_what_they_are_called() {
    let math = Math::new(1).unwrap();
    let x: Vec<f32> = (-400..=400).map(|i| i as f32 / 20.0).collect();
    let gate_up: Vec<f32> = x.iter().copied().chain(x.iter().map(|_| 1.0)).collect();
    let gelu = |x: f64| {
        let slope = (2.0 / std::f64::consts::PI).sqrt();
        x / 2.0 * (1.0 + (slope * (x + 0.044715 * x.powi(3))).tanh())
    };
    let silu = |x: f64| x / (1.0 + (-x).exp());
    for (gate, exact) in [(Gate::Silu, &silu as &dyn Fn(f64) -> f64), (Gate::GeluTanh, &gelu)] {
        let mut y = vec![0.0; x.len()];
        math.gated(gate, &gate_up, x.len(), &mut y);
        for (x, y) in x.iter().zip(y) {
            let exact = exact(f64::from(*x));
            assert!(
                (f64::from(y) - exact).abs() < 4e-7 * exact.abs().max(1.0),
                "{gate:?}({x}) is {y}, not {exact}"
            );
        }
    }
}
