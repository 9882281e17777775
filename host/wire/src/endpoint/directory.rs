//! A private folder for the Unix sockets of one server, which is removed with the server.
//!
//! A server that is killed leaves its folder behind. The next server of the same user removes it: a server locks its folder for
//! as long as it lives, so a folder that can be locked has no server.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

use super::address::LONGEST_PATH;
use super::listener::bind_socket;
use crate::random::random_u64;

/// How a folder's name begins. A random number follows.
const PREFIX: &str = "host-";
/// The longest name of a socket in the folder, in bytes.
const LONGEST_NAME: usize = 24;
/// Tries until a name is free.
const TRIES: usize = 16;

/// A private folder for sockets. It is removed when dropped.
#[derive(Debug)]
pub struct SocketDirectory {
    path: PathBuf,
    /// Holds the lock of the folder while it is open. Child processes do not inherit it.
    _lock: File,
}

impl SocketDirectory {
    /// Makes a folder where temporary files are, and removes folders that servers left there.
    ///
    /// `XDG_RUNTIME_DIR` is tried after those: it is removed when its user logs out, and a server may run longer.
    ///
    /// # Errors
    /// When a folder can be made in none of these places.
    pub fn new() -> io::Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let own = rustix::process::geteuid().as_raw();
        // After `su` and `sudo`, the variable may name another user's folder.
        let runtime = runtime.filter(|path| path.metadata().is_ok_and(|found| found.uid() == own));
        let bases =
            [std::env::temp_dir(), "/tmp".into()].into_iter().chain(runtime).chain(["/dev/shm".into()]);
        let mut tried = Vec::new();
        for base in bases {
            match Self::below(&base) {
                Ok(made) => return Ok(made),
                Err(error) => tried.push(format!("{}: {error}", base.display())),
            }
        }
        Err(io::Error::other(format!(
            "the processes of this server find no folder for sockets ({}); set TMPDIR to one of this user",
            tried.join("; ")
        )))
    }

    /// Makes a folder in another one, and removes folders that servers left there.
    ///
    /// # Errors
    /// When the folder cannot be made, or when its sockets' paths would be too long.
    pub fn below(base: &Path) -> io::Result<Self> {
        // The prefix, 16 digits and two slashes.
        let longest = base.as_os_str().len() + PREFIX.len() + 18 + LONGEST_NAME;
        // Addresses are text, and lists of them have commas.
        let is_text = base.to_str().is_some_and(|text| !text.contains(','));
        if !base.is_absolute() || longest > LONGEST_PATH || !is_text {
            return Err(io::Error::other(
                "its path is too long for sockets in it, not absolute, or has a comma",
            ));
        }
        sweep(base);
        for _ in 0..TRIES {
            let path = base.join(format!("{PREFIX}{:016x}", random_u64()?));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(error) => return Err(error),
            }
            // Until the folder is locked, another server may take it for an abandoned one.
            if let Some(lock) = locked(&path)? {
                let made = Self { path, _lock: lock };
                // Not every file system has sockets.
                drop(bind_socket(&made.socket("probe"))?);
                std::fs::remove_file(made.socket("probe"))?;
                return Ok(made);
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// The path of a socket in the folder.
    #[must_use]
    pub fn socket(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.sock"))
    }

    /// The folder's own path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Locks a folder, if no server holds it and it is still there.
fn locked(path: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = match open(path, flags, Mode::empty()) {
        Ok(folder) => File::from(folder),
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    match flock(folder.as_fd(), FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error.into()),
    }
    let (opened, named) = (folder.metadata()?, path.symlink_metadata());
    let is_there = named.is_ok_and(|named| (named.dev(), named.ino()) == (opened.dev(), opened.ino()));
    Ok(is_there.then_some(folder))
}

/// Removes folders of this user whose servers are gone.
fn sweep(base: &Path) {
    let own = rustix::process::geteuid().as_raw();
    let Ok(entries) = std::fs::read_dir(base) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(PREFIX)).unwrap_or_default();
        let is_ours = number.len() == 16
            && number.bytes().all(|digit| digit.is_ascii_hexdigit())
            && entry
                .metadata()
                .is_ok_and(|found| found.is_dir() && found.uid() == own && found.mode() & 0o777 == 0o700);
        if !is_ours {
            continue;
        }
        if let Ok(Some(_lock)) = locked(&entry.path()) {
            remove(&entry.path());
        }
    }
}

/// Removes a folder with the sockets in it. A folder with other files stays.
fn remove(path: &Path) {
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            // If a socket cannot be removed, the folder stays, and the next server tries again.
            drop(std::fs::remove_file(entry.path()));
        }
    }
    if let Err(error) = std::fs::remove_dir(path) {
        tracing::debug!(path = %path.display(), %error, "a folder of sockets stays");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders(base: &Path) -> Vec<PathBuf> {
        std::fs::read_dir(base).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn a_folder_is_private_and_goes_with_its_server() {
        let base = tempfile::tempdir().unwrap();
        let made = SocketDirectory::below(base.path()).unwrap();
        assert_eq!(made.path().metadata().unwrap().mode() & 0o777, 0o700);
        let _socket = bind_socket(&made.socket("router")).unwrap();
        assert_eq!(folders(base.path()), [made.path()]);
        drop(made);
        assert_eq!(folders(base.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn what_a_killed_server_left_is_removed_and_what_lives_or_is_not_ours_stays() {
        let base = tempfile::tempdir().unwrap();
        let left = base.path().join("host-00000000000000aa");
        DirBuilder::new().mode(0o700).create(&left).unwrap();
        drop(bind_socket(&left.join("decode-0.sock")).unwrap());
        let lives = SocketDirectory::below(base.path()).unwrap();
        assert!(!left.exists(), "{:?}", folders(base.path()));
        let others =
            ["host-00000000000000", "host-00000000000000zz", "other"].map(|name| base.path().join(name));
        for path in &others {
            DirBuilder::new().mode(0o700).create(path).unwrap();
        }
        let open = base.path().join("host-00000000000000bb");
        DirBuilder::new().mode(0o755).create(&open).unwrap();
        let kept = base.path().join("host-00000000000000cc");
        DirBuilder::new().mode(0o700).create(&kept).unwrap();
        std::fs::write(kept.join("notes"), "mine").unwrap();
        drop(SocketDirectory::below(base.path()).unwrap());
        assert!(lives.path().exists());
        assert!(others.iter().chain([&open, &kept]).all(|path| path.exists()), "{:?}", folders(base.path()));
    }

    #[test]
    fn a_folder_too_deep_for_sockets_is_not_taken() {
        let base = tempfile::tempdir().unwrap();
        let deep = base.path().join("d".repeat(LONGEST_PATH));
        std::fs::create_dir(&deep).unwrap();
        assert!(SocketDirectory::below(&deep).is_err());
        assert!(folders(&deep).is_empty());
    }
}
