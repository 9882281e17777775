//! Storage tier on a file system: pages keyed by 32 bytes, many to a file, checked on every read.
//!
//! # Layout
//!
//! Everything lies in `DIR/tier-v1/`. Other names there are left alone. A *segment* is a pair of files whose common name
//! is `TTTTTTTTTTTTTTTT-RRRRRRRRRRRRRRRR`: microseconds since 1970 at its birth and a random number, in hex. One
//! instance of one process writes it, from front to back, and it never changes afterwards but for removals.
//!
//! - `NAME.dat`: values, one behind the other, each from a multiple of 4096 bytes on and filled up with zeros to the next.
//!   Allocated in full when it is made, so that a full disk is met there and not in the middle, and cut to what is
//!   used when it is sealed.
//! - `NAME.idx`: 64 bytes of header, then records of 64 bytes, in the order in which values were published:
//!
//! | Bytes | Header | Record |
//! | --- | --- | --- |
//! | 0..32 | `HOSTTIER`, version u32, block size u32, birth u64, random u64 | key |
//! | 32..40 | bytes of a full segment u64 | checksum of the value u64 |
//! | 40..48 | zero | its first block u32, its bytes u32 |
//! | 48..56 | zero | kind u32 (1 value, 2 seal), own number u32 |
//! | 56..64 | XXH3-64 of the 56 bytes before | the same, seeded with the segment's random number |
//!
//! Integers are little-endian. The value's checksum is XXH3-64 of its bytes, seeded with XXH3-64 of key and length: it says
//! that these are the bytes *of this key*, so that a read of the wrong place is found out like a flipped bit. It guards
//! against accidents only: all processes that may write to the directory are trusted.
//!
//! # Publishing
//!
//! 1. The value is written to its place in `NAME.dat`, of which only the writer knows.
//! 2. With `fsync = "always"` the data is synced.
//! 3. The record is appended to `NAME.idx` by one `pwrite`, and synced with `always`.
//! 4. The index in memory gets it, and the put ends in `STORED`.
//!
//! A process killed before 3 leaves bytes that no record names. One killed within 3 leaves a record whose checksum is
//! wrong, which is no record. After a power cut a record may have come to disk before its value (`never`, `segment`), and
//! then the value's checksum is wrong and the page is missing. No order of events makes wrong bytes right.
//!
//! # Reading
//!
//! The index in memory (60 bytes per record) says where a key lies. The value goes straight into the host's memory, then its
//! checksum is computed. A wrong one, or less than the record promised, ends the get in `IO` (it has written to memory, so
//! that `MISSING` would be a lie), is counted, and removes the page: from then on it is `MISSING` and can be put again.
//!
//! # Opening
//!
//! Opening reads the directory, nothing more. A thread then reads the `.idx` files, newest first, while requests are
//! served. A key that is not known yet waits for that until `load_wait_ms` after opening, and is then `MISSING`. A put of a
//! key that is not known yet is written, whether or not an older segment has it.
//!
//! # Several processes and machines
//!
//! The writer of a segment holds a lock (`flock`) on its `.idx`, from before the file is visible until it is sealed or the
//! process is gone. A process locks `DIR/tier-v1/lock` while it makes or evicts segments, or finds that one has no writer. So:
//!
//! | Segment is | recognised by | its writer | others |
//! | --- | --- | --- | --- |
//! | open | lock held | appends, and removes records of its own | read what has records, and look for more every `refresh_ms`. They never write, cut or evict |
//! | orphaned | no seal, lock free | is gone | lock it, and under the directory's lock read it to its end. Without records, they unlink it. With records, and with the index's lock alone, they cut the data behind the last, and append the seal |
//! | sealed | last record is the seal | nothing special | read, remove records (64 zeros in place), and evict |
//! | evicted | name is gone | | reads in flight end well, because the file is open. Within `refresh_ms` its keys are forgotten |
//! | data without index | | | left by a crash between two unlinks: unlinked under the directory's lock |
//! | unreadable | header wrong | | not served, counted as corrupt, evicted in its turn |
//! | of unknown state | its index cannot be opened, or its lock cannot be tried | | left alone |
//!
//! Two processes that put one key store it twice, and each index serves the first it learns of. Both are right. A delete takes
//! all records of the key that this process knows, the copies too: from its own memory at once, from sealed segments and its own
//! at once, from another's open segment when this process learns that it is sealed. It waits until everything that was there at
//! opening is known. Others forget the page when they load its segment the next time. A segment that could not be sealed is tried
//! again as if its writer were gone. On a file system whose locks do not reach other machines a living writer may be taken for
//! dead, and what it publishes later is not seen by others until it is read again: pages are lost, none is wrong.
//!
//! # Eviction
//!
//! Before it makes a segment, a process takes the directory's lock and adds up what is there. While a full segment more would pass
//! `size_limit_mib` or 32768 segments, or leave less than `free_floor_mib` free, the segment goes that was used longest ago: by the
//! modification time of its data file, which readers renew every 5 s for segments that had hits. So the order survives
//! restarts and is the same for all. Evicted files take their space until the last process that reads them has let go, so no more
//! is evicted at once than would be enough. If there is no room then, puts are refused until those processes have let go, for up
//! to 5 s. After that more is evicted. If nothing is left to evict, puts are refused (`NO_RESOURCE`), and it is tried again after
//! a second. Before the first are refused, they wait for what is a moment from being free: until a segment that is full is
//! sealed, and up to 300 ms for one that is still written to, and for evicted files. The limit holds at every moment, for all
//! processes together.
//!
//! # Flow
//!
//! A batch takes a slot of memory that was allocated at opening, or is answered `WOULD_BLOCK`. Nothing is dropped: each page
//! ends in one completion. Neighbouring pages of a batch go to disk as one write of up to 4 MiB (1 MiB of the only batch there is), and come back as one read
//! if they still lie together. Memory that is aligned to 4096 bytes, offset and length too, is read and written in place.
//! Anything else goes through a copy.
//!
//! A thread, the keeper, makes segments, and another seals the full ones: a seal waits for all that the device was given before
//! it, and pages would wait for the next segment as long. While three wait for their seals no more are made, so that no more than
//! five are full and not sealed, and those that writes in flight still reach into.
//!
//! With io_uring the kernel has the host's memory pinned piece by piece from the first read or write in it to its deregistration,
//! up to `pinned_mib` and the system's limit, since looking up its pages is about half of what a direct read costs.

mod backing;
mod config;
mod format;
#[doc(hidden)]
pub mod fuzzing;
mod index;
mod keeper;
mod memory;
mod metrics;
mod pinned;
mod queue;
mod room;
mod run;
mod sealer;
mod segment;
mod store;
mod sync;
mod tier;
mod uring;
mod waker;
mod work;
mod writer;

pub use tier::FileTier;

/// Opens an instance.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `IO` when the directory cannot be used or the system refuses threads.
pub fn open(opening: &host_plugin_api::Opening) -> host_plugin_api::Result<FileTier> {
    FileTier::open(opening)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    tier: open,
    check_config: config::check,
}
