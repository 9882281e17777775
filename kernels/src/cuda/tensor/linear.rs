//! Matrix products for bf16 weights on Hopper's tensor cores, from one row to thousands.
//!
//! ```text
//!  row-major weights --pack (once)--> TensorMatrix --run--> f32 or bf16 rows
//! ```
//!
//! **A row's results do not depend on the batch.** The sum of an output is defined by the matrix: K is cut into
//! [`TensorMatrix::slices`] ranges; within one it is a chain of tensor core operations over 16 columns each, ascending, and the
//! ranges' sums are added in f32, ascending. Kernels for few and for many rows all follow it, so which one runs, and what other
//! rows there are, changes no bit.
//!
//! Kernels differ in how many rows of X share the weights that a block reads ([`Variant`]). For few rows the product is bound by
//! memory: each block streams 64 rows of weights, or one slice of them, and the blocks of a cluster add their slices. For many it
//! is bound by the tensor cores: a pair of blocks multiplies 256 rows of weights with 128 to 256 rows of X.
//!
//! A launch is programmatic: it may start while the kernel before it in the stream still runs, loads its first weights, and waits
//! for that kernel before it reads X or touches Y. It allocates nothing and can be captured in a graph.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, sys};

use super::super::device::function;
use super::super::{Array, CudaError, Device, Source, refused};

/// The source of the kernels. It is for devices of compute capability 9.0: their `wgmma` instructions are in no other.
pub const SOURCE: Source =
    Source { name: "linear.cu", text: include_str!("linear.cu"), options: &["--gpu-architecture=sm_90a"] };

/// Rows of weights in a tile, and columns in a block of it.
const TILE: usize = 64;
/// Blocks that should be there to keep all multiprocessors loading. With fewer tiles, K is sliced.
const ENOUGH_BLOCKS: usize = 128;
/// Slices of a matrix at most: the blocks of a cluster that every device can launch.
const MOST_SLICES: usize = 8;
/// Columns of a slice at least.
const LEAST_COLUMNS: usize = 256;
/// Shared memory that a block may have when two of them share a multiprocessor, and when it has it alone.
const SHARED_OF_TWO: usize = 113 << 10;
const SHARED_OF_ONE: usize = 227 << 10;
/// Stages of the ring at most.
const MOST_STAGES: usize = 16;
/// Of a stage: one for when it is full, and one for when it is empty.
const BARRIERS_BYTES: usize = 16;
/// Room to align the first stage to 1024 bytes and the inbox to 16, and one more barrier.
const ALIGNMENT_BYTES: usize = 1024 + 32;

/// A kernel. All of them give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// A block takes one slice of 64 rows of weights, and 8 rows of X.
    Split8,
    /// As before, and 16 rows of X.
    Split16,
    /// As before, and 32 rows of X.
    Split32,
    /// As before, and 64 rows of X.
    Split64,
    /// As before, and 128 rows of X.
    Split128,
    /// A block takes one slice of 128 rows of weights, and 128 rows of X.
    Wide128,
    /// A pair of blocks takes all slices of 256 rows of weights, one after the other, and 128 rows of X.
    Added128,
    /// As before, and 192 rows of X.
    Added192,
    /// A pair of blocks takes 256 rows of weights, and 256 rows of X. It is for matrices of one slice.
    One256,
}

impl Variant {
    /// All of them, in the order of the enum.
    pub const ALL: [Self; 9] = [
        Self::Split8,
        Self::Split16,
        Self::Split32,
        Self::Split64,
        Self::Split128,
        Self::Wide128,
        Self::Added128,
        Self::Added192,
        Self::One256,
    ];

    /// Name of the kernel in [`SOURCE`].
    #[must_use]
    pub fn kernel(self) -> &'static str {
        self.shape().0
    }

    /// Rows of X that a block takes.
    #[must_use]
    pub fn tokens(self) -> usize {
        self.shape().2
    }

    /// Tiles of 64 rows of weights that a block takes, each with a group of threads.
    #[must_use]
    pub fn groups(self) -> usize {
        self.shape().1
    }

    /// Whether it multiplies with this matrix.
    #[must_use]
    pub fn suits(self, matrix: &TensorMatrix) -> bool {
        self != Self::One256 || matrix.slices == 1
    }

    /// Its kernel, groups, and rows of X.
    fn shape(self) -> (&'static str, usize, usize) {
        match self {
            Self::Split8 => ("linear_split_8", 1, 8),
            Self::Split16 => ("linear_split_16", 1, 16),
            Self::Split32 => ("linear_split_32", 1, 32),
            Self::Split64 => ("linear_split_64", 1, 64),
            Self::Split128 => ("linear_split_128", 1, 128),
            Self::Wide128 => ("linear_wide_128", 2, 128),
            Self::Added128 => ("linear_added_128", 2, 128),
            Self::Added192 => ("linear_added_192", 2, 192),
            Self::One256 => ("linear_one_256", 2, 256),
        }
    }

    /// Whether a block takes one slice, and a cluster all of them. Else blocks are in pairs.
    fn split(self) -> bool {
        !matches!(self, Self::Added128 | Self::Added192 | Self::One256)
    }

    /// Blocks of a cluster, for a matrix of so many slices.
    fn cluster(self, slices: usize) -> usize {
        if self.split() { slices } else { 2 }
    }

    /// Rows of weights that a cluster takes.
    fn cluster_rows(self) -> usize {
        self.groups() * TILE * if self.split() { 1 } else { 2 }
    }

    /// Rows of X that one copy brings.
    fn copied(self) -> usize {
        if self.split() { self.tokens() } else { self.tokens() / 2 }
    }

    /// Threads of a block: its groups, and one warp, or one group, that fills the ring.
    fn threads(self) -> usize {
        if self.groups() == 1 { 160 } else { 384 }
    }

    fn stage_bytes(self) -> usize {
        (self.groups() * TILE + self.tokens()) * TILE * 2
    }

    /// What the blocks of a cluster send each other: 8 rows of X at a time.
    fn inbox_bytes(self, slices: usize) -> usize {
        let eights = (self.tokens() / 8).next_multiple_of(slices);
        if self.split() && slices > 1 { eights * self.groups() * TILE * 8 * 4 } else { 0 }
    }

    /// Stages of the ring: as many as there is room for, and no more than a block fills.
    fn stages(self, slices: usize, blocks: usize) -> usize {
        let room = if self.groups() == 1 { SHARED_OF_TWO } else { SHARED_OF_ONE };
        let room = room - ALIGNMENT_BYTES - self.inbox_bytes(slices);
        let most = if self.split() && slices > 1 { blocks.div_ceil(slices) } else { MOST_STAGES };
        (room / (self.stage_bytes() + BARRIERS_BYTES)).min(most)
    }

    fn shared_bytes(self, slices: usize, blocks: usize) -> usize {
        self.stages(slices, blocks) * (self.stage_bytes() + BARRIERS_BYTES)
            + self.inbox_bytes(slices)
            + ALIGNMENT_BYTES
    }

    /// The fastest for this many rows.
    fn best(rows: usize, matrix: &TensorMatrix, multiprocessors: usize) -> Self {
        match rows {
            0..=8 => Self::Split8,
            9..=16 => Self::Split16,
            17..=32 => Self::Split32,
            33..=64 => Self::Split64,
            65..=128 => Self::Split128,
            _ if matrix.slices == 1 => Self::One256,
            _ => {
                // Rounds of blocks, each as long as it has rows.
                let tiles = matrix.tiles().div_ceil(2);
                let time = |tokens: usize| (tiles * rows.div_ceil(tokens)).div_ceil(multiprocessors) * tokens;
                if time(192) <= time(128) { Self::Added192 } else { Self::Added128 }
            }
        }
    }
}

/// A matrix of bf16 weights, packed for these kernels.
#[derive(Debug)]
pub struct TensorMatrix {
    packed: Array<u16>,
    outputs: usize,
    inputs: usize,
    gated: bool,
    slices: usize,
}

impl TensorMatrix {
    /// Rows of weights. Of a gated matrix, half of them are gates.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of weights.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Whether its rows are gates and ups.
    #[must_use]
    pub fn gated(&self) -> bool {
        self.gated
    }

    /// Ranges of K that are summed apart. It depends on the size of the matrix alone: the fewest, 1, 2, 4 or 8, that make 128 pieces
    /// of 64 rows and at least 256 columns, or as many as there are.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.slices
    }

    /// Columns at which the slices begin, and the last one ends.
    #[must_use]
    pub fn slice_columns(&self) -> Vec<usize> {
        (0..=self.slices).map(|slice| (slice * self.blocks() / self.slices * TILE).min(self.inputs)).collect()
    }

    fn tiles(&self) -> usize {
        self.outputs.div_ceil(TILE)
    }

    fn blocks(&self) -> usize {
        self.inputs.div_ceil(TILE)
    }
}

fn experiment(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn slices(outputs: usize, inputs: usize) -> usize {
    let mut slices = 1;
    while slices < MOST_SLICES
        && outputs.div_ceil(TILE) * slices < experiment("ENOUGH", ENOUGH_BLOCKS)
        && inputs >= 2 * slices * LEAST_COLUMNS
    {
        slices *= 2;
    }
    slices
}

/// Where a product goes, and what is done with it.
#[derive(Debug)]
pub enum Output<'a> {
    /// Is written.
    Store(&'a mut Array<f32>),
    /// Is added to what is there.
    Add(&'a mut Array<f32>),
    /// Is rounded to bf16 and written.
    StoreBf16(&'a mut Array<u16>),
    /// Of a gated matrix: `silu(gate) * up` is rounded to bf16 and written, half as many columns as the matrix has rows.
    Gated(&'a mut Array<u16>),
}

impl Output<'_> {
    /// Its number in linear.cu.
    fn epilogue(&self) -> u32 {
        match self {
            Self::Store(_) => 0,
            Self::Add(_) => 1,
            Self::StoreBf16(_) => 2,
            Self::Gated(_) => 3,
        }
    }

    fn address(&self) -> u64 {
        match self {
            Self::Store(array) | Self::Add(array) => array.address(),
            Self::StoreBf16(array) | Self::Gated(array) => array.address(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Store(array) | Self::Add(array) => array.len(),
            Self::StoreBf16(array) | Self::Gated(array) => array.len(),
        }
    }
}

/// `Product` of linear.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct Product {
    weights: u64,
    out: u64,
    stride: u64,
    rows: u32,
    outputs: u32,
    tiles: u32,
    blocks: u32,
    slices: u32,
    stages: u32,
    ahead: u32,
    epilogue: u32,
}

// SAFETY: numbers only, in C's layout.
unsafe impl DeviceRepr for Product {}

/// Matrix products on one device.
#[derive(Debug)]
pub struct TensorLinear {
    device: Arc<Device>,
    pack: CudaFunction,
    /// By [`Variant`].
    kernels: [CudaFunction; Variant::ALL.len()],
    multiprocessors: usize,
}

impl TensorLinear {
    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// When the device's compute capability is not 9.0, there is no NVRTC, or it or the driver refuses.
    pub fn new(device: &Arc<Device>) -> Result<Self, CudaError> {
        if device.capability() != 90 {
            let found = device.capability();
            return Err(CudaError::Capability { what: "products on tensor cores", needed: &[90], found });
        }
        let module = device.module(&SOURCE)?;
        let kernel = |variant: Variant| {
            let kernel = function(&module, variant.kernel())?;
            let shared = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = if variant.groups() == 1 { SHARED_OF_TWO } else { SHARED_OF_ONE };
            kernel
                .set_attribute(shared, number(bytes).cast_signed())
                .map_err(refused("give a kernel its shared memory"))?;
            Ok(kernel)
        };
        let [a, b, c, d, e, f, g, h, i] = Variant::ALL.map(kernel);
        let multiprocessors = device
            .context()
            .attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(refused("count its multiprocessors"))?;
        Ok(Self {
            device: Arc::clone(device),
            pack: function(&module, "linear_pack")?,
            kernels: [a?, b?, c?, d?, e?, f?, g?, h?, i?],
            multiprocessors: usize::try_from(multiprocessors).unwrap_or(1),
        })
    }

    /// Packs row-major weights, `[outputs][inputs]`. Of a gated matrix the first half of the rows are gates, and the others the ups
    /// of the same outputs. The rows may be freed when the stream has come to it.
    ///
    /// # Errors
    /// When the device has no memory left, or the driver refuses.
    ///
    /// # Panics
    /// When `weights` is shorter, `outputs` is no multiple of 16, or `inputs` is no multiple of 8.
    pub fn pack(
        &self,
        stream: &CudaStream,
        weights: &Array<u16>,
        outputs: usize,
        inputs: usize,
        gated: bool,
    ) -> Result<TensorMatrix, CudaError> {
        assert!(outputs > 0 && outputs.is_multiple_of(16), "{outputs} outputs are no multiple of 16");
        assert!(inputs > 0 && inputs.is_multiple_of(8), "{inputs} inputs are no multiple of 8");
        assert!(weights.len() >= outputs * inputs, "{} weights for {outputs} x {inputs}", weights.len());
        let blocks = inputs.div_ceil(TILE);
        let elements = outputs.div_ceil(TILE) * blocks * TILE * TILE;
        let packed = Array::new(&self.device, elements)?;
        let chunks = elements as u64 / 8;
        let half = if gated { outputs / 2 } else { 0 };
        let sizes = [outputs, inputs, blocks, half].map(number);
        let addresses = [weights.address(), packed.address()];
        let config = LaunchConfig {
            grid_dim: (number(elements / 8).div_ceil(256), 1, 1),
            block_dim: (256, 1, 1),
            shared_mem_bytes: 0,
        };
        let mut builder = stream.launch_builder(&self.pack);
        addresses.iter().for_each(|address| {
            builder.arg(address);
        });
        sizes.iter().for_each(|size| {
            builder.arg(size);
        });
        builder.arg(&chunks);
        // SAFETY: the kernel's parameters. It reads `outputs` rows of `inputs` elements, and writes `chunks` times 8 elements.
        unsafe { builder.launch(config) }.map_err(refused("launch the packing of weights"))?;
        Ok(TensorMatrix { packed, outputs, inputs, gated, slices: slices(outputs, inputs) })
    }

    /// The product of the first `rows` rows of `x`, `[rows][inputs]`, with every row of the matrix. `stride` is the distance from one
    /// row of the output to the next, in elements.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When `x` or the output is shorter, `stride` is odd or less than a row, or one of the matrix and the output is gated and the
    /// other is not.
    pub fn run(
        &self,
        stream: &CudaStream,
        x: &Array<u16>,
        rows: usize,
        matrix: &TensorMatrix,
        output: Output<'_>,
        stride: usize,
    ) -> Result<(), CudaError> {
        let variant = Variant::best(rows, matrix, self.multiprocessors);
        self.run_as(variant, stream, x, rows, matrix, output, stride)
    }

    /// As [`run`](Self::run), with this kernel. The bits are the same for all.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there, and when the kernel does not [suit](Variant::suits) the matrix.
    #[allow(clippy::too_many_arguments, reason = "those of `run`, and the kernel")]
    pub fn run_as(
        &self,
        variant: Variant,
        stream: &CudaStream,
        x: &Array<u16>,
        rows: usize,
        matrix: &TensorMatrix,
        output: Output<'_>,
        stride: usize,
    ) -> Result<(), CudaError> {
        let TensorMatrix { outputs, inputs, gated, slices, .. } = *matrix;
        let columns = if gated { outputs / 2 } else { outputs };
        assert!(variant.suits(matrix), "{variant:?} for a matrix of {slices} slices");
        assert_eq!(
            gated,
            matches!(output, Output::Gated(_)),
            "a gated matrix and its output belong together"
        );
        assert!(x.len() >= rows * inputs, "{} elements of X for {rows} rows of {inputs}", x.len());
        assert!(stride >= columns && stride.is_multiple_of(2), "rows of {columns} at a stride of {stride}");
        if rows == 0 {
            return Ok(());
        }
        let needed = (rows - 1) * stride + columns;
        assert!(output.len() >= needed, "{} elements of output for {needed}", output.len());

        let cluster = variant.cluster(slices);
        let row_tiles = rows.div_ceil(variant.tokens());
        let tiles = outputs.div_ceil(variant.cluster_rows()) * row_tiles;
        // Without slices to exchange, clusters take one tile after the other, and there are as many as there is room for.
        let clusters = match (variant.split(), slices) {
            (true, 2..) => tiles,
            (true, _) if variant.groups() == 1 => tiles.min(experiment("PERSM", 2) * self.multiprocessors),
            _ => tiles.min(self.multiprocessors / cluster),
        };
        let blocks = clusters * cluster;
        let ahead =
            if variant.groups() == 1 && row_tiles == 1 { experiment("AHEAD", 0) / blocks / 8192 } else { 0 };
        let product = Product {
            weights: matrix.packed.address(),
            out: output.address(),
            stride: stride as u64,
            rows: number(rows),
            outputs: number(outputs),
            tiles: number(matrix.tiles()),
            blocks: number(matrix.blocks()),
            slices: number(slices),
            stages: number(variant.stages(slices, matrix.blocks())),
            ahead: number(ahead),
            epilogue: output.epilogue(),
        };
        let map = self.map(x, rows, inputs, variant.copied())?;
        self.launch(stream, variant, blocks, cluster, &map, &product)
    }

    /// How the kernel's copies find `tokens` rows and 64 columns of X, and how they lay them out.
    fn map(
        &self,
        x: &Array<u16>,
        rows: usize,
        inputs: usize,
        tokens: usize,
    ) -> Result<sys::CUtensorMap, CudaError> {
        self.device.bind()?;
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let sizes = [inputs as u64, rows as u64];
        let stride = [inputs as u64 * 2];
        let (window, steps) = ([number(TILE), number(tokens)], [1; 2]);
        // SAFETY: two sizes, one stride, and two sizes and steps of the window. It encodes them and follows no address.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                2,
                x.address() as *mut c_void,
                sizes.as_ptr(),
                stride.as_ptr(),
                window.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(refused("describe the rows of a product"))?;
        Ok(map)
    }

    fn launch(
        &self,
        stream: &CudaStream,
        variant: Variant,
        blocks: usize,
        cluster: usize,
        map: &sys::CUtensorMap,
        product: &Product,
    ) -> Result<(), CudaError> {
        let programmatic = sys::CUlaunchAttributeValue {
            programmaticStreamSerializationAllowed: experiment("PDL", 1) as i32,
        };
        let size = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: number(cluster), y: 1, z: 1 };
        let size = sys::CUlaunchAttributeValue { clusterDim: size };
        let mut attributes = [
            (sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, programmatic),
            (sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, size),
        ]
        .map(|(id, value)| sys::CUlaunchAttribute { id, pad: [0; 4], value });
        let config = sys::CUlaunchConfig {
            gridDimX: number(blocks),
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: number(variant.threads()),
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: number(variant.shared_bytes(product.slices as usize, product.blocks as usize)),
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: 2,
        };
        let mut parameters =
            [std::ptr::from_ref(map).cast_mut().cast(), std::ptr::from_ref(product).cast_mut().cast()];
        let kernel = self.kernels[variant as usize].cu_function();
        // SAFETY: the kernel's two parameters, which are copied. It reads the rows of the map and the packed weights, and writes
        // `rows` rows of the output, all of which were checked to be there.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel, parameters.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(refused(format!("launch {}", variant.kernel())))
    }
}

/// A size for a kernel.
///
/// # Panics
/// When it is 2^32 or more.
fn number(size: usize) -> u32 {
    u32::try_from(size).unwrap_or_else(|_| panic!("{size} is too much for a kernel"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_fill_the_device_and_are_no_shorter_than_they_should_be() {
        for (outputs, inputs, expected) in [
            (16384, 2048, 1),
            (128_256, 2048, 1),
            (6144, 4096, 2),
            (3072, 2048, 4),
            (2048, 2048, 4),
            (2048, 8192, 4),
            (4096, 4096, 2),
            (576, 1536, 4),
            (576, 576, 2),
            (256, 256, 1),
            (16, 16384, 8),
        ] {
            assert_eq!(slices(outputs, inputs), expected, "{outputs} x {inputs}");
        }
    }

    #[test]
    fn rings_fit_into_shared_memory_and_hold_enough_to_hide_latency() {
        for variant in Variant::ALL {
            for slices in [1, 2, 4, 8] {
                let (stages, bytes) = (variant.stages(slices, 256), variant.shared_bytes(slices, 256));
                let blocks = if variant.groups() == 1 { 2 } else { 1 };
                assert!(blocks * (bytes + 1024) <= 228 << 10, "{variant:?}: {bytes} bytes");
                assert!(stages >= 3, "{variant:?}: {stages} stages");
            }
        }
    }
}
