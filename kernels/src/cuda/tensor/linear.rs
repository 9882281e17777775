//! Matrix products for bf16 weights on Hopper's tensor cores, from one row to thousands.
//!
//! ```text
//!  row-major weights --pack (once)--> TensorMatrix --run--> f32 or bf16 rows
//! ```
//!
//! **A row's results do not depend on the batch.** The matrix alone defines the order of a sum: K is cut into
//! [`TensorMatrix::slices`] ranges. The sum of a range is a chain of tensor core operations over 16 columns each, ascending.
//! The sums of the ranges are added in f32, ascending. All kernels, for few and for many rows, keep this order. So neither the
//! choice of the kernel nor the other rows change a bit.
//!
//! Kernels differ in how many rows of X share the weights that a block reads ([`Variant`]). For few rows the product is
//! bound by memory: each block streams 64 rows of weights, or one slice of them, and the blocks of a cluster add their
//! slices. For many rows it is bound by the tensor cores: a pair of blocks multiplies 256 rows of weights with 128 to 256
//! rows of X.
//!
//! A launch is programmatic: it may start while the kernel before it in the stream still runs, loads its first weights,
//! and waits for that kernel before it reads X or touches Y. It allocates nothing and can be captured in a graph.

mod variant;

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, sys};

use super::super::device::function;
use super::super::{Array, CudaError, Device, Source, refused};
pub use variant::Variant;

/// The source of the kernels. It is for devices of compute capability 9.0: no other devices have `wgmma` instructions.
pub const SOURCE: Source = Source {
    name: "linear.cu",
    text: concat!(include_str!("bits.cuh"), include_str!("hopper.cu"), include_str!("linear.cu")),
    options: &["--gpu-architecture=sm_90a"],
};

/// Rows of weights in a tile, and columns in a block of it.
const TILE: usize = 64;
/// Blocks that are needed to keep all multiprocessors loading. If there are fewer tiles, K is sliced.
const ENOUGH_BLOCKS: usize = 128;
/// Most slices of a matrix: every device can launch a cluster of this many blocks.
const MOST_SLICES: usize = 8;
/// Least columns of a slice.
const LEAST_COLUMNS: usize = 256;

/// The sizes of a matrix, and how its products are cut into slices. It depends on the matrix alone.
#[derive(Clone, Copy, Debug)]
struct Size {
    outputs: usize,
    inputs: usize,
    slices: usize,
}

impl Size {
    fn new(outputs: usize, inputs: usize) -> Self {
        let mut slices = 1;
        while slices < MOST_SLICES
            && outputs.div_ceil(TILE) * slices < ENOUGH_BLOCKS
            && inputs >= 2 * slices * LEAST_COLUMNS
        {
            slices *= 2;
        }
        Self { outputs, inputs, slices }
    }

    /// Tiles of 64 rows of weights.
    fn tiles(self) -> usize {
        self.outputs.div_ceil(TILE)
    }

    /// Blocks of 64 columns.
    fn blocks(self) -> usize {
        self.inputs.div_ceil(TILE)
    }
}

/// A matrix of bf16 weights, packed for these kernels.
#[derive(Debug)]
pub struct TensorMatrix {
    packed: Array<u16>,
    size: Size,
    gated: bool,
}

impl TensorMatrix {
    /// Rows of weights. Of a gated matrix, half of them are gates.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.size.outputs
    }

    /// Columns of weights.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.size.inputs
    }

    /// Whether its rows are gates and ups.
    #[must_use]
    pub fn gated(&self) -> bool {
        self.gated
    }

    /// Number of ranges of K that are summed separately: 1, 2, 4 or 8. It depends on the size of the matrix alone. It is the
    /// smallest number that makes 128 pieces of 64 rows and at least 256 columns, or else the largest that keeps 256 columns.
    #[must_use]
    pub fn slices(&self) -> usize {
        self.size.slices
    }
}

/// The array that a product goes to, and what is done with the product.
#[derive(Debug)]
pub enum Output<'a> {
    /// The product is written.
    Store(&'a mut Array<f32>),
    /// The product is added to the array's content. Numbers below 2^-126 count as zero in this sum.
    Add(&'a mut Array<f32>),
    /// The product is rounded to bf16 and written.
    StoreBf16(&'a mut Array<u16>),
    /// For a gated matrix: `silu(gate) * up` is rounded to bf16 and written. The output has half as many columns as the matrix
    /// has rows.
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
    epilogue: u32,
}

// SAFETY: numbers only, in C's layout.
unsafe impl DeviceRepr for Product {}

/// Matrix products on one device.
#[derive(Debug)]
pub struct TensorLinear {
    device: Arc<Device>,
    pack: CudaFunction,
    /// Indexed by [`Variant`].
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
            kernel
                .set_attribute(shared, number(variant.most_shared_bytes()).cast_signed())
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

    /// Packs row-major weights, `[outputs][inputs]`. In a gated matrix the first half of the rows are gates, and the
    /// others are the ups of the same outputs. The rows may be freed when the stream has packed them.
    ///
    /// # Errors
    /// When the device has no memory left, or the driver refuses.
    ///
    /// # Panics
    /// When `weights` is too short, `outputs` is no multiple of 16, or `inputs` is no multiple of 8.
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
        let size = Size::new(outputs, inputs);
        let elements = size.tiles() * size.blocks() * TILE * TILE;
        let packed = Array::new(&self.device, elements)?;
        let chunks = elements as u64 / 8;
        let half = if gated { outputs / 2 } else { 0 };
        let sizes = [outputs, inputs, size.blocks(), half].map(number);
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
        // SAFETY: the kernel's parameters. It reads `outputs` rows of `inputs` elements, and writes `chunks` times 8
        // elements.
        unsafe { builder.launch(config) }.map_err(refused("launch the packing of weights"))?;
        Ok(TensorMatrix { packed, size, gated })
    }

    /// The product of the first `rows` rows of `x`, `[rows][inputs]`, with every row of the matrix. `stride` is the
    /// distance from one row of the output to the next, in elements.
    ///
    /// # Errors
    /// When the driver refuses.
    ///
    /// # Panics
    /// When `x` or the output is too short, `stride` is odd or less than a row, or only one of the matrix and the output is
    /// gated.
    pub fn run(
        &self,
        stream: &CudaStream,
        x: &Array<u16>,
        rows: usize,
        matrix: &TensorMatrix,
        output: Output<'_>,
        stride: usize,
    ) -> Result<(), CudaError> {
        let variant = Variant::best(rows, matrix.size, self.multiprocessors);
        self.run_as(variant, stream, x, rows, matrix, output, stride)
    }

    /// As [`run`](Self::run), with this kernel. All kernels give the same bits.
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
        let TensorMatrix { size, gated, .. } = *matrix;
        let Size { outputs, inputs, slices } = size;
        let columns = if gated { outputs / 2 } else { outputs };
        assert!(variant.suits(slices), "{variant:?} for a matrix of {slices} slices");
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

        let product = Product {
            weights: matrix.packed.address(),
            out: output.address(),
            stride: stride as u64,
            rows: number(rows),
            outputs: number(outputs),
            tiles: number(size.tiles()),
            blocks: number(size.blocks()),
            slices: number(slices),
            stages: number(variant.stages(size)),
            epilogue: output.epilogue(),
        };
        let map = self.map(x, rows, inputs, variant.copied_rows())?;
        let cluster = variant.cluster(slices);
        let blocks = cluster * variant.clusters(rows, size, self.multiprocessors);
        self.launch(stream, variant, [blocks, cluster, variant.shared_bytes(size)], &map, &product)
    }

    /// The map by which the kernel's copies find `tokens` rows and 64 columns of X, and lay them out.
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
        // SAFETY: two sizes, one stride, and two sizes and steps of the window. The call encodes them and follows no address.
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
        [blocks, cluster, shared]: [usize; 3],
        map: &sys::CUtensorMap,
        product: &Product,
    ) -> Result<(), CudaError> {
        let programmatic = sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
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
            sharedMemBytes: number(shared),
            hStream: stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: 2,
        };
        let mut parameters =
            [std::ptr::from_ref(map).cast_mut().cast(), std::ptr::from_ref(product).cast_mut().cast()];
        let kernel = self.kernels[variant as usize].cu_function();
        // SAFETY: the kernel's two parameters, which are copied. It reads the rows of the map and the packed weights,
        // and writes `rows` rows of the output, all of which were checked to be there.
        unsafe {
            sys::cuLaunchKernelEx(&raw const config, kernel, parameters.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .map_err(refused(format!("launch {}", variant.kernel())))
    }
}

/// A size as a kernel takes it, in 32 bits.
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
            assert_eq!(Size::new(outputs, inputs).slices, expected, "{outputs} x {inputs}");
        }
    }
}
