//! Entry points for fuzzing: readers of model files, as functions of bytes.
//!
//! Each function returns whether the bytes were accepted. No bytes may make it panic.

use std::path::{Path, PathBuf};

use super::checkpoint::{parse_index, safetensors_header};
use super::config;

/// A safetensors file.
#[must_use]
pub fn safetensors(bytes: &[u8]) -> bool {
    safetensors_header(Path::new("model.safetensors"), bytes)
}

/// A `model.safetensors.index.json`.
#[must_use]
pub fn safetensors_index(bytes: &[u8]) -> bool {
    parse_index(Path::new("model.safetensors.index.json"), bytes).is_ok()
}

/// A `config.json`.
#[must_use]
pub fn config_json(bytes: &[u8]) -> bool {
    config::parse(PathBuf::from("config.json"), bytes).is_ok()
}
