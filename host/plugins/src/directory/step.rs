//! Steps of a change. Each step replaces one whole file of a plugin directory.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::error::ChangeError;
use super::name_of;
use crate::lock::{Lock, write_whole};

/// One step of a change.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Writes a file.
    Write { path: PathBuf, text: String },
    /// Adds a second name of a file, and replaces a file that has this name.
    Link { from: PathBuf, to: PathBuf },
    /// Renames a file, and replaces a file that has the new name.
    Rename { from: PathBuf, to: PathBuf },
    /// Removes a file, if there is one.
    Remove(PathBuf),
    /// Writes `plugins.lock`.
    Lock(Lock),
}

/// Ending of the names of temporary files, which exist only during a change. These names begin with a dot.
const TEMPORARY: &str = ".tmp";

/// The name of a temporary file for a change of this path.
pub(super) fn temporary(path: &Path, what: &str) -> PathBuf {
    path.with_file_name(format!(".{}.{what}{TEMPORARY}", name_of(path)))
}

/// Whether this is the name of a temporary file that an interrupted change left.
pub(super) fn is_left_behind(name: &str) -> bool {
    let of_ours = name.contains(".so.") || name.starts_with(&format!(".{}.", crate::lock::FILE));
    name.starts_with('.') && name.ends_with(TEMPORARY) && of_ours
}

/// Does the steps in order, each safe against a loss of power before the next.
pub(super) fn run(directory: &Path, steps: &[Step]) -> Result<(), ChangeError> {
    for step in steps {
        let done = step.run(directory).and_then(|()| File::open(directory)?.sync_all());
        done.map_err(|source| ChangeError::File { path: step.path(directory), source })?;
    }
    Ok(())
}

impl Step {
    fn path(&self, directory: &Path) -> PathBuf {
        match self {
            Self::Write { path, .. } | Self::Remove(path) => path.clone(),
            Self::Link { to, .. } | Self::Rename { to, .. } => to.clone(),
            Self::Lock(_) => directory.join(crate::lock::FILE),
        }
    }

    fn run(&self, directory: &Path) -> io::Result<()> {
        match self {
            Self::Write { path, text } => write_whole(path, text.as_bytes(), 0o644),
            Self::Link { from, to } => link(from, to),
            Self::Rename { from, to } => rename(from, to),
            Self::Remove(path) => if_there(std::fs::remove_file(path)),
            Self::Lock(lock) => lock.write(directory),
        }
    }
}

fn link(from: &Path, to: &Path) -> io::Result<()> {
    let between = temporary(to, "link");
    if_there(std::fs::remove_file(&between))?;
    if std::fs::hard_link(from, &between).is_err() {
        // Some file systems do not support hard links.
        std::fs::copy(from, &between)?;
        File::open(&between)?.sync_all()?;
    }
    rename(&between, to)
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(from, to)?;
    // The system does nothing when both names are the same file, so the old name must be removed.
    if_there(std::fs::remove_file(from))
}

/// Treats a file that does not exist as removed.
fn if_there(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}
