//! Pages as files: one for each, named by its key, with a trailer that says what it holds.
//!
//! `DIR/nixl-v1/AB/ABCD….page` holds the value, then 32 bytes: the mark `HOSTNIXL`, the value's length, its checksum
//! (XXH3-64, seeded with that of the key), and the checksum of these 24 bytes. A file is written under another name in
//! `DIR/nixl-v1/tmp`, and gets its own when all of it is there, so that a reader finds all of a value or nothing. One that a
//! power cut left behind with holes in it does not pass its checksum.
//!
//! There is one file for each page, because then publishing is a rename, a removed page frees its room at once, and several
//! processes share a directory without messages to each other. An `open` and a `rename` for each page are little beside
//! pages of a megabyte.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use host_plugin_api::Key;
use rustix::fs::{FallocateFlags, OFlags, fallocate};
use rustix::io::Errno;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

const MARK: [u8; 8] = *b"HOSTNIXL";
const TRAILER: u64 = 32;
const SUFFIX: &str = ".page";
/// Unfinished files of this age have no writer any more.
const STALE: Duration = Duration::from_secs(3600);

/// A directory of pages.
pub struct Store {
    root: PathBuf,
    direct: bool,
    /// Nothing is made, written or removed.
    read_only: bool,
    /// Starts the names of our unfinished files. No other instance's names start with it.
    unique: String,
    written: AtomicU64,
}

/// A file that has no name of its own yet.
pub struct Unfinished {
    pub file: File,
    path: PathBuf,
}

/// A value that is there.
pub struct Found {
    pub file: File,
    checksum: u64,
}

/// What a key leads to.
pub enum Lookup {
    Missing,
    /// A file that is too short, too long, or says what is not so of itself.
    Damaged,
    There(Found),
}

/// Checksum of a value: that these are the bytes of this key.
pub fn checksum(key: &Key, value: &[u8]) -> u64 {
    xxh3_64_with_seed(value, xxh3_64(&key.0))
}

/// `None` for what is not there.
fn missing<T>(error: io::Error) -> io::Result<Option<T>> {
    if error.kind() == io::ErrorKind::NotFound { Ok(None) } else { Err(error) }
}

fn hex(byte: &u8) -> String {
    format!("{byte:02x}")
}

/// The key that a file is named by.
fn key_of(name: &str) -> Option<Key> {
    let digits = name.strip_suffix(SUFFIX).filter(|digits| digits.len() == 64 && digits.is_ascii())?;
    let mut key = Key::default();
    for (at, byte) in key.0.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(key)
}

impl Store {
    /// # Errors
    /// When the directory cannot be made or written to, or, with `read_only`, is not there.
    pub fn open(directory: &Path, direct: bool, read_only: bool, unique: String) -> io::Result<Self> {
        let root = directory.join("nixl-v1");
        let store = Self { root, direct, read_only, unique, written: AtomicU64::new(0) };
        if read_only { std::fs::read_dir(&store.root).map(drop) } else { store.prepare() }?;
        Ok(store)
    }

    /// Makes the folders, and removes what was left unfinished.
    fn prepare(&self) -> io::Result<()> {
        let root = &self.root;
        let mut folders = std::fs::DirBuilder::new();
        folders.recursive(true).mode(0o700);
        folders.create(root.join("tmp"))?;
        for byte in 0..=u8::MAX {
            folders.create(root.join(hex(&byte)))?;
        }
        for entry in std::fs::read_dir(root.join("tmp"))?.filter_map(Result::ok) {
            let age = |made: SystemTime| SystemTime::now().duration_since(made).unwrap_or_default();
            if entry.metadata().and_then(|meta| meta.modified()).is_ok_and(|made| age(made) > STALE) {
                // Another instance may be quicker.
                let _gone = std::fs::remove_file(entry.path()).is_err();
            }
        }
        Ok(())
    }

    /// Whether nothing may be made, written or removed.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn path(&self, key: &Key) -> PathBuf {
        let name: String = key.0.iter().map(hex).collect();
        self.root.join(&name[..2]).join(name + SUFFIX)
    }

    fn flags(&self) -> i32 {
        if self.direct { OFlags::DIRECT.bits() as i32 } else { 0 }
    }

    /// Bytes of a key's value, by the size of its file. 0 for a file that is too short to hold any.
    pub fn length(&self, key: &Key) -> io::Result<Option<u64>> {
        match std::fs::metadata(self.path(key)) {
            Ok(meta) => Ok(Some(meta.len().saturating_sub(TRAILER))),
            Err(error) => missing(error),
        }
    }

    /// Starts a value.
    pub fn create(&self) -> io::Result<Unfinished> {
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join("tmp").join(format!("{}-{number}", self.unique));
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).custom_flags(self.flags()).open(&path)?;
        Ok(Unfinished { file, path })
    }

    /// Gives a value that was written its name. It is only there when this returns well.
    pub fn publish(&self, key: &Key, unfinished: Unfinished, length: u64, checksum: u64) -> io::Result<()> {
        let published = self.finish(key, &unfinished, length, checksum);
        if published.is_err() {
            self.discard(unfinished);
        }
        published
    }

    fn finish(&self, key: &Key, unfinished: &Unfinished, length: u64, checksum: u64) -> io::Result<()> {
        let written = unfinished.file.metadata()?.len();
        if written != length {
            if unfinished.lacks_room(length) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let text = format!("{written} bytes of a value of {length} were written");
            return Err(io::Error::new(io::ErrorKind::WriteZero, text));
        }
        let mut trailer = [0; TRAILER as usize];
        trailer[..8].copy_from_slice(&MARK);
        trailer[8..16].copy_from_slice(&length.to_le_bytes());
        trailer[16..24].copy_from_slice(&checksum.to_le_bytes());
        let own = xxh3_64(&trailer[..24]);
        trailer[24..].copy_from_slice(&own.to_le_bytes());
        // Not through a descriptor that takes whole blocks only.
        let plain = OpenOptions::new().write(true).open(&unfinished.path)?;
        plain.write_all_at(&trailer, length)?;
        std::fs::rename(&unfinished.path, self.path(key))
    }

    /// Forgets a value that was started.
    pub fn discard(&self, unfinished: Unfinished) {
        // What stays behind is removed when it is old.
        let _stays = std::fs::remove_file(unfinished.path).is_err();
    }

    /// A value of this many bytes. One of another length is not there.
    pub fn find(&self, key: &Key, length: u64) -> io::Result<Lookup> {
        let path = self.path(key);
        let Some(plain) = File::open(&path).map(Some).or_else(missing)? else { return Ok(Lookup::Missing) };
        let size = plain.metadata()?.len();
        let mut trailer = [0; TRAILER as usize];
        let read = match size.checked_sub(TRAILER).map(|at| plain.read_exact_at(&mut trailer, at)) {
            // Says nothing of what is in the file.
            Some(Err(error)) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error),
            read => matches!(read, Some(Ok(()))),
        };
        let number = |at: usize| trailer[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let whole = read && trailer[..8] == MARK && number(24) == xxh3_64(&trailer[..24]);
        if !whole || number(8).checked_add(TRAILER) != Some(size) {
            return Ok(Lookup::Damaged);
        }
        if number(8) != length {
            return Ok(Lookup::Missing);
        }
        let unbuffered = || OpenOptions::new().read(true).custom_flags(self.flags()).open(&path);
        let file = if self.direct { unbuffered().map(Some).or_else(missing)? } else { Some(plain) };
        let there = |file| Lookup::There(Found { file, checksum: number(16) });
        Ok(file.map_or(Lookup::Missing, there))
    }

    /// Whether a value that was found has the bytes that were put, read with nothing in between.
    ///
    /// # Errors
    /// When the system cannot read it, which says nothing of its bytes.
    pub fn is_whole(&self, key: &Key, found: &Found, length: u64) -> io::Result<bool> {
        let mut value = vec![0; length as usize];
        match File::open(self.path(key))?.read_exact_at(&mut value, 0) {
            Ok(()) => Ok(found.is(key, &value)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a value. Returns its bytes if it was there.
    pub fn remove(&self, key: &Key) -> io::Result<Option<u64>> {
        let path = self.path(key);
        let size = match std::fs::metadata(&path) {
            Ok(meta) => meta.len(),
            Err(error) => return missing(error),
        };
        match std::fs::remove_file(path) {
            Ok(()) => Ok(Some(size.saturating_sub(TRAILER))),
            Err(error) => missing(error),
        }
    }

    /// Keys in one of the 256 folders.
    pub fn keys(&self, folder: u8) -> io::Result<Vec<Key>> {
        let entries = std::fs::read_dir(self.root.join(hex(&folder)))?;
        Ok(entries.filter_map(|entry| key_of(entry.ok()?.file_name().to_str()?)).collect())
    }

    /// Values, and their bytes.
    pub fn usage(&self) -> io::Result<(u64, u64)> {
        let (mut values, mut bytes) = (0, 0);
        for folder in 0..=u8::MAX {
            for entry in std::fs::read_dir(self.root.join(hex(&folder)))?.filter_map(Result::ok) {
                if let Ok(meta) = entry.metadata() {
                    values += 1;
                    bytes += meta.size().saturating_sub(TRAILER);
                }
            }
        }
        Ok((values, bytes))
    }
}

impl Unfinished {
    /// Whether the file system has no room for a value of this many bytes.
    pub fn lacks_room(&self, length: u64) -> bool {
        let taken = fallocate(&self.file, FallocateFlags::empty(), 0, length);
        matches!(taken, Err(Errno::NOSPC | Errno::DQUOT))
    }
}

impl Found {
    /// Whether these are the bytes that were put.
    pub fn is(&self, key: &Key, value: &[u8]) -> bool {
        checksum(key, value) == self.checksum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value of 5000 bytes.
    fn put(store: &Store) -> Key {
        let (key, value) = (Key([3; 32]), vec![7; 5000]);
        let unfinished = store.create().unwrap();
        unfinished.file.write_all_at(&value, 0).unwrap();
        assert!(!unfinished.lacks_room(5000));
        store.publish(&key, unfinished, 5000, checksum(&key, &value)).unwrap();
        key
    }

    #[test]
    fn a_page_is_whole_when_its_file_is_whatever_a_read_before_said() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("pages");
        let store = Store::open(&directory, false, false, "test".into()).unwrap();
        let key = put(&store);
        let Lookup::There(found) = store.find(&key, 5000).unwrap() else { panic!("it is there") };
        assert!(store.is_whole(&key, &found, 5000).unwrap());
        OpenOptions::new().write(true).open(store.path(&key)).unwrap().write_all_at(&[8], 4999).unwrap();
        assert!(!store.is_whole(&key, &found, 5000).unwrap(), "a flipped byte");
        File::options().write(true).open(store.path(&key)).unwrap().set_len(100).unwrap();
        assert!(!store.is_whole(&key, &found, 5000).unwrap(), "a file that is cut");
        store.remove(&key).unwrap();
        assert!(store.is_whole(&key, &found, 5000).is_err(), "nothing can be said of what cannot be read");
    }

    #[test]
    fn a_file_that_is_cut_is_damaged_and_not_missing_and_finding_it_removes_nothing() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("pages");
        let store = Store::open(&directory, false, false, "test".into()).unwrap();
        let key = put(&store);
        assert!(matches!(store.find(&key, 4999).unwrap(), Lookup::Missing), "another length");
        for length in [5031, 2500, 32, 7, 0] {
            File::options().write(true).open(store.path(&key)).unwrap().set_len(length).unwrap();
            assert!(matches!(store.find(&key, 5000).unwrap(), Lookup::Damaged), "{length} bytes");
            assert_eq!(store.length(&key).unwrap(), Some(length.saturating_sub(32)));
        }
        store.remove(&key).unwrap();
        assert!(matches!(store.find(&key, 5000).unwrap(), Lookup::Missing));
        assert_eq!(store.length(&key).unwrap(), None);
    }

    #[test]
    fn what_is_opened_to_read_makes_no_folder_and_removes_no_unfinished_file() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("pages");
        let read = || Store::open(&directory, false, true, "test".into());
        assert_eq!(read().err().unwrap().kind(), io::ErrorKind::NotFound);
        assert!(!directory.exists());
        drop(Store::open(&directory, false, false, "test".into()).unwrap());
        let unfinished = directory.join("nixl-v1/tmp/of-another");
        let file = File::create(&unfinished).unwrap();
        file.set_modified(SystemTime::now() - 2 * STALE).unwrap();
        assert!(read().unwrap().is_read_only() && unfinished.exists());
        assert!(!Store::open(&directory, false, false, "test".into()).unwrap().is_read_only());
        assert!(!unfinished.exists(), "a store that may write tidies up");
    }
}
