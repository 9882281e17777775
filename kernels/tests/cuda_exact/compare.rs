//! Compares the exact math on a GPU with the CPU's, bit by bit. The tests on the stand-in and the check on hardware use it.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use host_kernels::cuda::batch::{Attention, KvView, Rows};
use host_kernels::cuda::exact::Exact;
use host_kernels::cuda::{Array, Device};
use host_kernels::math::{
    AttentionShape, Element, Gate, Heads, KvRows, Math, Panels, QueryRows, RopeFrequencies, RopeScaling,
    bf16_from_f32,
};

/// The math of the GPU and of the CPU.
pub struct Both {
    pub device: Arc<Device>,
    pub exact: Exact,
    pub math: Math,
}

/// Random numbers from a seed.
pub struct Numbers {
    random: fastrand::Rng,
    /// How many of 256 numbers are of any size, infinite or NaN.
    wild: u8,
}

const WILD: [f32; 14] = [
    0.0,
    -0.0,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::MAX,
    f32::MIN,
    1e-40,
    -3e-42,
    f32::MIN_POSITIVE,
    88.0,
    -87.5,
    1e19,
    -30.0,
];

impl Numbers {
    pub fn new(seed: u64, wild: u8) -> Self {
        Self { random: fastrand::Rng::with_seed(seed), wild }
    }

    fn next(&mut self) -> f32 {
        if self.random.u8(..) < self.wild {
            return match self.random.usize(..20) {
                place @ 0..14 => WILD[place],
                // Any exponent.
                14..17 => f32::from_bits(self.random.u32(..)),
                _ => (self.random.f32() - 0.5) * 200.0,
            };
        }
        self.random.f32() * 2.0 - 1.0
    }

    pub fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }

    /// Little-endian elements.
    fn stored(&mut self, element: Element, count: usize) -> Vec<u8> {
        match element {
            Element::F32 => self.take(count).iter().flat_map(|value| value.to_le_bytes()).collect(),
            Element::Bf16 => {
                self.take(count).iter().flat_map(|value| bf16_from_f32(*value).to_le_bytes()).collect()
            }
            Element::F16 => (0..count)
                .flat_map(|_| {
                    let any = self.random.u8(..) < self.wild;
                    // Otherwise the number is small: the highest bit of the exponent is cleared.
                    let bits = if any { self.random.u16(..) } else { self.random.u16(..) & 0xbfff };
                    bits.to_le_bytes()
                })
                .collect(),
        }
    }
}

/// Asserts that the bits are the same. All NaN count as equal.
fn assert_same(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len());
    let differs = |(found, expected): (&f32, &f32)| {
        found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan())
    };
    let count = found.iter().zip(expected).filter(|pair| differs(*pair)).count();
    if let Some(at) = found.iter().zip(expected).position(differs) {
        panic!("{what}: {count} of {}; {at} is {:e} and not {:e}", found.len(), found[at], expected[at]);
    }
}

impl Both {
    pub fn array<T: DeviceRepr + Copy>(&self, values: &[T]) -> Array<T> {
        let mut array = Array::new(&self.device, values.len()).unwrap();
        array.upload(self.exact.stream(), values).unwrap();
        array
    }

    /// An array for so many numbers, which are NaN until they are written.
    fn target(&self, length: usize) -> Array<f32> {
        self.array(&vec![f32::NAN; length])
    }

    fn read<T: DeviceRepr + Copy + Default>(&self, array: &Array<T>, length: usize) -> Vec<T> {
        let mut values = vec![T::default(); length];
        array.download(self.exact.stream(), &mut values).unwrap();
        values
    }

    fn rows(&self, tokens: &[u32], positions: &[u32], tables: &[u32], pages: &[u32]) -> Rows {
        Rows {
            rows: tokens.len(),
            sequences: 1,
            token: self.array(tokens),
            position: self.array(positions),
            table: self.array(tables),
            pages: self.array(pages),
        }
    }

    pub fn embed(&self, mut numbers: Numbers, element: Element, [rows, held, width]: [usize; 3], first: u32) {
        let bytes = numbers.stored(element, held * width);
        let table = self.exact.upload_matrix(&bytes, element, held, width).unwrap();
        let around = |random: &mut fastrand::Rng| (first + random.u32(..held as u32 + 6)).saturating_sub(3);
        let tokens: Vec<u32> = (0..rows).map(|_| around(&mut numbers.random)).collect();
        let mut out = self.target(rows * width);
        self.exact.embed(&table, &self.rows(&tokens, &[0], &[0], &[0]), first, &mut out).unwrap();
        let mut expected = vec![0.0; rows * width];
        for (token, row) in tokens.iter().zip(expected.chunks_exact_mut(width)) {
            let entry = token.checked_sub(first).map_or(held, |entry| entry as usize);
            if entry < held {
                let bytes_of_row = width * element.bytes();
                element.widen(&bytes[entry * bytes_of_row..][..bytes_of_row], row);
            }
        }
        assert_same(&self.read(&out, rows * width), &expected, &format!("{element:?} rows of tokens"));
    }

    pub fn linear(&self, mut numbers: Numbers, element: Element, [rows, outputs, inputs]: [usize; 3]) {
        let bytes = numbers.stored(element, outputs * inputs);
        let row = inputs * element.bytes();
        let panels = Panels::pack(&self.math, outputs, inputs, element, false, |range, target| {
            target.copy_from_slice(&bytes[range.start * row..range.end * row]);
            Ok::<(), String>(())
        });
        let x = numbers.take(rows * inputs);
        let mut expected = vec![0.0; rows * outputs];
        self.math.linear(&x, rows, &panels.unwrap(), &mut expected);
        let weight = self.exact.upload_matrix(&bytes, element, outputs, inputs).unwrap();
        let mut y = self.target(rows * outputs);
        self.exact.linear(&self.array(&x), rows, &weight, &mut y).unwrap();
        let what = format!("{rows} rows of {inputs} by {outputs} {element:?}");
        assert_same(&self.read(&y, rows * outputs), &expected, &what);
    }

    pub fn rms_norm(&self, mut numbers: Numbers, rows: usize, width: usize) {
        let (x, weight) = (numbers.take(rows * width), numbers.take(width));
        let mut expected = vec![0.0; rows * width];
        self.math.rms_norm(&x, &weight, 1e-6, &mut expected);
        let mut y = self.target(rows * width);
        self.exact.rms_norm(&self.array(&x), rows, &self.array(&weight), 1e-6, &mut y).unwrap();
        assert_same(&self.read(&y, rows * width), &expected, &format!("norm of {rows} rows of {width}"));
    }

    pub fn rotate_heads(&self, mut numbers: Numbers, rows: usize, heads: Heads, normed: bool) {
        let mut expected = numbers.take(rows * heads.stride);
        let weight = numbers.take(heads.head_dim);
        let pairs = heads.head_dim / 2;
        let rope = RopeFrequencies::new(heads.head_dim, 10_000.0, RopeScaling::None);
        let (mut cosines, mut sines) = (vec![0.0; rows * pairs], vec![0.0; rows * pairs]);
        for (cosines, sines) in cosines.chunks_exact_mut(pairs).zip(sines.chunks_exact_mut(pairs)) {
            rope.angles(numbers.random.usize(..100_000), cosines, sines);
        }
        let mut data = self.array(&expected);
        let norm = normed.then_some((&weight[..], 1e-5));
        self.math.rotate_heads(&mut expected, heads, norm, &cosines, &sines);
        let (weight, cosines, sines) = (self.array(&weight), self.array(&cosines), self.array(&sines));
        let norm = normed.then_some((&weight, 1e-5));
        self.exact.rotate_heads(&mut data, rows, heads, norm, &cosines, &sines).unwrap();
        assert_same(
            &self.read(&data, expected.len()),
            &expected,
            &format!("{rows} rows, {heads:?}, {normed}"),
        );
    }

    pub fn gated(&self, mut numbers: Numbers, rows: usize, width: usize) {
        let gate_up = numbers.take(2 * rows * width);
        for gate in [Gate::Silu, Gate::GeluTanh] {
            let mut expected = vec![0.0; rows * width];
            self.math.gated(gate, &gate_up, width, &mut expected);
            let mut y = self.target(rows * width);
            self.exact.gated(gate, &self.array(&gate_up), rows, width, &mut y).unwrap();
            assert_same(
                &self.read(&y, rows * width),
                &expected,
                &format!("{gate:?}, {rows} rows of {width}"),
            );
        }
    }

    pub fn add_and_select(&self, mut numbers: Numbers, rows: usize, width: usize) {
        let (mut expected, y) = (numbers.take(rows * width), numbers.take(rows * width));
        let mut x = self.array(&expected);
        self.math.add(&mut expected, &y);
        self.exact.add(&mut x, &self.array(&y), rows * width).unwrap();
        assert_same(&self.read(&x, rows * width), &expected, &format!("{rows} sums of {width}"));
        let indices: Vec<u32> = (0..rows).map(|_| numbers.random.u32(..rows as u32)).collect();
        let chosen: Vec<f32> =
            indices.iter().flat_map(|index| &expected[*index as usize * width..][..width]).copied().collect();
        let mut selected = self.target(rows * width);
        self.exact.select(&x, &self.array(&indices), rows, width, &mut selected).unwrap();
        assert_same(
            &self.read(&selected, rows * width),
            &chosen,
            &format!("{rows} selected rows of {width}"),
        );
    }

    pub fn argmax(&self, mut numbers: Numbers, rows: usize, width: usize) {
        let mut x = numbers.take(rows * width);
        // Rows with many equal numbers, and rows of one value only.
        for row in x.chunks_exact_mut(width) {
            match numbers.random.usize(..4) {
                0 => row.iter_mut().for_each(|x| *x = (*x * 4.0).trunc()),
                1 => row.fill(WILD[numbers.random.usize(..6)]),
                _ => {}
            }
        }
        let expected: Vec<u32> = x
            .chunks_exact(width)
            .map(|row| {
                let mut best = (0, f32::NEG_INFINITY);
                for (id, &value) in (0..).zip(row) {
                    if value > best.1 {
                        best = (id, value);
                    }
                }
                best.0
            })
            .collect();
        let mut places = Array::new(&self.device, rows).unwrap();
        self.exact.argmax(&self.array(&x), rows, width, &mut places).unwrap();
        assert_eq!(self.read(&places, rows), expected, "greatest of {rows} rows of {width}");
    }
}

/// Sequences in a pool, and the rows of a batch at their ends.
#[derive(Clone, Debug)]
pub struct Batch {
    /// For each sequence: the position of its first row, and its number of rows.
    pub sequences: Vec<[usize; 2]>,
    pub page_tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub bf16: bool,
    /// Whether pages hold all tokens of a head side by side. Otherwise they hold all heads of a token side by side.
    pub heads_first: bool,
}

/// A sequence of a pool on the host.
struct Paged<'a> {
    pool: &'a [u8],
    view: &'a KvView,
    row_bytes: usize,
    pages: &'a [u32],
}

impl Paged<'_> {
    /// Where a row of K or V is.
    fn place(&self, side: usize, head: usize, position: usize) -> usize {
        let tokens = self.view.page_tokens as usize;
        let page = self.pages[position / tokens] as usize;
        let steps =
            [self.view.page[side], self.view.head[side], self.view.token[side]].map(|step| step as usize);
        self.view.start[side] as usize + page * steps[0] + head * steps[1] + position % tokens * steps[2]
    }
}

impl KvRows for Paged<'_> {
    fn rows<'a>(&'a self, head: usize, first: usize, keys: &mut [&'a [u8]], values: &mut [&'a [u8]]) {
        for (side, rows) in [keys, values].into_iter().enumerate() {
            for (slot, row) in rows.iter_mut().enumerate() {
                *row = &self.pool[self.place(side, head, first + slot)..][..self.row_bytes];
            }
        }
    }
}

impl Both {
    /// Writes K and V of a batch's rows, and attends.
    pub fn attention(&self, mut numbers: Numbers, batch: &Batch) {
        let Batch { page_tokens, heads, kv_heads, head_dim, bf16, heads_first, .. } = *batch;
        let element = if bf16 { Element::Bf16 } else { Element::F32 };
        let (row_bytes, side_width) = (head_dim * element.bytes(), kv_heads * head_dim);
        let (mut positions, mut tables, mut counts) = (Vec::new(), Vec::new(), Vec::new());
        for [position, rows] in &batch.sequences {
            positions.extend((*position..position + rows).map(|position| position as u32));
            tables.extend(std::iter::repeat_n(counts.iter().sum::<usize>() as u32, *rows));
            counts.push((position + rows).div_ceil(page_tokens));
        }
        let mut pages: Vec<u32> = (0..counts.iter().sum::<usize>() as u32 + 3).collect();
        numbers.random.shuffle(&mut pages);
        let held = pages.len();
        // Addresses that count from the start of the pool.
        let page = page_tokens * side_width * element.bytes();
        let [page, head, token, second] = if heads_first {
            [2 * page, 2 * page_tokens * row_bytes, row_bytes, page_tokens * row_bytes]
        } else {
            [page, row_bytes, kv_heads * row_bytes, held * page]
        }
        .map(|bytes| bytes as u64);
        let view = KvView {
            start: [0, second],
            page: [page; 2],
            head: [head; 2],
            token: [token; 2],
            page_tokens: page_tokens as u32,
            element: element.bytes() as u32,
        };
        let mut pool = numbers.stored(element, 2 * held * page_tokens * side_width);
        let on_device = self.array(&pool);
        let device_view = KvView { start: view.start.map(|start| start + on_device.address()), ..view };

        // Rows of queries, keys and values, with unused elements.
        let rows = positions.len();
        let stride = (heads + 2 * kv_heads) * head_dim + 16;
        let first = [heads * head_dim, heads * head_dim + side_width + 8];
        let data = numbers.take(rows * stride);
        let batch_rows = self.rows(&vec![0; rows], &positions, &tables, &pages[..held - 3]);
        let device_data = self.array(&data);
        self.exact
            .write_kv(&device_data, &batch_rows, stride, first, kv_heads, head_dim, &device_view)
            .unwrap();
        for (row, data) in data.chunks_exact(stride).enumerate() {
            for side in 0..2 {
                for head in 0..kv_heads {
                    let pages = &pages[tables[row] as usize..];
                    let place = Paged { pool: &[], view: &view, row_bytes, pages };
                    let place = place.place(side, head, positions[row] as usize);
                    let target = &mut pool[place..][..row_bytes];
                    let source = &data[first[side] + head * head_dim..][..head_dim];
                    for (target, value) in target.chunks_exact_mut(element.bytes()).zip(source) {
                        if bf16 {
                            target.copy_from_slice(&bf16_from_f32(*value).to_le_bytes());
                        } else {
                            target.copy_from_slice(&value.to_le_bytes());
                        }
                    }
                }
            }
        }
        assert!(self.read(&on_device, pool.len()) == pool, "the pool after K and V were written: {batch:?}");

        let scale = 1.0 / (head_dim as f32).sqrt();
        let shape =
            AttentionShape { heads, kv_heads, head_dim, element, query_stride: stride, scale, window: None };
        let kept: Vec<Paged<'_>> = {
            let mut from = 0;
            let table = |count: &usize| {
                from += count;
                Paged { pool: &pool, view: &view, row_bytes, pages: &pages[from - count..from] }
            };
            counts.iter().map(table).collect()
        };
        let mut row = 0;
        let sequences = batch.sequences.iter().zip(&kept).map(|([position, rows], kv)| {
            row += rows;
            QueryRows { row: row - rows, rows: *rows, position: *position, first: 0, kv }
        });
        let mut expected = vec![0.0; rows * heads * head_dim];
        self.math.attention(shape, &data, &sequences.collect::<Vec<_>>(), &mut expected);
        let mut out = self.target(expected.len());
        let shape = Attention { heads, kv_heads, head_dim, query_stride: stride, scale };
        self.exact.attention(shape, &device_data, &batch_rows, &device_view, &mut out).unwrap();
        assert_same(&self.read(&out, expected.len()), &expected, &format!("{batch:?}"));
    }
}
