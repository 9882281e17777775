//! A plugin's file that is opened once, so that the bytes that were checked are the bytes that are loaded.

use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, OFlags, SealFlags, fcntl_add_seals, memfd_create};
use sha2::{Digest, Sha256};

use host_ownership::regular;

use super::bounded::Bounded;
use super::dynamic::needs_its_place;
use super::error::PreflightError;
use super::manifest::Manifest;
use super::policy::Policy;
use super::preflight::{read, read_and_check};

/// Limit, in bytes, of lock files, side-cars and files of publishers.
const LONGEST_TEXT: u64 = 1 << 20;

/// Largest file that is read into memory, to be pinned or installed.
const LARGEST_WHOLE: u64 = 1 << 30;

/// Whether a file of so many bytes is read into memory.
fn may_be_read(bytes: u64) -> Result<(), PreflightError> {
    if bytes <= LARGEST_WHOLE {
        return Ok(());
    }
    let text = format!("it has {bytes} bytes, a file that is pinned or installed may have {LARGEST_WHOLE}");
    Err(PreflightError::Unreadable(io::Error::other(text)))
}

/// Properties of a file by which a change shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub device: u64,
    pub inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// An open file of a plugin.
pub(super) struct PluginFile {
    path: PathBuf,
    file: File,
    pub stamp: Stamp,
    /// Warnings for the operator about an accepted file.
    pub warnings: Vec<String>,
}

impl PluginFile {
    /// Opens a file and checks which users could replace it.
    pub(super) fn open(path: &Path, policy: &Policy) -> Result<Self, PreflightError> {
        // Checked before opening, because opening a device may have effects.
        if !std::fs::metadata(path).map_err(PreflightError::Unreadable)?.is_file() {
            return Err(PreflightError::NotAFile);
        }
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.map_err(PreflightError::Unreadable)?;
        let metadata = file.metadata().map_err(PreflightError::Unreadable)?;
        if !metadata.is_file() {
            return Err(PreflightError::NotAFile);
        }
        let found = host_ownership::check(path, &metadata).map_err(PreflightError::Unreadable)?;
        let mut warnings = found.warned;
        if policy.insecure_permissions {
            warnings.extend(found.refused);
        } else if !found.refused.is_empty() {
            return Err(PreflightError::Permissions(found.refused.join("; ")));
        }
        Ok(Self { path: path.to_owned(), file, stamp: Stamp::of(&metadata), warnings })
    }

    /// The path at which the file was opened.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The sha256 of its bytes, in hexadecimal.
    pub(super) fn sha256(&self) -> Result<String, PreflightError> {
        self.digest_into(&mut io::sink())
    }

    /// Writes the file's bytes to `to` and returns their sha256, in hexadecimal.
    pub(super) fn digest_into(&self, to: &mut impl Write) -> Result<String, PreflightError> {
        copy_and_digest(&self.file, to).map_err(PreflightError::Unreadable)
    }

    /// The manifest, if this host can load the file as a plugin.
    pub(super) fn manifest(&self, policy: &Policy) -> Result<Manifest, PreflightError> {
        let file = self.file.try_clone().map_err(PreflightError::Unreadable)?;
        read_and_check(&Bounded::new(file), self.stamp.size, policy)
    }

    /// Whether the file must be loaded from its own path. Reads the open file, because the path may lead to another one by now.
    pub(super) fn needs_its_place(&self) -> Result<bool, PreflightError> {
        let file = self.file.try_clone().map_err(PreflightError::Unreadable)?;
        Ok(needs_its_place(&Bounded::new(file)))
    }

    /// Metadata of the open file, as they are now.
    pub(super) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// A path in `/proc` to the open file. It is valid while the file is open, whatever happens to the file's own path.
    pub(super) fn name_of_open(&self) -> Result<PathBuf, PreflightError> {
        let number = self.file.as_raw_fd();
        // A debugger has another `/proc/self`, but finds the file under the number of this process.
        let paths = [format!("/proc/{}/fd/{number}", std::process::id()), format!("/proc/self/fd/{number}")];
        let is_it =
            |path: &PathBuf| std::fs::metadata(path).is_ok_and(|found| Stamp::of(&found) == self.stamp);
        let found = paths.map(PathBuf::from).into_iter().find(is_it);
        found.ok_or_else(|| {
            let text = "it changed while it was opened, or /proc is not there, through which it is loaded";
            PreflightError::Unreadable(io::Error::other(text))
        })
    }

    /// Copies the file into memory that cannot change any more, if its bytes have this hash. Else returns the hash that they have.
    pub(super) fn sealed(&self, sha256: &str) -> Result<Result<Sealed, String>, PreflightError> {
        may_be_read(self.stamp.size)?;
        let sealed = (|| {
            let name = self.path.file_name().unwrap_or_default().to_string_lossy();
            // The system refuses longer names. The name appears only in `/proc/self/maps`.
            let name: String = name.chars().filter(char::is_ascii_graphic).take(64).collect();
            let memory = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
            let mut memory = File::from(memory);
            let found = copy_and_digest(&self.file, &mut memory)?;
            let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
            fcntl_add_seals(&memory, seals)?;
            let size = memory.metadata()?.len();
            Ok((memory, size, found))
        })();
        let (memory, size, found) = sealed.map_err(PreflightError::Unreadable)?;
        Ok(if found == sha256 { Ok(Sealed { memory, size }) } else { Err(found) })
    }
}

/// Reads a small regular text file that decides which file is loaded, or which hash is right. So it must be no easier to replace
/// than a plugin. The operator may accept that it is, unless every user may change the file.
pub(super) fn text(path: &Path, policy: &Policy) -> io::Result<String> {
    if !policy.insecure_permissions {
        return trusted_text(path);
    }
    let (file, metadata) = regular(path)?;
    if host_ownership::every_user_may_change(&metadata) {
        return Err(io::Error::other("it may be changed by every user of this machine: chmod o-w it"));
    }
    read_up_to(file, LONGEST_TEXT)
}

/// Reads a small regular text file, and refuses one that is easier to replace than this program.
pub(super) fn trusted_text(path: &Path) -> io::Result<String> {
    let (file, metadata) = regular(path)?;
    let found = host_ownership::check(path, &metadata)?;
    if !found.refused.is_empty() {
        return Err(io::Error::other(format!(
            "it could be replaced by others: {}",
            found.refused.join("; ")
        )));
    }
    read_up_to(file, LONGEST_TEXT)
}

/// Reads a regular text file of at most `longest` bytes, regardless of its permissions.
pub(super) fn short_text(path: &Path, longest: u64) -> io::Result<String> {
    read_up_to(regular(path)?.0, longest)
}

/// All bytes of a regular file, up to the largest that is read into memory.
pub(super) fn whole(path: &Path) -> Result<Vec<u8>, PreflightError> {
    let (file, metadata) = regular(path).map_err(PreflightError::Unreadable)?;
    may_be_read(metadata.len())?;
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(LARGEST_WHOLE + 1).read_to_end(&mut bytes).map_err(PreflightError::Unreadable)?;
    may_be_read(bytes.len() as u64)?;
    Ok(bytes)
}

fn read_up_to(file: File, longest: u64) -> io::Result<String> {
    let mut text = String::new();
    file.take(longest + 1).read_to_string(&mut text)?;
    if text.len() as u64 > longest {
        return Err(io::Error::other(format!("it has more than {longest} bytes")));
    }
    Ok(text)
}

/// Bytes of a file that were verified and cannot change.
pub(super) struct Sealed {
    memory: File,
    size: u64,
}

/// Reads the manifest of a file, whether this host could load the file or not.
///
/// # Errors
/// When the file has no manifest that can be read.
pub fn describe(path: &Path) -> Result<Manifest, PreflightError> {
    let any = Policy { insecure_permissions: true, ..Policy::default() };
    let PluginFile { file, stamp, .. } = PluginFile::open(path, &any)?;
    read(&Bounded::new(file), stamp.size)
}

/// Checks the file and returns its manifest. Ignores lock files and signatures beside it.
///
/// # Errors
/// The first problem that is found.
pub fn preflight(path: &Path, policy: &Policy) -> Result<Manifest, PreflightError> {
    PluginFile::open(path, policy)?.manifest(policy)
}

impl Sealed {
    pub(super) fn manifest(&self, policy: &Policy) -> Result<Manifest, PreflightError> {
        let file = self.memory.try_clone().map_err(PreflightError::Unreadable)?;
        read_and_check(&Bounded::new(file), self.size, policy)
    }

    /// A path in `/proc` to the memory, valid in this process while the descriptor is open.
    pub(super) fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.memory.as_raw_fd()).into()
    }

    pub(super) fn into_fd(self) -> OwnedFd {
        self.memory.into()
    }
}

/// The sha256 of the file at a path, in hexadecimal.
pub(super) fn sha256(path: &Path) -> io::Result<String> {
    copy_and_digest(&File::open(path)?, &mut io::sink())
}

fn copy_and_digest(mut from: impl Read + Seek, to: &mut impl Write) -> io::Result<String> {
    from.rewind()?;
    let mut digest = Sha256::new();
    let mut piece = vec![0; 1 << 16];
    loop {
        match from.read(&mut piece)? {
            0 => break,
            n => {
                digest.update(&piece[..n]);
                to.write_all(&piece[..n])?;
            }
        }
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use host_tests::elf::dynamic;

    use super::*;

    const RUNPATH: u64 = 29;

    #[test]
    fn whether_a_file_needs_its_place_is_asked_of_the_one_that_was_checked() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("plugin.so"), folder.path().join("other.so"));
        let open = || PluginFile::open(&path, &Policy::default()).unwrap();
        dynamic(&path, &[], b"$ORIGIN/lib\0");
        dynamic(&other, &[(RUNPATH, 0)], b"$ORIGIN/lib\0");
        let checked = open();
        std::fs::rename(&other, &path).unwrap();
        assert!(!checked.needs_its_place().unwrap(), "what was checked can be loaded from sealed memory");
        assert!(open().needs_its_place().unwrap());
    }
}
