//! When a worker packs small pieces of KV, and in how much memory.

use host_core::transfer::StagingMode;

use super::Refused;
use super::settings::{Settings, parse_bytes};
use crate::worker::Staging;

/// Least memory: with less, pieces are no larger than what they are made of.
const LEAST: u64 = 64 << 10;
/// Most memory, far beyond what a link can have under way.
const MOST: u64 = 1 << 40;
/// Largest knee.
const KNEE: u64 = 1 << 30;

/// Reads `--staging`, `--staging-bytes` and `--staging-knee`.
///
/// # Errors
/// When one of them is not what it should be, or they contradict each other.
pub fn staging(settings: &Settings) -> Result<Staging, Refused> {
    let default = Staging::default();
    let mode: StagingMode = match settings.staging.as_deref() {
        None => default.mode,
        Some(word) => word.parse().map_err(|error| Refused(format!("--staging: {error}")))?,
    };
    let bytes = match settings.staging_bytes.as_deref() {
        None => default.bytes as u64,
        Some(text) => parsed("--staging-bytes", text)?,
    };
    let knee = settings.staging_knee.as_deref().map(knee).transpose()?;
    if bytes != 0 && !(LEAST..=MOST).contains(&bytes) {
        return Err(Refused(format!("--staging-bytes: {bytes} bytes: give 64KiB to 1024GiB, or 0 for none")));
    }
    if mode == StagingMode::Always && bytes == 0 {
        return Err(Refused("--staging always needs memory: leave --staging-bytes 0 out".into()));
    }
    let too_large =
        |error| Refused(format!("--staging-bytes: {bytes} bytes are too many for this machine: {error}"));
    let bytes = usize::try_from(bytes).map_err(too_large)?;
    Ok(Staging { mode, knee, bytes })
}

fn parsed(flag: &str, text: &str) -> Result<u64, Refused> {
    parse_bytes(text).map_err(|error| Refused(format!("{flag}: {error}")))
}

fn knee(text: &str) -> Result<usize, Refused> {
    let knee = parsed("--staging-knee", text)?;
    match usize::try_from(knee) {
        Ok(bytes) if (1..=KNEE).contains(&knee) => Ok(bytes),
        _ => Err(Refused(format!("--staging-knee: {knee} bytes: give 1 to 1GiB"))),
    }
}
