//! A file system that passes all calls to a folder, with delays and errors as ordered.
//!
//! This process serves it (FUSE). The kernel keeps the locks. It caches no attributes, so that each process sees the changes of
//! others.

mod folder;
mod orders;

use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use rustix::fs::{AtFlags, FallocateFlags, Mode, OFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};

use folder::{Folder, Open};
use orders::Told;
pub use orders::{Done, Orders};

/// Threads that serve requests. Each delayed request occupies one.
const THREADS: usize = 48;
/// How long the kernel may cache names and attributes.
const TTL: Duration = Duration::ZERO;

/// A mounted file system. Dropping it unmounts it.
pub struct Passthrough {
    session: Option<BackgroundSession>,
    told: Arc<Told>,
}

impl Passthrough {
    /// Mounts a view of `folder` at `mount`.
    ///
    /// # Errors
    /// Without FUSE, or without the right to mount.
    pub fn mount(folder: &Path, mount: &Path) -> io::Result<Self> {
        let told = Arc::new(Told::default());
        let served = Served { folder: Folder::open(folder)?, told: Arc::clone(&told) };
        let mut config = Config::default();
        config.mount_options =
            vec![MountOption::FSName("host-chaos".into()), MountOption::NoSuid, MountOption::NoDev];
        config.n_threads = Some(THREADS);
        let session = fuser::spawn_mount(served, mount, &config)?;
        Ok(Self { session: Some(session), told })
    }

    /// Sets the orders for all calls from now on.
    pub fn tell(&self, orders: Orders) {
        self.told.tell(orders);
    }

    /// Counts of reads, writes and syncs that were late or failed so far.
    pub fn done(&self) -> Done {
        self.told.done()
    }
}

impl Drop for Passthrough {
    fn drop(&mut self) {
        self.tell(Orders::default());
        if let Some(session) = self.session.take()
            && let Err(error) = session.umount_and_join()
        {
            // The mount namespace ends with this process, so the mount does, too.
            println!("the slow file system is not unmounted: {error}");
        }
    }
}

struct Served {
    folder: Folder,
    told: Arc<Told>,
}

fn attributes(number: u64, stat: &std::fs::Metadata) -> FileAttr {
    let time = |seconds: i64, nanoseconds: i64| {
        let whole = Duration::from_secs(seconds.max(0).unsigned_abs());
        SystemTime::UNIX_EPOCH + whole + Duration::from_nanos(nanoseconds.max(0).unsigned_abs())
    };
    FileAttr {
        ino: INodeNo(number),
        size: stat.size(),
        blocks: stat.blocks(),
        atime: time(stat.atime(), stat.atime_nsec()),
        mtime: time(stat.mtime(), stat.mtime_nsec()),
        ctime: time(stat.ctime(), stat.ctime_nsec()),
        crtime: SystemTime::UNIX_EPOCH,
        kind: if stat.is_dir() { FileType::Directory } else { FileType::RegularFile },
        perm: (stat.mode() & 0o7777) as u16,
        nlink: u32::try_from(stat.nlink()).unwrap_or(u32::MAX),
        uid: stat.uid(),
        gid: stat.gid(),
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn timestamp(time: Option<TimeOrNow>) -> Timespec {
    let special = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    match time {
        None => special(UTIME_OMIT),
        Some(TimeOrNow::Now) => special(UTIME_NOW),
        Some(TimeOrNow::SpecificTime(time)) => {
            let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let tv_sec = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
            Timespec { tv_sec, tv_nsec: since.subsec_nanos().into() }
        }
    }
}

/// Reads until the buffer is full or the file ends.
fn read(file: &std::fs::File, bytes: &mut [u8], at: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], at + filled as u64)? {
            0 => break,
            count => filled += count,
        }
    }
    Ok(filled)
}

impl Served {
    /// Sets mode, size and times, and returns the attributes after that.
    fn set(
        &self,
        number: u64,
        handle: Option<FileHandle>,
        mode: Option<u32>,
        size: Option<u64>,
        times: Option<Timestamps>,
    ) -> io::Result<std::fs::Metadata> {
        let path = self.folder.path(number)?;
        if let Some(mode) = mode {
            rustix::fs::chmod(&path, Mode::from_raw_mode(mode & 0o7777))?;
        }
        if let Some(size) = size {
            match handle.map(|handle| self.folder.file(handle.0)) {
                Some(file) => file?.set_len(size)?,
                None => std::fs::OpenOptions::new().write(true).open(&path)?.set_len(size)?,
            }
        }
        if let Some(times) = times {
            rustix::fs::utimensat(rustix::fs::CWD, &path, &times, AtFlags::empty())?;
        }
        std::fs::metadata(path)
    }
}

/// Replies with a result, or with its error.
macro_rules! answer {
    ($reply:ident, $result:expr, |$found:pat_param| $good:expr) => {
        match $result {
            Ok($found) => $good,
            Err(error) => $reply.error(Errno::from(io::Error::from(error))),
        }
    };
}

impl Filesystem for Served {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        answer!(reply, self.folder.look_up(parent.0, name), |(number, stat)| {
            reply.entry(&TTL, &attributes(number, &stat), Generation(0));
        });
    }

    fn forget(&self, _: &Request, number: INodeNo, count: u64) {
        self.folder.forget(number.0, count);
    }

    fn getattr(&self, _: &Request, number: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let stat = self.folder.path(number.0).and_then(std::fs::metadata);
        answer!(reply, stat, |stat| reply.attr(&TTL, &attributes(number.0, &stat)));
    }

    fn setattr(
        &self,
        _: &Request,
        number: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        if uid.is_some() || gid.is_some() {
            return reply.error(Errno::EPERM);
        }
        let times = (atime.is_some() || mtime.is_some())
            .then(|| Timestamps { last_access: timestamp(atime), last_modification: timestamp(mtime) });
        answer!(reply, self.set(number.0, handle, mode, size, times), |stat| {
            reply.attr(&TTL, &attributes(number.0, &stat));
        });
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        let made = self.folder.path(parent.0).and_then(|path| {
            rustix::fs::mkdir(path.join(name), Mode::from_raw_mode(mode & 0o7777))?;
            self.folder.look_up(parent.0, name)
        });
        answer!(reply, made, |(number, stat)| {
            reply.entry(&TTL, &attributes(number, &stat), Generation(0));
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let gone = self.folder.path(parent.0).and_then(|path| std::fs::remove_file(path.join(name)));
        answer!(reply, gone, |()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let gone = self.folder.path(parent.0).and_then(|path| std::fs::remove_dir(path.join(name)));
        answer!(reply, gone, |()| reply.ok());
    }

    fn open(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // Only the access mode is passed on: the kernel has checked the other flags, and truncates files itself.
        let mode = OFlags::from_bits_retain(flags.0.unsigned_abs()) & OFlags::ACCMODE;
        let opened = self
            .folder
            .path(number.0)
            .and_then(|path| Ok(rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty())?));
        answer!(reply, opened, |fd| {
            reply.opened(
                self.folder.keep(Open::File(Arc::new(fd.into()))),
                FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
            );
        });
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let kept = OFlags::ACCMODE | OFlags::EXCL | OFlags::CREATE | OFlags::TRUNC;
        let flags = OFlags::from_bits_retain(flags.unsigned_abs()) & kept;
        let made = self.folder.path(parent.0).and_then(|path| {
            let flags = flags | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::open(path.join(name), flags, Mode::from_raw_mode(mode & 0o7777))?;
            Ok((fd, self.folder.look_up(parent.0, name)?))
        });
        answer!(reply, made, |(fd, (number, stat))| {
            let handle = self.folder.keep(Open::File(Arc::new(fd.into())));
            let flags = FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
            reply.created(&TTL, &attributes(number, &stat), Generation(0), handle, flags);
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        at: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let done = self.told.obey().and_then(|()| {
            let mut bytes = vec![0; size as usize];
            let count = read(&*self.folder.file(handle.0)?, &mut bytes, at)?;
            bytes.truncate(count);
            Ok(bytes)
        });
        answer!(reply, done, |bytes| reply.data(&bytes));
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        at: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let done = self.told.obey().and_then(|()| self.folder.file(handle.0)?.write_at(bytes, at));
        answer!(reply, done, |count| reply.written(u32::try_from(count).unwrap_or(u32::MAX)));
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.folder.close(handle.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let done = self.told.obey().and_then(|()| {
            let file = self.folder.file(handle.0)?;
            if data_only { file.sync_data() } else { file.sync_all() }
        });
        answer!(reply, done, |()| reply.ok());
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        answer!(reply, self.told.obey(), |()| reply.ok());
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        at: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let mode = FallocateFlags::from_bits_retain(mode.unsigned_abs());
        let done =
            self.folder.file(handle.0).and_then(|file| Ok(rustix::fs::fallocate(&*file, mode, at, length)?));
        answer!(reply, done, |()| reply.ok());
    }

    fn opendir(&self, _: &Request, number: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        answer!(reply, self.folder.list(number.0), |entries| {
            reply.opened(self.folder.keep(Open::Folder(Arc::new(entries))), FopenFlags::empty());
        });
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, at: u64, mut reply: ReplyDirectory) {
        answer!(reply, self.folder.entries(handle.0), |entries| {
            let from = usize::try_from(at).unwrap_or(usize::MAX);
            for (entry, next) in entries.iter().zip(1..).skip(from) {
                if reply.add(INodeNo(entry.number), next, entry.kind, &entry.name) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.folder.close(handle.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, number: INodeNo, reply: ReplyStatfs) {
        let stat = self.folder.path(number.0).and_then(|path| Ok(rustix::fs::statvfs(path)?));
        answer!(reply, stat, |stat| {
            let small = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
            let (size, part, name) = (small(stat.f_bsize), small(stat.f_frsize), small(stat.f_namemax));
            let (blocks, free, left) = (stat.f_blocks, stat.f_bfree, stat.f_bavail);
            reply.statfs(blocks, free, left, stat.f_files, stat.f_ffree, size, name, part);
        });
    }
}
