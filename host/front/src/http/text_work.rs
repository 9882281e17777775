//! Where bodies are parsed, templates rendered and texts tokenized: on threads of their own, a few at a time.
//!
//! A client that hangs up does not stop the work of a thread, so the work holds its permit itself. What clients abandon can
//! therefore take no more memory and no more threads than what they wait for.
//!
//! The bytes that wait or are worked on have a limit, and each client has a share of it: one that sends prompts faster than they
//! are read is told so, and the queue stays short for the others.

use std::sync::Arc;
use std::thread::available_parallelism;

use tokio::sync::Semaphore;

use super::error::ApiError;
use crate::audit::Refusal;
use crate::shares::{Client, NoShare, Share, Shares};

/// Bodies up to this many bytes are short: some milliseconds of work each. They do not wait for long ones.
const SHORT: usize = 16 << 10;
/// Short bodies worked on at once at most, for every thread that runs at once: some read and wait, most compute.
const SHORT_PER_THREAD: usize = 4;
/// Long bodies worked on at once at most. One of 8 MiB may take hundreds of megabytes.
const LONG_AT_ONCE: usize = 8;

/// Permits for work on text.
#[derive(Clone, Debug)]
pub struct TextWork {
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    bytes: Shares,
}

impl TextWork {
    /// As much at once as this machine has threads for; so many bytes that wait or are worked on.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        let threads = available_parallelism().map_or(1, usize::from);
        Self {
            short: Arc::new(Semaphore::new(threads * SHORT_PER_THREAD)),
            long: Arc::new(Semaphore::new(threads.min(LONG_AT_ONCE))),
            bytes: Shares::new(bytes),
        }
    }

    /// Bytes that wait or are worked on.
    pub(super) fn taken(&self) -> usize {
        self.bytes.taken()
    }

    /// A client's share for a body of so many bytes.
    ///
    /// # Errors
    /// When it and what else waits is more than the client's share, or than all.
    pub(super) fn take(&self, client: &Client, bytes: usize) -> Result<Share, ApiError> {
        self.bytes.take(client, bytes).map_err(|why| match why {
            NoShare::Full => {
                let message = "as much text as this server takes waits to be read".to_owned();
                ApiError::full(message, Refusal::AllText)
            }
            NoShare::Client => ApiError::over_share("bytes of requests that wait to be read", Refusal::Text),
        })
    }

    /// Does work on a body for whose bytes there is a share, which is held as long as the body is. Dropping the future leaves the
    /// queue; work that has begun goes on to its end.
    ///
    /// # Errors
    /// The work's own, and an internal error when it panics.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        share: Share,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let permits = if share.amount() <= SHORT { &self.short } else { &self.long };
        let failed =
            |error: &dyn std::fmt::Display| ApiError::internal(format!("the tokenizer failed: {error}"));
        let permit = Arc::clone(permits).acquire_owned().await.map_err(|closed| failed(&closed))?;
        let done = tokio::task::spawn_blocking(move || {
            let done = work();
            drop((share, permit));
            done
        });
        done.await.map_err(|error| failed(&error))?
    }
}
