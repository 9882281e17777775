//! Checks that page copies on a GPU give the same bytes as on the CPU, and compares their speed with a plain copy inside the
//! device.
//!
//!     NVRTC=FOLDER cargo bench -p host-kernels --bench cuda_copy
//!
//! or, on another machine than the one that built it, the program alone with `--bench`. It needs the driver and NVRTC, which
//! `NVRTC` names (`libnvrtc.so` or a folder with it, such as NVIDIA's wheel, unpacked anywhere). First every shape is copied
//! once and compared bit for bit with [`Copier`]'s result. The exit code is 1 if a shape differs. Then the copies are timed: the
//! best of [`ROUNDS`] batches of copies between two events, in GB of payload per second, each byte read once and written once.
//! `-- check` leaves out the times.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use host_kernels::copy::{Copier, CopyPages, Dimension, Memory, PageBlock, PagesCopy};
use host_kernels::cuda::{Array, CudaCopier, CudaKernels, Device, Nvrtc, Pinned};

const ROUNDS: usize = 7;
const TOKENS: usize = 16;
/// KV heads in the pool.
const HEADS: usize = 8;

/// A pool, the pages and heads that are copied from it, and their layout in the pool.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    token_major: bool,
    layers: usize,
    heads: usize,
    /// Bytes of one head's K of one token.
    row: usize,
    pages: usize,
    /// Bytes from the start of the allocation to the pool.
    shift: usize,
}

const SHAPES: [Shape; 10] = {
    let shape = Shape {
        name: "page-head-first",
        token_major: false,
        layers: 32,
        heads: 8,
        row: 256,
        pages: 256,
        shift: 0,
    };
    let token = Shape { name: "token-major", token_major: true, ..shape };
    [
        shape,
        Shape { heads: 4, ..shape },
        Shape { heads: 1, pages: 2048, ..shape },
        token,
        Shape { heads: 4, ..token },
        Shape { heads: 1, pages: 2048, ..token },
        Shape { pages: 8, ..token },
        Shape { heads: 2, row: 64, pages: 1024, ..token },
        Shape { name: "8 bytes off", shift: 8, ..token },
        Shape { name: "odd, 1 byte off", heads: 3, row: 33, pages: 200, shift: 1, ..token },
    ]
};

impl Shape {
    /// The blocks that gather into pieces of page, head, layer, K or V, token. The pool has twice as many pages as are copied.
    fn blocks(&self) -> [PageBlock; 2] {
        let Shape { layers, heads, row, .. } = *self;
        let kv = TOKENS * row;
        let pool_pages = 2 * self.pages;
        let (start, source_page, source) = if self.token_major {
            let page = TOKENS * HEADS * row;
            (page * pool_pages, page, [row, 2 * page * pool_pages, HEADS * row])
        } else {
            (kv, 2 * kv * layers * HEADS, [2 * kv * layers, 2 * kv, row])
        };
        let (extents, target) = ([heads, layers, TOKENS], [2 * kv * layers, 2 * kv, row]);
        let dims = [0, 1, 2].map(|d| Dimension { extent: extents[d], source: source[d], target: target[d] });
        [0, 1].map(|side| PageBlock {
            run: row,
            source: side * start,
            target: side * kv,
            source_page,
            target_page: 2 * kv * layers * heads,
            dims,
        })
    }

    fn pairs(&self) -> Vec<[u32; 2]> {
        (0..self.pages).map(|page| [((page * 7919 + 13) % (2 * self.pages)) as u32, page as u32]).collect()
    }

    fn pool_bytes(&self) -> usize {
        2 * self.pages * HEADS * self.layers * 2 * TOKENS * self.row
    }

    fn dense_bytes(&self) -> usize {
        self.pages * self.heads * self.layers * 2 * TOKENS * self.row
    }
}

fn bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; length];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

fn memory(buffer: &CudaSlice<u8>, shift: usize, stream: &CudaStream) -> Memory {
    Memory::device(buffer.device_ptr(stream).0 + shift as u64, buffer.len() - shift)
}

/// Gathers out of a pool and scatters into another, on CPU and GPU. Returns the first difference.
fn difference(copier: &CudaCopier, shape: &Shape) -> Option<String> {
    let stream = copier.stream();
    let cpu = Copier::new(0).unwrap();
    let (blocks, pairs) = (shape.blocks(), shape.pairs());
    let pool = bytes(shape.pool_bytes() + shape.shift, 1);
    let mut dense = vec![0xaa; shape.dense_bytes()];
    let mut other = bytes(shape.pool_bytes() + shape.shift, 2);
    let device_pool = stream.clone_htod(&pool).unwrap();
    let device_dense = stream.clone_htod(&dense).unwrap();
    let device_other = stream.clone_htod(&other).unwrap();

    let gather = PagesCopy { pages: &pairs, blocks: &blocks };
    cpu.copy(&gather, &pool[shape.shift..], &mut dense).unwrap();
    let back: Vec<[u32; 2]> = pairs.iter().map(|&[from, to]| [to, from]).collect();
    let reversed = blocks.map(PageBlock::reversed);
    let scatter = PagesCopy { pages: &back, blocks: &reversed };
    cpu.copy(&scatter, &dense, &mut other[shape.shift..]).unwrap();

    let (from, to) = (memory(&device_pool, shape.shift, stream), memory(&device_dense, 0, stream));
    // SAFETY: all three live until the stream is waited for, and nothing else uses them.
    unsafe { copier.copy_memory(&gather, from, to).unwrap() };
    // SAFETY: as above, and the stream keeps the order.
    unsafe { copier.copy_memory(&scatter, to, memory(&device_other, shape.shift, stream)).unwrap() };
    let found = [stream.clone_dtoh(&device_dense).unwrap(), stream.clone_dtoh(&device_other).unwrap()];
    stream.synchronize().unwrap();
    for (name, found, expected) in [("gather", &found[0], &dense), ("scatter", &found[1], &other)] {
        let differs = found.iter().zip(expected).position(|(a, b)| a != b);
        if let Some(at) = differs {
            return Some(format!("{name} differs first at byte {at} of {}", expected.len()));
        }
    }
    None
}

/// Best GB/s of something that moves `payload` bytes.
fn speed(stream: &Arc<CudaStream>, payload: usize, mut once: impl FnMut()) -> f64 {
    // Enough repetitions that the cost of the two events does not count.
    let repetitions = ((2_usize << 30) / payload).clamp(4, 400);
    once();
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let start = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        (0..repetitions).for_each(|_| once());
        let end = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
        best = best.min(f64::from(start.elapsed_ms(&end).unwrap()));
    }
    payload as f64 * repetitions as f64 / (best / 1e3) / 1e9
}

fn time(copier: &CudaCopier, shape: &Shape) {
    let stream = copier.stream();
    let (blocks, pairs) = (shape.blocks(), shape.pairs());
    let payload = shape.dense_bytes();
    let pool = stream.alloc_zeros::<u8>(shape.pool_bytes() + shape.shift).unwrap();
    let mut dense = stream.alloc_zeros::<u8>(payload).unwrap();
    let plain = stream.alloc_zeros::<u8>(payload).unwrap();
    let (from, to) = (memory(&pool, shape.shift, stream), memory(&dense, 0, stream));
    let back: Vec<[u32; 2]> = pairs.iter().map(|&[from, to]| [to, from]).collect();
    let reversed = blocks.map(PageBlock::reversed);
    let gather = PagesCopy { pages: &pairs, blocks: &blocks };
    let scatter = PagesCopy { pages: &back, blocks: &reversed };
    // SAFETY: both buffers live until the events of the stream were waited for, and nothing else uses them.
    let gathered = speed(stream, payload, || unsafe { copier.copy_memory(&gather, from, to).unwrap() });
    // SAFETY: as above.
    let scattered = speed(stream, payload, || unsafe { copier.copy_memory(&scatter, to, from).unwrap() });
    let copied = speed(stream, payload, || stream.memcpy_dtod(&plain, &mut dense).unwrap());
    println!(
        "{:>16} {:>6} {:>6} {:>5} B {:>7.1} MiB {copied:>10.0} {gathered:>10.0} ({:.2}) {scattered:>10.0} ({:.2})",
        shape.name,
        shape.heads,
        shape.pages,
        shape.row,
        payload as f64 / f64::from(1 << 20),
        gathered / copied,
        scattered / copied,
    );
}

/// Times copies between a pool and pinned memory of the host, beside the driver's copy of as many bytes between the two.
fn time_host(copier: &CudaCopier, device: &Arc<Device>, shape: &Shape) {
    let stream = copier.stream();
    let (blocks, pairs) = (shape.blocks(), shape.pairs());
    let payload = shape.dense_bytes();
    let pool = stream.alloc_zeros::<u8>(shape.pool_bytes() + shape.shift).unwrap();
    let mut plain = Array::<u8>::new(device, payload).unwrap();
    let pinned = Pinned::<u8>::new(device, payload).unwrap();
    let mut dense = pinned.array();
    let (from, to) = (memory(&pool, shape.shift, stream), Memory::device(dense.address(), payload));
    let back: Vec<[u32; 2]> = pairs.iter().map(|&[from, to]| [to, from]).collect();
    let reversed = blocks.map(PageBlock::reversed);
    let gather = PagesCopy { pages: &pairs, blocks: &blocks };
    let scatter = PagesCopy { pages: &back, blocks: &reversed };
    // SAFETY: both buffers live until the events of the stream were waited for, and nothing else uses them.
    let saved = speed(stream, payload, || unsafe { copier.copy_memory(&gather, from, to).unwrap() });
    // SAFETY: as above.
    let restored = speed(stream, payload, || unsafe { copier.copy_memory(&scatter, to, from).unwrap() });
    let down = speed(stream, payload, || dense.copy_from(stream, &plain, payload).unwrap());
    let up = speed(stream, payload, || plain.copy_from(stream, &dense, payload).unwrap());
    println!(
        "{:>16} {:>6} {:>6} {:>5} B {:>7.1} MiB {down:>10.1} {saved:>10.1} ({:.2}) {up:>10.1} {restored:>10.1} ({:.2})",
        shape.name,
        shape.heads,
        shape.pages,
        shape.row,
        payload as f64 / f64::from(1 << 20),
        saved / down,
        restored / up,
    );
}

fn main() -> ExitCode {
    if !std::env::args().any(|argument| argument == "--bench") {
        return ExitCode::SUCCESS;
    }
    let nvrtc = std::env::var_os("NVRTC").map(PathBuf::from);
    let (kernels, nvrtc) = match Nvrtc::open(nvrtc.as_deref())
        .and_then(|found| Ok((CudaKernels::load(&Device::open(0, nvrtc.as_deref())?)?, found)))
    {
        Ok(both) => both,
        Err(error) => {
            println!("{error}");
            return ExitCode::from(2);
        }
    };
    let kernels = Arc::new(kernels);
    println!(
        "{}, compute capability {:?}, NVRTC {:?}",
        kernels.context().name().unwrap(),
        kernels.context().compute_capability().unwrap(),
        nvrtc.version().unwrap()
    );
    let copier = kernels.on(kernels.context().new_stream().unwrap());
    for shape in &SHAPES {
        // Few layers are enough to compare. There are still more pages than one launch can name, if the shape has so many.
        let few = Shape { pages: shape.pages.min(500), layers: 4, ..*shape };
        if let Some(difference) = difference(&copier, &few) {
            println!("{} of {} heads, rows of {}: {difference}", few.name, few.heads, few.row);
            return ExitCode::FAILURE;
        }
    }
    println!("{} shapes, gathered and scattered: the CPU's bytes", SHAPES.len());
    if std::env::args().any(|argument| argument == "check") {
        return ExitCode::SUCCESS;
    }
    println!(
        "{:>16} {:>6} {:>6} {:>7} {:>11} {:>10} {:>17} {:>17}",
        "pool", "heads", "pages", "row", "", "copy", "gather", "scatter"
    );
    for shape in &SHAPES {
        time(&copier, shape);
    }
    println!(
        "{:>16} {:>6} {:>6} {:>7} {:>11} {:>10} {:>17} {:>10} {:>17}",
        "to and from host", "heads", "pages", "row", "", "copy down", "gather", "copy up", "scatter"
    );
    for shape in SHAPES.iter().take(4) {
        time_host(&copier, kernels.device(), shape);
    }
    ExitCode::SUCCESS
}
