//! Folders for files that no other user may put others in the place of, and the files in them.
//!
//! The operator names a folder, and a folder of our own lies in it. All names are relative to an open descriptor. So nothing
//! that happens to the path later leads elsewhere.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    FileType, Mode, OFlags, Stat, fchmod, fcntl_getfl, fcntl_setfl, fstat, mkdirat, open, openat,
};
use rustix::io::Errno;

/// A folder is opened so: a link is not followed.
const FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Which users may read and write what is in a folder of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The user that made it.
    User,
    /// That user's group, too.
    Group,
}

impl Access {
    fn mode(self) -> Mode {
        Mode::from_raw_mode(match self {
            Self::User => 0o700,
            Self::Group => 0o770,
        })
    }

    /// The bits that must not be set, and the change that takes them away.
    fn closed(self) -> (u32, &'static str) {
        match self {
            Self::User => (0o077, "go-rwx"),
            Self::Group => (0o007, "o-rwx"),
        }
    }
}

/// An open folder.
#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
    path: PathBuf,
    /// Every user may make names in it, and its sticky bit keeps them from others' names.
    is_shared: bool,
}

fn failed(what: &str, path: &Path, error: Errno) -> io::Error {
    let error = io::Error::from(error);
    io::Error::new(error.kind(), format!("cannot {what} {}: {error}", path.display()))
}

impl Folder {
    /// Opens a folder that the operator named. With `make` it is made, if the folder above it is there.
    ///
    /// # Errors
    /// When it cannot be opened, is a link, or every user may change what lies in it. The error says what to do.
    pub fn named(path: &Path, access: Access, make: bool) -> io::Result<Self> {
        let opened = match open(path, FLAGS, Mode::empty()) {
            Err(Errno::NOENT) if make => {
                // Another process that starts at the same moment may have been quicker.
                match rustix::fs::mkdir(path, access.mode()) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(error) => return Err(failed("make the directory", path, error)),
                }
                open(path, FLAGS, Mode::empty())
            }
            other => other,
        };
        let what = "open the directory (a symbolic link is not followed)";
        let fd = opened.map_err(|error| failed(what, path, error))?;
        let stat = fstat(&fd).map_err(|error| failed("look at", path, error))?;
        let mode = Mode::from_raw_mode(stat.st_mode);
        // Where names stay their owners', as in /tmp, others can only have been there first.
        let is_shared = mode.contains(Mode::WOTH);
        if is_shared && !mode.contains(Mode::SVTX) {
            let path = path.display();
            let text =
                format!("every user may write to {path}: take the right away (chmod o-w), or use another");
            return Err(io::Error::other(text));
        }
        Ok(Self { fd, path: path.to_owned(), is_shared })
    }

    /// Opens a folder in this one that belongs to this user and is closed to others. With [`Access::Group`] it may belong to
    /// another user of its group, unless every user could have made it. With `make` it is made. `instead` is what an operator
    /// could do to use one that is not so.
    ///
    /// # Errors
    /// When it cannot be opened, is a link, or is not so. The error says what to do.
    pub fn own(&self, name: &str, access: Access, make: bool, instead: &str) -> io::Result<Self> {
        let path = self.path.join(name);
        if make {
            match mkdirat(&self.fd, name, access.mode()) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(failed("make the directory", &path, error)),
            }
        }
        let fd = openat(&self.fd, name, FLAGS, Mode::empty());
        let fd = fd.map_err(|error| failed("open", &path, error))?;
        let look = || fstat(&fd).map_err(|error| failed("look at", &path, error));
        let user = rustix::process::geteuid().as_raw();
        let group = access == Access::Group;
        if group && make && look()?.st_uid == user {
            // Whatever the umask said.
            fchmod(&fd, access.mode())
                .map_err(|error| failed("give the group its rights on", &path, error))?;
        }
        let stat = look()?;
        let is_ours = stat.st_uid == user || group && !self.is_shared;
        let (bits, closing) = access.closed();
        if stat.st_mode & bits != 0 || !is_ours {
            let instead = if self.is_shared { "use a directory of your own" } else { instead };
            let text = format!(
                "{} belongs to user {} and has mode {:o}: it must be this user's own and closed to others \
                 (chmod -R {closing}), or {instead}",
                path.display(),
                stat.st_uid,
                stat.st_mode & 0o7777
            );
            return Err(io::Error::other(text));
        }
        Ok(Self { fd, path, is_shared: false })
    }

    /// The path that led here.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Folder> for OwnedFd {
    fn from(folder: Folder) -> Self {
        folder.fd
    }
}

/// Opens a regular file in a folder, and nothing else: a link is not followed, and the other end of a pipe is not waited for.
/// `None` for what is no regular file.
///
/// # Errors
/// What the system says. Of a link it says `ELOOP`.
pub fn plain_file(
    folder: impl AsFd,
    name: &str,
    flags: OFlags,
    mode: Mode,
) -> io::Result<Option<(OwnedFd, Stat)>> {
    let careful = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = openat(folder, name, careful, mode)?;
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(Some((file, stat)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn set(path: &Path, mode: u32) {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_folder_that_others_could_change_is_refused_and_the_sentence_says_what_to_do() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("pages");
        let opened = || {
            let named = Folder::named(&path, Access::User, true)?;
            named.own("ours", Access::User, true, "do otherwise")
        };
        let refused = || opened().unwrap_err().to_string();
        let mode = opened().unwrap().path().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        set(&path, 0o777);
        assert!(refused().contains("every user may write to") && refused().contains("chmod o-w"));
        set(&path, 0o1777);
        assert!(opened().is_ok(), "names stay their owners'");
        set(&path, 0o755);
        for mode in [0o701, 0o750, 0o770, 0o777] {
            set(&path.join("ours"), mode);
            assert!(refused().contains("chmod -R go-rwx), or do otherwise"), "{mode:o}: {}", refused());
        }
        std::fs::remove_dir(path.join("ours")).unwrap();
        std::os::unix::fs::symlink("/", path.join("ours")).unwrap();
        assert!(refused().contains("cannot open"), "{}", refused());
        let missing = Folder::named(&scratch.path().join("no"), Access::User, false).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn only_a_regular_file_is_opened_and_nothing_is_waited_for() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = Folder::named(scratch.path(), Access::User, false).unwrap();
        std::fs::write(scratch.path().join("file"), "text").unwrap();
        std::fs::create_dir(scratch.path().join("folder")).unwrap();
        std::os::unix::fs::symlink("file", scratch.path().join("link")).unwrap();
        rustix::fs::mknodat(&folder, "pipe", FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        let opened = |name: &str| plain_file(&folder, name, OFlags::RDONLY, Mode::empty());
        let (file, stat) = opened("file").unwrap().unwrap();
        assert_eq!(stat.st_size, 4);
        assert!(!fcntl_getfl(&file).unwrap().contains(OFlags::NONBLOCK));
        assert!(opened("folder").unwrap().is_none() && opened("pipe").unwrap().is_none());
        assert_eq!(Errno::from_io_error(&opened("link").unwrap_err()), Some(Errno::LOOP));
    }
}
