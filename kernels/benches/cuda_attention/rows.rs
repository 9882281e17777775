//! Checks and times the kernels of [`TensorRows`].

use host_kernels::cuda::Array;
use host_kernels::cuda::batch::Rows;
use host_kernels::cuda::tensor::rows::{ARGMAX_PARTS, NO_POSITION, Projection, TensorRows};
use host_kernels::math::{bf16_from_f32, f32_from_bf16};

use crate::Gpu;
use crate::pool::{LAYER, LAYERS, NAN, ORDERS, Pool, Sizes};
use crate::speed::seconds;

fn random(rng: &mut fastrand::Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| 2.0 * rng.f32() - 1.0).collect()
}

/// Whether a bf16 is this number, within one rounding to bf16 and a small error of f32.
fn near(bits: u16, value: f64) -> bool {
    (f64::from(f32_from_bf16(bits)) - value).abs() <= value.abs() / 256.0 + 1e-6
}

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what()) }
}

fn check_embed(gpu: &Gpu, kernels: &TensorRows, rng: &mut fastrand::Rng) -> Result<(), String> {
    let (vocabulary, hidden) = (1000, 576);
    let table: Vec<u16> = random(rng, vocabulary * hidden).into_iter().map(bf16_from_f32).collect();
    let tokens: Vec<u32> =
        (0..70).map(|_| rng.u32(0..vocabulary as u32)).chain([vocabulary as u32]).collect();
    let mut residual = gpu.array(&vec![f32::NAN; tokens.len() * hidden]);
    let (device_table, device_tokens) = (gpu.array(&table), gpu.array(&tokens));
    let sizes = [vocabulary, hidden];
    kernels.embed(&gpu.stream, &device_tokens, tokens.len(), &device_table, sizes, &mut residual).unwrap();
    let found = gpu.read(&residual);
    for (row, &token) in found.chunks(hidden).zip(&tokens) {
        let expected = |index: usize| {
            table.get(token as usize * hidden + index).map_or(0.0, |&bits| f32_from_bf16(bits))
        };
        ensure(row.iter().enumerate().all(|(index, &value)| value == expected(index)), || {
            format!("embedding of token {token}")
        })?;
    }
    Ok(())
}

fn check_norm(gpu: &Gpu, kernels: &TensorRows, rng: &mut fastrand::Rng, hidden: usize) -> Result<(), String> {
    let (rows, epsilon) = (9, 1e-5);
    let residual = random(rng, rows * hidden);
    let weight = random(rng, hidden);
    let selected = [8, 0, 3, 3];
    let (device_residual, device_weight) = (gpu.array(&residual), gpu.array(&weight));
    let norm = |selected: Option<&Array<u32>>, rows: usize| {
        let mut normed = gpu.array(&vec![NAN; rows * hidden]);
        let (residual, weight) = (&device_residual, &device_weight);
        kernels
            .rms_norm(&gpu.stream, residual, selected, rows, weight, hidden, epsilon, &mut normed)
            .unwrap();
        gpu.read(&normed)
    };
    let all = norm(None, rows);
    for (row, (found, from)) in all.chunks(hidden).zip(residual.chunks(hidden)).enumerate() {
        let squares: f64 = from.iter().map(|&value| f64::from(value).powi(2)).sum();
        let factor = (squares / hidden as f64 + f64::from(epsilon)).sqrt().recip();
        let right =
            |index: usize| near(found[index], f64::from(from[index]) * factor * f64::from(weight[index]));
        ensure((0..hidden).all(right), || format!("norm of row {row} of {hidden}"))?;
    }
    let some = norm(Some(&gpu.array(&selected)), selected.len());
    for (found, row) in some.chunks(hidden).zip(selected) {
        let row = row as usize;
        ensure(*found == all[row * hidden..(row + 1) * hidden], || {
            format!("norm of selected row {row} of {hidden}")
        })?;
    }
    Ok(())
}

fn check_rotation(
    gpu: &Gpu,
    kernels: &TensorRows,
    rng: &mut fastrand::Rng,
    [heads, kv_heads, head_dim]: [usize; 3],
    with_norms: bool,
) -> Result<(), String> {
    let lengths = [5_usize, 40, 17];
    let rows: usize = lengths.iter().sum::<usize>() + 1;
    let (all, half) = (heads + 2 * kv_heads, head_dim / 2);
    let qkv = random(rng, rows * all * head_dim);
    let angles: Vec<f32> = random(rng, rows * half).into_iter().map(|angle| 3.0 * angle).collect();
    let weights = [random(rng, head_dim), random(rng, head_dim)];
    let cosines = gpu.array(&angles.iter().map(|angle| angle.cos()).collect::<Vec<_>>());
    let sines = gpu.array(&angles.iter().map(|angle| angle.sin()).collect::<Vec<_>>());
    let norms = weights.each_ref().map(|weights| gpu.array(weights));
    let epsilon = 1e-6;
    let norms = with_norms.then(|| norms.each_ref());
    let projection =
        Projection { heads, kv_heads, head_dim, cosines: &cosines, sines: &sines, norms, epsilon };
    let device_qkv = gpu.array(&qkv);

    let head = |row: usize, head: usize| -> Vec<f64> {
        let at = (row * all + head) * head_dim;
        let mut values: Vec<f64> = qkv[at..at + head_dim].iter().map(|&value| f64::from(value)).collect();
        if head >= heads + kv_heads {
            return values;
        }
        if with_norms {
            let squares: f64 = values.iter().map(|value| value * value).sum();
            let factor = (squares / head_dim as f64 + f64::from(epsilon)).sqrt().recip();
            let weights = &weights[usize::from(head >= heads)];
            values.iter_mut().zip(weights).for_each(|(value, &weight)| *value *= factor * f64::from(weight));
        }
        (0..head_dim)
            .map(|i| {
                let (sin, cos) = f64::from(angles[row * half + i % half]).sin_cos();
                if i < half {
                    values[i] * cos - values[i + half] * sin
                } else {
                    values[i] * cos + values[i - half] * sin
                }
            })
            .collect()
    };
    let right = |found: &[u16], expected: &[f64]| {
        found
            .iter()
            .zip(expected)
            .all(|(&bits, &value)| near(bits, value) || (f64::from(f32_from_bf16(bits)) - value).abs() < 1e-5)
    };

    for order in ORDERS {
        let sizes = Sizes { order, pages: 0, page_tokens: 16, layers: LAYERS, heads: kv_heads, head_dim };
        let pool = Pool::new(gpu, sizes, &lengths, 3, |_, _, _, _| None);
        let mut places: Vec<(usize, usize)> = Vec::new();
        for (sequence, &length) in lengths.iter().enumerate() {
            places.extend((0..length).map(|position| (sequence, position)));
        }
        let position: Vec<u32> =
            places.iter().map(|&(_, position)| position as u32).chain([NO_POSITION]).collect();
        let table: Vec<u32> = places.iter().map(|&(sequence, _)| pool.tables[sequence]).chain([0]).collect();
        let batch = Rows {
            rows,
            sequences: lengths.len(),
            token: gpu.array(&[0]),
            position: gpu.array(&position),
            table: gpu.array(&table),
            pages: gpu.array(&pool.pages),
        };
        let mut queries = gpu.array(&vec![NAN; rows * heads * head_dim]);
        kernels
            .rotate_and_store(&gpu.stream, &device_qkv, &batch, &projection, &pool.view(), &mut queries)
            .unwrap();
        let (queries, bits) = (gpu.read(&queries), gpu.read(&pool.bits));
        for (row, &(sequence, position)) in places.iter().enumerate() {
            for query in 0..heads {
                let at = (row * heads + query) * head_dim;
                let found = &queries[at..at + head_dim];
                ensure(right(found, &head(row, query)), || {
                    format!("query {query} of row {row}, {head_dim} elements")
                })?;
            }
            for (kv, kv_head) in (0..2).flat_map(|kv| (0..kv_heads).map(move |head| (kv, head))) {
                let page = pool.pages[pool.tables[sequence] as usize + position / 16] as usize;
                let at = pool.sizes.index(page, kv_head, LAYER, kv, position % 16);
                let expected = head(row, heads + kv * kv_heads + kv_head);
                let found = &bits[at..at + head_dim];
                ensure(right(found, &expected), || {
                    format!("{} of row {row}, head {kv_head}, {order:?}", ["K", "V"][kv])
                })?;
            }
        }
        let written = bits.iter().filter(|&&bits| bits != NAN).count();
        ensure(written == places.len() * 2 * kv_heads * head_dim, || {
            format!("{written} elements of the pool written, {order:?}")
        })?;
        ensure(queries[(rows - 1) * heads * head_dim..].iter().all(|&bits| bits == NAN), || {
            "a row without a position".into()
        })?;
    }
    Ok(())
}

fn check_argmax(gpu: &Gpu, kernels: &TensorRows, rng: &mut fastrand::Rng) -> Result<(), String> {
    for vocabulary in [1, 3, 7, 1023, 49152, 128_256, 151_937] {
        let rows = 9;
        let mut logits = random(rng, rows * vocabulary);
        let at = |row: usize, index: usize| row * vocabulary + index % vocabulary;
        // Ties, NaN of both signs, rows of NaN alone, zeros of both signs, infinities.
        (0..3).for_each(|i| logits[at(1, 5000 + 7 * i)] = 2.0);
        logits[at(2, 3)] = f32::NAN;
        logits[at(2, 4)] = -f32::NAN;
        logits[3 * vocabulary..4 * vocabulary].fill(f32::NAN);
        logits[4 * vocabulary..5 * vocabulary].fill(-0.0);
        logits[at(4, vocabulary - 1)] = 0.0;
        logits[5 * vocabulary..6 * vocabulary].fill(f32::NEG_INFINITY);
        logits[at(5, 0)] = f32::NAN;
        logits[at(6, vocabulary - 1)] = f32::INFINITY;
        let expected: Vec<u32> = logits
            .chunks(vocabulary)
            .map(|row| {
                let better = |best: Option<usize>, index: usize| match best {
                    _ if row[index].is_nan() => best,
                    Some(best) if row[best] >= row[index] => Some(best),
                    _ => Some(index),
                };
                (0..vocabulary).fold(None, better).unwrap_or(0) as u32
            })
            .collect();
        let mut highest = gpu.array(&vec![u32::MAX; rows]);
        let (logits, mut parts) = (gpu.array(&logits), gpu.array(&vec![0; rows * ARGMAX_PARTS]));
        kernels.argmax(&gpu.stream, &logits, rows, vocabulary, &mut parts, &mut highest).unwrap();
        let found = gpu.read(&highest);
        ensure(found == expected, || format!("highest of {vocabulary}: {found:?}, not {expected:?}"))?;
    }
    Ok(())
}

pub fn check(gpu: &Gpu) -> Result<(), String> {
    let kernels = TensorRows::new(&gpu.device).unwrap();
    let mut rng = fastrand::Rng::with_seed(7);
    check_embed(gpu, &kernels, &mut rng)?;
    for hidden in [64, 576, 2048, 4096, 5120, 16384] {
        check_norm(gpu, &kernels, &mut rng, hidden)?;
    }
    for (shape, norms) in
        [([9, 3, 64], false), ([32, 8, 64], true), ([16, 8, 128], false), ([32, 8, 128], true)]
    {
        check_rotation(gpu, &kernels, &mut rng, shape, norms)?;
    }
    check_argmax(gpu, &kernels, &mut rng)?;
    println!("rows: embedding, norms, rotation in all orders of the pool, argmax: as on the CPU");
    Ok(())
}

fn line(what: &str, rows: usize, seconds: f64, bytes: usize) {
    println!("{what:>18} {rows:>6} {:>8.1} us {:>8.0} GB/s", seconds * 1e6, bytes as f64 / seconds / 1e9);
}

pub fn time(gpu: &Gpu) {
    let kernels = TensorRows::new(&gpu.device).unwrap();
    let (hidden, heads, kv_heads, head_dim, vocabulary) = (2048, 32, 8, 64, 128_256);
    let all = heads + 2 * kv_heads;
    println!("rows of Llama-3.2-1B: what, rows");
    for rows in [1, 32, 8192] {
        let residual = gpu.array(&vec![1.0_f32; rows * hidden]);
        let weight = gpu.array(&vec![1.0_f32; hidden]);
        let mut normed = gpu.array(&vec![0_u16; rows * hidden]);
        let stream = &gpu.stream;
        let time = seconds(gpu, 20, |_| {
            kernels.rms_norm(stream, &residual, None, rows, &weight, hidden, 1e-5, &mut normed).unwrap();
        });
        line("rms_norm", rows, time, rows * hidden * 6);

        let lengths = vec![rows.div_ceil(32).max(1); rows.min(32)];
        let sizes =
            Sizes { order: ORDERS[0], pages: 0, page_tokens: 16, layers: LAYERS, heads: kv_heads, head_dim };
        let pool = Pool::new(gpu, sizes, &lengths, 3, |_, _, _, _| None);
        let each = |value: &dyn Fn(usize) -> u32| gpu.array(&(0..rows).map(value).collect::<Vec<_>>());
        let batch = Rows {
            rows,
            sequences: lengths.len(),
            token: gpu.array(&[0]),
            position: each(&|row| (row % lengths[0]) as u32),
            table: each(&|row| pool.tables[row / lengths[0]]),
            pages: gpu.array(&pool.pages),
        };
        let angles = gpu.array(&vec![0.5_f32; rows * head_dim / 2]);
        let qkv = gpu.array(&vec![0.5_f32; rows * all * head_dim]);
        let mut queries = gpu.array(&vec![0_u16; rows * heads * head_dim]);
        let projection = Projection {
            heads,
            kv_heads,
            head_dim,
            cosines: &angles,
            sines: &angles,
            norms: None,
            epsilon: 1e-6,
        };
        let time = seconds(gpu, 20, |_| {
            kernels.rotate_and_store(stream, &qkv, &batch, &projection, &pool.view(), &mut queries).unwrap();
        });
        line("rotate_and_store", rows, time, rows * (all * 6 + 4) * head_dim);
    }
    for rows in [1, 32, 128] {
        let logits = gpu.array(&vec![1.0_f32; rows * vocabulary]);
        let mut parts = gpu.array(&vec![0; rows * ARGMAX_PARTS]);
        let mut highest = gpu.array(&vec![0_u32; rows]);
        let time = seconds(gpu, 20, |_| {
            kernels.argmax(&gpu.stream, &logits, rows, vocabulary, &mut parts, &mut highest).unwrap();
        });
        line("argmax", rows, time, rows * vocabulary * 4);
    }
}
