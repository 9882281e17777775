//! `plugins.lock`: which files of a directory may be loaded, by their bytes.
//!
//! Entries are per target, so that one lock file serves a directory that several machines share. While it exists, only the files
//! that it lists are usable. The hash is checked when the directory is read, and again before the library is loaded.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::PreflightError;
use super::libraries::{self, LockedLibrary};
use super::manifest::Manifest;
use super::policy::Policy;

/// The lock file's name in a plugin directory.
pub const FILE: &str = "plugins.lock";

/// The content of a lock file.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Lock {
    /// One entry for each file and target.
    #[serde(default, rename = "plugin")]
    pub plugins: Vec<Locked>,
    #[serde(skip)]
    path: PathBuf,
}

/// A file that may be loaded.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Locked {
    /// The plugin's id.
    pub id: String,
    /// Its version.
    pub version: semver::Version,
    /// Target triple for which the file was built.
    pub target: String,
    /// Name of the file, without its directory.
    pub file: String,
    /// The sha256 of the whole file, in hexadecimal.
    pub sha256: String,
    /// Libraries beside it that are loaded with it.
    #[serde(default, rename = "library", skip_serializing_if = "Vec::is_empty")]
    pub libraries: Vec<LockedLibrary>,
}

impl Locked {
    /// Makes the entry for this plugin.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of(path: &Path, manifest: &Manifest) -> io::Result<Self> {
        Ok(Self {
            id: manifest.plugin.id.clone(),
            version: manifest.plugin.version.clone(),
            target: manifest.build.target.clone(),
            file: file_name(path),
            sha256: sha256(path)?,
            libraries: libraries::beside(path)?,
        })
    }
}

impl Lock {
    /// The lock of the directory, if it has one.
    ///
    /// # Errors
    /// A sentence, when the file cannot be read or is no lock file.
    pub fn of_directory(directory: &Path, policy: &Policy) -> Result<Option<Self>, String> {
        let path = directory.join(FILE);
        let text = match super::file::text(&path, policy) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{} cannot be read: {error}", path.display())),
        };
        Self::parse(&text, &path).map(Some)
    }

    /// Parses the text of the lock file at this path.
    ///
    /// # Errors
    /// A sentence, when the text is no lock file.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self, String> {
        let lock: Self = toml::from_str(text).map_err(|error| {
            let error = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
            format!("{} is wrong: {error}", path.display())
        })?;
        Ok(Self { path: path.to_owned(), ..lock })
    }

    /// Checks that a file is listed under its name with this hash, and with the libraries beside it. Returns these libraries. Reads
    /// nothing but the bytes of a file that is not listed.
    ///
    /// # Errors
    /// `NotLocked`, `WrongHash`, or `Libraries`.
    pub fn check(&self, path: &Path, found: &str) -> Result<Vec<LockedLibrary>, PreflightError> {
        let file = file_name(path);
        // There are several entries if machines with different files of this name share the directory.
        let mut listed = self.plugins.iter().filter(|locked| locked.file == file).peekable();
        let Some(first) = listed.peek().copied() else {
            return Err(PreflightError::NotLocked(self.path.clone()));
        };
        if let Some(locked) = listed.find(|locked| locked.sha256 == found) {
            let beside = libraries::beside(path).map_err(PreflightError::Unreadable)?;
            return match libraries::difference(&locked.libraries, &beside) {
                None => Ok(beside),
                Some(what) => Err(PreflightError::Libraries { lock: self.path.clone(), what }),
            };
        }
        let (pinned, found) = (first.sha256.clone(), found.to_owned());
        Err(PreflightError::WrongHash { lock: self.path.clone(), pinned, found })
    }

    /// Replaces all entries of a target by these. Entries of other targets stay.
    pub fn replace(&mut self, target: &str, plugins: Vec<Locked>) {
        self.plugins.retain(|locked| locked.target != target);
        self.plugins.extend(plugins);
    }

    /// A lock without entries.
    pub(super) fn empty(directory: &Path) -> Self {
        Self { plugins: Vec::new(), path: directory.join(FILE) }
    }

    /// Removes the entry for a file of this name and target.
    pub(super) fn forget(&mut self, file: &str, target: &str) {
        self.plugins.retain(|locked| locked.file != file || locked.target != target);
    }

    /// Writes the directory's lock. A failure leaves the old file.
    ///
    /// # Errors
    /// When the directory cannot be written.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let mut sorted = self.clone();
        sorted.plugins.sort_by(|a, b| (&a.file, &a.target, &a.sha256).cmp(&(&b.file, &b.target, &b.sha256)));
        sorted.plugins.dedup();
        let text = toml::to_string(&sorted).map_err(io::Error::other)?;
        write_whole(&directory.join(FILE), text.as_bytes(), 0o644)
    }
}

/// Writes a temporary file beside this one, syncs it and renames it: a reader sees the old file or the new one.
///
/// A loaded plugin's file must never be written in place, since the process has it mapped.
///
/// # Errors
/// When any step fails. The file is unchanged then.
pub fn write_whole(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = directory.join(format!(".{}.{}.tmp", file_name(path), std::process::id()));
    let written = (|| {
        let mut file = File::options().write(true).create_new(true).mode(mode).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&temporary, path)?;
        File::open(directory)?.sync_all()
    })();
    if written.is_err() {
        // After a successful rename there is nothing to remove.
        let _removed = std::fs::remove_file(&temporary);
    }
    written
}

/// The sha256 of a file, in hexadecimal.
///
/// # Errors
/// When it cannot be read.
pub fn sha256(path: &Path) -> io::Result<String> {
    super::file::sha256(path)
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
