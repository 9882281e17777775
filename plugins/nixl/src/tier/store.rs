//! Pages as files: one for each, named by its key, with a trailer that says what it holds.
//!
//! `DIR/nixl-v1/AB/ABCD….page` holds the value, then 32 bytes: the mark `HOSTNIXL`, the value's length, its checksum
//! (XXH3-64, seeded with that of the key), and the checksum of these 24 bytes. A file is written under another name in
//! `DIR/nixl-v1/tmp`, and gets its own when all of it is there, so that a reader finds all of a value or nothing. A
//! file that a power cut left behind with holes in it does not pass its checksum.
//!
//! The folders are this user's own and closed to others. All names are relative to the open `nixl-v1`. What lies in the
//! place of a page and is no regular file, as a link or a pipe, is not there.
//!
//! There is one file for each page, because then publishing is a rename, a removed page frees its room at once, and several
//! processes share a directory without messages to each other. An `open` and a `rename` for each page are little beside
//! pages of a megabyte.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use host_ownership::{Access, Folder, plain_file};
use host_plugin_api::{Key, Level, log};
use rustix::fs::{
    AtFlags, Dir, FallocateFlags, FileType, Mode, OFlags, Stat, fallocate, fstatvfs, openat, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The folder of pages in the configured directory. Another format gets another name.
const FORMAT: &str = "nixl-v1";
/// The folder of unfinished files in it.
const UNFINISHED: &str = "tmp";
/// What an operator may do instead of giving a folder the rights that are asked for.
const INSTEAD: &str = "use a directory of your own";
const MARK: [u8; 8] = *b"HOSTNIXL";
const TRAILER: u64 = 32;
const SUFFIX: &str = ".page";
/// How often the file system is asked for its free room.
const LOOK: Duration = Duration::from_millis(100);
/// Unfinished files of this age have no writer any more.
const STALE: Duration = Duration::from_secs(3600);

/// A directory of pages.
pub struct Store {
    root: Folder,
    direct: bool,
    /// Whether nothing may be made, written or removed.
    read_only: bool,
    /// The names of this instance's unfinished files start with it. No other instance's names do.
    unique: String,
    written: AtomicU64,
    free_floor: u64,
    free_space: Mutex<FreeSpace>,
}

/// Whether the file system has room for pages, and when that was looked at.
#[derive(Default)]
struct FreeSpace {
    looked: Option<Instant>,
    full: bool,
}

/// Why no value may be started: too little room is free. It was logged.
#[derive(Debug)]
pub struct BelowFloor;

impl std::error::Error for BelowFloor {}

impl std::fmt::Display for BelowFloor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("less than free_floor_mib is free")
    }
}

/// A file that does not have its final name yet.
pub struct Unfinished {
    pub file: File,
    name: String,
}

/// A value that was found.
pub struct StoredFile {
    pub file: File,
    checksum: u64,
}

/// The result of looking for a key.
pub enum Lookup {
    Missing,
    /// A file that is too short, too long, or has a wrong trailer.
    Damaged,
    There(StoredFile),
}

/// Checksum of a value, which says that these are the bytes of this key.
pub fn checksum(key: &Key, value: &[u8]) -> u64 {
    xxh3_64_with_seed(value, xxh3_64(&key.0))
}

fn hex(byte: &u8) -> String {
    format!("{byte:02x}")
}

/// The name of a key's file, from the folder of pages.
fn name_of(key: &Key) -> String {
    let name: String = key.0.iter().map(hex).collect();
    format!("{}/{name}{SUFFIX}", &name[..2])
}

/// Bytes of a regular file.
fn size(stat: &Stat) -> Option<u64> {
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    u64::try_from(stat.st_size).ok().filter(|_| is_file)
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
    /// When the directory cannot be made or written to, is not this user's own, or, with `read_only`, is not there.
    pub fn open(directory: &Path, direct: bool, read_only: bool, unique: String) -> io::Result<Self> {
        if !read_only {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        let named = Folder::named(directory, Access::User, !read_only)?;
        let root = named.own(FORMAT, Access::User, !read_only, INSTEAD)?;
        let store = Self {
            root,
            direct,
            read_only,
            unique,
            written: AtomicU64::new(0),
            free_floor: 0,
            free_space: Mutex::default(),
        };
        store.prepare()?;
        Ok(store)
    }

    /// The same directory, in which no value is started while fewer bytes than this are free in its file system.
    pub fn keeping_free(mut self, bytes: u64) -> Self {
        self.free_floor = bytes;
        self
    }

    /// Whether a value may be started. Logs each change.
    fn has_room(&self) -> io::Result<bool> {
        let mut space = self.free_space.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if self.free_floor > 0 && space.looked.is_none_or(|looked| now.duration_since(looked) >= LOOK) {
            let stat = fstatvfs(&self.root)?;
            // Once it is full, somewhat more must be free, so that the log does not fill with changes.
            let enough = if space.full {
                self.free_floor.saturating_add(self.free_floor / 16)
            } else {
                self.free_floor
            };
            let full = stat.f_bavail.saturating_mul(stat.f_frsize) < enough;
            let was = std::mem::replace(&mut *space, FreeSpace { looked: Some(now), full }).full;
            let floor = self.free_floor >> 20;
            match (was, full) {
                (false, true) => log!(
                    Level::WARN,
                    "less than {floor} MiB are free in the file system of the pages (free_floor_mib): no page is stored until there \
                     is room; remove pages, or make room otherwise"
                ),
                (true, false) => log!(Level::INFO, "{floor} MiB are free again: pages are stored"),
                _ => {}
            }
        }
        Ok(!space.full)
    }

    /// Makes the folders, or looks at those that are there, and removes what was left unfinished.
    fn prepare(&self) -> io::Result<()> {
        self.folder(UNFINISHED)?;
        for byte in 0..=u8::MAX {
            self.folder(&hex(&byte))?;
        }
        if self.read_only { Ok(()) } else { self.tidy() }
    }

    /// A folder may have been put there while others could write to the one above.
    fn folder(&self, name: &str) -> io::Result<()> {
        match self.root.own(name, Access::User, !self.read_only, INSTEAD) {
            Err(error) if self.read_only && error.kind() == io::ErrorKind::NotFound => Ok(()),
            opened => opened.map(drop),
        }
    }

    /// Removes unfinished files that have no writer any more.
    fn tidy(&self) -> io::Result<()> {
        for entry in self.entries(UNFINISHED)?.filter_map(Result::ok) {
            let Ok(name) = entry.file_name().to_str().map(|name| format!("{UNFINISHED}/{name}")) else {
                continue;
            };
            let Ok(stat) = statat(&self.root, &name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
            let written = SystemTime::UNIX_EPOCH + Duration::from_secs(stat.st_mtime.max(0) as u64);
            let age = SystemTime::now().duration_since(written).unwrap_or_default();
            if age > STALE && size(&stat).is_some() {
                // Another instance may be quicker.
                let _gone = unlinkat(&self.root, &name, AtFlags::empty()).is_err();
            }
        }
        Ok(())
    }

    fn entries(&self, folder: &str) -> io::Result<Dir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Dir::new(openat(&self.root, folder, flags, Mode::empty())?)?)
    }

    /// Whether nothing may be made, written or removed.
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    fn flags(&self) -> OFlags {
        if self.direct { OFlags::DIRECT } else { OFlags::empty() }
    }

    /// An open file. `None` for what is not there, and for what is no regular file.
    fn opened(&self, name: &str, flags: OFlags) -> io::Result<Option<File>> {
        match plain_file(&self.root, name, flags, Mode::empty()) {
            Ok(found) => Ok(found.map(|(file, _)| File::from(file))),
            Err(error) => match Errno::from_io_error(&error) {
                // `LOOP` is said of a link, `NXIO` of a socket and of a pipe without a reader.
                Some(Errno::NOENT | Errno::LOOP | Errno::NXIO) => Ok(None),
                _ => Err(error),
            },
        }
    }

    /// Bytes of a file. `None` for what is not there, and for what is no regular file.
    fn size(&self, name: &str) -> io::Result<Option<u64>> {
        match statat(&self.root, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(size(&stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Bytes of a key's value, by the size of its file. 0 for a file that is too short to hold any.
    pub fn length(&self, key: &Key) -> io::Result<Option<u64>> {
        Ok(self.size(&name_of(key))?.map(|size| size.saturating_sub(TRAILER)))
    }

    /// Makes an unfinished file for a value.
    ///
    /// # Errors
    /// [`BelowFloor`] when too little room is free.
    pub fn create(&self) -> io::Result<Unfinished> {
        if !self.has_room()? {
            return Err(io::Error::new(io::ErrorKind::StorageFull, BelowFloor));
        }
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let name = format!("{UNFINISHED}/{}-{number}", self.unique);
        let new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | self.flags();
        let file = openat(&self.root, &name, new, Mode::from_raw_mode(0o600))?;
        Ok(Unfinished { file: File::from(file), name })
    }

    /// Publishes a written value under its name. The value is there only when this succeeds.
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
        let plain = self.opened(&unfinished.name, OFlags::WRONLY)?.ok_or(io::ErrorKind::NotFound)?;
        plain.write_all_at(&trailer, length)?;
        Ok(renameat(&self.root, &unfinished.name, &self.root, name_of(key))?)
    }

    /// Forgets a value that was started.
    pub fn discard(&self, unfinished: Unfinished) {
        // What stays behind is removed when it is old.
        let _stays = unlinkat(&self.root, &unfinished.name, AtFlags::empty()).is_err();
    }

    /// Finds a value of this many bytes. A value of another length counts as missing.
    pub fn find(&self, key: &Key, length: u64) -> io::Result<Lookup> {
        let name = name_of(key);
        let Some(plain) = self.opened(&name, OFlags::RDONLY)? else { return Ok(Lookup::Missing) };
        let size = plain.metadata()?.len();
        let mut trailer = [0; TRAILER as usize];
        let read = match size.checked_sub(TRAILER).map(|at| plain.read_exact_at(&mut trailer, at)) {
            // Such an error says nothing about the file's content.
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
        let unbuffered = || self.opened(&name, OFlags::RDONLY | OFlags::DIRECT);
        let file = if self.direct { unbuffered()? } else { Some(plain) };
        let there = |file| Lookup::There(StoredFile { file, checksum: number(16) });
        Ok(file.map_or(Lookup::Missing, there))
    }

    /// Whether a value that was found has the bytes that were put. Reads the file without NIXL.
    ///
    /// # Errors
    /// When the system cannot read the file, which says nothing of its bytes.
    pub fn is_whole(&self, key: &Key, found: &StoredFile, length: u64) -> io::Result<bool> {
        let mut value = vec![0; length as usize];
        let file = self.opened(&name_of(key), OFlags::RDONLY)?.ok_or(io::ErrorKind::NotFound)?;
        match file.read_exact_at(&mut value, 0) {
            Ok(()) => Ok(found.is(key, &value)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes a value. Returns its bytes if it was there.
    pub fn remove(&self, key: &Key) -> io::Result<Option<u64>> {
        let name = name_of(key);
        let Some(size) = self.size(&name)? else { return Ok(None) };
        match unlinkat(&self.root, &name, AtFlags::empty()) {
            Ok(()) => Ok(Some(size.saturating_sub(TRAILER))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Keys in one of the 256 folders.
    pub fn keys(&self, folder: u8) -> io::Result<Vec<Key>> {
        let mut keys = Vec::new();
        for entry in self.entries(&hex(&folder))?.filter_map(Result::ok) {
            let Some(key) = entry.file_name().to_str().ok().and_then(key_of) else { continue };
            let is_file = match entry.file_type() {
                FileType::RegularFile => true,
                // Not every file system says it.
                FileType::Unknown => matches!(self.length(&key), Ok(Some(_))),
                _ => false,
            };
            keys.extend(is_file.then_some(key));
        }
        Ok(keys)
    }

    /// Values, and their bytes.
    pub fn usage(&self) -> io::Result<(u64, u64)> {
        let (mut values, mut bytes) = (0, 0);
        for folder in 0..=u8::MAX {
            for key in self.keys(folder)? {
                if let Ok(Some(length)) = self.length(&key) {
                    values += 1;
                    bytes += length;
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

impl StoredFile {
    /// Whether these are the bytes that were put.
    pub fn is(&self, key: &Key, value: &[u8]) -> bool {
        checksum(key, value) == self.checksum
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// A key's file.
    fn path(directory: &Path, key: &Key) -> PathBuf {
        directory.join(FORMAT).join(name_of(key))
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    }

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
    fn no_page_is_started_while_less_than_the_floor_is_free() {
        let scratch = tempfile::tempdir().unwrap();
        let open = || Store::open(scratch.path(), false, false, "test".into()).unwrap();
        let refused = open().keeping_free(u64::MAX).create().map(drop).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        put(&open().keeping_free(1));
    }

    #[test]
    fn a_page_is_whole_when_its_file_is_whatever_a_read_before_said() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("pages");
        let store = Store::open(&directory, false, false, "test".into()).unwrap();
        let key = put(&store);
        let Lookup::There(found) = store.find(&key, 5000).unwrap() else { panic!("it is there") };
        assert!(store.is_whole(&key, &found, 5000).unwrap());
        let written = || File::options().write(true).open(path(&directory, &key)).unwrap();
        written().write_all_at(&[8], 4999).unwrap();
        assert!(!store.is_whole(&key, &found, 5000).unwrap(), "a flipped byte");
        written().set_len(100).unwrap();
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
            File::options().write(true).open(path(&directory, &key)).unwrap().set_len(length).unwrap();
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

    #[test]
    fn a_folder_that_others_could_change_is_refused_and_the_sentence_says_what_to_do() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("above/pages");
        let open = |read_only| Store::open(&directory, false, read_only, "test".into());
        drop(open(false).unwrap());
        let inside = directory.join(FORMAT);
        let mode = |path: &Path| {
            std::os::unix::fs::PermissionsExt::mode(&path.metadata().unwrap().permissions()) & 0o777
        };
        for made in [scratch.path().join("above"), directory.clone(), inside.clone(), inside.join("a7")] {
            assert_eq!(mode(&made), 0o700, "{}", made.display());
        }
        let cases = [
            (directory.clone(), 0o777, 0o700, "every user may write to"),
            (inside.clone(), 0o777, 0o700, "chmod -R go-rwx"),
            (inside.clone(), 0o770, 0o700, "chmod -R go-rwx"),
            (inside.join("a7"), 0o777, 0o700, "chmod -R go-rwx"),
        ];
        for (path, wrong, right, says) in cases {
            set_mode(&path, wrong);
            for read_only in [false, true] {
                let error = open(read_only).err().unwrap().to_string();
                assert!(error.contains(says) && error.contains(path.to_str().unwrap()), "{error}");
            }
            set_mode(&path, right);
            assert!(open(false).is_ok() && open(true).is_ok());
        }
        // Another's folder, behind a link.
        std::fs::remove_dir(inside.join("a7")).unwrap();
        std::os::unix::fs::symlink("/tmp", inside.join("a7")).unwrap();
        assert!(open(false).is_err() && open(true).is_err());
    }

    #[test]
    fn what_is_no_regular_file_is_missing_and_nothing_waits_for_it() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = scratch.path().join("pages");
        for direct in [false, true] {
            let store = Store::open(&directory, direct, false, "test".into()).unwrap();
            let (key, value) = (Key([3; 32]), vec![7; 5000]);
            let page = path(&directory, &key);
            let outside = scratch.path().join("outside");
            let missing = |what: &str| {
                assert!(matches!(store.find(&key, 5000).unwrap(), Lookup::Missing), "{what}");
                assert_eq!(store.length(&key).unwrap(), None, "{what}");
                assert_eq!(store.remove(&key).unwrap(), None, "{what}");
                assert!(store.keys(3).unwrap().is_empty() && store.usage().unwrap() == (0, 0), "{what}");
                assert!(page.symlink_metadata().is_ok(), "{what} stays");
            };
            // A whole value, through a link.
            let plain = Store::open(&directory, false, false, "other".into()).unwrap();
            put(&plain);
            assert_eq!((store.keys(3).unwrap(), store.usage().unwrap()), (vec![key], (1, 5000)));
            std::fs::rename(&page, &outside).unwrap();
            std::os::unix::fs::symlink(&outside, &page).unwrap();
            missing("a link");
            std::fs::remove_file(&page).unwrap();
            rustix::fs::mknodat(rustix::fs::CWD, &page, FileType::Fifo, Mode::from_raw_mode(0o600), 0)
                .unwrap();
            missing("a pipe");
            // A put takes its place.
            put(&plain);
            let Lookup::There(found) = plain.find(&key, 5000).unwrap() else { panic!("it is there") };
            assert!(found.is(&key, &value) && plain.is_whole(&key, &found, 5000).unwrap());
            plain.remove(&key).unwrap();
        }
    }
}
