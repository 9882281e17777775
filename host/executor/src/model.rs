//! Models on disk: configuration, tensors, identity, and the part of them that a rank has.
//!
//! A model is a Hugging Face directory (config.json and safetensors weights) or a GGUF file. [`Checkpoint`] stands for both. The
//! executor decides which memory the weights go to ([`WeightMemory`]).

mod checkpoint;
mod config;
mod error;
mod form;
#[doc(hidden)]
pub mod fuzzing;
mod identity;
mod rotation;
mod shard;
mod weights;

use std::path::Path;

use self::checkpoint::{Checkpoint, GgufWeights, Safetensors};
pub(crate) use self::config::ModelConfig;
pub use self::error::LoadError;
use self::form::Form;
pub(crate) use self::rotation::{Angles, Rotation};
pub(crate) use self::shard::Shards;
pub(crate) use self::weights::{Layer, Loader, MatrixSource, Usage, WeightMemory, Weights};
use crate::ModelShape;

/// The number of query heads of a model. At most as many ranks can share it.
///
/// # Errors
/// When there is no model, or its configuration is not supported.
pub fn read_query_heads(model: &Path) -> Result<usize, LoadError> {
    let config = match Form::of(model)? {
        Form::Directory => config::read(model)?.1,
        Form::Gguf(gguf) => config::read_gguf(model, &gguf)?.1,
    };
    Ok(config.heads)
}

/// A model whose configuration and headers were read.
pub(crate) struct Opened {
    pub config: ModelConfig,
    pub checkpoint: Checkpoint,
    /// Digest of everything that makes this model's KV differ from another's, hex.
    pub identity: String,
}

impl Opened {
    /// Reads configuration, headers and identity of the model at this path.
    ///
    /// # Errors
    /// When there is no model, or it is of an unknown kind. Faults that only the tensors show are not found.
    pub fn at(model: &Path) -> Result<Self, LoadError> {
        match Form::of(model)? {
            Form::Directory => {
                let (bytes, config) = config::read(model)?;
                let files = Safetensors::open(model)?;
                let identity = identity::of_directory(&bytes, &files)?;
                Ok(Self { config, checkpoint: Checkpoint::Safetensors(files), identity })
            }
            Form::Gguf(gguf) => {
                let (architecture, config) = config::read_gguf(model, &gguf)?;
                let file = GgufWeights::new(model, gguf, architecture, &config)?;
                let identity = identity::of_gguf(&file)?;
                Ok(Self { config, checkpoint: Checkpoint::Gguf(file), identity })
            }
        }
    }

    /// The shape of the model when it is computed with this math.
    pub fn shape(&self, math: &str) -> ModelShape {
        let config = &self.config;
        ModelShape {
            layers: config.layers,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            vocabulary: config.vocabulary,
            max_positions: config.max_positions,
            kv_dtype: config.kv_dtype,
            weights: self.identity.clone(),
            math: math.to_owned(),
            sliding: config.sliding(),
            state_layers: 0,
        }
    }
}
