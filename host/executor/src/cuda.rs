//! Computes Qwen3 and Llama models on a GPU, through NVIDIA's driver.
//!
//! There are two kinds of math. Exact math gives the bits of the CPU executor, so that workers of both kinds can exchange pages.
//! Tensor math rounds activations to bf16 and multiplies on tensor cores. Its bits differ from the CPU's, but they do not depend on
//! the batch, the chunks or the pages either. Weights, activations and the pool lie in the device's memory. Logits come to the
//! host, where tokens are drawn as the CPU executor draws them.
//!
//! The build needs nothing of CUDA. The driver and NVRTC are loaded when an executor is loaded.

mod arrays;
mod exact;
mod tensor;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use host_core::{Batch, Dtype, KvLayout, Sampled, Sampling, Sequence, SequenceOutput};
use host_kernels::cuda::batch::KvView;
use host_kernels::cuda::{Array, CudaError, CudaStream, Device};

use self::exact::ExactModel;
use self::tensor::{BatchResult, TensorModel};
use super::group::Seat;
use super::model::{LoadError, ModelConfig, Opened, Shards};
use super::sampling::{outputs, outputs_from};
use super::{Constraint, Executor, ExecutorError, KvMemory, LayersDone, ModelShape, cpu, window};

/// Name and version of the math on tensor cores. Raise the version whenever a change alters any bit of KV or logits.
pub const TENSOR_MATH: &str = "cuda-bf16-1";

/// How a GPU computes a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CudaMath {
    /// On tensor cores if model and device allow it, otherwise exact.
    #[default]
    Auto,
    /// With the bits of the CPU executor.
    Exact,
    /// On tensor cores, with weights and activations in bf16.
    Tensor,
}

impl CudaMath {
    /// All kinds of math.
    pub const ALL: [CudaMath; 3] = [CudaMath::Auto, CudaMath::Exact, CudaMath::Tensor];

    /// The name in options.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            CudaMath::Auto => "auto",
            CudaMath::Exact => "exact",
            CudaMath::Tensor => "tensor",
        }
    }
}

/// Where a model is computed, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// Number of the device.
    pub device: usize,
    /// NVRTC's library, or a folder with it. If absent, the library is looked for where the system's loader looks.
    pub nvrtc: Option<PathBuf>,
    /// The math.
    pub math: CudaMath,
    /// Most ranks that share the model, in this worker or in a worker that it exchanges pages with. Tensor math allows one rank
    /// only.
    pub ranks: usize,
}

/// Reads the shape of a model that this device is to compute.
///
/// # Errors
/// When there is no such device, no model, or [`CudaExecutor`] could not compute the model.
pub fn read_shape(model: &Path, options: &CudaOptions) -> Result<ModelShape, LoadError> {
    let device = Device::open(options.device, options.nvrtc.as_deref())?;
    let opened = Opened::at(model)?;
    check(model, &opened)?;
    let math = math(model, options.math, &device, &opened, options.ranks)?;
    Ok(opened.shape(math))
}

/// Name and version of the math that this model is computed with.
fn math(
    model: &Path,
    wanted: CudaMath,
    device: &Device,
    opened: &Opened,
    ranks: usize,
) -> Result<&'static str, LoadError> {
    let config = &opened.config;
    let reasons = [
        (device.capability() != 90, "a device of another compute capability than 9.0"),
        (ranks > 1, "more than one rank"),
        (
            !tensor::fits(config),
            "sizes that the kernels do not have (heads of 64 or 128 elements, at most 16 query heads for a KV head, at most 16384 elements in a row, SiLU, multiples of 16)",
        ),
        (config.kv_dtype != Dtype::Bf16, "KV in f32"),
    ];
    match (wanted, reasons.iter().find(|(is_there, _)| *is_there)) {
        (CudaMath::Exact, _) | (CudaMath::Auto, Some(_)) => Ok(cpu::MATH),
        (CudaMath::Auto | CudaMath::Tensor, None) => Ok(TENSOR_MATH),
        (CudaMath::Tensor, Some((_, reason))) => {
            Err(LoadError::NoTensorMath { model: model.to_owned(), reason })
        }
    }
}

/// A rank's part of a model, in exact math or in tensor math.
enum Model {
    Exact(Box<ExactModel>),
    Tensor(Box<TensorModel>),
}

/// An [`Executor`] for one rank, which holds its part of the model in a device's memory.
pub struct CudaExecutor {
    shape: ModelShape,
    device: Arc<Device>,
    /// Nothing is ever put into it: waiting for it only asks for the state of the device.
    idle: Arc<CudaStream>,
    model: Model,
    seat: Seat,
    constraint: Option<Arc<dyn Constraint>>,
}

impl CudaExecutor {
    /// Loads the part of a model that one rank computes.
    ///
    /// # Errors
    /// As [`read_shape`]. Also when a file cannot be read, the model has fewer query heads than there are ranks, or it does not fit
    /// in the device's memory.
    pub fn load_rank(model: &Path, options: &CudaOptions, seat: Seat) -> Result<Self, LoadError> {
        let device = Device::open(options.device, options.nvrtc.as_deref())?;
        let opened = Opened::at(model)?;
        check(model, &opened)?;
        let math = math(model, options.math, &device, &opened, options.ranks.max(seat.ranks()))?;
        let shape = opened.shape(math);
        if seat.ranks() > opened.config.heads {
            return Err(LoadError::Ranks {
                directory: model.to_owned(),
                heads: opened.config.heads,
                ranks: seat.ranks(),
            });
        }
        let shards = Shards::new(&opened.config, seat.ranks(), seat.rank());
        let model = match math {
            TENSOR_MATH => Model::Tensor(Box::new(TensorModel::load(&device, opened, shards)?)),
            _ => Model::Exact(Box::new(ExactModel::load(&device, opened, shards)?)),
        };
        Ok(Self { shape, idle: device.stream()?, device, model, seat, constraint: None })
    }

    /// Computes a batch and returns the logits of all its tokens, `[token][vocabulary]`, instead of sampling. Ranks other than 0
    /// return nothing. It is for tests and for scoring text.
    ///
    /// # Errors
    /// As [`Executor::forward`].
    pub fn forward_logits(&mut self, kv: &mut KvMemory, batch: &Batch) -> Result<&[f32], ExecutorError> {
        let mut turn = self.seat.turn()?;
        let wanted = |sequence: &Sequence| sequence.tokens.len();
        let logits = match &mut self.model {
            Model::Exact(model) => model.forward(&mut turn, kv, batch, wanted)?,
            Model::Tensor(model) => match model.forward(kv, batch, wanted, false, &mut |_layers| {})? {
                BatchResult::Logits(logits) => logits,
                BatchResult::Likeliest(_) => &[],
            },
        };
        turn.finish();
        Ok(logits)
    }
}

impl Executor for CudaExecutor {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn pool(&self, layout: KvLayout, first_head: usize) -> Result<KvMemory, ExecutorError> {
        KvMemory::on_device(layout, first_head, &self.device)
            .map_err(|error| ExecutorError::no_pool(&layout, error))
    }

    fn constrain(&mut self, constraint: Arc<dyn Constraint>) {
        self.constraint = Some(constraint);
    }

    fn check(&mut self) -> Result<(), ExecutorError> {
        Ok(self.device.wait(&self.idle)?)
    }

    fn forward_by_layer(
        &mut self,
        kv: &mut KvMemory,
        batch: &Batch,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<Vec<SequenceOutput>, ExecutorError> {
        // This comes first, because the other ranks learn only of failures after it.
        let mut turn = self.seat.turn()?;
        let constraint = self.constraint.as_deref().filter(|_| turn.rank() == 0);
        if let Some(constraint) = constraint {
            constraint.begins(batch);
        }
        let found = match &mut self.model {
            Model::Exact(model) => {
                BatchResult::Logits(model.forward(&mut turn, kv, batch, Sequence::wanted_rows)?)
            }
            Model::Tensor(model) => {
                let likeliest = batch.sequences.iter().all(|sequence| draws_likeliest(sequence, constraint));
                model.forward(kv, batch, Sequence::wanted_rows, likeliest, layers_done)?
            }
        };
        turn.finish();
        // The device has done all work of the batch.
        layers_done(self.shape.layers);
        if self.seat.rank() > 0 {
            return Ok(Vec::new());
        }
        let vocabulary = self.shape.vocabulary;
        Ok(match &found {
            BatchResult::Likeliest(tokens) => outputs(&batch.sequences, None, |_, row, _, _| {
                Ok(Sampled { token: tokens[row], logprob: None, top: Vec::new() })
            }),
            BatchResult::Logits(logits) => outputs_from(logits, vocabulary, &batch.sequences, constraint),
        })
    }
}

/// Whether a sequence draws the likeliest token, and needs nothing else of its logits.
fn draws_likeliest(sequence: &Sequence, constraint: Option<&dyn Constraint>) -> bool {
    let plain = sequence.sample.as_ref().is_none_or(|draw| {
        let Sampling { temperature, logprobs, shaping, .. } = &draw.sampling;
        *temperature <= 0.0 && logprobs.is_none() && shaping.is_none()
    });
    plain && sequence.scored.is_none() && !constraint.is_some_and(|constraint| constraint.limits(sequence))
}

/// Refuses a model that only the CPU executor computes.
fn check(model: &Path, opened: &Opened) -> Result<(), LoadError> {
    let config = &opened.config;
    let unsupported = [
        (config.sliding.is_some(), "layers with a sliding window"),
        (config.output_norms, "norms after attention and MLP"),
        (config.embedding_scale.is_some(), "a scale of the embedding"),
    ];
    match unsupported.iter().find(|(has, _)| *has) {
        Some((_, feature)) => Err(LoadError::NotOnGpu { model: model.to_owned(), feature }),
        None => Ok(()),
    }
}

impl From<CudaError> for ExecutorError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Lost { .. } => ExecutorError::Lost(error.to_string()),
            _ => ExecutorError::Failed(error.to_string()),
        }
    }
}

/// Refuses a batch that cannot be computed, before anything is written. Returns the address of the pool.
fn checked_pool(
    config: &ModelConfig,
    shards: &Shards,
    kv: &KvMemory,
    batch: &Batch,
) -> Result<u64, ExecutorError> {
    let shape = kv.layout().shape;
    let found = (shape.layers, kv.heads(), shape.head_dim);
    let wanted = (config.layers, shards.kv_heads.clone(), config.head_dim);
    if found != wanted {
        return Err(ExecutorError::Failed(format!(
            "the KV pool has (layers, heads, head dim) {found:?}, this rank of the model {wanted:?}"
        )));
    }
    for sequence in &batch.sequences {
        window::check_tokens(sequence, config.max_positions, config.vocabulary)
            .and_then(|()| window::check(sequence, &shape, None))
            .map_err(|why| ExecutorError::Failed(format!("room {}: {why}", sequence.room)))?;
    }
    kv.device()
        .map(Array::address)
        .ok_or_else(|| ExecutorError::Failed("the KV pool is not in the memory of a device".to_owned()))
}

/// Where a layer's K and V lie in a pool at this address.
fn view(layout: &KvLayout, pool: u64, layer: usize) -> KvView {
    let [keys, values] = &layout.sides;
    let both = |value: fn(&host_core::layout::Strides) -> usize| [value(keys) as u64, value(values) as u64];
    let start = [keys, values].map(|side| pool + (side.start + layer * side.layer) as u64);
    KvView {
        start,
        page: both(|side| side.page),
        head: both(|side| side.head),
        token: both(|side| side.token),
        page_tokens: layout.shape.page_tokens as u32,
        element: element_bytes(layout.shape.dtype),
    }
}

/// Bytes of an element of the pool.
fn element_bytes(dtype: Dtype) -> u32 {
    match dtype {
        Dtype::F32 => 4,
        Dtype::Bf16 => 2,
    }
}
