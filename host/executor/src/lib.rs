//! Executors, which compute the scheduler's batches with a model.

pub mod constraint;
pub mod cpu;
pub mod cuda;
pub mod digest;
pub mod group;
pub mod memory;
pub mod model;
pub mod sampling;
mod sync;
pub mod synthetic;
pub mod window;

use std::sync::Arc;

use host_core::pool::{LayerGroup, Retained};
use host_core::window::WindowShape;
use host_core::{Batch, Dtype, KvLayout, SequenceOutput};

pub use constraint::Constraint;
pub use memory::{KvMemory, MemoryError};

/// What the host must know of a model before it can size pools and compare workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Transformer layers.
    pub layers: usize,
    /// KV heads over all ranks.
    pub kv_heads: usize,
    /// Elements of one head.
    pub head_dim: usize,
    /// Token ids are below this.
    pub vocabulary: usize,
    /// Longest sequence that the model was made for.
    pub max_positions: usize,
    /// Element type that the model prefers for its KV.
    pub kv_dtype: Dtype,
    /// Digest of everything that makes this model's KV differ from another's, hex.
    pub weights: String,
    /// Name and version of the math ("cpu-1"): KV from other math is close but not equal.
    pub math: String,
    /// Layers that see the newest tokens only, if there are any.
    pub sliding: Option<Sliding>,
    /// Layers that keep a state instead of KV. It is 0 if layers slide.
    pub state_layers: usize,
}

/// Layers that attend to the newest tokens only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sliding {
    /// How many of the model's layers, fewer than all.
    pub layers: usize,
    /// Tokens that they see, the newest included.
    pub window: usize,
}

impl ModelShape {
    /// Layers in a page of the pool: those that attend to all tokens. They lie there in the model's order.
    #[must_use]
    pub fn page_layers(&self) -> usize {
        self.layers.saturating_sub(self.beside_layers())
    }

    /// Layers that slide or keep a state.
    #[must_use]
    pub fn beside_layers(&self) -> usize {
        self.sliding.map_or(self.state_layers, |sliding| sliding.layers)
    }

    /// Pages of the pool that hold the sliding layers, or the state, of one token page. It is 0 without such layers. The j-th of
    /// these layers, in the model's order, lies in page j / n at layer j % n, where n is [`page_layers`](Self::page_layers).
    #[must_use]
    pub fn window_parts(&self) -> usize {
        self.beside_layers().div_ceil(self.page_layers().max(1))
    }

    /// The model's layers, for the allocator of its pool.
    #[must_use]
    pub fn groups(&self) -> Vec<LayerGroup> {
        let full = LayerGroup { needs: Retained::All, layers: count(self.page_layers()), parts: 1 };
        let needs = match self.sliding {
            Some(sliding) => Retained::Newest(count(sliding.window)),
            None if self.state_layers > 0 => Retained::State,
            None => return vec![full],
        };
        let beside =
            LayerGroup { needs, layers: count(self.beside_layers()), parts: count(self.window_parts()) };
        vec![full, beside]
    }

    /// The window or state that a sequence needs, if some layers do not see all positions.
    #[must_use]
    pub fn window(&self) -> Option<WindowShape> {
        let groups = self.groups();
        let shape = |of: &LayerGroup| match of.needs {
            Retained::Newest(tokens) => Some(WindowShape { tokens, parts: of.parts, layers: of.layers }),
            Retained::State => Some(WindowShape::state(of.parts)),
            Retained::All => None,
        };
        groups.iter().find_map(shape)
    }
}

/// A number of layers or tokens, all of which are far below the limit.
fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Why a forward pass failed. The batch fails and the worker goes on, except after [`Lost`](Self::Lost).
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// This rank cannot compute the batch.
    #[error("the executor failed: {0}")]
    Failed(String),
    /// The device that this rank computes on is lost. The rank computes nothing more, and the worker has to be started again.
    #[error("the executor is lost: {0}")]
    Lost(String),
    /// Another rank could not compute the batch.
    #[error("the executor failed: {0}")]
    Broken(#[from] group::Broken),
    /// There is no memory for the pool.
    #[error("no memory for a KV pool of {bytes} bytes: {error}")]
    NoPool {
        /// Its bytes.
        bytes: usize,
        /// The error of the system or the device.
        error: MemoryError,
    },
}

impl ExecutorError {
    /// There is no memory for a pool of this layout.
    #[must_use]
    pub fn no_pool(layout: &KvLayout, error: impl Into<MemoryError>) -> Self {
        Self::NoPool { bytes: layout.bytes(), error: error.into() }
    }
}

/// Computes batches. Lives on one rank thread, which also owns the rank's KV memory.
///
/// The result for a sequence depends on its tokens, its KV and its sampling alone: never on what else is in the
/// batch, how the prompt was cut into chunks, which pages were used, or how many threads and ranks computed it.
///
/// Each rank of a worker has an executor, made with a seat of one [`group`]. All of them get the same batches in the same order.
/// Each gets a pool ([`Executor::pool`]) with its own KV heads ([`KvMemory::heads`]) and the layers that see all positions
/// ([`ModelShape::page_layers`]). KV of sliding layers is written and read through [`Sequence::window`] alone.
///
/// [`Sequence::window`]: host_core::Sequence::window
pub trait Executor: Send {
    /// The model.
    fn shape(&self) -> &ModelShape;

    /// Sets the constraint on the tokens that the executor draws. It is called before the first batch, on rank 0 alone. An executor
    /// that draws from no logits ignores it.
    fn constrain(&mut self, constraint: Arc<dyn Constraint>) {
        drop(constraint);
    }

    /// A zeroed pool of this layout where the executor computes, whose head 0 is the model's KV head `first_head`.
    ///
    /// # Errors
    /// When there is no memory for it.
    fn pool(&self, layout: KvLayout, first_head: usize) -> Result<KvMemory, ExecutorError> {
        KvMemory::for_heads(layout, first_head).map_err(|error| ExecutorError::no_pool(&layout, error))
    }

    /// Computes one batch: writes the new positions' K and V into `kv`, reads all earlier ones from it, and samples where asked.
    /// Rank 0 returns one output per sequence, in order. The other ranks return none.
    ///
    /// Tells `layers_done` how many layers, counted from the first, have the KV of all new positions in the pool. From
    /// then on the transfer thread may read these layers' rows, and the call writes them no more. Telling is optional. It has a
    /// use only if [`Batch::layer_group`] asks for it.
    ///
    /// # Errors
    /// When the batch cannot be computed. The KV of its new positions is then undefined. The other ranks' calls fail too, unless
    /// they already have everything that they need from this rank.
    fn forward_by_layer(
        &mut self,
        kv: &mut KvMemory,
        batch: &Batch,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<Vec<SequenceOutput>, ExecutorError>;

    /// Whether batches can still be computed, as far as it can be known without one. A worker calls it while there is nothing to
    /// compute.
    ///
    /// # Errors
    /// [`ExecutorError::Lost`] if the device is lost.
    fn check(&mut self) -> Result<(), ExecutorError> {
        Ok(())
    }

    /// Computes one batch and reports no layers.
    ///
    /// # Errors
    /// As [`forward_by_layer`](Executor::forward_by_layer).
    fn forward(&mut self, kv: &mut KvMemory, batch: &Batch) -> Result<Vec<SequenceOutput>, ExecutorError> {
        self.forward_by_layer(kv, batch, &mut |_layers| {})
    }
}

/// A callback that is told how many layers of a batch have their KV in the pool.
///
/// Any thread that computes may call it. It does not wait.
pub type LayersDone<'a> = dyn FnMut(usize) + Send + 'a;
