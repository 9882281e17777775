//! Digests of KV in a GPU's memory, computed without copying the KV to the host.
//!
//! A block is one head of one layer of one page. Its hash is XXH3-64 (seed 0) over its rows in the order K/V, token, independent of
//! the pool's layout. Its term is XXH3-64 of four little-endian numbers of 64 bits: the page's index among the digested pages,
//! the layer, the model's head, the hash. A digest is the wrapping sum of the terms of its blocks.
//!
//! If rows and distances are multiples of 16 bytes, memory is read at about its full speed. Otherwise it is read a byte at a time.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, sys};

use super::device::function;
use super::launch::Divisor;
use super::{Array, CudaError, Device, Source, refused};

/// The kernels of [`DigestKernels`].
pub const SOURCE: Source = Source { name: "digest.cu", text: include_str!("digest.cu"), options: &[] };

/// Threads of a block. This number and the next two are as in the source.
const THREADS: usize = 128;
const SHARES: usize = 4;
const TERMS: usize = 8;
/// Most blocks of a launch, unless one part has more. Each block takes 32 bytes of scratch.
const BLOCKS: usize = 1 << 20;
/// Most blocks of a grid in its second dimension.
const COLUMNS: usize = 65_535;
/// A block has fewer bytes than this, so that divisions are exact.
const BYTES: usize = 1 << 30;

/// Where the rows of K, or the rows of V, lie. All distances are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Address of the pool's first row.
    pub start: u64,
    /// From one page to the next.
    pub page: u64,
    /// From one head to the next.
    pub head: u64,
    /// From one layer to the next.
    pub layer: u64,
    /// From one token of a page to the next.
    pub token: u64,
    /// Bytes of one row.
    pub row: usize,
}

/// A pool on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// K and V.
    pub sides: [Side; 2],
    /// Pages.
    pub pages: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Layers.
    pub layers: usize,
    /// KV heads.
    pub heads: usize,
    /// The model's number of the pool's first KV head.
    pub first_head: usize,
}

/// Part of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PagePart {
    /// The page's number in the pool.
    pub page: usize,
    /// The page's index among the digested pages.
    pub index: u64,
    /// Which layers.
    pub layers: Range<usize>,
    /// Which KV heads of the model. The pool must hold them.
    pub heads: Range<usize>,
    /// Number of tokens, from the page's first. A number above the page's tokens means all of them.
    pub tokens: usize,
}

/// Laid out as its counterpart in the source, like the next two structures.
#[repr(C)]
#[derive(Clone, Copy)]
struct DeviceSide {
    start: u64,
    page: u64,
    head: u64,
    layer: u64,
    token: u64,
    row: u32,
    pieces: Divisor,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DevicePool {
    sides: [DeviceSide; 2],
    first_head: u64,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for DevicePool {}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct DevicePart {
    index: u64,
    first_block: u64,
    page: u32,
    tokens: u32,
    first_layer: u32,
    layers: u32,
    first_head: u32,
    heads: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for DevicePart {}

/// Memory on the device for one call.
#[derive(Debug)]
struct Scratch {
    parts: Array<DevicePart>,
    folds: Array<u64>,
    digests: Array<u64>,
}

/// The kernels on one device.
#[derive(Debug)]
pub struct DigestKernels {
    folds: CudaFunction,
    terms: CudaFunction,
    /// Used by one call at a time.
    scratch: Mutex<Scratch>,
}

impl DigestKernels {
    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// When there is no NVRTC, or the driver refuses.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        let module = device.module(&SOURCE)?;
        let scratch = Scratch {
            parts: Array::new(device, 1024)?,
            folds: Array::new(device, 1024 * SHARES)?,
            digests: Array::new(device, 1024)?,
        };
        Ok(Self {
            folds: function(&module, "digest_folds")?,
            terms: function(&module, "digest_terms")?,
            scratch: Mutex::new(scratch),
        })
    }

    /// The digest of each part, over the content that the pool has when the stream reaches this call. Waits for the stream. Calls
    /// are served one at a time.
    ///
    /// # Errors
    /// When the driver refuses, or the device has no memory left for 40 bytes per part and 32 bytes per block.
    ///
    /// # Panics
    /// When the pool does not hold all of a part, or its blocks are of 1 GiB or more.
    pub fn digests(
        &self,
        stream: &Arc<CudaStream>,
        pool: &Pool,
        parts: &[PagePart],
    ) -> Result<Vec<u64>, CudaError> {
        let on_device: Vec<DevicePart> = parts.iter().map(|part| pool.part(part)).collect();
        let mut digests = vec![0; parts.len()];
        // The lock may be poisoned by a panic. No call uses what an earlier one left in the scratch memory.
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut from, mut results) = (0, &mut digests[..]);
        while from < on_device.len() {
            let mut blocks = 0;
            let fits = |part: &&DevicePart| {
                let before = blocks;
                blocks += part.blocks();
                before == 0 || blocks <= BLOCKS
            };
            let count = on_device[from..].iter().take_while(fits).count();
            let (now, later) = results.split_at_mut(count);
            self.launch(&mut scratch, stream, pool, &on_device[from..from + count], now)?;
            (from, results) = (from + count, later);
        }
        Ok(digests)
    }

    fn launch(
        &self,
        scratch: &mut Scratch,
        stream: &Arc<CudaStream>,
        pool: &Pool,
        parts: &[DevicePart],
        results: &mut [u64],
    ) -> Result<(), CudaError> {
        let (mut blocks, mut most) = (0, 0);
        let mut numbered = Vec::with_capacity(parts.len());
        for part in parts {
            numbered.push(DevicePart { first_block: blocks as u64, ..*part });
            blocks += part.blocks();
            most = most.max(part.blocks());
        }
        scratch.parts.reserve(parts.len())?;
        scratch.folds.reserve(blocks * SHARES)?;
        scratch.digests.reserve(parts.len())?;
        scratch.parts.upload(stream, &numbered)?;
        results.fill(0);
        if most == 0 {
            return Ok(());
        }
        // SAFETY: the array has as many elements as `results`. `upload` has bound the context.
        unsafe {
            sys::cuMemsetD8Async(scratch.digests.address(), 0, size_of_val(results), stream.cu_stream())
        }
        .result()
        .map_err(refused("clear digests"))?;
        let (parts_at, digests_at) = (scratch.parts.address(), scratch.digests.address());
        let wide = pool.is_wide();
        let folds_at = if wide { scratch.folds.address() } else { 0 };
        let device_pool = pool.on_device();
        if wide {
            let config = grid(parts.len(), most * SHARES);
            let mut builder = stream.launch_builder(&self.folds);
            builder.arg(&device_pool).arg(&parts_at).arg(&folds_at);
            // SAFETY: these are the kernel's arguments. It reads rows of parts that the pool holds. It writes as many folds as
            // there is room for.
            unsafe { builder.launch(config) }.map_err(refused("launch the kernel digest_folds"))?;
        }
        let config = grid(parts.len(), most.div_ceil(TERMS));
        let mut builder = stream.launch_builder(&self.terms);
        builder.arg(&device_pool).arg(&parts_at).arg(&folds_at).arg(&digests_at);
        // SAFETY: as above. The kernel adds to as many digests as there are parts.
        unsafe { builder.launch(config) }.map_err(refused("launch the kernel digest_terms"))?;
        scratch.digests.download(stream, results)
    }
}

impl DevicePart {
    fn blocks(&self) -> usize {
        self.layers as usize * self.heads as usize
    }
}

impl Pool {
    /// Whether rows can be read in aligned pieces of 16 bytes.
    fn is_wide(&self) -> bool {
        self.sides.iter().all(|side| {
            let distances = [side.start, side.page, side.head, side.layer, side.token, side.row as u64];
            distances.iter().all(|bytes| bytes.is_multiple_of(16))
        })
    }

    fn on_device(&self) -> DevicePool {
        let sides = self.sides.map(|side| {
            let Side { start, page, head, layer, token, row } = side;
            // A block is shorter than 2^30 bytes.
            let (row, pieces) = (row as u32, (row / 16).max(1) as u32);
            DeviceSide { start, page, head, layer, token, row, pieces: Divisor::of(pieces) }
        });
        DevicePool { sides, first_head: self.first_head as u64 }
    }

    fn part(&self, part: &PagePart) -> DevicePart {
        let PagePart { page, index, ref layers, ref heads, tokens } = *part;
        let held = self.first_head..self.first_head + self.heads;
        assert!(page < self.pages, "page {page} of a pool of {}", self.pages);
        assert!(
            layers.is_empty() || layers.end <= self.layers,
            "layers {layers:?} of a pool of {}",
            self.layers
        );
        assert!(
            heads.is_empty() || (held.start <= heads.start && heads.end <= held.end),
            "heads {heads:?} of a pool with the heads {held:?}"
        );
        let tokens = tokens.min(self.page_tokens);
        let bytes = tokens * (self.sides[0].row + self.sides[1].row);
        assert!(bytes < BYTES, "a block of {bytes} bytes is too large to be digested");
        let number = |value: usize| {
            u32::try_from(value).unwrap_or_else(|_| panic!("{value} is too large to be digested"))
        };
        DevicePart {
            index,
            first_block: 0,
            page: number(page),
            tokens: number(tokens),
            first_layer: if layers.is_empty() { 0 } else { number(layers.start) },
            layers: number(layers.len()),
            first_head: if heads.is_empty() { 0 } else { number(heads.start - held.start) },
            heads: number(heads.len()),
        }
    }
}

/// A row of blocks for each of `parts`, wide enough for `columns` threads.
fn grid(parts: usize, columns: usize) -> LaunchConfig {
    let blocks = columns.div_ceil(THREADS);
    assert!(
        blocks <= COLUMNS && parts <= i32::MAX as usize,
        "{parts} parts of {columns} blocks are too many"
    );
    LaunchConfig {
        grid_dim: (parts as u32, blocks as u32, 1),
        block_dim: (THREADS as u32, 1, 1),
        shared_mem_bytes: 0,
    }
}
