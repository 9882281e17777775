//! The identity of a model: a digest of all its content.

mod content;
mod known;

use sha2::{Digest, Sha256};

use self::known::Known;
use super::checkpoint::{GgufWeights, Safetensors};
use super::error::LoadError;

/// Hex SHA-256 over config.json and, per weight file in order of first use, its name and the digest of its
/// [content](content). Each part is preceded by its length as a little-endian u64.
pub(crate) fn of_directory(config: &[u8], weights: &Safetensors) -> Result<String, LoadError> {
    let known = Known::of_user();
    let mut digest = PartDigest::default();
    digest.part(config);
    for file in &weights.files {
        digest.part(file.path.file_name().unwrap_or_default().as_encoded_bytes());
        digest.part(&known.digest(&file.path, &file.file)?);
    }
    Ok(digest.hex())
}

/// Hex SHA-256 over a GGUF file: the text `gguf` and the digest of its content, each preceded by its length. The file's name is
/// not part of it, because one file carries the weights and the configuration.
pub(crate) fn of_gguf(weights: &GgufWeights) -> Result<String, LoadError> {
    let mut digest = PartDigest::default();
    digest.part(b"gguf");
    digest.part(&Known::of_user().digest(&weights.path, weights.gguf.source())?);
    Ok(digest.hex())
}

/// A digest of parts, each after its length.
#[derive(Default)]
struct PartDigest(Sha256);

impl PartDigest {
    fn part(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn hex(self) -> String {
        hex(&self.0.finalize())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
