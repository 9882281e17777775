//! Storage tier on a file system: pages keyed by 32 bytes, many to a file, checked on every read.
//!
//! # Layout
//!
//! Everything lies in `DIR/tier-v1/`. Other names there are left alone. A *segment* is a pair of files whose common
//! name is `TTTTTTTTTTTTTTTT-RRRRRRRRRRRRRRRR`: microseconds since 1970 at its birth and a random number, in hex. One
//! instance of one process writes it, from front to back. Afterwards only removals change it.
//!
//! - `NAME.dat`: values, one after the other. Each starts at a multiple of 4096 bytes and is filled up with zeros to
//!   the next. The file is allocated in full when it is made, so that a full disk is met there and not in the middle.
//!   It is cut to the used length when it is sealed.
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
//! Integers are little-endian. The value's checksum is XXH3-64 of its bytes, seeded with XXH3-64 of key and length. It
//! says that these are the bytes *of this key*, so it detects a read of the wrong place as well as a flipped bit. It
//! guards against accidents only: all processes that may write to the directory are trusted.
//!
//! # Publishing
//!
//! 1. The value is written to its place in `NAME.dat`, of which only the writer knows.
//! 2. With `fsync = "always"` the data is synced.
//! 3. The record is appended to `NAME.idx` by one `pwrite`, and synced with `always`.
//! 4. The index in memory gets it, and the put ends in `STORED`.
//!
//! A process killed before step 3 leaves bytes that no record names. A process killed within step 3 leaves a record whose checksum
//! is wrong, which counts as no record. After a power cut a record may be on disk without its value (`never`, `segment`): the
//! value's checksum is then wrong, and the page is missing. In no order of events are wrong bytes taken for right ones.
//!
//! # Reading
//!
//! The index in memory (60 bytes per record) says where a key lies. The value goes straight into the host's memory,
//! then its checksum is computed. A wrong checksum, or fewer bytes than the record promised, ends the get in `IO`: the
//! get has written to memory, so `MISSING` would be false. The failure is counted and the page is removed. From then on
//! it is `MISSING` and can be put again.
//!
//! # Opening
//!
//! Opening reads the directory, nothing more. A thread then reads the `.idx` files, newest first, while requests are
//! served. A request for a key that is not known yet waits for this thread until `load_wait_ms` after opening. A key that
//! is still not known then is `MISSING`. A put of a key that is not known yet is written, whether or not an older segment
//! has it.
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
//! Two processes that put one key store it twice, and each index serves the record that it learns of first. Both are right.
//! A delete takes all records of the key that this process knows, the copies too. It takes them from this process's memory
//! at once, from sealed segments and its own segments at once, and from another process's open segment when this process
//! learns that the segment is sealed. A delete waits until everything that was there at opening is known. Other processes
//! forget the page when they load its segment the next time. A segment that could not be sealed is tried again as if its
//! writer were gone. On a file system whose locks do not reach other machines a living writer may be taken for dead. Other
//! processes then do not see what it publishes later until they read the segment again: pages are lost, none is wrong.
//!
//! # Eviction
//!
//! Before it makes a segment, a process takes the directory's lock and adds up the sizes of all segments. While one
//! more full segment would exceed `size_limit_mib` or 32768 segments, or leave less than `free_floor_mib` free, it
//! evicts the segment that was used longest ago. The time of use is the modification time of the data file, which
//! readers renew every 5 s for segments that had hits. So the order survives restarts and is the same for all
//! processes. Evicted files take their space until the last process that reads them has closed them, so no more is
//! evicted at once than would be enough. If there is no room then, puts are refused until those processes have closed
//! the files, for up to 5 s. After that more is evicted. If nothing is left to evict, puts are refused (`NO_RESOURCE`),
//! and it is tried again after a second. Before the first puts are refused, they wait for space that will be free soon:
//! until a full segment is sealed, and up to 300 ms for a segment that is still written to and for evicted files. The
//! limit holds at every moment, for all processes together.
//!
//! # Flow
//!
//! A batch takes a slot of memory that was allocated at opening, or is answered `WOULD_BLOCK`. Nothing is dropped: each
//! page ends in one completion. Neighbouring pages of a batch go to disk as one write of up to 4 MiB (1 MiB when no
//! other batch is there), and come back as one read if they still lie together. Memory that is aligned to 4096 bytes,
//! offset and length too, is read and written in place. Other memory goes through a copy.
//!
//! A thread, the keeper, makes segments, and another thread seals the full ones. A seal waits for all work that the device got
//! before it. If the keeper sealed, pages would wait as long for the next segment. While three segments wait for their seals no
//! more are made. So no more than five are full and not sealed, besides those that writes in flight still reach into.
//!
//! With io_uring the kernel has the host's memory pinned piece by piece, from the first read or write in a piece to its
//! deregistration, up to `pinned_mib` and the system's limit. Without pinning, the lookup of memory pages is about half
//! of the cost of a direct read.

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
