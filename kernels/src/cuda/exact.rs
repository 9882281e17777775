//! The math of [`crate::math`] on a GPU, with the same bits: every sum in the same order, every rounding in the same place.
//!
//! It is for weights of 32 bits, for workers whose answers must be the same as those of the CPU, and for tests. Each function puts
//! its launches into the stream and returns.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};

use super::batch::Rows;
use super::device::function;
use super::{Array, CudaError, Device, Source, refused};
use crate::math::{Element, Gate};

/// A matrix on the device, `[outputs][inputs]`.
#[derive(Debug)]
pub struct Matrix {
    /// Elements, row after row, as they are stored.
    pub bytes: Array<u8>,
    /// How an element is stored.
    pub element: Element,
    /// Rows.
    pub outputs: usize,
    /// Columns.
    pub inputs: usize,
}

/// The source of the kernels of [`Exact`].
pub const SOURCE: Source = Source {
    name: "exact.cu",
    text: include_str!("exact.cu"),
    // The compiler may not fuse multiplications and additions by itself. The source says where they are fused.
    options: &["--fmad=false"],
};

/// Threads of a block, as in the source.
const THREADS: usize = 256;
const LINEAR_THREADS: usize = 32;
/// Numbers of rows that share a pass over a matrix.
const LINEAR_ROWS: [usize; 3] = [8, 2, 1];
/// Threads that look for a row's greatest element.
const SHARES: usize = 256;
/// Elements of the scratch memory, which holds data between the launches of one function. If the rows do not fit, they are
/// computed a part at a time.
const SCRATCH: usize = 1 << 24;
/// Most blocks of a grid in its second dimension.
const COLUMNS: usize = 65_535;

macro_rules! functions {
    ($($name:ident)*) => {
        /// All kernels of the source.
        #[derive(Debug)]
        struct Functions {
            $($name: CudaFunction,)*
        }

        impl Functions {
            fn load(device: &Arc<Device>) -> Result<Self, CudaError> {
                let module = device.module(&SOURCE)?;
                Ok(Self { $($name: function(&module, stringify!($name))?,)* })
            }
        }
    };
}

functions! {
    embed_f32 embed_bf16 embed_f16 square_lanes rms_norm rotate_heads gated_silu gated_gelu_tanh add select_rows
    greatest_of_shares greatest_of_rows linear_f32_1 linear_f32_2 linear_f32_8 linear_bf16_1 linear_bf16_2 linear_bf16_8
    linear_f16_1 linear_f16_2 linear_f16_8 write_kv attention_scores_f32 attention_scores_bf16 attention_maxima
    attention_weights attention_values_f32 attention_values_bf16
}

/// Puts a launch into the stream. Arguments are variables with the kernel's own types (addresses are `u64`).
macro_rules! launch {
    ($exact:ident . $name:ident, $grid:expr, $threads:expr, $($argument:ident),*) => {{
        let mut builder = $exact.stream.launch_builder(&$exact.functions.$name);
        $(builder.arg(&$argument);)*
        let (grid_dim, threads): (_, usize) = ($grid, $threads);
        let config = LaunchConfig { grid_dim, block_dim: (number(threads), 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the arguments are those of the kernel with this name. The function that launches has checked that the
        // arrays are as long as its sizes say. A kernel touches only these arrays and memory that the caller vouches for.
        unsafe { builder.launch(config) }
            .map(|_no_events| ())
            .map_err(refused(concat!("launch the kernel ", stringify!($name))))
    }};
}

// Behind the macro that it uses.
mod attention;

/// The math, in one stream.
///
/// Results are those of [`crate::math::Math`] to the last bit, except for the bits of a NaN. Arrays may be longer than
/// needed. These functions cannot check tokens, positions and tables, which only the device reads: if those of [`Rows`] name
/// pages that the pool does not have, or more pages than there are, kernels touch memory outside the arrays.
#[derive(Debug)]
pub struct Exact {
    device: Arc<Device>,
    stream: Arc<CudaStream>,
    functions: Functions,
    /// Data between the launches of one function. It is locked until all of them are in the stream.
    scratch: Mutex<Array<f32>>,
}

/// A size as a kernel takes it, in 32 bits.
fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap_or_else(|_| panic!("{value} is too large for the kernels"))
}

/// A grid with a row of blocks for each of `rows`, wide enough for `columns` threads.
fn grid(rows: usize, columns: usize, threads: usize) -> (u32, u32, u32) {
    let blocks = columns.div_ceil(threads);
    assert!(blocks <= COLUMNS, "rows of {columns} elements are too long for the kernels");
    (number(rows), number(blocks), 1)
}

/// Address of an element.
fn at<T: DeviceRepr + Copy>(array: &Array<T>, element: usize) -> u64 {
    array.address() + (element * size_of::<T>()) as u64
}

fn assert_holds<T: DeviceRepr + Copy>(array: &Array<T>, elements: usize, what: &str) {
    assert!(array.len() >= elements, "{what}: {elements} elements in an array of {}", array.len());
}

impl Exact {
    /// Compiles and loads the kernels.
    ///
    /// # Errors
    /// When there is no NVRTC, or the driver refuses.
    pub fn new(device: &Arc<Device>, stream: Arc<CudaStream>) -> Result<Self, CudaError> {
        let functions = Functions::load(device)?;
        let scratch = Mutex::new(Array::new(device, SCRATCH)?);
        Ok(Self { device: Arc::clone(device), stream, functions, scratch })
    }

    /// The stream that all launches are ordered in.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Copies a matrix of `[outputs][inputs]` little-endian elements to the device without changes. Waits until the copy is done.
    ///
    /// # Errors
    /// When the device has no memory left.
    ///
    /// # Panics
    /// When `bytes` does not have the length of such a matrix.
    pub fn upload_matrix(
        &self,
        bytes: &[u8],
        element: Element,
        outputs: usize,
        inputs: usize,
    ) -> Result<Matrix, CudaError> {
        assert_eq!(
            bytes.len(),
            outputs * inputs * element.bytes(),
            "bytes of {outputs} rows of {inputs} {element:?}"
        );
        let mut array = Array::new(&self.device, bytes.len())?;
        array.upload(&self.stream, bytes)?;
        Ok(Matrix { bytes: array, element, outputs, inputs })
    }

    /// `out[row] = table[token[row] - first_token]`, widened. Rows of tokens that the table does not have are zeros.
    ///
    /// # Errors
    /// When the driver refuses a launch, as for all functions here.
    ///
    /// # Panics
    /// When `out` or the rows' tokens are too short.
    pub fn embed(
        &self,
        table: &Matrix,
        rows: &Rows,
        first_token: u32,
        out: &mut Array<f32>,
    ) -> Result<(), CudaError> {
        let width = table.inputs;
        assert_holds(out, rows.rows * width, "embedded rows");
        assert_holds(&rows.token, rows.rows, "tokens");
        if rows.rows * width == 0 {
            return Ok(());
        }
        let grid = grid(rows.rows, width, THREADS);
        let (held, width) = (number(table.outputs), number(width));
        let (table_at, tokens, out) = (table.bytes.address(), rows.token.address(), out.address());
        match table.element {
            Element::F32 => {
                launch!(self.embed_f32, grid, THREADS, table_at, tokens, first_token, held, width, out)
            }
            Element::Bf16 => {
                launch!(self.embed_bf16, grid, THREADS, table_at, tokens, first_token, held, width, out)
            }
            Element::F16 => {
                launch!(self.embed_f16, grid, THREADS, table_at, tokens, first_token, held, width, out)
            }
        }
    }

    /// `y = x / sqrt(mean(x^2) + epsilon) * weight` for `rows` rows of `weight.len()` elements.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When the row length is no multiple of 8, or an array is too short.
    pub fn rms_norm(
        &self,
        x: &Array<f32>,
        rows: usize,
        weight: &Array<f32>,
        epsilon: f32,
        y: &mut Array<f32>,
    ) -> Result<(), CudaError> {
        let width = weight.len();
        assert!(width.is_multiple_of(8), "rows of {width} elements, which is no multiple of 8");
        assert_holds(x, rows * width, "rows to norm");
        assert_holds(y, rows * width, "normed rows");
        let scratch = self.scratch();
        for (first, rows) in parts(rows, SCRATCH / 8) {
            let (x, y, weight) = (at(x, first * width), at(y, first * width), weight.address());
            let sums = scratch.address();
            self.square_lanes(x, width, 1, width, rows, sums)?;
            let grid = grid(rows, width, THREADS);
            let width = number(width);
            launch!(self.rms_norm, grid, THREADS, x, sums, weight, epsilon, width, y)?;
        }
        Ok(())
    }

    /// Computes the 8 lanes of the sum of squares of each head: `heads` heads of `width` elements in each of `rows` rows.
    fn square_lanes(
        &self,
        data: u64,
        stride: usize,
        heads: usize,
        width: usize,
        rows: usize,
        sums: u64,
    ) -> Result<(), CudaError> {
        let lanes = rows * heads * 8;
        let grid = (number(lanes.div_ceil(THREADS)), 1, 1);
        let (stride, heads, width, lanes) = (number(stride), number(heads), number(width), lanes as u64);
        launch!(self.square_lanes, grid, THREADS, data, stride, heads, width, lanes, sums)
    }

    /// `y[m][n] = sum over k of x[m][k] * weight[n][k]` for `rows` rows: one chain of fused multiply-adds over k from 0.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When an array is too short.
    pub fn linear(
        &self,
        x: &Array<f32>,
        rows: usize,
        weight: &Matrix,
        y: &mut Array<f32>,
    ) -> Result<(), CudaError> {
        let (outputs, inputs) = (weight.outputs, weight.inputs);
        assert_holds(x, rows * inputs, "inputs of a product");
        assert_holds(y, rows * outputs, "outputs of a product");
        if rows * outputs == 0 {
            return Ok(());
        }
        let tile = LINEAR_ROWS.into_iter().find(|tile| *tile <= rows).unwrap_or(1);
        let grid = grid(rows.div_ceil(tile), outputs, LINEAR_THREADS);
        let (rows, outputs, inputs) = (number(rows), number(outputs), number(inputs));
        let (x, w, y) = (x.address(), weight.bytes.address(), y.address());
        macro_rules! product {
            ($name:ident) => {
                launch!(self.$name, grid, LINEAR_THREADS, x, rows, w, outputs, inputs, y)
            };
        }
        match (weight.element, tile) {
            (Element::F32, 8) => product!(linear_f32_8),
            (Element::F32, 2) => product!(linear_f32_2),
            (Element::F32, _) => product!(linear_f32_1),
            (Element::Bf16, 8) => product!(linear_bf16_8),
            (Element::Bf16, 2) => product!(linear_bf16_2),
            (Element::Bf16, _) => product!(linear_bf16_1),
            (Element::F16, 8) => product!(linear_f16_8),
            (Element::F16, 2) => product!(linear_f16_2),
            (Element::F16, _) => product!(linear_f16_1),
        }
    }

    /// `y = gate(g) * up` for `rows` rows of `gate_up`, each `width` elements g and then `width` ups.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When an array is too short.
    pub fn gated(
        &self,
        gate: Gate,
        gate_up: &Array<f32>,
        rows: usize,
        width: usize,
        y: &mut Array<f32>,
    ) -> Result<(), CudaError> {
        assert_holds(gate_up, 2 * rows * width, "gates and ups");
        assert_holds(y, rows * width, "gated rows");
        if rows * width == 0 {
            return Ok(());
        }
        let grid = grid(rows, width, THREADS);
        let (gate_up, width, y) = (gate_up.address(), number(width), y.address());
        match gate {
            Gate::Silu => launch!(self.gated_silu, grid, THREADS, gate_up, width, y),
            Gate::GeluTanh => launch!(self.gated_gelu_tanh, grid, THREADS, gate_up, width, y),
        }
    }

    /// `x += y` for the first `length` elements.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When an array is too short.
    pub fn add(&self, x: &mut Array<f32>, y: &Array<f32>, length: usize) -> Result<(), CudaError> {
        assert_holds(x, length, "sums");
        assert_holds(y, length, "addends");
        if length == 0 {
            return Ok(());
        }
        let grid = (number(length.div_ceil(THREADS)), 1, 1);
        let (x, y, length) = (x.address(), y.address(), length as u64);
        launch!(self.add, grid, THREADS, x, y, length)
    }

    /// `y[i] = x[indices[i]]` for the first `count` indices and rows of `width` elements.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When `indices` or `y` is too short. An index beyond x is not detected.
    pub fn select(
        &self,
        x: &Array<f32>,
        indices: &Array<u32>,
        count: usize,
        width: usize,
        y: &mut Array<f32>,
    ) -> Result<(), CudaError> {
        assert_holds(indices, count, "indices of rows");
        assert_holds(y, count * width, "selected rows");
        if count * width == 0 {
            return Ok(());
        }
        let grid = grid(count, width, THREADS);
        let (x, indices, width, y) = (x.address(), indices.address(), number(width), y.address());
        launch!(self.select_rows, grid, THREADS, x, indices, width, y)
    }

    /// The index of the greatest of each row's `width` elements. Among equals it is the lowest. NaN is never the greatest. A row
    /// without an element greater than -inf has index 0.
    ///
    /// # Errors
    /// As [`embed`](Self::embed).
    ///
    /// # Panics
    /// When an array is too short.
    pub fn argmax(
        &self,
        x: &Array<f32>,
        rows: usize,
        width: usize,
        places: &mut Array<u32>,
    ) -> Result<(), CudaError> {
        assert_holds(x, rows * width, "rows");
        assert_holds(places, rows, "places of the greatest");
        let scratch = self.scratch();
        for (first, rows) in parts(rows, SCRATCH / SHARES / 2) {
            let (x, out) = (at(x, first * width), at(places, first));
            let (values, shares) = (scratch.address(), at(&scratch, rows * SHARES));
            let grid = ((number(rows), 1, 1), (number(rows.div_ceil(32)), 1, 1));
            let (rows, width) = (number(rows), number(width));
            launch!(self.greatest_of_shares, grid.0, SHARES, x, width, values, shares)?;
            launch!(self.greatest_of_rows, grid.1, 32, values, shares, rows, out)?;
        }
        Ok(())
    }

    fn scratch(&self) -> MutexGuard<'_, Array<f32>> {
        // The lock may be poisoned by a panic. No call uses what an earlier one left in the scratch memory.
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Divides rows into parts of at most `most` rows. Gives the first row and the number of rows of each part.
fn parts(rows: usize, most: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(most).map(move |first| (first, most.min(rows - first)))
}
