//! Bounds of numbers that do not depend on other settings.

use super::{Refused, refused};
use crate::cli::settings::Settings;

/// Shortest target for the time between tokens: in a shorter step scheduling takes longer than computing.
const SHORTEST_TARGET_MS: f64 = 0.1;
/// Longest target for the time between tokens.
const LONGEST_TARGET_MS: f64 = 60_000.0;
/// Limit of the threads of a worker.
const MOST_THREADS: usize = 1024;
/// Limit of the prompt tokens in one step, which is more than any context.
const MOST_CHUNK_TOKENS: u32 = 1 << 24;
/// Limit of the sequences in one step.
const MOST_BATCH: u32 = 1 << 14;
/// Limit of the requests with pages. Each takes a row of memory beside the pool, which is allocated at the start.
const MOST_RUNNING: u32 = 1 << 15;
/// Limit of the requests in the queue. Each holds its prompt.
const MOST_QUEUED: u32 = 1 << 20;
/// Longest time for a request: a week.
const MOST_SECONDS: u32 = 7 * 24 * 3600;
/// Limit of the bodies in transit at once. Each has a connection, or a stream of one.
const MOST_UPLOADS: u32 = 1 << 20;
/// Longest wait for a client.
const MOST_SECONDS_OF_CLIENTS: u32 = 24 * 3600;
/// Limit of the guesses for an answer in a step. All of them are computed, right or wrong.
const MOST_DRAFT_TOKENS: u32 = 128;
/// Limit of the tokens in a page.
const MOST_PAGE_TOKENS: u32 = 1 << 16;

/// Checks that every number is within its bounds.
///
/// # Errors
/// When a number is out of its bounds. The error has the bounds.
pub(super) fn check(settings: &Settings) -> Result<(), Refused> {
    for (flag, value, most) in [
        ("--chunk-tokens", settings.chunk_tokens, MOST_CHUNK_TOKENS),
        ("--max-batch", settings.max_batch, MOST_BATCH),
        ("--max-running", settings.max_running, MOST_RUNNING),
        ("--max-queued", settings.max_queued, MOST_QUEUED),
        ("--page-size", settings.page_size, MOST_PAGE_TOKENS),
        ("--pool-pages", settings.pool_pages, u32::MAX),
        ("--max-model-len", settings.max_model_len, u32::MAX),
        ("--reserved-decode-tokens", settings.reserved_decode_tokens, u32::MAX),
        ("--draft-tokens", settings.draft_tokens, MOST_DRAFT_TOKENS),
        ("--max-requests", settings.max_requests, MOST_QUEUED),
        ("--max-uploads", settings.max_uploads, MOST_UPLOADS),
        ("--body-timeout", settings.body_timeout, MOST_SECONDS_OF_CLIENTS),
        ("--idle-timeout", settings.idle_timeout, MOST_SECONDS_OF_CLIENTS),
        ("--request-timeout", settings.request_timeout, MOST_SECONDS),
        ("--stream-keep-alive", settings.stream_keep_alive, MOST_SECONDS_OF_CLIENTS),
        ("--transfer-timeout", settings.transfer_timeout, MOST_SECONDS),
        ("--retry-timeout", settings.retry_timeout, MOST_SECONDS),
        ("--default-max-tokens", settings.default_max_tokens, u32::MAX),
    ] {
        if value.is_some_and(|value| value == 0 || value > most) {
            let value = value.unwrap_or_default();
            return Err(refused(format!("{flag} is {value}: it must be 1 to {most}")));
        }
    }
    if settings.draft_tokens.is_some() && settings.speculate.is_none() {
        return Err(refused(
            "--draft-tokens has no effect without --speculate: give --speculate ngram, too, or leave --draft-tokens out",
        ));
    }
    if let Some(target) = settings.target_itl_ms
        && !(SHORTEST_TARGET_MS..=LONGEST_TARGET_MS).contains(&target)
    {
        return Err(refused(format!(
            "--target-itl-ms is {target}: it must be {SHORTEST_TARGET_MS} to {LONGEST_TARGET_MS}"
        )));
    }
    if settings.threads.is_some_and(|threads| threads == 0 || threads > MOST_THREADS) {
        return Err(refused(format!(
            "--threads must be 1 to {MOST_THREADS}: more than there are cores gain nothing"
        )));
    }
    Ok(())
}
