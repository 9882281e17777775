//! Kernels for the rows of a batch, besides matrix products and attention.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DeviceRepr};

use super::launch::{Geometry, Kernel, argument};
use super::pool::{Pool, source};
use crate::cuda::batch::{KvView, Rows};
use crate::cuda::{Array, CudaError, Device, Source};

/// The kernels' source.
pub const SOURCE: Source = Source { name: "rows.cu", text: source!("pool.cuh", "rows.cu"), options: &[] };

/// Vectors of 4 elements that a thread of the norm keeps, as in `rows.cu`.
const NORM_VECTORS: usize = 8;
/// Most threads of a thread block of the norm, as in `rows.cu`.
const NORM_THREADS: usize = 512;
/// Parts of a row of [`TensorRows::argmax`], as in `rows.cu`.
pub const ARGMAX_PARTS: usize = 32;
/// Threads of a thread block of `argmax_parts`, as in `rows.cu`.
const ARGMAX_THREADS: u32 = 256;
/// Threads of other thread blocks.
const THREADS: u32 = 128;

/// Position of a row that belongs to no sequence, in a batch with more rows than its sequences need. Nothing is stored for the row.
pub const NO_POSITION: u32 = u32::MAX;

/// Sizes and parameters for [`TensorRows::rotate_and_store`], which takes a product apart.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head: 64 or 128.
    pub head_dim: usize,
    /// Cosines of the rotary angles, `[rows][head_dim / 2]`.
    pub cosines: &'a Array<f32>,
    /// Sines of the rotary angles, `[rows][head_dim / 2]`.
    pub sines: &'a Array<f32>,
    /// Weights of the norms of query and key heads, `[head_dim]` each, where the model has such norms.
    pub norms: Option<[&'a Array<f32>; 2]>,
    /// The number that these norms add to the mean of squares.
    pub epsilon: f32,
}

/// `Rotate` of `rows.cu`, byte for byte.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rotate {
    pool: Pool,
    qkv: u64,
    cosines: u64,
    sines: u64,
    norms: [u64; 2],
    queries: u64,
    position: u64,
    table: u64,
    pages: u64,
    heads: u32,
    kv_heads: u32,
    epsilon: f32,
    unused: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for Rotate {}

/// The kernels on one device.
///
/// Each function enqueues its launches and returns. It panics if an array is shorter than the sizes say. The content of arrays
/// is not checked: tokens, pages and positions must be valid for the model and the pool. Weights, positions, tables, pages and
/// angles are read while preceding kernels may still run. So they must be written by copies, or by kernels up to the last
/// [`embed`](Self::embed) or [`copy_words`](Self::copy_words).
#[derive(Debug)]
pub struct TensorRows {
    embed: Kernel,
    rms_norm: Kernel,
    rotate_64: Kernel,
    rotate_128: Kernel,
    argmax_parts: Kernel,
    argmax_merge: Kernel,
    copy_words: Kernel,
}

fn fits<T: DeviceRepr + Copy>(array: &Array<T>, what: &str, rows: usize, of: usize) {
    assert!(array.len() / of.max(1) >= rows, "{what}: {rows} rows of {of}, in an array of {}", array.len());
}

fn number(size: usize) -> u32 {
    u32::try_from(size).unwrap_or_else(|_| panic!("a size of {size}, 2^32 or more"))
}

impl TensorRows {
    /// Compiles the kernels.
    ///
    /// # Errors
    /// As [`Device::module`].
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE)?;
        let kernel = |name| Kernel::new(device, &module, name, 0);
        Ok(Self {
            embed: kernel("embed")?,
            rms_norm: kernel("rms_norm")?,
            rotate_64: kernel("rotate_and_store_64")?,
            rotate_128: kernel("rotate_and_store_128")?,
            argmax_parts: kernel("argmax_parts")?,
            argmax_merge: kernel("argmax_merge")?,
            copy_words: kernel("copy_words")?,
        })
    }

    /// Fills the residual stream, `rows` rows of `hidden` elements, with the rows of `table` that `tokens` name. A token that is
    /// not below `vocabulary` gives zeros.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When an array is too short, or `hidden` is no multiple of 8.
    pub fn embed(
        &self,
        stream: &CudaStream,
        tokens: &Array<u32>,
        rows: usize,
        table: &Array<u16>,
        [vocabulary, hidden]: [usize; 2],
        residual: &mut Array<f32>,
    ) -> Result<(), CudaError> {
        assert!(hidden.is_multiple_of(8), "rows of {hidden} elements, not a multiple of 8");
        fits(tokens, "tokens", rows, 1);
        fits(table, "the embedding", vocabulary, hidden);
        fits(residual, "the residual stream", rows, hidden);
        let geometry = Geometry { grid: [rows, 1, 1], threads: THREADS, shared: 0 };
        let arguments = [tokens.address(), table.address(), residual.address()];
        let sizes = [number(hidden), number(vocabulary)];
        let [tokens, table, residual] = arguments.each_ref().map(argument);
        let [hidden, vocabulary] = sizes.each_ref().map(argument);
        // SAFETY: the parameters of `embed`, which stays within the arrays by the checks above.
        unsafe { self.embed.launch(stream, geometry, &[tokens, table, residual, hidden, vocabulary]) }
    }

    /// RMS norm of `rows` rows of the residual stream: the first rows, or the rows that the first elements of `selected` name.
    /// Rows have `hidden` elements. `weight` may be longer.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When an array is too short, or `hidden` is no multiple of 4 or more than 16384.
    #[allow(clippy::too_many_arguments, reason = "arrays of one call")]
    pub fn rms_norm(
        &self,
        stream: &CudaStream,
        residual: &Array<f32>,
        selected: Option<&Array<u32>>,
        rows: usize,
        weight: &Array<f32>,
        hidden: usize,
        epsilon: f32,
        normed: &mut Array<u16>,
    ) -> Result<(), CudaError> {
        let vectors = hidden / 4;
        assert!(
            hidden.is_multiple_of(4) && (1..=NORM_VECTORS * NORM_THREADS).contains(&vectors),
            "rows of {hidden} elements: not a multiple of 4 up to {}",
            4 * NORM_VECTORS * NORM_THREADS
        );
        fits(weight, "weights", 1, hidden);
        fits(normed, "normed rows", rows, hidden);
        match selected {
            Some(selected) => fits(selected, "selected rows", rows, 1),
            None => fits(residual, "the residual stream", rows, hidden),
        }
        // A thread gets half of the vectors that it can keep. It still has several loads in flight, and a row has several warps.
        let threads = vectors.div_ceil(NORM_VECTORS / 2).next_multiple_of(32).min(NORM_THREADS);
        let geometry = Geometry { grid: [rows, 1, 1], threads: number(threads), shared: 0 };
        let arrays =
            [residual.address(), selected.map_or(0, Array::address), weight.address(), normed.address()];
        let [residual, selected, weight, normed] = arrays.each_ref().map(argument);
        let hidden = number(hidden);
        let arguments = [residual, selected, weight, normed, argument(&hidden), argument(&epsilon)];
        // SAFETY: the parameters of `rms_norm`, which stays within the arrays by the checks above. The caller vouches for
        // selected rows.
        unsafe { self.rms_norm.launch(stream, geometry, &arguments) }
    }

    /// Takes the product `[rows][queries, K, V]` apart: norms of heads where the model has them, rotary embedding (dimension
    /// `i` with `i + head_dim / 2`), queries in bf16 to `queries` `[rows][heads][head_dim]`, K and V in bf16 to the pool.
    ///
    /// A row with [`NO_POSITION`] is left out.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When an array is too short, or the kernel does not support the sizes or the view.
    pub fn rotate_and_store(
        &self,
        stream: &CudaStream,
        qkv: &Array<f32>,
        batch: &Rows,
        projection: &Projection<'_>,
        view: &KvView,
        queries: &mut Array<u16>,
    ) -> Result<(), CudaError> {
        let &Projection { heads, kv_heads, head_dim, cosines, sines, norms, epsilon } = projection;
        let (rows, all) = (batch.rows, heads + 2 * kv_heads);
        fits(qkv, "the product", rows, all * head_dim);
        fits(cosines, "cosines", rows, head_dim / 2);
        fits(sines, "sines", rows, head_dim / 2);
        for weights in norms.iter().flatten() {
            fits(weights, "weights of a head's norm", 1, head_dim);
        }
        fits(queries, "queries", rows, heads * head_dim);
        fits(&batch.position, "positions", rows, 1);
        fits(&batch.table, "tables", rows, 1);
        let kernel = match head_dim {
            64 => &self.rotate_64,
            128 => &self.rotate_128,
            other => panic!("heads of {other} elements: 64 or 128"),
        };
        let heads_at_once = THREADS as usize / (head_dim / 4);
        let geometry = Geometry { grid: [rows, all.div_ceil(heads_at_once), 1], threads: THREADS, shared: 0 };
        let rotate = Rotate {
            pool: Pool::new(view, head_dim),
            qkv: qkv.address(),
            cosines: cosines.address(),
            sines: sines.address(),
            norms: norms.map_or([0; 2], |norms| norms.map(Array::address)),
            queries: queries.address(),
            position: batch.position.address(),
            table: batch.table.address(),
            pages: batch.pages.address(),
            heads: number(heads),
            kv_heads: number(kv_heads),
            epsilon,
            unused: 0,
        };
        // SAFETY: the parameter of the kernel, which stays within the arrays by the checks above. The caller vouches for the
        // view and the pages.
        unsafe { kernel.launch(stream, geometry, &[argument(&rotate)]) }
    }

    /// Index of the highest of each row's `vocabulary` logits. Among equals it is the lowest index. NaN is never the highest, and
    /// a row of NaN alone gives 0. `parts` is memory for [`ARGMAX_PARTS`] numbers of each row.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When an array is too short.
    pub fn argmax(
        &self,
        stream: &CudaStream,
        logits: &Array<f32>,
        rows: usize,
        vocabulary: usize,
        parts: &mut Array<u64>,
        highest: &mut Array<u32>,
    ) -> Result<(), CudaError> {
        fits(logits, "logits", rows, vocabulary);
        fits(parts, "parts", rows, ARGMAX_PARTS);
        fits(highest, "results", rows, 1);
        let vocabulary = number(vocabulary);
        let arrays = [logits.address(), parts.address(), highest.address()];
        let [logits, parts, highest] = arrays.each_ref().map(argument);
        let geometry = Geometry { grid: [rows, ARGMAX_PARTS, 1], threads: ARGMAX_THREADS, shared: 0 };
        // SAFETY: the parameters of `argmax_parts`, which stays within the arrays by the checks above.
        unsafe { self.argmax_parts.launch(stream, geometry, &[logits, parts, argument(&vocabulary)])? };
        let geometry = Geometry { grid: [rows, 1, 1], threads: ARGMAX_PARTS as u32, shared: 0 };
        // SAFETY: the parameters of `argmax_merge`, as above.
        unsafe { self.argmax_merge.launch(stream, geometry, &[parts, highest]) }
    }

    /// Copies the first `words` words, which may lie in the host's memory ([`Pinned::array`](crate::cuda::Pinned::array)). It is a
    /// launch in the stream's order: a copy by the driver would wait for another engine.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When an array is too short, or `words` is no multiple of 4.
    pub fn copy_words(
        &self,
        stream: &CudaStream,
        source: &Array<u32>,
        target: &mut Array<u32>,
        words: usize,
    ) -> Result<(), CudaError> {
        assert!(words.is_multiple_of(4), "{words} words, not a multiple of 4");
        fits(source, "words to copy", words, 1);
        fits(target, "copied words", words, 1);
        let vectors = number(words / 4);
        let geometry =
            Geometry { grid: [vectors.div_ceil(THREADS) as usize, 1, 1], threads: THREADS, shared: 0 };
        let arrays = [source.address(), target.address()];
        let [source, target] = arrays.each_ref().map(argument);
        // SAFETY: the parameters of `copy_words`, which stays within the arrays by the checks above.
        unsafe { self.copy_words.launch(stream, geometry, &[source, target, argument(&vectors)]) }
    }
}
