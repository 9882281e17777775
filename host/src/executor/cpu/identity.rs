//! Which model this is, without reading all of it.

use sha2::{Digest, Sha256};

use super::checkpoint::Checkpoint;
use super::error::LoadError;

/// Bytes of one sample.
const SAMPLE: u64 = 64 << 10;
/// Samples per file.
const SAMPLES: u64 = 16;

/// Hex SHA-256 over config.json and, per weight file in order of first use, its name, size, safetensors header and 16
/// evenly spaced samples of 64 KiB of its data (all of it, where that is no more). Each part is preceded by its length
/// as a little-endian u64.
///
/// It tells models, fine-tunes and conversions apart, since those change weights everywhere; it is no proof against
/// somebody who edits single weights on purpose.
pub(super) fn digest(config: &[u8], checkpoint: &Checkpoint) -> Result<String, LoadError> {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(config);
    let mut sample = vec![0; SAMPLE as usize];
    for file in &checkpoint.files {
        part(file.path.file_name().unwrap_or_default().as_encoded_bytes());
        part(&file.bytes.to_le_bytes());
        part(&file.header);
        let data = file.bytes - file.data_start();
        let mut next = 0;
        for index in 0..SAMPLES {
            let spaced = data.saturating_sub(SAMPLE) / (SAMPLES - 1) * index;
            let start = if data <= SAMPLE * SAMPLES { next } else { spaced };
            let bytes = &mut sample[..SAMPLE.min(data - start) as usize];
            file.read(file.data_start() + start, bytes)?;
            part(bytes);
            next = start + bytes.len() as u64;
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}
