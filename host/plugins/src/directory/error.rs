//! Why a plugin directory was not changed.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::PreflightError;

/// Why a plugin directory was not changed.
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
    /// A file cannot be read or written. The plugin is as before, or as it should be.
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
    /// A file would be refused where it shall lie.
    #[error("{} {source}", path.display())]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<PreflightError>,
    },
    /// No file can be named so.
    #[error("{} names itself {name:?}: use letters, digits, - and _, 64 at most", path.display())]
    Name {
        /// The file.
        path: PathBuf,
        /// The plugin's name.
        name: String,
    },
    /// Another plugin would be replaced.
    #[error(
        "{} is another plugin of this name: its id is {there:?}, that of {} is {new:?}; install into another directory, or replace it \
         with --force", path.display(), file.display()
    )]
    OtherPlugin {
        /// What would be replaced.
        path: PathBuf,
        /// Its id.
        there: String,
        /// What would take its place.
        file: PathBuf,
        /// Its id.
        new: String,
    },
    /// A first lock would shut out what is there.
    #[error(
        "there is no {} yet, and one that lists {name} alone would shut out {}: write one for all that is there with `host plugins \
         lock`, then install with --lock", lock.display(), others.join(", ")
    )]
    WouldShutOut {
        /// Where the lock would be.
        lock: PathBuf,
        /// What is installed.
        name: String,
        /// Files that are there.
        others: Vec<String>,
    },
    /// There is nothing to go back to.
    #[error("no file before {} is kept: `host plugins install` keeps the one that it replaces", path.display())]
    NoneBefore {
        /// The plugin.
        path: PathBuf,
    },
    /// The plugin is not there.
    #[error("no plugin {name:?} is in {}", directories.join(", "))]
    NotThere {
        /// Its name.
        name: String,
        /// Where it was looked for.
        directories: Vec<String>,
    },
    /// Several files are the plugin.
    #[error("{name:?} is the plugin of several files: {}; name the one file to remove", paths.join(", "))]
    Several {
        /// Its name.
        name: String,
        /// All of them.
        paths: Vec<String>,
    },
    /// A side-car would be left that names nothing.
    #[error("{} is named by {}: remove the file's entry there first", path.display(), side_car.display())]
    SideCar {
        /// The plugin.
        path: PathBuf,
        /// What names it.
        side_car: PathBuf,
    },
}

impl ChangeError {
    /// That a file is not one that is loaded here.
    pub(super) fn unusable(path: &Path, source: PreflightError) -> Self {
        Self::Unusable { path: path.to_owned(), source: Box::new(source) }
    }

    /// Whether the request cannot be met, rather than that something failed.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        !matches!(self, Self::Directory { .. } | Self::File { .. })
    }
}
