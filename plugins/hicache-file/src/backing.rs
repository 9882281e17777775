//! The directory of the segments: names, permissions, locks. All names are relative to one open descriptor, so that
//! later changes of the path cannot redirect them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use host_ownership::{Access, Folder, plain_file};
use host_plugin_api::{Error, ErrorCode, Level, Result, log};
use rustix::fs::{
    Advice, AtFlags, Dir, FallocateFlags, FlockOperation, Mode, OFlags, Stat, Timespec, Timestamps,
    UTIME_NOW, fadvise, fallocate, fchmod, flock, fstat, fstatvfs, ftruncate, openat, statat, unlinkat,
    utimensat,
};
use rustix::io::Errno;

use crate::config::{Config, Direct, Permissions};
use crate::format::Name;

/// The folder of segments in the configured directory. Another format has another folder.
const FORMAT: &str = "tier-v1";
const LOCK: &str = "lock";
/// The most names of segments that are read: a bound on memory.
const MOST_NAMES: usize = 1 << 17;
/// How long another process may hold the directory's lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The open directory of segments.
pub struct Directory {
    fd: OwnedFd,
    path: PathBuf,
    identity: (u64, u64),
    file_mode: Mode,
    group: bool,
    direct: AtomicBool,
    direct_required: bool,
    pub read_only: bool,
}

/// The directory's lock, held while segments are made or evicted, or are found to have no writer.
pub struct DirectoryLock {
    _file: OwnedFd,
}

/// One file of a segment.
#[derive(Clone, Copy, Debug)]
pub struct SegmentFile {
    pub name: Name,
    pub is_index: bool,
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

impl Directory {
    pub fn open(config: &Config) -> Result<Self> {
        let group = config.permissions == Permissions::Group;
        let (access, make) = (if group { Access::Group } else { Access::User }, !config.read_only);
        let io = |error: io::Error| Error::new(ErrorCode::IO, error.to_string());
        let above = Folder::named(&config.dir, access, make).map_err(io)?;
        let folder = above.own(FORMAT, access, make, "set permissions = \"group\"").map_err(io)?;
        let path = folder.path().to_owned();
        let fd = OwnedFd::from(folder);
        let stat = fstat(&fd).map_err(|e| io(e.into()))?;
        let directory = Self {
            identity: identity(&stat),
            fd,
            file_mode: Mode::from_raw_mode(if group { 0o660 } else { 0o600 }),
            group,
            direct: AtomicBool::new(config.direct != Direct::Never),
            direct_required: config.direct == Direct::Always,
            read_only: config.read_only,
            path,
        };
        if !config.read_only {
            // Tries the lock, so that an error is reported at opening and not at the first put. If another process has it, for
            // however long, locks work here.
            let tried = directory.lock_file().and_then(|file| locked(&file));
            tried.map_err(|e| {
                let path = directory.path.join(LOCK);
                let text = format!("cannot lock {}: {e} (read_only = true needs no lock)", path.display());
                Error::new(ErrorCode::IO, text)
            })?;
            // Finds out whether the file system has O_DIRECT.
            let probed = directory.opened_direct(LOCK, OFlags::RDONLY);
            probed.map_err(|e| {
                let text = format!("cannot open files in {} with O_DIRECT: {e}", directory.path.display());
                Error::new(ErrorCode::IO, text)
            })?;
        }
        Ok(directory)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Why the path no longer leads to this directory, or `None` when it does.
    pub fn astray(&self) -> Option<String> {
        match rustix::fs::stat(&self.path) {
            Ok(stat) if identity(&stat) == self.identity => None,
            Ok(_) | Err(Errno::NOENT | Errno::NOTDIR) => Some(
                "the directory is gone or was replaced (another in its place is used after a restart)"
                    .to_owned(),
            ),
            Err(e) => Some(format!("the directory cannot be looked at: {e}")),
        }
    }

    /// The directory's modification time. It changes whenever a name is added or removed.
    pub fn changes(&self) -> io::Result<(i64, u64)> {
        let stat = fstat(&self.fd)?;
        Ok((stat.st_mtime, stat.st_mtime_nsec as u64))
    }

    /// Lists the files of segments, in no order.
    pub fn list(&self) -> io::Result<Vec<SegmentFile>> {
        let mut found = Vec::new();
        let fd = openat(&self.fd, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        for entry in Dir::new(fd)? {
            let entry = entry?;
            if let Some((name, is_index)) = Name::parse(entry.file_name().to_bytes())
                && found.len() < MOST_NAMES
            {
                found.push(SegmentFile { name, is_index });
            }
        }
        Ok(found)
    }

    fn opened(&self, file: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let found = plain_file(&self.fd, file, flags, self.file_mode)?;
        let Some((fd, stat)) = found.filter(|(_, stat)| stat.st_nlink <= 1) else {
            return Err(io::Error::other(format!("{file} is no plain file with one name")));
        };
        if self.group && flags.contains(OFlags::CREATE) && stat.st_uid == rustix::process::geteuid().as_raw()
        {
            fchmod(&fd, self.file_mode)?;
        }
        Ok(fd)
    }

    /// Opens a file, with `O_DIRECT` where the file system has it.
    fn opened_direct(&self, file: &str, flags: OFlags) -> io::Result<OwnedFd> {
        if self.direct.load(Ordering::Relaxed) {
            match self.opened(file, flags | OFlags::DIRECT) {
                Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) && !self.direct_required => {
                    self.direct.store(false, Ordering::Relaxed);
                    let path = self.path.display();
                    log!(
                        Level::WARN,
                        "the file system of {path} has no O_DIRECT: pages go through its cache"
                    );
                }
                other => return other,
            }
            // The refused open may have made the file.
            let flags = flags - OFlags::EXCL;
            return self.opened(file, flags);
        }
        self.opened(file, flags)
    }

    pub fn is_direct(&self) -> bool {
        self.direct.load(Ordering::Relaxed)
    }

    /// An index file, to read or also to write.
    pub fn index(&self, name: Name, write: bool) -> io::Result<OwnedFd> {
        self.opened(&name.index(), if write { OFlags::RDWR } else { OFlags::RDONLY })
    }

    /// Asks the system to read an index file into its cache. If the system does not, a later read does.
    pub fn prefetch(&self, name: Name) {
        if let Ok(index) = self.index(name, false) {
            let _only_advice = fadvise(&index, 0, None, Advice::WillNeed);
        }
    }

    /// A data file, to read.
    pub fn data(&self, name: Name) -> io::Result<OwnedFd> {
        self.opened_direct(&name.data(), OFlags::RDONLY)
    }

    /// Opens a data file to cut it. Not for reading: the file is opened without `O_DIRECT`.
    pub fn data_to_cut(&self, name: Name) -> io::Result<OwnedFd> {
        self.opened(&name.data(), OFlags::RDWR)
    }

    /// Makes both files of a segment. The index is locked, the data is `segment` bytes long. A failed attempt removes
    /// the files that it made.
    pub fn make(&self, name: Name, segment: u64, _lock: &DirectoryLock) -> io::Result<(OwnedFd, OwnedFd)> {
        let make = || {
            let new = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
            let index = self.opened(&name.index(), new)?;
            flock(&index, FlockOperation::NonBlockingLockExclusive)?;
            write_at(&index, &name.header(segment), 0)?;
            let data = self.opened_direct(&name.data(), new)?;
            match fallocate(&data, FallocateFlags::empty(), 0, segment) {
                // The file system cannot allocate ahead: a write may then meet a full disk.
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => ftruncate(&data, segment)?,
                other => other?,
            }
            Ok((index, data))
        };
        let made: io::Result<(OwnedFd, OwnedFd)> = make();
        if made.is_err() {
            self.remove(name);
        }
        made
    }

    /// Removes both files. A missing file is no error.
    pub fn remove(&self, name: Name) -> bool {
        let gone = |file: String| {
            let result = unlinkat(&self.fd, file.as_str(), AtFlags::empty());
            matches!(result, Ok(()) | Err(Errno::NOENT))
        };
        // The index first: without it no process can read the data.
        gone(name.index()) && gone(name.data())
    }

    /// A file's size in bytes, and its modification time. That of a data file is when the segment was used last.
    pub fn size(&self, found: SegmentFile) -> Option<(u64, (i64, u64))> {
        let file = if found.is_index { found.name.index() } else { found.name.data() };
        let stat = statat(&self.fd, file.as_str(), AtFlags::SYMLINK_NOFOLLOW).ok()?;
        Some((u64::try_from(stat.st_size).unwrap_or(0), (stat.st_mtime, stat.st_mtime_nsec as u64)))
    }

    /// Bytes that a segment's files take on the file system. While the files are not full, the segment counts for more.
    pub fn taken(&self, name: Name) -> u64 {
        let blocks = |file: String| {
            let stat = statat(&self.fd, file.as_str(), AtFlags::SYMLINK_NOFOLLOW);
            stat.map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0))
        };
        512 * (blocks(name.index()) + blocks(name.data()))
    }

    /// Notes that the segment was used now.
    pub fn touch(&self, name: Name) -> io::Result<()> {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        utimensat(&self.fd, name.data().as_str(), &times, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(())
    }

    /// Bytes that this user may still write to the file system.
    pub fn free(&self) -> io::Result<u64> {
        let stat = fstatvfs(&self.fd)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Takes the directory's lock. Waits for other processes, at most `LOCK_PATIENCE`.
    pub fn lock(&self) -> io::Result<DirectoryLock> {
        let file = self.lock_file()?;
        let deadline = Instant::now() + LOCK_PATIENCE;
        while !locked(&file)? {
            if Instant::now() >= deadline {
                return Err(io::Error::other("another process holds it, for more than 2 s"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(DirectoryLock { _file: file })
    }

    fn lock_file(&self) -> io::Result<OwnedFd> {
        self.opened(LOCK, OFlags::RDWR | OFlags::CREATE)
    }

    /// Makes names durable.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(self.fd.as_fd())?)
    }
}

/// Locks this file until it is closed. Returns `false` if another process has the lock.
fn locked(file: &OwnedFd) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Locks this index file, unless it is locked already. This process has the lock until `index` is closed.
pub fn try_lock(index: &OwnedFd) -> bool {
    flock(index, FlockOperation::NonBlockingLockExclusive).is_ok()
}

/// Length of an open file.
pub fn length(file: &OwnedFd) -> io::Result<u64> {
    Ok(u64::try_from(fstat(file)?.st_size).unwrap_or(0))
}

/// Writes all of `bytes`.
pub fn write_at(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(file, bytes, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                bytes = &bytes[n..];
                at += n as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// Reads up to `most` bytes, fewer at the end of the file.
pub fn read_at(file: &OwnedFd, at: u64, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; most];
    let mut filled = 0;
    while filled < most {
        match rustix::io::pread(file, &mut bytes[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slow file system may hold up the process that has the lock.
    #[test]
    fn a_directory_opens_while_another_process_has_its_lock() {
        let parent = tempfile::tempdir().unwrap();
        let config = Config::parse(&format!("dir = {:?}", parent.path().join("pages"))).unwrap();
        let first = Directory::open(&config).unwrap();
        let lock = first.lock().unwrap();
        let second = Directory::open(&config).unwrap();
        assert!(second.lock().is_err());
        drop(lock);
        assert!(second.lock().is_ok());
    }

    #[test]
    fn workers_that_start_together_make_the_directory_once() {
        for _ in 0..50 {
            let parent = tempfile::tempdir().unwrap();
            let config = Config::parse(&format!("dir = {:?}", parent.path().join("pages"))).unwrap();
            let together = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                let open = || {
                    together.wait();
                    Directory::open(&config).map(drop)
                };
                let workers: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
                for worker in workers {
                    assert!(worker.join().unwrap().is_ok());
                }
            });
        }
    }
}
