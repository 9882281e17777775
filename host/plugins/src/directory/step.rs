//! Steps of a change, each of which replaces one file of a plugin directory as a whole.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::error::ChangeError;
use super::name_of;
use crate::lock::{Lock, write_whole};

/// One step.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Writes a file.
    Write { path: PathBuf, text: String },
    /// Gives a file another name beside its own, where another may lie.
    Link { from: PathBuf, to: PathBuf },
    /// Moves a file to where another may lie.
    Rename { from: PathBuf, to: PathBuf },
    /// Removes a file, if there is one.
    Remove(PathBuf),
    /// Writes `plugins.lock`.
    Lock(Lock),
}

/// How the names of files end that exist during a step. They begin with a dot.
const TEMPORARY: &str = ".tmp";

/// A name for a file that exists during a change of this one.
pub(super) fn temporary(path: &Path, what: &str) -> PathBuf {
    path.with_file_name(format!(".{}.{what}{TEMPORARY}", name_of(path)))
}

/// Whether a file of this name was left by a change that was ended in the middle.
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
        // Some file systems have no second names.
        std::fs::copy(from, &between)?;
        File::open(&between)?.sync_all()?;
    }
    rename(&between, to)
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(from, to)?;
    // The system leaves two names of one file as they are.
    if_there(std::fs::remove_file(from))
}

/// What is not there need not be removed.
fn if_there(removed: io::Result<()>) -> io::Result<()> {
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}
