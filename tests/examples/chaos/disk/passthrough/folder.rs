//! The folder that is passed through: the files in it that the kernel knows, by number.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use fuser::{FileHandle, FileType};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The number of the folder itself.
const ROOT: u64 = 1;

/// A file that the kernel knows. The descriptor only names the file, which is thus found even after its name was removed.
struct Node {
    fd: OwnedFd,
    /// Lookups by the kernel that it has not forgotten yet.
    known: u64,
}

/// An open file or folder.
pub enum Open {
    File(Arc<File>),
    Folder(Arc<Vec<Entry>>),
}

/// A name in a folder, as it was when the folder was opened.
pub struct Entry {
    pub number: u64,
    pub kind: FileType,
    pub name: OsString,
}

#[derive(Default)]
struct Opened {
    last: u64,
    all: HashMap<u64, Open>,
}

/// The folder that is passed through, with its known and open files.
pub struct Folder {
    nodes: Mutex<HashMap<u64, Node>>,
    opened: Mutex<Opened>,
}

fn named(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// A path to the file that a descriptor names.
fn leads_to(fd: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
}

impl Folder {
    pub fn open(path: &Path) -> io::Result<Self> {
        let root = Node { fd: named(path)?, known: 1 };
        Ok(Self { nodes: Mutex::new(HashMap::from([(ROOT, root)])), opened: Mutex::default() })
    }

    /// A path to a file that the kernel knows.
    pub fn path(&self, number: u64) -> io::Result<PathBuf> {
        let nodes = self.nodes.lock().unwrap();
        Ok(nodes.get(&number).map(|node| leads_to(&node.fd)).ok_or(Errno::STALE)?)
    }

    /// The number and attributes of a name. Counts one more lookup by the kernel.
    pub fn look_up(&self, parent: u64, name: &OsStr) -> io::Result<(u64, Metadata)> {
        let fd = named(&self.path(parent)?.join(name))?;
        let mut nodes = self.nodes.lock().unwrap();
        let stat = std::fs::metadata(leads_to(&fd))?;
        let number = stat.ino();
        nodes.entry(number).or_insert(Node { fd, known: 0 }).known += 1;
        Ok((number, stat))
    }

    pub fn forget(&self, number: u64, count: u64) {
        let mut nodes = self.nodes.lock().unwrap();
        let Some(node) = nodes.get_mut(&number) else { return };
        node.known = node.known.saturating_sub(count);
        if node.known == 0 && number != ROOT {
            nodes.remove(&number);
        }
    }

    pub fn list(&self, number: u64) -> io::Result<Vec<Entry>> {
        let entries = std::fs::read_dir(self.path(number)?)?;
        entries
            .map(|entry| {
                let entry = entry?;
                let kind = FileType::from_std(entry.file_type()?).unwrap_or(FileType::RegularFile);
                Ok(Entry { number: entry.ino(), kind, name: entry.file_name() })
            })
            .collect()
    }

    /// Keeps an open file or folder until it is closed.
    pub fn keep(&self, open: Open) -> FileHandle {
        let mut opened = self.opened.lock().unwrap();
        opened.last += 1;
        let handle = opened.last;
        opened.all.insert(handle, open);
        FileHandle(handle)
    }

    pub fn file(&self, handle: u64) -> io::Result<Arc<File>> {
        match self.opened.lock().unwrap().all.get(&handle) {
            Some(Open::File(file)) => Ok(Arc::clone(file)),
            _ => Err(Errno::BADF.into()),
        }
    }

    pub fn entries(&self, handle: u64) -> io::Result<Arc<Vec<Entry>>> {
        match self.opened.lock().unwrap().all.get(&handle) {
            Some(Open::Folder(entries)) => Ok(Arc::clone(entries)),
            _ => Err(Errno::BADF.into()),
        }
    }

    pub fn close(&self, handle: u64) {
        self.opened.lock().unwrap().all.remove(&handle);
    }
}
