//! Settings of staging: when a worker packs small pieces of KV, and how much memory it has for that.

use host_core::KvLayout;
use host_core::staging::{LONGEST_PIECE, MOST_PIECES, piece_limit};
use host_core::transfer::{Cut, StagingMode};
use host_worker::StagingSettings;

use super::Refused;
use super::launch::share;
use super::settings::{Bytes, RoleName, Settings};

/// Lower limit of the memory of a rank. With less, pieces would be no larger than the writes that they replace.
const LEAST: u64 = 64 << 10;
/// Upper limit of the memory of a worker. No link can have so much in flight.
const MOST: u64 = 1 << 40;
/// Upper limit of the knee.
const KNEE: u64 = 1 << 30;

/// Reads `--staging`, `--staging-bytes` and `--staging-knee`.
///
/// # Errors
/// When one of them is out of its bounds, or they contradict each other.
pub fn staging(settings: &Settings) -> Result<StagingSettings, Refused> {
    let mode = settings.staging.unwrap_or(StagingSettings::default().mode);
    let bytes = match settings.staging_bytes {
        None => share::staging_bytes(settings).max(LEAST),
        Some(Bytes(bytes)) => bytes,
    };
    let knee = settings.staging_knee.map(knee).transpose()?;
    if bytes != 0 && !(LEAST..=MOST).contains(&bytes) {
        let (least, most) = (Bytes(LEAST), Bytes(MOST));
        return Err(Refused(format!(
            "--staging-bytes: {bytes} bytes: give {least} to {most}, or 0 for none"
        )));
    }
    if mode == StagingMode::Always && bytes == 0 {
        return Err(Refused("--staging always needs memory: leave --staging-bytes 0 out".into()));
    }
    let too_large =
        |error| Refused(format!("--staging-bytes: {bytes} bytes are too many for this machine: {error}"));
    let bytes = usize::try_from(bytes).map_err(too_large)?;
    let set = [
        ("--staging-knee", knee.is_some()),
        ("--staging-bytes", settings.staging_bytes.is_some()),
        ("--staging", settings.staging.is_some()),
    ];
    let of_no_use =
        |flags: &[&str], why: &str| match set.iter().find(|(flag, set)| *set && flags.contains(flag)) {
            Some((flag, _)) => Err(Refused(format!("{flag} says nothing {why}: leave it out"))),
            None => Ok(()),
        };
    if settings.role == Some(RoleName::Aggregated) {
        of_no_use(
            &["--staging-knee", "--staging-bytes", "--staging"],
            "for an aggregated worker, which sends no pages",
        )?;
    }
    match mode {
        StagingMode::Never => of_no_use(&["--staging-knee", "--staging-bytes"], "with --staging never")?,
        StagingMode::Always => of_no_use(&["--staging-knee"], "with --staging always")?,
        StagingMode::Auto if bytes == 0 => of_no_use(&["--staging-knee"], "with --staging-bytes 0")?,
        StagingMode::Auto => {}
    }
    Ok(StagingSettings { mode, knee, bytes })
}

/// Checks the staging memory of a worker's ranks against their pools, for prompts of up to `max_tokens` tokens.
///
/// # Errors
/// When pieces would be too small, or a prompt would have too many of them.
pub fn check_ranks(staging: &StagingSettings, layouts: &[KvLayout], max_tokens: u32) -> Result<(), Refused> {
    let ranks = layouts.len() as u64;
    let bytes = staging.bytes_of_rank(layouts.len()) as u64;
    if staging.bytes == 0 || staging.mode == StagingMode::Never {
        return Ok(());
    }
    if bytes < LEAST {
        return Err(Refused(format!(
            "--staging-bytes: {} bytes are {bytes} for each of {ranks} ranks: give at least {}, or 0 for none",
            staging.bytes,
            LEAST * ranks
        )));
    }
    layouts.iter().try_for_each(|layout| {
        // All pieces of the prompt for this rank, if the other side has as much memory.
        let shape = layout.shape;
        let block = shape.block_bytes() as u64;
        let pages = (max_tokens as usize).div_ceil(shape.page_tokens);
        let pieces = |bytes| {
            let limit = usize::try_from(piece_limit(bytes, bytes)).ok()?;
            Some(Cut::new(&shape, pages, 0..shape.layers, 0..shape.heads, limit)?.pieces())
        };
        // The other half of the limit is for pieces that end with a part of the prompt or a group of layers.
        let fits = |pieces: usize| pieces <= MOST_PIECES / 2;
        match pieces(bytes) {
            None if staging.mode == StagingMode::Always => Err(Refused(format!(
                "--staging always: one head of one layer of a page has {block} bytes, more than a piece may have with {bytes} \
                 bytes of staging memory for a rank: {}",
                match block > LONGEST_PIECE {
                    true => "lower --page-size".to_owned(),
                    false => format!("raise --staging-bytes to {}", block * 8 * ranks),
                }
            ))),
            Some(count) if !fits(count) => {
                let doubled = std::iter::successors(Some(bytes), |bytes| bytes.checked_mul(2));
                let enough = doubled.take_while(|bytes| *bytes <= MOST).find(|bytes| pieces(*bytes).is_some_and(fits));
                let raise = enough.map(|bytes| format!("raise it to {}, or ", bytes * ranks)).unwrap_or_default();
                Err(Refused(format!(
                    "--staging-bytes: {bytes} bytes of a rank cut a prompt of {max_tokens} tokens into {count} pieces, and {} \
                     may be under way: {raise}lower --max-model-len",
                    MOST_PIECES / 2
                )))
            }
            _ => Ok(()),
        }
    })
}

fn knee(Bytes(knee): Bytes) -> Result<usize, Refused> {
    match usize::try_from(knee) {
        Ok(bytes) if (1..=KNEE).contains(&knee) => Ok(bytes),
        _ => Err(Refused(format!("--staging-knee: {knee} bytes: give 1 to {}", Bytes(KNEE)))),
    }
}
