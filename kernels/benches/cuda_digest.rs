//! Checks that digests on a GPU are those of the CPU, and measures how fast memory is read for them.
//!
//!     NVRTC=FOLDER cargo bench -p host-kernels --bench cuda_digest
//!
//! or, on another machine than the one that built it, the program alone with `--bench`. First many shapes are compared with the
//! CPU. The program panics if a shape differs. `-- check` leaves out the times. These are the best of several calls over 1 GiB with
//! everything that a call does, and the time of 1 GiB more in a pool of 4 GiB. Each page is a part of its own.

#![allow(clippy::unwrap_used, reason = "a benchmark ends at its first error")]

#[path = "../tests/cuda_digest/pool.rs"]
mod pool;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaStream, sys};
use host_kernels::cuda::digest::{DigestKernels, PagePart};
use host_kernels::cuda::{Array, Device};
use pool::{ORDERS, Order, Shape};

const GIB: usize = 1 << 30;
const ROUNDS: usize = 9;

struct Bench {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    kernels: DigestKernels,
}

fn main() {
    let nvrtc = std::env::var_os("NVRTC").map(PathBuf::from);
    let device = Device::open(0, nvrtc.as_deref()).unwrap();
    let bench =
        Bench { stream: device.stream().unwrap(), kernels: DigestKernels::new(&device).unwrap(), device };
    bench.compare_all();
    if !std::env::args().any(|argument| argument == "check") {
        bench.measure();
    }
}

impl Bench {
    fn compare(&self, shape: Shape, parts: &[PagePart], seed: u64, shift: usize) {
        let mut bytes = vec![0; shape.bytes() + shift];
        fastrand::Rng::with_seed(seed).fill(&mut bytes);
        let mut memory = Array::new(&self.device, bytes.len()).unwrap();
        memory.upload(&self.stream, &bytes).unwrap();
        let pool = shape.at(memory.address() + shift as u64);
        let found = self.kernels.digests(&self.stream, &pool, parts).unwrap();
        for (part, found) in parts.iter().zip(found) {
            assert_eq!(found, shape.digest(&bytes[shift..], part), "{shape:?}, {part:?}, {shift} bytes off");
        }
    }

    fn compare_all(&self) {
        let mut random = fastrand::Rng::with_seed(1);
        let mut within = |from: usize, most: usize| {
            let (a, b) = (random.usize(0..=most), random.usize(0..=most));
            from + a.min(b)..from + a.max(b)
        };
        let mut cases = 0;
        for order in ORDERS {
            for (key, value) in
                [(256, 256), (512, 512), (128, 128), (64, 64), (160, 96), (16, 32), (24, 24), (8, 8), (7, 0)]
            {
                for page_tokens in [1, 5, 16, 33, 64] {
                    let rows = [key, value];
                    let shape =
                        Shape { order, pages: 4, page_tokens, layers: 5, heads: 3, first_head: 2, rows };
                    let parts: Vec<PagePart> = (0..12)
                        .map(|number| PagePart {
                            page: number % 4,
                            index: number as u64 * 77,
                            layers: within(0, 5),
                            heads: within(2, 3),
                            tokens: within(0, 80).end,
                        })
                        .collect();
                    self.compare(shape, &parts, cases, if cases % 3 == 0 { 3 } else { 16 });
                    cases += 1;
                }
            }
        }
        for (tokens, row) in [(1300, 1), (1300, 16)] {
            let shape = Shape {
                order: Order::PageHeadLayer,
                pages: 1,
                page_tokens: tokens,
                layers: 2,
                heads: 1,
                first_head: 0,
                rows: [row, 0],
            };
            let part = |tokens| PagePart { page: 0, index: 3, layers: 0..2, heads: 0..1, tokens };
            self.compare(shape, &(0..=tokens).map(part).collect::<Vec<_>>(), 1, 0);
        }
        println!("{} pools: the same digests", cases + 2);
    }

    /// Seconds of the best of several calls.
    fn time(&self, shape: Shape, address: u64) -> f64 {
        let pool = shape.at(address);
        let part = |page| PagePart {
            page,
            index: page as u64,
            layers: 0..shape.layers,
            heads: 0..shape.heads,
            tokens: 1 << 20,
        };
        let parts: Vec<PagePart> = (0..shape.pages).map(part).collect();
        let call = |_| {
            let begun = Instant::now();
            self.kernels.digests(&self.stream, &pool, &parts).unwrap();
            begun.elapsed().as_secs_f64()
        };
        (0..ROUNDS).map(call).fold(f64::INFINITY, f64::min)
    }

    fn measure(&self) {
        let mut memory = Array::<u8>::new(&self.device, 4 * GIB).unwrap();
        let mut bytes = vec![0; 16 << 20];
        fastrand::Rng::with_seed(3).fill(&mut bytes);
        memory.upload(&self.stream, &bytes).unwrap();
        let mut filled = bytes.len();
        while filled < memory.len() {
            let (to, from) = (memory.address() + filled as u64, memory.address());
            // SAFETY: both halves lie in the array.
            unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, filled, self.stream.cu_stream()) }.result().unwrap();
            filled *= 2;
        }
        self.stream.synchronize().unwrap();
        for (page_tokens, row) in [(8, 256), (16, 256), (64, 256), (16, 128), (16, 64)] {
            for order in ORDERS {
                let shape = Shape {
                    order,
                    pages: 1,
                    page_tokens,
                    layers: 32,
                    heads: 8,
                    first_head: 0,
                    rows: [row; 2],
                };
                let of = |bytes: usize| Shape { pages: bytes / shape.bytes(), ..shape };
                let (one, four) =
                    (self.time(of(GIB), memory.address()), self.time(of(4 * GIB), memory.address()));
                let rate = |seconds: f64| GIB as f64 / seconds / 1e12;
                println!(
                    "blocks of {:5} bytes, rows of {row:3}, {order:?}: {:.0} us for 1 GiB ({:.2} TB/s), {:.2} TB/s beyond",
                    shape.bytes() / 256,
                    one * 1e6,
                    rate(one),
                    rate((four - one) / 3.0)
                );
            }
        }
    }
}
