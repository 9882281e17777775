//! Which model this is, without reading all of it.

use sha2::{Digest, Sha256};

use super::checkpoint::{GgufWeights, Safetensors};
use super::error::LoadError;

/// Bytes of one sample.
const SAMPLE: u64 = 64 << 10;
/// Samples per file.
const SAMPLES: u64 = 16;

/// Bytes of a GGUF file's header that are hashed at once.
const PIECE: u64 = 1 << 20;

/// Hex SHA-256 over config.json and, per weight file in order of first use, its name, size, safetensors header and 16
/// evenly spaced samples of 64 KiB of its data (all of it, where that is no more). Each part is preceded by its length
/// as a little-endian u64.
///
/// It tells models, fine-tunes and conversions apart, since those change weights everywhere; it is no proof against
/// single weights that were edited on purpose.
pub(super) fn of_directory(config: &[u8], weights: &Safetensors) -> Result<String, LoadError> {
    let mut digest = PartDigest::default();
    digest.part(config);
    for file in &weights.files {
        digest.part(file.path.file_name().unwrap_or_default().as_encoded_bytes());
        digest.part(&file.bytes.to_le_bytes());
        digest.part(&file.header);
        digest.samples(file.data_start(), file.bytes, |start, bytes| file.read(start, bytes))?;
    }
    Ok(digest.hex())
}

/// The same over a GGUF file: the text `gguf`, its size, everything before its data, and samples of its data. Its name is
/// not part of it, since it is one file that carries its own configuration.
pub(super) fn of_gguf(weights: &GgufWeights) -> Result<String, LoadError> {
    let gguf = &weights.gguf;
    let read = |start, bytes: &mut [u8]| {
        let refused = |source| LoadError::Gguf { file: weights.path.clone(), source };
        gguf.read_at(start, bytes).map_err(refused)
    };
    let mut digest = PartDigest::default();
    digest.part(b"gguf");
    digest.part(&gguf.size().to_le_bytes());
    // A file without tensors may end before its padding does.
    let data_start = gguf.data_start().min(gguf.size());
    let mut piece = vec![0; PIECE.min(data_start) as usize];
    let mut start = 0;
    while start < data_start {
        let bytes = &mut piece[..PIECE.min(data_start - start) as usize];
        read(start, bytes)?;
        digest.part(bytes);
        start += bytes.len() as u64;
    }
    digest.samples(data_start, gguf.size(), read)?;
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

    /// Samples of what lies from `first` to `end` of a file.
    fn samples(
        &mut self,
        first: u64,
        end: u64,
        read: impl Fn(u64, &mut [u8]) -> Result<(), LoadError>,
    ) -> Result<(), LoadError> {
        let data = end - first;
        let mut sample = vec![0; SAMPLE as usize];
        let mut next = 0;
        for index in 0..SAMPLES {
            let spaced = data.saturating_sub(SAMPLE) / (SAMPLES - 1) * index;
            let start = if data <= SAMPLE * SAMPLES { next } else { spaced };
            let bytes = &mut sample[..SAMPLE.min(data - start) as usize];
            read(first + start, bytes)?;
            self.part(bytes);
            next = start + bytes.len() as u64;
        }
        Ok(())
    }

    fn hex(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
