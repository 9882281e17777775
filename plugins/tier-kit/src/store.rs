//! The store, which the author of a tier writes.

use host_plugin_api::{Error, ErrorCode, Key, Result, TierLimits, TierUsage};

/// A store of values by keys.
///
/// Threads: [`Limits::threads`] threads call `get`, `put`, `exists` and `delete` at once, at most [`Limits::writers`] of
/// them `put` or `delete`. Threads of the host call `scan` and `usage`. All calls may block.
///
/// An error ends that page with the error's code. The other pages of the batch go on. Errors are logged, except for
/// `NO_RESOURCE`, which says that the store is full, and `INVALID_ARGUMENT`.
pub trait Store: Send + Sync + 'static {
    /// Reads a value. Returns `true` when all of `to` is its value, `false` when the key is not there and `to` is unchanged.
    ///
    /// # Errors
    /// [`other_length`] when the value is not as long as `to`, which has 1 to [`Limits::max_value`] bytes. Else the
    /// error that occurred. `to` may have been written in part.
    fn get(&self, key: &Key, to: &mut [u8]) -> Result<bool>;

    /// Stores a value. A value never changes, so a key that is there may be left alone. A reader sees all of the value or
    /// none of it, also after a crash.
    ///
    /// # Errors
    /// `NO_RESOURCE` when the store is full, or the error that occurred.
    fn put(&self, key: &Key, from: &[u8]) -> Result<()>;

    /// The length of a value in bytes, or `None` when the key is not there. 0 stands for a length that is not known.
    ///
    /// # Errors
    /// The error that occurred.
    fn exists(&self, key: &Key) -> Result<Option<u64>>;

    /// Removes a value. Answers as [`exists`](Store::exists) did before.
    ///
    /// # Errors
    /// The error that occurred.
    fn delete(&self, key: &Key) -> Result<Option<u64>>;

    /// Writes the next keys after `after` into `keys`, in the order of their bytes, and returns how many. A number that
    /// is less than the length of `keys` ends the scan.
    ///
    /// # Errors
    /// `UNSUPPORTED` when the store cannot list, or the error that occurred.
    fn scan(&self, after: Option<&Key>, keys: &mut [Key]) -> Result<usize> {
        let _ = (after, keys);
        Err(Error::new(ErrorCode::UNSUPPORTED, "the store cannot list its keys"))
    }

    /// How much is stored now.
    ///
    /// # Errors
    /// `UNSUPPORTED` when the store does not count, or the error that occurred.
    fn usage(&self) -> Result<TierUsage> {
        Err(Error::new(ErrorCode::UNSUPPORTED, "the store does not count its values"))
    }
}

/// The error of a [`get`](Store::get) for another length than the value's.
pub fn other_length(stored: u64, wanted: usize) -> Error {
    let text = format!("the value has {stored} bytes, {wanted} were requested");
    Error::new(ErrorCode::INVALID_ARGUMENT, text)
}

/// How much a tier takes at once. The queue takes 72 bytes for each of `max_pages` times `max_batches` when the tier opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Longest value, in bytes.
    pub max_value: u64,
    /// Offsets and lengths are multiples of this many bytes.
    pub alignment: u64,
    /// Most pages in one batch.
    pub max_pages: u32,
    /// Most batches that the host has started and not yet polled to their end.
    pub max_batches: u32,
    /// Threads that call the store, 1 to 1024.
    pub threads: u32,
    /// Most threads that put or delete at the same time. At least 1. With fewer than `threads`, one is left for restoring.
    pub writers: u32,
}

impl Default for Limits {
    /// Values of 64 MiB, which is a page of a large model. 64 batches of 256 pages. Four threads, three of which may write.
    fn default() -> Self {
        Self { max_value: 64 << 20, alignment: 1, max_pages: 256, max_batches: 64, threads: 4, writers: 3 }
    }
}

impl Limits {
    pub(crate) fn check(&self) -> Result<()> {
        let counts =
            [u64::from(self.max_pages), self.max_batches.into(), self.threads.into(), self.writers.into()];
        let wrong = |text: &str| Err(Error::new(ErrorCode::CONFIG, text));
        if counts.contains(&0) || self.max_value == 0 || self.alignment == 0 {
            return wrong("each limit of the tier must be at least 1");
        }
        if self.threads > 1024 {
            return wrong("threads must be at most 1024");
        }
        Ok(())
    }

    pub(crate) fn of_tier(&self) -> TierLimits {
        TierLimits {
            max_pages: self.max_pages,
            max_batches: self.max_batches,
            max_value: self.max_value,
            alignment: self.alignment,
            reserved: [0; 4],
        }
    }
}
