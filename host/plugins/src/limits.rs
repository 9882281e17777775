//! Checks the limits of an instance before the host relies on them.

use host_plugin_api::{Error, ErrorCode, StorageTier, TierLimits, TransferBackend, TransferLimits};

/// The limits of a transfer backend.
///
/// # Errors
/// A clause that says that the backend can carry nothing. If `limits` panicked, the clause has the text of the panic.
pub fn of_transfer(backend: &dyn TransferBackend) -> Result<TransferLimits, String> {
    let limits = backend.limits();
    match limits.max_writes == 0 || limits.max_submissions == 0 {
        true => Err(panicked(|| backend.endpoint().err())
            .unwrap_or_else(|| format!("it can carry nothing: {limits:?}"))),
        false => Ok(limits),
    }
}

/// The limits of a storage tier.
///
/// # Errors
/// As for [a transfer backend](of_transfer).
pub fn of_tier(tier: &dyn StorageTier) -> Result<TierLimits, String> {
    let limits = tier.limits();
    let TierLimits { max_pages, max_batches, max_value, alignment, .. } = limits;
    match max_pages == 0 || max_batches == 0 || max_value == 0 || alignment == 0 {
        true => {
            Err(panicked(|| tier.usage().err())
                .unwrap_or_else(|| format!("it can store nothing: {limits:?}")))
        }
        false => Ok(limits),
    }
}

/// Says that `limits` panicked, if another call reports it: after its first panic an instance answers every call with `PANICKED`.
fn panicked(asked: impl FnOnce() -> Option<Error>) -> Option<String> {
    let error = asked().filter(|error| error.code == ErrorCode::PANICKED)?;
    // A panic's text may have several lines. The clause has one.
    let text = error.message.split_whitespace().collect::<Vec<_>>().join(" ");
    Some(format!("limits answered PANICKED ({text})"))
}
