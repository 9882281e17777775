//! Why a model could not be loaded.

use std::path::PathBuf;

/// A model that cannot be loaded. Every variant names the file or the directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The system could not read a file.
    #[error("cannot read {file}: {source}")]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Neither a model directory nor a GGUF file.
    #[error(
        "no model at {path}: {found}; give a Hugging Face directory (config.json, safetensors, tokenizer.json) or a .gguf file"
    )]
    NoModel {
        /// The path where a model should be.
        path: PathBuf,
        /// What is there.
        found: String,
    },
    /// A GGUF file that cannot be read.
    #[error("{file}: {source}")]
    Gguf {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        source: host_gguf::Error,
    },
    /// A tensor that would change the computation, in a way that the executor does not know.
    #[error(
        "{file}: tensor {tensor} is none that the cpu executor knows of {architecture} models, and leaving it out would change \
         the model"
    )]
    UnknownTensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The architecture that the file names.
        architecture: &'static str,
    },
    /// No weights in the directory.
    #[error(
        "no weights in {directory}: expected model.safetensors, or model.safetensors.index.json with its shards"
    )]
    NoWeights {
        /// The model directory.
        directory: PathBuf,
    },
    /// A file that is not JSON, or JSON without the expected content.
    #[error("cannot parse {file}: {reason}")]
    Parse {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A configuration value that is absent, of the wrong kind or out of range.
    #[error("{file}: {key} is {found}, expected {expected}")]
    Config {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// A model, or a feature of one, that this executor does not compute.
    #[error("{file}: {key} is {found}, which the cpu executor does not support; it supports {supported}")]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What is supported.
        supported: String,
    },
    /// A tensor that the model needs and the file lacks.
    #[error("{file} has no tensor {tensor}")]
    MissingTensor {
        /// The file, or the index of a sharded model.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor whose shape does not follow from the model's configuration.
    #[error(
        "{file}: tensor {tensor} has shape {found:?}, but the model's configuration asks for {expected:?}"
    )]
    Shape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that the configuration asks for.
        expected: Vec<usize>,
    },
    /// A tensor of an element type that we do not read.
    #[error("{file}: tensor {tensor} has element type {found}, expected {expected}")]
    ElementType {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its element type.
        found: String,
        /// What it may be.
        expected: String,
    },
    /// A file that ends before its last tensor does.
    #[error(
        "{file} is truncated: its header describes {expected} bytes, the file has {found}; download it again"
    )]
    Truncated {
        /// The file.
        file: PathBuf,
        /// Bytes that the header describes.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// More ranks than can share the model.
    #[error(
        "the model {directory} has {heads} query heads, which {ranks} ranks cannot share: use at most {heads}"
    )]
    Ranks {
        /// The model.
        directory: PathBuf,
        /// Its query heads.
        heads: usize,
        /// The ranks.
        ranks: usize,
    },
    /// The math threads could not be started.
    #[error("cannot start {threads} math threads: {source}")]
    Threads {
        /// The requested number of threads.
        threads: usize,
        /// The system's error.
        source: std::io::Error,
    },
    /// A model that only the CPU executor computes.
    #[error("{model} has {feature}, which the cuda executor does not compute: use --executor cpu")]
    NotOnGpu {
        /// The model.
        model: PathBuf,
        /// The feature that the cuda executor does not compute.
        feature: &'static str,
    },
    /// Tensor cores were requested, but the model cannot be computed on them.
    #[error("{model} cannot be computed on tensor cores: there is {reason}; use --cuda-math exact")]
    NoTensorMath {
        /// The model.
        model: PathBuf,
        /// The property of the model or the device that prevents it.
        reason: &'static str,
    },
    /// An error of the device, its driver or its compiler.
    #[error(transparent)]
    Device(#[from] host_kernels::cuda::CudaError),
}
