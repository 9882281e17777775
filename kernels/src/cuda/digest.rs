//! Digests of KV in a GPU's memory, computed without copying the KV to the host.
//!
//! A block is one head of one layer of one page. Its hash is XXH3-64 (seed 0) over its rows in the order K/V, token, independent of
//! the pool's layout. Its term is XXH3-64 of four little-endian numbers of 64 bits: the page's index among the digested pages,
//! the layer, the model's head, the hash. A digest is the wrapping sum of the terms of its blocks.
//!
//! If rows and distances are multiples of 16 bytes, memory is read at about its full speed. Otherwise it is read a byte at a time.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::device::function;
use super::launch::Divisor;
use super::{Array, CudaError, Device, Pinned, Source, WaitsFor, refused};

/// The kernels of [`DigestKernels`].
pub const SOURCE: Source = Source { name: "digest.cu", text: include_str!("digest.cu"), options: &[] };

/// Threads of a block. This number and the next two are as in the source.
const THREADS: usize = 128;
const SHARES: usize = 4;
const TERMS: usize = 8;
/// Bytes of the longest block that the first kernel leaves to the second.
const SHORT: usize = 240;
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
#[derive(Clone, Copy, Debug, Default)]
struct DevicePart {
    index: u64,
    page: u32,
    tokens: u32,
    first_layer: u32,
    layers: u32,
    first_head: u32,
    heads: u32,
}

// SAFETY: numbers only, in C's layout, without padding.
unsafe impl DeviceRepr for DevicePart {}

/// Memory for one call: on the device, and pinned for the copies to and from it.
#[derive(Debug)]
struct Scratch {
    parts: Array<DevicePart>,
    digests: Array<u64>,
    sent: Pinned<DevicePart>,
    received: Pinned<u64>,
}

/// The kernels on one device.
#[derive(Debug)]
pub struct DigestKernels {
    device: Arc<Device>,
    long: CudaFunction,
    rest: CudaFunction,
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
            digests: Array::new(device, 1024)?,
            sent: Pinned::new(device, 1024)?,
            received: Pinned::new(device, 1024)?,
        };
        Ok(Self {
            device: Arc::clone(device),
            long: function(&module, "digest_long")?,
            rest: function(&module, "digest_rest")?,
            scratch: Mutex::new(scratch),
        })
    }

    /// The digest of each part, over the content that the pool has when the stream reaches this call. Waits for the stream. Calls
    /// are served one at a time.
    ///
    /// # Errors
    /// When the driver refuses, or the device or the host has no memory left for 40 bytes per part.
    ///
    /// # Panics
    /// When the pool does not hold all of a part, or its blocks are of 1 GiB or more.
    pub fn digests(
        &self,
        stream: &Arc<CudaStream>,
        pool: &Pool,
        parts: &[PagePart],
    ) -> Result<Vec<u64>, CudaError> {
        let count = parts.len();
        if count == 0 {
            return Ok(Vec::new());
        }
        // The lock may be poisoned by a panic. No call uses what an earlier one left in the scratch memory.
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let Scratch { parts: parts_there, digests, sent, received } = &mut *scratch;
        parts_there.reserve(count)?;
        digests.reserve(count)?;
        sent.reserve(count)?;
        received.reserve(count)?;
        // SAFETY: every call waits for its copies, also after an error or a panic.
        let sent_parts = unsafe { &mut sent.elements_mut()[..count] };
        for (to, part) in sent_parts.iter_mut().zip(parts) {
            *to = pool.part(part);
        }
        let launches = Launches::of(pool, sent_parts);
        let end = WaitsFor::new(&self.device, stream);
        parts_there.copy_from(stream, &sent.array(), count)?;
        self.launch(stream, pool, &launches, parts_there, &digests.part(0, count))?;
        received.array().copy_from(stream, digests, count)?;
        end.wait()?;
        // SAFETY: the copy was waited for.
        Ok(unsafe { received.elements()[..count].to_vec() })
    }

    /// Clears the digests, and adds the terms of all parts to them.
    fn launch(
        &self,
        stream: &CudaStream,
        pool: &Pool,
        launches: &Launches,
        parts: &Array<DevicePart>,
        digests: &Array<u64>,
    ) -> Result<(), CudaError> {
        digests.part(0, digests.len()).zero(stream)?;
        let count = digests.len();
        let (parts, digests, pool) = (parts.address(), digests.address(), pool.on_device());
        if launches.long > 0 {
            let mut builder = stream.launch_builder(&self.long);
            builder.arg(&pool).arg(&parts).arg(&digests);
            // SAFETY: these are the kernel's arguments. It reads rows of parts that the pool holds. It adds to as many digests as
            // there are parts.
            unsafe { builder.launch(grid(count, launches.long * SHARES)) }
                .map_err(refused("launch the kernel digest_long"))?;
        }
        if launches.rest > 0 {
            let wide = u32::from(launches.wide);
            let mut builder = stream.launch_builder(&self.rest);
            builder.arg(&pool).arg(&parts).arg(&wide).arg(&digests);
            // SAFETY: as above.
            unsafe { builder.launch(grid(count, launches.rest.div_ceil(TERMS))) }
                .map_err(refused("launch the kernel digest_rest"))?;
        }
        Ok(())
    }
}

/// Most blocks of a part that each kernel has to do. A kernel that has none is not launched.
struct Launches {
    wide: bool,
    long: usize,
    rest: usize,
}

impl Launches {
    fn of(pool: &Pool, parts: &[DevicePart]) -> Self {
        let wide = pool.is_wide();
        let row: usize = pool.sides.iter().map(|side| side.row).sum();
        let (mut long, mut rest) = (0, 0);
        for part in parts {
            let most = if wide && part.tokens as usize * row > SHORT { &mut long } else { &mut rest };
            *most = part.blocks().max(*most);
        }
        Self { wide, long, rest }
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
