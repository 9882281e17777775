//! Caches compiled kernels on disk, so that the second start of a program does not compile them.
//!
//! There is one file per source, options, device and compiler, in `host/kernels` in the user's cache directory. It has a line
//! that names these, then the image, then a checksum over both. If a file is damaged or cannot be written, the kernels are
//! compiled again. Processes that start at the same time write files of their own and rename them.

use std::fmt::Write as _;
use std::fs::{DirBuilder, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::nvrtc::Image;
use super::source::Source;
use crate::xxh3::{xxh3, xxh3_128};

/// Most bytes of a file. The largest images have some megabytes.
const MAX_FILE: u64 = 64 << 20;
/// Permission bits of a file that others than its owner may write.
const OTHERS_WRITE: u32 = 0o022;
/// Bytes of the checksum at a file's end.
const SUM: usize = 8;

/// A folder that keeps compiled kernels.
#[derive(Debug)]
pub(super) struct Cache {
    /// Absent if no compiled kernels are kept.
    folder: Option<PathBuf>,
}

impl Cache {
    /// A cache in the user's cache directory, if the environment names one.
    pub(super) fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")));
        Self { folder: cache.map(|cache| cache.join("host").join("kernels")) }
    }

    /// A cache in this folder, or one that keeps nothing.
    pub(super) fn at(folder: Option<&Path>) -> Self {
        Self { folder: folder.map(Path::to_owned) }
    }

    /// The entry for a source that this version of the compiler compiles for devices of this capability.
    pub(super) fn entry(&self, source: &Source, capability: i32, (major, minor): (i32, i32)) -> Entry {
        let text = xxh3_128(&[0; 32], source.text.as_bytes());
        // The number at the start of the line is the version of this format.
        let mut line = format!("1 {} {text:032x} sm_{capability} NVRTC {major}.{minor}", source.name);
        for option in source.options {
            // Writing to a string cannot fail.
            let _written = write!(line, " {option}");
        }
        line.push('\n');
        let name = source.name.trim_end_matches(".cu");
        let file = format!("{name}-{:032x}", xxh3_128(&[0; 32], line.as_bytes()));
        Entry { path: self.folder.as_ref().map(|folder| folder.join(file)), line }
    }
}

/// The file of one image.
pub(super) struct Entry {
    path: Option<PathBuf>,
    line: String,
}

impl Entry {
    /// The image, if its file exists, is not damaged, and no other user could have written it.
    pub(super) fn read(&self) -> Option<Image> {
        let mut bytes = own_file(self.path.as_ref()?).ok()?;
        let (content, sum) = bytes.split_last_chunk::<SUM>()?;
        if xxh3(content, 0) != u64::from_le_bytes(*sum) {
            return None;
        }
        let &kind = content.strip_prefix(self.line.as_bytes())?.first()?;
        bytes.truncate(bytes.len() - SUM);
        let image = bytes.split_off(self.line.len() + 1);
        match kind {
            b'b' => Some(Image::Binary(image)),
            b'a' => String::from_utf8(image).ok().map(Image::Assembly),
            _ => None,
        }
    }

    /// Keeps an image for later starts, if it can be written.
    pub(super) fn write(&self, image: &Image) {
        // After an error the next start compiles again.
        let _not_kept = self.path.as_ref().map(|path| self.write_to(path, image));
    }

    fn write_to(&self, path: &Path, image: &Image) -> io::Result<()> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let (kind, bytes) = match image {
            Image::Binary(bytes) => (b'b', bytes.as_slice()),
            Image::Assembly(text) => (b'a', text.as_bytes()),
        };
        let mut content = [self.line.as_bytes(), &[kind], bytes].concat();
        content.extend(xxh3(&content, 0).to_le_bytes());
        if let Some(folder) = path.parent() {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            check_folder(folder)?;
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{number}", std::process::id()));
        // A killed process with the same number may have left such a file.
        let _not_there = std::fs::remove_file(&temporary);
        let open = || File::options().write(true).create_new(true).mode(0o600).open(&temporary);
        let written = open().and_then(|mut file| file.write_all(&content));
        written.and_then(|()| std::fs::rename(&temporary, path)).inspect_err(|_error| {
            let _gone = std::fs::remove_file(&temporary);
        })
    }
}

/// The bytes of a file that this process's user alone may write, in a folder for which the same holds. Kernels run with access to all
/// memory of the device.
fn own_file(path: &Path) -> io::Result<Vec<u8>> {
    check_folder(path.parent().unwrap_or(Path::new("/")))?;
    if !std::fs::symlink_metadata(path)?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let file = File::open(path)?;
    let opened = file.metadata()?;
    if !is_own(&opened)? || opened.len() > MAX_FILE {
        return Err(io::Error::other("it belongs to another user, others may write it, or it is too long"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Checks that this process's user alone may make and replace files in a folder.
fn check_folder(folder: &Path) -> io::Result<()> {
    let place = std::fs::symlink_metadata(folder)?;
    if place.is_dir() && is_own(&place)? {
        return Ok(());
    }
    Err(io::Error::other("the folder belongs to another user, or others may write it"))
}

/// Whether a file or folder belongs to this process's user, and no other may write it.
fn is_own(place: &Metadata) -> io::Result<bool> {
    let user = std::fs::metadata("/proc/self")?.uid();
    Ok(place.uid() == user && place.mode() & OTHERS_WRITE == 0)
}
