//! Batch-invariant CPU math: every output element has one fixed order of operations.
//!
//! Floating-point sums depend on their order. Libraries choose the order by the number of rows, so a token's logits change
//! with the rest of its batch. Here the order is part of each kernel's definition:
//!
//! * A matrix product is one chain of fused multiply-adds over the inner dimension ([`Math::linear`]).
//! * A dot product or a sum of squares runs in 8 lanes that are added up by one fixed tree ([`Math::rms_norm`]).
//! * Attention takes a row's positions in ascending order, in blocks of 16 that are aligned to the sequence and independent
//!   of the pages ([`Math::attention`]).
//! * `exp` is our own polynomial, and rotary angles come from the `libm` crate, so that results do not depend on a C library.
//!
//! Tiling, row count and threads change where and when an element is computed, never the order of its operations. Each
//! kernel is written once over vectors and compiled for plain Rust, for AVX2 with FMA, and for AVX-512. All of these give the
//! same bits, because IEEE 754 defines fused multiply-add, division and square root exactly. Tests compare all instruction
//! sets that the CPU has.

mod attention;
mod convert;
mod disjoint;
mod exponential;
mod instructions;
mod lanes;
mod linear;
mod panels;
mod rope;
mod rows;

pub use attention::{ATTENTION_BLOCK, AttentionShape, KvRows, QueryRows};
pub use convert::{Element, bf16_from_f32, f32_from_bf16};
pub use exponential::{exp, softmax_weights};
pub use instructions::Instructions;
pub use panels::{PackError, Panels};
pub use rope::{RopeFrequencies, RopeScaling};
pub use rows::{Gate, Heads};

use instructions::dispatch;

/// The kernels, with the threads that they run on.
///
/// Results do not depend on the number of threads. A `Math` is meant for one caller at a time. Concurrent callers share its
/// threads.
pub struct Math {
    instructions: Instructions,
    threads: usize,
    /// Absent for one thread: the caller's thread computes.
    pool: Option<rayon::ThreadPool>,
}

impl Math {
    /// Kernels on `threads` threads (0 for one per core), with the best instructions this CPU has.
    ///
    /// # Errors
    /// When the system refuses to start the threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::with(Instructions::best(), threads)
    }

    /// Kernels without CPU-specific instructions. They are slow and give the same bits.
    ///
    /// # Errors
    /// When the system refuses to start the threads.
    pub fn portable(threads: usize) -> std::io::Result<Self> {
        Self::with(Instructions::PORTABLE, threads)
    }

    /// Kernels of these instructions on `threads` threads (0 for one per core). All instructions give the same bits.
    ///
    /// # Errors
    /// When the system refuses to start the threads.
    pub fn with(instructions: Instructions, threads: usize) -> std::io::Result<Self> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            some => some,
        };
        let pool = if threads == 1 {
            None
        } else {
            let builder =
                rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("math-{i}"));
            Some(builder.build().map_err(std::io::Error::other)?)
        };
        Ok(Self { instructions, threads, pool })
    }

    /// Threads that the kernels run on.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work` on the kernels' threads. Kernels called inside start without a hand-over between threads, so put a
    /// whole forward pass in here.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.pool {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Calls `task` for `0..tasks`, in parallel when `parallel` says that it pays.
    fn each(&self, tasks: usize, parallel: bool, task: impl Fn(usize) + Sync + Send) {
        use rayon::prelude::*;
        match &self.pool {
            Some(pool) if parallel && tasks > 1 => {
                pool.install(|| (0..tasks).into_par_iter().for_each(&task));
            }
            _ => (0..tasks).for_each(task),
        }
    }
}
