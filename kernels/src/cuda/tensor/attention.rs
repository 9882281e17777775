//! Attention over a paged pool of K and V in bf16.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaStream, DeviceRepr};

use super::launch::{Geometry, Kernel, argument};
use super::pool::{Pool, source};
use crate::cuda::batch::{Attention, KvView, Rows};
use crate::cuda::launch::Divisor;
use crate::cuda::{Array, CudaError, Device, Source, refused};

const TEXT: &str = source!("hopper.cu", "pool.cuh", "attention.cu", "prefill.cu");

/// The kernels' source, for heads of 64 elements. It is for devices of compute capability 9.0: no other devices have `wgmma`
/// instructions.
pub const SOURCE_64: Source =
    Source { name: "attention.cu", text: TEXT, options: &["--gpu-architecture=sm_90a", "-DHEAD_DIM=64"] };
/// The kernels' source, for heads of 128 elements, and the same devices.
pub const SOURCE_128: Source =
    Source { name: "attention.cu", text: TEXT, options: &["--gpu-architecture=sm_90a", "-DHEAD_DIM=128"] };

/// Positions of a chunk, whose sums are merged as one, as in `attention.cu`. Decode has a thread block for each chunk.
pub const CHUNK: usize = 256;

/// Positions of a block, as in `attention.cu`.
const BLOCK: usize = 64;
/// Warps of a thread block of decode, as there.
const WARPS: usize = 4;
/// The numbers of `prefill.cu`: groups of 128 threads that compute 64 rows each, and blocks of K and V in shared memory.
#[derive(Clone, Copy)]
struct Prefill {
    groups: usize,
    stages: usize,
}

impl Prefill {
    fn of(head_dim: usize) -> Self {
        if head_dim == 64 { Self { groups: 4, stages: 4 } } else { Self { groups: 3, stages: 3 } }
    }

    /// Rows of a tile: tokens times heads of a group.
    fn rows(self) -> usize {
        64 * self.groups
    }

    /// Threads of a thread block: those that compute, and a group for the warp that copies.
    fn threads(self) -> usize {
        128 * (self.groups + 1)
    }

    /// Bytes of shared memory of a thread block: K and V of its stages, sums of V in f32, and two barriers of each stage.
    fn shared(self, head_dim: usize) -> usize {
        self.stages * (2 * BLOCK * head_dim * 2 + 16) + self.rows() * head_dim * 4
    }
}

/// Blocks of K and V that decode with few thread blocks has in shared memory: a chunk, and room for the block after it.
const FEW_STAGES: usize = CHUNK / BLOCK + 1;
/// Most query heads of a KV head: the rows of a matrix of `mma`.
const GROUP: usize = 16;
/// Bytes of shared memory of a thread block that CUDA takes for itself.
const RESERVED: usize = 1024;

/// Blocks of K and V that decode has in shared memory, as in `attention.cu`.
fn decode_stages(head_dim: usize) -> usize {
    if head_dim == 64 { 3 } else { 2 }
}

/// Bytes of shared memory of a thread block of decode: K and V of `stages` blocks, and the data that its warps exchange. That is
/// 16 maxima of each warp, and weights in bf16 of 16 rows and one block.
fn decode_shared(head_dim: usize, stages: usize) -> usize {
    stages * 2 * BLOCK * head_dim * 2 + WARPS * 16 * 4 + 16 * BLOCK * 2
}

/// The driver's description of an array, as a kernel's parameter.
#[repr(transparent)]
struct TensorMap(sys::CUtensorMap);

// SAFETY: numbers only, in C's layout.
unsafe impl DeviceRepr for TensorMap {}

/// Rows of one sequence that lie side by side in a batch, at ascending positions.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First row in the batch.
    pub first_row: u32,
    /// Rows, one per token.
    pub rows: u32,
    /// Position of the first row in its sequence.
    pub start: u32,
    /// Where the sequence's pages begin in the list of all pages.
    pub table: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for Run {}

/// `Attend` of `attention.cu`, byte for byte.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attend {
    pool: Pool,
    queries: u64,
    pages: u64,
    heads: u32,
    group: Divisor,
    query_stride: u32,
    scale: f32,
    copied: u32,
    unused: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for Attend {}

/// `Partials` of `attention.cu`, byte for byte.
#[repr(C)]
#[derive(Clone, Copy)]
struct PartialsView {
    values: u64,
    sums: u64,
    done: u64,
    chunks: u32,
    unused: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for PartialsView {}

/// Memory for the results of decode's chunks before they are merged.
#[derive(Debug)]
pub struct Partials {
    values: Array<f32>,
    sums: Array<f32>,
    /// Counts of the thread blocks that are done, for each row and head. All are 0 between launches.
    done: Array<u32>,
    /// Capacity: rows times heads times chunks of a row.
    chunks: usize,
    head_dim: usize,
}

impl Partials {
    /// Room for `rows` rows of `heads` query heads that see up to `positions` positions.
    ///
    /// # Errors
    /// When the device has no memory left.
    pub fn new(
        device: &Arc<Device>,
        rows: usize,
        heads: usize,
        head_dim: usize,
        positions: usize,
    ) -> Result<Self, CudaError> {
        let chunks = rows * heads * positions.div_ceil(CHUNK);
        let mut done = Array::new(device, rows * heads)?;
        done.upload(&*device.stream()?, &vec![0; rows * heads])?;
        Ok(Self {
            done,
            values: Array::new(device, chunks * head_dim)?,
            sums: Array::new(device, chunks * 2)?,
            chunks,
            head_dim,
        })
    }
}

/// The kernels for one size of heads.
///
/// Each function enqueues its launches and returns. Rows of a batch see the pool's positions up to their own, so the caller
/// stores K and V of the batch first. [`decode`](Self::decode) and [`prefill`](Self::prefill) give a row the same bits, which
/// do not depend on other rows, on how a prompt is cut, or on pages.
///
/// The content of arrays is not checked: pages must be pages of the pool, and positions must lie in their sequence's pages.
/// Positions, tables, pages and tiles are read while preceding kernels may still run. Decode reads K and V of positions before a
/// row's own in that way, too. So all of them must be written by copies, or by kernels up to the last [`embed`](super::rows::TensorRows::embed) or
/// [`copy_words`](super::rows::TensorRows::copy_words).
#[derive(Debug)]
pub struct TensorAttention {
    device: Arc<Device>,
    head_dim: usize,
    decode: Kernel,
    decode_few: Kernel,
    /// Thread blocks of `decode_few` that the device holds at once.
    few: usize,
    prefill: Kernel,
}

fn number(size: usize) -> u32 {
    u32::try_from(size).unwrap_or_else(|_| panic!("a size of {size}, 2^32 or more"))
}

impl TensorAttention {
    /// Compiles the kernels for heads of `head_dim` elements: 64 or 128.
    ///
    /// # Errors
    /// When the device's compute capability is not 9.0, and as [`Device::module`].
    ///
    /// # Panics
    /// When heads have another size.
    pub fn new(device: &Arc<Device>, head_dim: usize) -> Result<Self, CudaError> {
        if device.capability() != 90 {
            let found = device.capability();
            return Err(CudaError::Capability { what: "attention on tensor cores", needed: &[90], found });
        }
        let source = match head_dim {
            64 => SOURCE_64,
            128 => SOURCE_128,
            other => panic!("heads of {other} elements: 64 or 128"),
        };
        let module = device.module(&source)?;
        let kernel = |name, shared| Kernel::new(device, &module, name, number(shared));
        let size = |attribute| {
            let size = device.context().attribute(attribute).map_err(refused("tell its sizes"))?;
            Ok(usize::try_from(size).unwrap_or(0))
        };
        let shared = size(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?;
        let few_at_once = shared / (decode_shared(head_dim, FEW_STAGES) + RESERVED);
        Ok(Self {
            device: Arc::clone(device),
            head_dim,
            decode: kernel("attention_decode", decode_shared(head_dim, decode_stages(head_dim)))?,
            decode_few: kernel("attention_decode_few", decode_shared(head_dim, FEW_STAGES))?,
            few: size(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? * few_at_once,
            prefill: kernel("attention_prefill", Prefill::of(head_dim).shared(head_dim))?,
        })
    }

    /// Attention of `rows` of the batch, each of which is the last one of its sequence. The preceding kernel may store the K and V
    /// of these rows. Those of earlier positions are older, as the type says.
    ///
    /// Positions are read on the device, so a captured graph serves sequences of all lengths up to `positions`. Positions beyond
    /// are not seen. The graph also serves fewer sequences than rows: rows with [`NO_POSITION`](super::rows::NO_POSITION) are left
    /// out.
    ///
    /// `queries` and `outputs` `[rows][heads][head_dim]` are those of the batch.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When an array or `partials` is too short, or the kernels do not support the sizes or the view.
    #[allow(clippy::too_many_arguments, reason = "arrays of one call")]
    pub fn decode(
        &self,
        stream: &CudaStream,
        attention: &Attention,
        queries: &Array<u16>,
        view: &KvView,
        batch: &Rows,
        rows: Range<usize>,
        positions: usize,
        partials: &mut Partials,
        outputs: &mut Array<u16>,
    ) -> Result<(), CudaError> {
        let attend = self.attend(attention, queries, view, &batch.pages, batch.rows, outputs);
        let &Attention { heads, kv_heads, query_stride, .. } = attention;
        assert!(rows.end <= batch.rows, "rows {rows:?} of {}", batch.rows);
        assert!(rows.len() < 1 << 16, "decode of {} rows, at most 65535", rows.len());
        assert!(
            batch.position.len() >= batch.rows && batch.table.len() >= batch.rows,
            "arrays shorter than the batch"
        );
        let chunks = positions.div_ceil(CHUNK);
        let needed = rows.len() * heads * chunks;
        assert!(
            partials.head_dim == self.head_dim
                && partials.chunks >= needed
                && partials.done.len() >= rows.len() * kv_heads,
            "partials for {} chunks of heads of {}, of {needed} of {}",
            partials.chunks,
            partials.head_dim,
            self.head_dim
        );
        let first = rows.start as u64;
        let attend = Attend { queries: attend.queries + first * query_stride as u64 * 2, ..attend };
        let view = PartialsView {
            values: partials.values.address(),
            sums: partials.sums.address(),
            done: partials.done.address(),
            chunks: number(chunks),
            unused: 0,
        };
        let position = batch.position.address() + first * 4;
        let table = batch.table.address() + first * 4;
        let outputs = outputs.address() + first * (heads * self.head_dim) as u64 * 2;
        let grid = [chunks, kv_heads, rows.len()];
        let (kernel, stages) = if grid.iter().product::<usize>() <= self.few {
            (&self.decode_few, FEW_STAGES)
        } else {
            (&self.decode, decode_stages(self.head_dim))
        };
        let shared = number(decode_shared(self.head_dim, stages));
        let geometry = Geometry { grid, threads: 32 * WARPS as u32, shared };
        let arguments =
            [argument(&attend), argument(&view), argument(&position), argument(&table), argument(&outputs)];
        // SAFETY: the parameters of `attention_decode`, which stays within the arrays by the checks above. The caller
        // vouches for the view, the positions and the pages.
        unsafe { kernel.launch(stream, geometry, &arguments) }
    }

    /// Cuts runs of rows into the tiles that [`prefill`](Self::prefill) takes, the longest first.
    #[must_use]
    pub fn tiles(&self, attention: &Attention, runs: &[Run]) -> Vec<Run> {
        let group = attention.heads / attention.kv_heads;
        cut(runs, number(Prefill::of(self.head_dim).rows() / group))
    }

    /// Attention of the first `count` of these tiles, of a batch of `rows` rows.
    ///
    /// `queries` and `outputs` `[rows][heads][head_dim]` are those of the batch.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When an array is too short, or the kernels do not support the sizes or the view.
    #[allow(clippy::too_many_arguments, reason = "arrays of one call")]
    pub fn prefill(
        &self,
        stream: &CudaStream,
        attention: &Attention,
        queries: &Array<u16>,
        view: &KvView,
        pages: &Array<u32>,
        rows: usize,
        (tiles, count): (&Array<Run>, usize),
        outputs: &mut Array<u16>,
    ) -> Result<(), CudaError> {
        let attend = self.attend(attention, queries, view, pages, rows, outputs);
        assert!(
            count <= tiles.len() && count < 1 << 16,
            "{count} tiles in an array of {}, at most 65535",
            tiles.len()
        );
        let numbers = Prefill::of(self.head_dim);
        let geometry = Geometry {
            grid: [attention.kv_heads, count, 1],
            threads: number(numbers.threads()),
            shared: number(numbers.shared(self.head_dim)),
        };
        let [keys, values] = [0, 1].map(|side| self.map(view, side, attention.kv_heads, attend.copied));
        let (keys, values) = (keys?, values?);
        let (tiles, outputs) = (tiles.address(), outputs.address());
        let arguments =
            [argument(&keys), argument(&values), argument(&attend), argument(&tiles), argument(&outputs)];
        // SAFETY: the parameters of `attention_prefill`, which stays within the arrays by the checks above. The caller
        // vouches for the view, the tiles and the pages.
        unsafe { self.prefill.launch(stream, geometry, &arguments) }
    }

    /// The map by which copies find a box of `copied` tokens of a page in K (`side` 0) or V, 64 elements wide. Its dimensions are
    /// element, token, head, page. How many pages there are is not known here: there is no limit.
    fn map(&self, view: &KvView, side: usize, heads: usize, copied: u32) -> Result<TensorMap, CudaError> {
        self.device.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let sizes = [self.head_dim as u64, u64::from(view.page_tokens), heads as u64, 1 << 31];
        let strides = [view.token[side], view.head[side], view.page[side]];
        let (window, steps) = ([64, copied, 1, 1], [1; 4]);
        // SAFETY: four sizes, three strides, and four sizes and steps of the window. The call encodes them and follows no address.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                4,
                view.start[side] as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                window.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(refused("describe the pages of K and V"))?;
        Ok(TensorMap(map))
    }

    fn attend(
        &self,
        attention: &Attention,
        queries: &Array<u16>,
        view: &KvView,
        pages: &Array<u32>,
        rows: usize,
        outputs: &Array<u16>,
    ) -> Attend {
        let &Attention { heads, kv_heads, head_dim, query_stride, scale } = attention;
        assert_eq!(head_dim, self.head_dim, "elements of a head");
        assert!(
            kv_heads > 0 && heads >= kv_heads && heads.is_multiple_of(kv_heads),
            "{heads} query heads and {kv_heads} KV heads"
        );
        assert!(
            heads / kv_heads <= GROUP,
            "{heads} query heads and {kv_heads} KV heads: more than {GROUP} each"
        );
        assert!(scale > 0.0 && scale.is_finite(), "a scale of {scale}");
        assert!(
            query_stride.is_multiple_of(2) && query_stride >= heads * head_dim,
            "{query_stride} elements from one row to the next, of {heads} heads of {head_dim}"
        );
        assert!(
            queries.len() / query_stride >= rows,
            "{rows} rows of queries in an array of {}",
            queries.len()
        );
        assert!(
            outputs.len() / (heads * head_dim) >= rows,
            "{rows} rows of outputs in an array of {}",
            outputs.len()
        );
        Attend {
            pool: Pool::new(view, head_dim),
            queries: queries.address(),
            pages: pages.address(),
            heads: number(heads),
            group: Divisor::of(number(heads / kv_heads)),
            query_stride: number(query_stride),
            scale: scale * std::f32::consts::LOG2_E,
            // The largest power of two that divides a page's tokens and a block's.
            copied: 1 << view.page_tokens.trailing_zeros().min(BLOCK.trailing_zeros()),
            unused: 0,
        }
    }
}

/// Cuts runs into tiles of up to `tokens` rows. The tiles that see the most positions come first: they take the longest, and
/// the short tiles keep the device busy at the end.
fn cut(runs: &[Run], tokens: u32) -> Vec<Run> {
    let tiles = |&run: &Run| {
        (0..run.rows.div_ceil(tokens)).map(move |index| Run {
            first_row: run.first_row + index * tokens,
            rows: tokens.min(run.rows - index * tokens),
            start: run.start + index * tokens,
            table: run.table,
        })
    };
    let mut tiles: Vec<Run> = runs.iter().flat_map(tiles).collect();
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile.start + tile.rows));
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_have_every_row_once_and_the_longest_come_first() {
        let runs = [(0, 70, 5, 0), (70, 1, 300, 9), (71, 0, 0, 40), (71, 32, 0, 50)];
        let runs = runs.map(|(first_row, rows, start, table)| Run { first_row, rows, start, table });
        let tiles = cut(&runs, 32);
        let ends: Vec<u32> = tiles.iter().map(|tile| tile.start + tile.rows).collect();
        assert_eq!(ends, [301, 75, 69, 37, 32]);
        let mut rows: Vec<[u32; 3]> = Vec::new();
        for tile in &tiles {
            assert!((1..=32).contains(&tile.rows), "{tile:?}");
            rows.extend((0..tile.rows).map(|row| [tile.first_row + row, tile.start + row, tile.table]));
        }
        rows.sort_unstable();
        let expected: Vec<[u32; 3]> = runs
            .iter()
            .flat_map(|run| (0..run.rows).map(|row| [run.first_row + row, run.start + row, run.table]))
            .collect();
        assert_eq!(rows, expected);
    }
}
