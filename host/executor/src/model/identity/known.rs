//! Keeps digests of files that were read before, so that the second start of a large model does not read it for its digest.
//!
//! Each weight file has one small entry, `host/digests/DEVICE-INODE` in the user's cache directory. It holds the file's size and
//! times when it was read, its digest, and a checksum over the line. A weight file is read again if its size, its time of change
//! or its time of status change (which no program can set) differs. Processes that start at the same time write files of their
//! own and rename them.
//!
//! An entry that another user could have written is not believed.
//!
//! A program that has mapped the file to write it may change it without changing its times at once.

use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use host_kernels::xxh3::xxh3;
use host_ownership::{only_this_user_may_write, regular};

use super::content::{self, ContentDigest};
use super::hex;
use crate::model::LoadError;

/// Smaller files have no entry, because they are read as fast as an entry.
const SMALLEST: u64 = 16 << 20;
/// Seconds for which a file must not have changed before it is read, or its digest is not kept. A change right after the reading
/// could leave the file's times as they were, because file systems count time in steps of up to 2 seconds.
const SETTLED: i64 = 3;
/// Most bytes of an entry.
const ENTRY: u64 = 512;

/// A folder that keeps digests, and the conditions for a file to have an entry.
pub(super) struct Known {
    /// Absent if the environment names no cache directory.
    directory: Option<PathBuf>,
    smallest: u64,
    settled: i64,
}

/// The metadata that changes when a file changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Known {
    /// A folder in the user's cache directory.
    pub fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        let directory = cache.map(|cache| cache.join("host").join("digests"));
        Self { directory, smallest: SMALLEST, settled: SETTLED }
    }

    /// The digest of a file, from its entry or from its content. A digest from the content is then noted in an entry.
    pub fn digest(&self, path: &Path, file: &File) -> Result<ContentDigest, LoadError> {
        self.find(path, file).map_err(|source| LoadError::Read { file: path.to_owned(), source })
    }

    fn find(&self, path: &Path, file: &File) -> io::Result<ContentDigest> {
        let stamp = Stamp::of(file)?;
        let directory = self.directory.as_deref().filter(|_| stamp.size >= self.smallest);
        let Some(directory) = directory else { return content::digest(file, stamp.size) };
        let entry = directory.join(stamp.name());
        if let Some(digest) = stamp.noted(&entry) {
            return Ok(digest);
        }
        // The entry's file is made before the weight file is read, so that its time says when the reading began.
        let begun = Unfinished::begin(directory, &entry);
        let digest = content::digest(file, stamp.size)?;
        let noted = begun.and_then(|begun| {
            if Stamp::of(file)? != stamp {
                return Err(io::Error::other("it was changed while it was read"));
            }
            if begun.at.saturating_sub(stamp.newest()) < self.settled {
                return Err(io::Error::other("it was changed just before it was read"));
            }
            begun.finish(&stamp.line(&digest))
        });
        if let Err(error) = noted {
            tracing::debug!("the digest of {} is computed again at the next start: {error}", path.display());
        }
        Ok(digest)
    }
}

impl Stamp {
    fn of(file: &File) -> io::Result<Self> {
        let data = file.metadata()?;
        Ok(Self {
            device: data.dev(),
            inode: data.ino(),
            size: data.size(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        })
    }

    /// The name of the entry.
    fn name(&self) -> String {
        format!("{:x}-{:x}", self.device, self.inode)
    }

    /// The later of the two times, in seconds.
    fn newest(&self) -> i64 {
        self.modified.0.max(self.changed.0)
    }

    /// The text of an entry before the digest. The number at its start is the version of this format and of the digest's
    /// definition.
    fn text(&self) -> String {
        let Self { device, inode, size, modified, changed } = self;
        let times = format!("{}.{:09} {}.{:09}", modified.0, modified.1, changed.0, changed.1);
        format!("1 {device:x} {inode:x} {size} {times} ")
    }

    fn line(&self, digest: &ContentDigest) -> String {
        let said = self.text() + &hex(digest);
        format!("{said} {:016x}\n", xxh3(said.as_bytes(), 0))
    }

    /// The digest that an entry has for a file with this stamp. `None` if the entry is damaged or has another stamp, or if another
    /// user could have written it.
    fn noted(&self, entry: &Path) -> Option<ContentDigest> {
        let (file, about) = regular(entry).ok()?;
        let folder = std::fs::symlink_metadata(entry.parent()?).ok()?;
        if ![about, folder].iter().all(only_this_user_may_write) {
            tracing::debug!("{} is not used: another user could have written it", entry.display());
            return None;
        }
        let mut text = String::new();
        file.take(ENTRY).read_to_string(&mut text).ok()?;
        let digest = text.strip_prefix(&self.text())?.get(..64)?;
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(digest.as_bytes().chunks(2)) {
            *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        (text == self.line(&bytes)).then_some(bytes)
    }
}

/// An entry under a temporary name. Dropping it removes its file.
struct Unfinished<'a> {
    temporary: PathBuf,
    file: File,
    entry: &'a Path,
    /// The time when the file was made, in seconds.
    at: i64,
}

impl<'a> Unfinished<'a> {
    fn begin(directory: &Path, entry: &'a Path) -> io::Result<Self> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = entry.with_extension(format!("{}-{number}", std::process::id()));
        let open = || File::options().write(true).create_new(true).mode(0o600).open(&temporary);
        // A killed process with the same number may have left such a file. A live process with this number can only be in
        // another container. Then its rename fails, or installs a line that has bytes of both. Neither does harm.
        let file = open().or_else(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => std::fs::remove_file(&temporary).and_then(|()| open()),
            _ => Err(error),
        })?;
        let at = file.metadata()?.mtime();
        Ok(Self { temporary, file, entry, at })
    }

    fn finish(mut self, line: &str) -> io::Result<()> {
        self.file.write_all(line.as_bytes())?;
        std::fs::rename(&self.temporary, self.entry)
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        // After a rename the file does not exist any more.
        let _gone = std::fs::remove_file(&self.temporary);
    }
}

#[cfg(test)]
mod tests;
