//! Computes models on an NVIDIA GPU.

use std::path::{Path, PathBuf};

use host_core::{Batch, SequenceOutput};

use super::group::Seat;
use super::{Executor, ExecutorError, KvMemory, LayersDone, ModelShape};

/// How to run a model on a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// The GPU's number.
    pub device: usize,
    /// NVIDIA's run-time compiler, or a folder with it.
    pub nvrtc: Option<PathBuf>,
}

/// Reads what the host must know of a model.
///
/// # Errors
/// When there is no model that can be computed.
pub fn read_shape(model: &Path) -> Result<ModelShape, ExecutorError> {
    Err(ExecutorError::Failed(format!("{} cannot be computed on a GPU yet", model.display())))
}

/// An [`Executor`] for one rank.
pub struct CudaExecutor {
    shape: ModelShape,
}

impl CudaExecutor {
    /// Loads the part of a model that one rank computes.
    ///
    /// # Errors
    /// When that is not possible.
    pub fn load_rank(model: &Path, _options: &CudaOptions, _seat: Seat) -> Result<Self, ExecutorError> {
        read_shape(model).map(|shape| Self { shape })
    }
}

impl Executor for CudaExecutor {
    fn shape(&self) -> &ModelShape {
        &self.shape
    }

    fn forward_by_layer(
        &mut self,
        _kv: &mut KvMemory,
        _batch: &Batch,
        _layers_done: &mut LayersDone<'_>,
    ) -> Result<Vec<SequenceOutput>, ExecutorError> {
        Err(ExecutorError::Failed("nothing is computed on a GPU yet".to_owned()))
    }
}
