//! Checks matrix products on tensor cores for correct values, and for bits that do not depend on the batch, and times them.
//!
//!     NVRTC=FOLDER cargo bench -p host-kernels --bench cuda_linear
//!
//! or, on another machine than the one that built it, the program alone with `--bench`. It needs an H100 or H200, its driver
//! and NVRTC, which `NVRTC` names. First come the checks. If one fails, the exit code is 1:
//!
//! * A product in f64 over the same bf16 numbers differs by at most [`BOUND`] times the sum of the products'
//!   magnitudes.
//! * Every kernel gives each row the same bits, in a batch of any size and alone.
//! * A chain of `mma.sync` over the same slices gives the same bits, too.
//! * The epilogues write what they say and nothing else.
//!
//! Then come times: products of matrices in turn that fill more than L2, in a graph, best of [`ROUNDS`] rounds between two
//! events. `-- check` leaves out the times, `-- times` leaves out the checks, `-- decode` and `-- prefill` time few or many
//! rows only, and `-- sweep` times every kernel for many rows.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaFunction, CudaStream, LaunchConfig, PushKernelArg};
use host_kernels::cuda::tensor::linear::{Output, TensorLinear, TensorMatrix, Variant};
use host_kernels::cuda::{Array, Device, Source};
use host_kernels::math::{bf16_from_f32, f32_from_bf16};

/// The largest allowed error, as a share of the sum of the products' magnitudes. The tensor cores cut off bits that do not fit
/// beside the largest of 16 products and the sum. An H100 was within 2^-22.
const BOUND: f64 = 1.0 / (1 << 20) as f64;
const ROUNDS: usize = 5;
/// bf16 operations per second of the tensor cores of an H100 or H200, as NVIDIA gives them.
const OPERATIONS: f64 = 989.4e12;
/// Bytes of the matrices that are timed in turn: several times more than L2 holds.
const WORKING_SET: usize = 400 << 20;

const SOURCE: Source = Source { name: "cuda_linear.cu", text: include_str!("cuda_linear.cu"), options: &[] };

/// A matrix, by its use.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    outputs: usize,
    inputs: usize,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Store,
    Add,
    StoreBf16,
    Gated,
}

const fn shape(name: &'static str, outputs: usize, inputs: usize, kind: Kind) -> Shape {
    Shape { name, outputs, inputs, kind }
}

/// The shapes that are checked: multiples of tiles and others, of one slice and of many.
const CHECKED: [Shape; 7] = [
    shape("small", 576, 576, Kind::Store),
    shape("edges", 1040, 1096, Kind::Store),
    shape("narrow", 16, 512, Kind::Store),
    shape("qkv", 3072, 2048, Kind::Store),
    shape("down", 2048, 8192, Kind::Store),
    shape("wide", 8272, 576, Kind::Store),
    shape("eight", 256, 4160, Kind::Store),
];
const CHECKED_ROWS: [usize; 13] = [1, 2, 3, 5, 8, 9, 17, 33, 64, 65, 100, 129, 1000];

/// The shapes of a layer of Llama-3.2-1B.
const LAYER: [Shape; 4] = [
    shape("qkv", 3072, 2048, Kind::StoreBf16),
    shape("o", 2048, 2048, Kind::Add),
    shape("gate_up", 16384, 2048, Kind::Gated),
    shape("down", 2048, 8192, Kind::Add),
];
/// SmolLM2-135M's largest matrix except its head. Its time is hardly more than latency.
const SMALL: Shape = shape("small", 3072, 576, Kind::Gated);
const HEAD: Shape = shape("lm_head", 128_256, 2048, Kind::Store);

struct Bench {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    linear: TensorLinear,
    fill: CudaFunction,
    chain: CudaFunction,
    /// Peak rate of the GPU's memory, in bytes per second.
    memory_rate: f64,
}

impl Bench {
    /// Numbers between -1 and 1.
    fn numbers(&self, count: usize, seed: u32) -> Array<u16> {
        let array = Array::new(&self.device, count).unwrap();
        let (address, count) = (array.address(), count as u64);
        let config = LaunchConfig {
            grid_dim: (u32::try_from(count.div_ceil(256)).unwrap(), 1, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut builder = self.stream.launch_builder(&self.fill);
        builder.arg(&address).arg(&count).arg(&seed);
        // SAFETY: the kernel's parameters. It writes `count` elements.
        unsafe { builder.launch(config) }.unwrap();
        array
    }

    fn matrix(&self, shape: &Shape, weights: &Array<u16>) -> TensorMatrix {
        let gated = shape.kind == Kind::Gated;
        self.linear.pack(&self.stream, weights, shape.outputs, shape.inputs, gated).unwrap()
    }

    fn chain(&self, x: &Array<u16>, rows: usize, weights: &Array<u16>, matrix: &TensorMatrix) -> Vec<f32> {
        let y = Array::<f32>::new(&self.device, rows * matrix.outputs()).unwrap();
        let blocks = matrix.inputs().div_ceil(64);
        let sizes =
            [rows, matrix.outputs(), matrix.inputs(), blocks, matrix.slices()].map(|size| size as u32);
        let addresses = [x.address(), weights.address(), y.address()];
        let config = LaunchConfig {
            grid_dim: (sizes[1] / 16, sizes[0].div_ceil(8), 1),
            block_dim: (32, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut builder = self.stream.launch_builder(&self.chain);
        addresses.iter().for_each(|address| {
            builder.arg(address);
        });
        sizes.iter().for_each(|size| {
            builder.arg(size);
        });
        // SAFETY: the kernel's parameters. It reads both matrices and writes `rows` rows of `y`.
        unsafe { builder.launch(config) }.unwrap();
        self.floats(&y)
    }

    fn floats(&self, array: &Array<f32>) -> Vec<f32> {
        let mut values = vec![0.0; array.len()];
        array.download(&self.stream, &mut values).unwrap();
        values
    }

    fn halves(&self, array: &Array<u16>) -> Vec<u16> {
        let mut values = vec![0; array.len()];
        array.download(&self.stream, &mut values).unwrap();
        values
    }

    /// The product's bits, by this kernel or by the chosen one.
    fn store(
        &self,
        variant: Option<Variant>,
        x: &Array<u16>,
        rows: usize,
        matrix: &TensorMatrix,
    ) -> Vec<u32> {
        let mut y = Array::<f32>::new(&self.device, rows * matrix.outputs()).unwrap();
        // NaN shows elements that the product does not write.
        y.upload(&self.stream, &vec![f32::NAN; rows * matrix.outputs()]).unwrap();
        let (stream, stride) = (&self.stream, matrix.outputs());
        match variant {
            Some(variant) => {
                self.linear.run_as(variant, stream, x, rows, matrix, Output::Store(&mut y), stride)
            }
            None => self.linear.run(stream, x, rows, matrix, Output::Store(&mut y), stride),
        }
        .unwrap();
        self.floats(&y).into_iter().map(f32::to_bits).collect()
    }

    /// Checks the bits of all kernels and row counts, and the values.
    fn check(&self, shape: &Shape) -> Result<(), String> {
        let &Shape { name, outputs, inputs, .. } = shape;
        let most = CHECKED_ROWS[CHECKED_ROWS.len() - 1];
        let x = self.numbers(most * inputs, 1);
        let weights = self.numbers(outputs * inputs, 2);
        let matrix = self.matrix(shape, &weights);
        let expected = self.store(Some(Variant::Split8), &x, most, &matrix);

        let worst = self.error(&x, &weights, &matrix, &expected)?;
        for rows in CHECKED_ROWS {
            let suitable = Variant::ALL.into_iter().filter(|variant| variant.suits(matrix.slices()));
            for variant in suitable.map(Some).chain([None]) {
                let found = self.store(variant, &x, rows, &matrix);
                if let Some(at) = found.iter().zip(&expected).position(|(found, expected)| found != expected)
                {
                    let (row, output) = (at / outputs, at % outputs);
                    let [found, expected] = [found[at], expected[at]].map(f32::from_bits);
                    return Err(format!(
                        "{name}, {variant:?}, {rows} rows: row {row}, output {output} is {found} and not {expected}"
                    ));
                }
            }
        }
        let elements = self.halves(&x);
        for row in [0, 1, 7, 8, 200, 999] {
            let mut alone = Array::new(&self.device, inputs).unwrap();
            alone.upload(&self.stream, &elements[row * inputs..][..inputs]).unwrap();
            for variant in Variant::ALL.into_iter().filter(|variant| variant.suits(matrix.slices())) {
                if self.store(Some(variant), &alone, 1, &matrix) != expected[row * outputs..][..outputs] {
                    return Err(format!("{name}, {variant:?}: row {row} alone has other bits"));
                }
            }
        }
        let chain = self.chain(&x, most, &weights, &matrix);
        if let Some(at) =
            chain.iter().zip(&expected).position(|(chain, expected)| chain.to_bits() != *expected)
        {
            return Err(format!("{name}: a chain of mma.sync has other bits in element {at}"));
        }
        println!(
            "{name:>8} {outputs:>6} x {inputs:<5} {} slices: the same bits for all, error 2^{:.1} of the magnitudes",
            matrix.slices(),
            worst.log2()
        );
        Ok(())
    }

    /// The largest error over some outputs of all rows, as a share of the sum of the products' magnitudes.
    fn error(
        &self,
        x: &Array<u16>,
        weights: &Array<u16>,
        matrix: &TensorMatrix,
        found: &[u32],
    ) -> Result<f64, String> {
        let (outputs, inputs) = (matrix.outputs(), matrix.inputs());
        let [x, weights] =
            [x, weights].map(|array| self.halves(array).into_iter().map(f32_from_bf16).collect::<Vec<_>>());
        let mut worst = 0.0_f64;
        let some = [0, 1, 7, 8, 15, outputs / 2 - 1, outputs / 2, outputs - 2, outputs - 1];
        for (row, x) in x.chunks(inputs).enumerate() {
            for output in some.into_iter().chain([row % outputs]) {
                let (mut sum, mut magnitude) = (0.0, 0.0);
                for (x, w) in x.iter().zip(&weights[output * inputs..]) {
                    let product = f64::from(*x) * f64::from(*w);
                    sum += product;
                    magnitude += product.abs();
                }
                let value = f32::from_bits(found[row * outputs + output]);
                let error = (f64::from(value) - sum).abs() / magnitude;
                if error.is_nan() || error > BOUND {
                    return Err(format!("row {row}, output {output} is {value} and not {sum}"));
                }
                worst = worst.max(error);
            }
        }
        Ok(worst)
    }

    /// Checks each epilogue against the f32 product, with rows that are further apart than they are long.
    fn check_epilogues(&self, outputs: usize, inputs: usize) -> Result<(), String> {
        let rows = 100;
        let x = self.numbers(rows * inputs, 3);
        let weights = self.numbers(outputs * inputs, 4);
        let plain = self.matrix(&shape("", outputs, inputs, Kind::Store), &weights);
        let gated = self.matrix(&shape("", outputs, inputs, Kind::Gated), &weights);
        let product: Vec<f32> = self.store(None, &x, rows, &plain).into_iter().map(f32::from_bits).collect();
        let stride = outputs + 6;
        let before: Vec<f32> = (0..rows * stride).map(|i| i as f32 / 7.0).collect();
        let untouched: Vec<u16> = (0..rows * stride).map(|i| i as u16).collect();
        for variant in Variant::ALL.into_iter().filter(|variant| variant.suits(plain.slices())) {
            let mut floats = Array::<f32>::new(&self.device, rows * stride).unwrap();
            let mut halves = Array::<u16>::new(&self.device, rows * stride).unwrap();
            let run = |matrix: &TensorMatrix, output: Output<'_>| {
                self.linear.run_as(variant, &self.stream, &x, rows, matrix, output, stride).unwrap();
            };
            floats.upload(&self.stream, &before).unwrap();
            run(&plain, Output::Add(&mut floats));
            let added = self.floats(&floats);
            halves.upload(&self.stream, &untouched).unwrap();
            run(&plain, Output::StoreBf16(&mut halves));
            let rounded = self.halves(&halves);
            halves.upload(&self.stream, &untouched).unwrap();
            run(&gated, Output::Gated(&mut halves));
            let activated = self.halves(&halves);
            for at in 0..rows * stride {
                let (row, column) = (at / stride, at % stride);
                let value = |column: usize| product[row * outputs + column];
                let [sum, half] = match column < outputs {
                    true => [(before[at] + value(column)).to_bits(), u32::from(bf16_from_f32(value(column)))],
                    false => [before[at].to_bits(), u32::from(untouched[at])],
                };
                if added[at].to_bits() != sum || u32::from(rounded[at]) != half {
                    return Err(format!(
                        "{variant:?}: row {row}, column {column}: {} {}",
                        added[at], rounded[at]
                    ));
                }
                if column >= outputs / 2 {
                    if activated[at] != untouched[at] {
                        return Err(format!("{variant:?}: row {row}, column {column} is written"));
                    }
                } else {
                    let (gate, up) = (f64::from(value(column)), f64::from(value(column + outputs / 2)));
                    let expected = gate / (1.0 + (-gate).exp()) * up;
                    let found = f64::from(f32_from_bf16(activated[at]));
                    // Half of the last place of bf16, and a little for the exponential.
                    if (found - expected).abs() > expected.abs() * (1.0 / 256.0 + 1e-5) {
                        return Err(format!(
                            "{variant:?}: row {row}, column {column} is {found} and not {expected}"
                        ));
                    }
                }
            }
        }
        println!("epilogues of {outputs} x {inputs}: as they say, in rows of {stride}");
        Ok(())
    }

    /// Seconds of the work that `once` enqueues, run as a graph.
    fn seconds(&self, once: impl FnOnce()) -> f64 {
        let stream = &self.stream;
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        once();
        let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = stream.end_capture(flags).unwrap().unwrap();
        graph.launch().unwrap();
        let mut best = f64::MAX;
        for _ in 0..ROUNDS {
            let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
            graph.launch().unwrap();
            let end = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
            best = best.min(f64::from(start.elapsed_ms(&end).unwrap()));
        }
        best / 1e3
    }

    fn enqueue(
        &self,
        variant: Option<Variant>,
        buffers: &mut Buffers,
        rows: usize,
        shape: &Shape,
        matrix: &TensorMatrix,
    ) {
        let Buffers { x, floats, halves } = buffers;
        let (output, stride) = match shape.kind {
            Kind::Store => (Output::Store(floats), shape.outputs),
            Kind::Add => (Output::Add(floats), shape.outputs),
            Kind::StoreBf16 => (Output::StoreBf16(halves), shape.outputs),
            Kind::Gated => (Output::Gated(halves), shape.outputs / 2),
        };
        match variant {
            Some(variant) => self.linear.run_as(variant, &self.stream, x, rows, matrix, output, stride),
            None => self.linear.run(&self.stream, x, rows, matrix, output, stride),
        }
        .unwrap();
    }

    /// Prints a line for each number of rows and each kernel.
    fn time(&self, shape: &Shape, rows: &[usize], variants: &[Option<Variant>], buffers: &mut Buffers) {
        let bytes = shape.outputs * shape.inputs * 2;
        let weights = self.numbers(shape.outputs * shape.inputs, 5);
        let copies = (WORKING_SET / bytes).clamp(1, 64);
        let matrices: Vec<_> = (0..copies).map(|_| self.matrix(shape, &weights)).collect();
        for &rows in rows {
            let suits = |variant: &&Option<Variant>| {
                variant.is_none_or(|variant| variant.suits(matrices[0].slices()))
            };
            for &variant in variants.iter().filter(suits) {
                let launches = copies.max(8);
                let seconds = self.seconds(|| {
                    for i in 0..launches {
                        self.enqueue(variant, buffers, rows, shape, &matrices[i % copies]);
                    }
                }) / launches as f64;
                self.report(shape.name, rows, variant, seconds, bytes, shape.outputs * shape.inputs);
            }
        }
    }

    /// Times a decoder's products, one after the other.
    fn time_model(&self, layers: usize, rows: &[usize], buffers: &mut Buffers) {
        let matrix = |shape: &Shape| self.matrix(shape, &self.numbers(shape.outputs * shape.inputs, 6));
        let matrices: Vec<_> =
            (0..layers).flat_map(|_| LAYER.iter().map(|shape| (shape, matrix(shape)))).collect();
        let head = matrix(&HEAD);
        let weights: usize =
            matrices.iter().map(|(_, matrix)| matrix).chain([&head]).map(|m| m.outputs() * m.inputs()).sum();
        for &rows in rows {
            let seconds = self.seconds(|| {
                matrices.iter().for_each(|(shape, matrix)| self.enqueue(None, buffers, rows, shape, matrix));
                self.enqueue(None, buffers, rows, &HEAD, &head);
            });
            self.report("model", rows, None, seconds, 2 * weights, weights);
        }
    }

    fn report(
        &self,
        name: &str,
        rows: usize,
        variant: Option<Variant>,
        seconds: f64,
        bytes: usize,
        weights: usize,
    ) {
        let operations = 2.0 * weights as f64 * rows as f64;
        let bound = (bytes as f64 / self.memory_rate).max(operations / OPERATIONS);
        let variant = variant.map_or_else(|| "-".to_owned(), |variant| format!("{variant:?}"));
        println!(
            "{name:>8} {rows:>5} {variant:>9} {:>9.2} us {:>6.0} GB/s {:>6.1} TFLOP/s {:>5.2}",
            seconds * 1e6,
            bytes as f64 / seconds / 1e9,
            operations / seconds / 1e12,
            bound / seconds
        );
    }
}

struct Buffers {
    x: Array<u16>,
    floats: Array<f32>,
    halves: Array<u16>,
}

fn main() -> ExitCode {
    let told = |name: &str| std::env::args().any(|argument| argument == name);
    if !told("--bench") {
        return ExitCode::SUCCESS;
    }
    let nvrtc = std::env::var_os("NVRTC").map(PathBuf::from);
    let opened = Device::open(0, nvrtc.as_deref()).and_then(|device| {
        let linear = TensorLinear::new(&device)?;
        let module = device.module(&SOURCE)?;
        Ok((device, linear, module))
    });
    let (device, linear, module) = match opened {
        Ok(all) => all,
        Err(error) => {
            println!("{error}");
            return ExitCode::from(2);
        }
    };
    let [fill, chain] = ["fill", "chain"].map(|name| module.load_function(name).unwrap());
    let memory_rate = device.memory_rate().unwrap();
    println!("peak of the memory: {:.0} GB/s", memory_rate / 1e9);
    let bench = Bench { stream: device.stream().unwrap(), device, linear, fill, chain, memory_rate };
    if !told("times") {
        let epilogues = [(1040, 1096), (12_320, 256)];
        let results = CHECKED.iter().map(|shape| bench.check(shape));
        let results =
            results.chain(epilogues.map(|(outputs, inputs)| bench.check_epilogues(outputs, inputs)));
        let differences = results.filter_map(Result::err).inspect(|difference| println!("{difference}"));
        if differences.count() > 0 {
            return ExitCode::FAILURE;
        }
    }
    if told("check") {
        return ExitCode::SUCCESS;
    }

    let most = 8192;
    let mut buffers = Buffers {
        x: bench.numbers(most * 8192, 7),
        floats: Array::new(&bench.device, most * 16384).unwrap(),
        halves: Array::new(&bench.device, most * 16384).unwrap(),
    };
    println!(
        "{:>8} {:>5} {:>9} {:>12} {:>11} {:>14} {:>5}",
        "matrix", "rows", "kernel", "time", "weights", "", "of bound"
    );
    let chosen: &[Option<Variant>] = &[None];
    if !told("prefill") {
        for shape in LAYER.iter().chain([&SMALL, &HEAD]) {
            bench.time(shape, &[1, 8, 16, 32, 64, 128], chosen, &mut buffers);
        }
        bench.time_model(16, &[1, 8, 32, 64], &mut buffers);
    }
    if !told("decode") {
        let large: Vec<_> = match told("sweep") {
            true => Variant::ALL[3..].iter().copied().map(Some).collect(),
            false => chosen.to_vec(),
        };
        for shape in &LAYER {
            bench.time(shape, &[128, 256, 512, 1024, 2048, 8192], &large, &mut buffers);
        }
    }
    ExitCode::SUCCESS
}
