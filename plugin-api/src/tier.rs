//! The storage role: keeps KV pages that left the accelerator, under 32-byte keys.
//!
//! A key names a whole prefix of tokens under one layout (see the host's page hashing), so the value of a key never
//! changes. A tier may answer a put of a stored key without writing, and two workers may put the same key at once.
//!
//! The life of a call: the host [`register`](StorageTier::register)s its memory once, then starts batches, each under a tag
//! of its own. Every page of an accepted batch ends in exactly one [`TierCompletion`], in any order. The host fetches the
//! completions with [`poll`](StorageTier::poll) into its own memory. Until then the pages' memory belongs to the batch.
//!
//! A get that finds less than was requested is a miss or an error, never a success: [`TierCompletion::status`] says
//! [`FOUND`] only after all `length` bytes are in memory.
//!
//! Threads: every method may be called from any thread. Methods marked **hot** neither block nor allocate.

use core::fmt;

use abi_stable::StableAbi;

use crate::error::Result;
use crate::transfer::{Memory, RegionId, Tag};

/// Name of a page in storage. Keys that differ in any byte are different keys.
#[repr(transparent)]
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, StableAbi)]
pub struct Key(pub [u8; 32]);

/// 64 lower-case hex digits, as `host tier ls` prints them.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// As [`Display`](fmt::Display), so that logs and lists name a page alike.
impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One page to write or read: a key and its place in registered memory. 48 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct TierPage {
    /// Its name.
    pub key: Key,
    /// Region of this instance.
    pub region: RegionId,
    /// Bytes, at least 1. A get must ask for the length that was put. With another length it ends with [`MISSING`] or a code.
    pub length: u32,
    /// Bytes from the start of the region.
    pub offset: u64,
}

const _: () = assert!(size_of::<TierPage>() == 48 && align_of::<TierPage>() == 8);

/// [`TierCompletion::status`]: the key was there (exists), its bytes are in memory (get), or were removed (delete).
pub const FOUND: i32 = 1;

/// [`TierCompletion::status`]: the value is stored (put).
pub const STORED: i32 = 1;

/// [`TierCompletion::status`]: the key is not there. Nothing was written to memory.
pub const MISSING: i32 = 0;

/// How one page of a batch ended. 24 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct TierCompletion {
    /// The batch.
    pub tag: Tag,
    /// Which of its pages, counted from 0.
    pub page: u32,
    /// [`FOUND`], [`STORED`], [`MISSING`], or an error code. A get that ended in a code may have written some bytes of
    /// its page, but no bytes outside of the page.
    pub status: i32,
    /// Bytes of the value, where the operation knows them.
    pub bytes: u64,
}

/// What an instance can carry at once.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, StableAbi)]
pub struct TierLimits {
    /// Most pages or keys in one batch.
    pub max_pages: u32,
    /// Most batches accepted and not yet polled to their last page.
    pub max_batches: u32,
    /// Longest value, in bytes.
    pub max_value: u64,
    /// Offsets and lengths must be multiples of this many bytes. At least 1.
    pub alignment: u64,
    /// Zero.
    pub reserved: [u64; 4],
}

/// How much a tier stores.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct TierUsage {
    /// Values.
    pub values: u64,
    /// Bytes of values.
    pub bytes: u64,
    /// The most bytes that the tier can store, or 0 when the tier knows no bound.
    pub capacity: u64,
    /// Zero.
    pub reserved: [u64; 5],
}

/// One step of a [`scan`](StorageTier::scan).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, StableAbi)]
pub struct Scanned {
    /// Keys written to the caller's slice.
    pub keys: u32,
    /// Zero.
    pub reserved: u32,
    /// Where the next step goes on, or 0 when this was the last.
    pub cursor: u64,
}

/// A storage tier.
pub trait StorageTier: Send + Sync + 'static {
    /// What this instance can carry.
    fn limits(&self) -> TierLimits;

    /// Registers memory that batches read pages from and write pages to. The host keeps it mapped until the region is
    /// deregistered.
    ///
    /// # Errors
    /// `UNSUPPORTED` for a kind of memory the tier cannot reach.
    fn register(&self, memory: &Memory) -> Result<RegionId>;

    /// Ends the registration of a region. When it returns, the tier touches the region's memory no more.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an unknown region.
    fn deregister(&self, region: RegionId) -> Result<()>;

    /// **Hot.** Starts a check for each key whether a get would find it now. Returns 0, or a code. `WOULD_BLOCK` says that
    /// the tier is full and nothing was started. An accepted batch ends in one completion per key, a refused batch in none.
    fn exists(&self, tag: Tag, keys: &[Key]) -> i32;

    /// **Hot.** Reads values into memory. Returns as [`exists`](StorageTier::exists) does.
    fn get(&self, tag: Tag, pages: &[TierPage]) -> i32;

    /// **Hot.** Stores values from memory. Returns as [`exists`](StorageTier::exists) does. A reader sees all of a value
    /// or none of it: while it is put, while it is deleted, and after the process was killed in the middle of a put.
    fn put(&self, tag: Tag, pages: &[TierPage]) -> i32;

    /// **Hot.** Removes values. Returns as [`exists`](StorageTier::exists) does.
    fn delete(&self, tag: Tag, keys: &[Key]) -> i32;

    /// **Hot.** Moves finished pages into `completions`. Returns how many, or a code. Drives progress.
    fn poll(&self, completions: &mut [TierCompletion]) -> i32;

    /// Asks the tier to leave out the pages of a batch that have not started. Each page of the batch still ends in one
    /// completion. Returns 0, or `INVALID_ARGUMENT` for a tag that is not in flight.
    fn cancel(&self, tag: Tag) -> i32;

    /// **Hot.** Whether a tag is settled, which means that no work on any of its pages touches memory any more. Returns 1
    /// when settled, 0 when not yet, or a code. A tag never seen is settled. A batch that has settled stays settled.
    fn settled(&self, tag: Tag) -> i32;

    /// Lists stored keys: writes the next keys, from `cursor` on, into `keys`. A cursor of 0 starts a scan. A scan returns
    /// a key exactly once if the key is stored during the whole scan. It returns other keys at most once. May block.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for a cursor that no scan gave out, `UNSUPPORTED` when the store cannot list.
    fn scan(&self, cursor: u64, keys: &mut [Key]) -> Result<Scanned>;

    /// How much is stored now. May block.
    ///
    /// # Errors
    /// When the store does not answer.
    fn usage(&self) -> Result<TierUsage>;

    /// Says how the host learns of waiting completions. An instance always returns the same answer.
    ///
    /// - A descriptor that is readable while completions wait. The plugin owns it.
    /// - [`WAKES`](crate::WAKES) when the plugin instead calls [`Host::wake`](crate::Host::wake) for every new completion.
    /// - `-1`: the host then polls on a timer.
    fn event_fd(&self) -> i32;

    /// Stops all threads of the instance, after which every call answers `CLOSED`.
    ///
    /// # Errors
    /// `TIMEOUT` when something still ran at the deadline.
    fn shutdown(&self, deadline_ms: u64) -> Result<()>;
}
