//! The digest of every byte of a file.
//!
//! A file is cut into pieces of 4 MiB. The digest is the SHA-256 of its length and of the XXH3-128 of each piece with the
//! piece's number. Threads share the pieces, so the file is read as fast as the disk or the memory allows.
//!
//! XXH3 finds every change that was not made to deceive it. It is possible to build a file that has the digest of another file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};

use host_kernels::xxh3::xxh3_128;
use sha2::{Digest as _, Sha256};

/// The digest of a file's content.
pub(super) type ContentDigest = [u8; 32];

/// Bytes of a piece. Part of the definition: another value gives other digests.
const PIECE: u64 = 4 << 20;
/// Most threads: more threads do not read faster.
const MOST_THREADS: usize = 8;

/// The digest of a file of `size` bytes. Reads all of it.
pub(super) fn digest(file: &File, size: u64) -> io::Result<ContentDigest> {
    let pieces = size.div_ceil(PIECE);
    let next = AtomicU64::new(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let helpers =
        cores.min(MOST_THREADS).min(usize::try_from(pieces).unwrap_or(usize::MAX)).saturating_sub(1);
    let mut sums = std::thread::scope(|scope| {
        let share = || sums_of(file, size, &next);
        // If the system refuses to start helpers, this thread does their share.
        let start =
            |number| std::thread::Builder::new().name(format!("digest-{number}")).spawn_scoped(scope, share);
        let started: Vec<_> = (0..helpers).filter_map(|number| start(number).ok()).collect();
        let mut sums = share();
        for helper in started {
            let theirs =
                helper.join().unwrap_or_else(|_| Err(io::Error::other("a thread that reads it panicked")));
            sums = sums.and_then(|sums| Ok([sums, theirs?].concat()));
        }
        sums
    })?;
    sums.sort_unstable_by_key(|(number, _)| *number);
    let mut digest = Sha256::new();
    digest.update(size.to_le_bytes());
    sums.iter().for_each(|(_, sum)| digest.update(sum.to_le_bytes()));
    Ok(digest.finalize().into())
}

/// Sums of the pieces that no other thread has taken, with their numbers.
fn sums_of(file: &File, size: u64, next: &AtomicU64) -> io::Result<Vec<(u64, u128)>> {
    let mut sums = Vec::new();
    let mut buffer = vec![0; PIECE.min(size) as usize];
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(start) = number.checked_mul(PIECE).filter(|start| *start < size) else { return Ok(sums) };
        let piece = &mut buffer[..PIECE.min(size - start) as usize];
        file.read_exact_at(piece, start)?;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&number.to_le_bytes());
        sums.push((number, xxh3_128(&key, piece)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> ContentDigest {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        digest(&file, bytes.len() as u64).unwrap()
    }

    #[test]
    fn every_byte_and_the_order_of_pieces_count() {
        let piece = PIECE as usize;
        let mut bytes = vec![0; 3 * piece + 17];
        fastrand::Rng::with_seed(1).fill(&mut bytes);
        let whole = of(&bytes);
        assert_eq!(whole, of(&bytes));
        let mut random = fastrand::Rng::with_seed(2);
        let edges = [0, 1, piece - 1, piece, 2 * piece, 3 * piece - 1, 3 * piece, 3 * piece + 16];
        for at in edges.into_iter().chain((0..24).map(|_| random.usize(..3 * piece + 17))) {
            bytes[at] ^= 1;
            assert_ne!(whole, of(&bytes), "byte {at}");
            bytes[at] ^= 1;
        }
        let swapped = [&bytes[piece..2 * piece], &bytes[..piece], &bytes[2 * piece..]].concat();
        assert_ne!(whole, of(&swapped));
        assert_ne!(whole, of(&bytes[..3 * piece + 16]));
        assert_ne!(of(&[]), of(&[0]));
    }

    /// Digests are part of page names in stores, and these outlive a version of the program.
    #[test]
    fn the_digest_of_these_bytes_is_the_one_that_stores_have() {
        let bytes: Vec<u8> = (0..PIECE + 3).map(|at| (at % 251) as u8).collect();
        let mut sums = Sha256::new();
        sums.update(bytes.len().to_le_bytes());
        for (number, piece) in bytes.chunks(PIECE as usize).enumerate() {
            let key = [&(number as u64).to_le_bytes()[..], &[0; 24]].concat();
            sums.update(xxhash_rust::xxh3::xxh3_128(&[&key, piece].concat()).to_le_bytes());
        }
        assert_eq!(of(&bytes), ContentDigest::from(sums.finalize()));
    }

    #[test]
    fn a_file_that_is_shorter_than_was_said_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 100], 0).unwrap();
        assert_eq!(digest(&file, 101).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}
