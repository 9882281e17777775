//! Errors of changes of a plugin directory.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::PreflightError;

/// The reasons for which a plugin directory could not be changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChangeError {
    /// The directory cannot be read or written.
    #[error("the plugin directory {} cannot be used: {source}", path.display())]
    Directory {
        /// Where it is.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// A file cannot be read or written. The plugin is usable, in its old version or in the new one.
    #[error("{} cannot be read or written: {source}", path.display())]
    File {
        /// Where it is.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The file of publishers cannot be used.
    #[error("{0}")]
    Publishers(String),
    /// `plugins.lock` cannot be used.
    #[error("{0}")]
    Lock(String),
    /// The host would refuse the file at the path where it would be installed.
    #[error("{} {source}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: Box<PreflightError>,
    },
    /// The plugin's name cannot be a file name.
    #[error("{} names itself {name:?}: use letters, digits, - and _, 64 at most", path.display())]
    Name {
        /// The file.
        path: PathBuf,
        /// The plugin's name.
        name: String,
    },
    /// The file became another plugin while it was installed.
    #[error("{} changed while it was read: install it again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// The file would replace a plugin that has another id.
    #[error(
        "{} is another plugin of this name: its id is {there:?}, that of {} is {new:?}; install into another directory, or replace it \
         with --force", path.display(), file.display()
    )]
    OtherPlugin {
        /// The file that would be replaced.
        path: PathBuf,
        /// Its id.
        there: String,
        /// The file that would replace it.
        file: PathBuf,
        /// Its id.
        new: String,
    },
    /// A first `plugins.lock` would shut out other files.
    #[error(
        "there is no {} yet, and one that lists {name} alone would shut out {}: write one for all that is there with `host plugins \
         lock`, then install with --lock", lock.display(), others.join(", ")
    )]
    WouldShutOut {
        /// Where the lock would be.
        lock: PathBuf,
        /// Name of the plugin that is installed.
        name: String,
        /// The other files of the directory.
        others: Vec<String>,
    },
    /// A side-car may name the file, and cannot be used.
    #[error("{} could name the file, and cannot be used: {problem}; mend it or delete it (rm) first", path.display())]
    UnreadableSideCar {
        /// The side-car.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// No previous file is kept.
    #[error("no file before {} is kept: `host plugins install` keeps the one that it replaces", path.display())]
    NoneBefore {
        /// The path of the plugin.
        path: PathBuf,
    },
    /// No plugin of this name is in the directories.
    #[error("no plugin {name:?} is in {}", directories.join(", "))]
    NotThere {
        /// Its name.
        name: String,
        /// The directories that were searched.
        directories: Vec<String>,
    },
    /// Several files contain a plugin of this name.
    #[error("{name:?} is the plugin of several files: {}; name the one file to remove", paths.join(", "))]
    Several {
        /// Its name.
        name: String,
        /// Paths of these files.
        paths: Vec<String>,
    },
    /// A side-car names the file that would be removed.
    #[error("{} is named by {}: remove the file's entry there first", path.display(), side_car.display())]
    SideCar {
        /// The plugin.
        path: PathBuf,
        /// The side-car that names it.
        side_car: PathBuf,
    },
}

impl ChangeError {
    /// Says that the host would refuse this file here.
    pub(super) fn unusable(path: &Path, source: PreflightError) -> Self {
        Self::Unusable { path: path.to_owned(), source: Box::new(source) }
    }

    /// Whether the change was refused, as opposed to an error of the system.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Directory { .. } | Self::File { .. })
    }
}
