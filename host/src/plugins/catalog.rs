//! The plugins in some directories.

use std::path::{Path, PathBuf};

use super::error::{NoneFound, PluginError, PreflightError};
use super::lock::Lock;
use super::manifest::Manifest;
use super::preflight::preflight;

/// Most files looked at in one directory.
const MAX_FILES: usize = 4096;

/// A usable plugin file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where it is.
    pub path: PathBuf,
    /// What it says about itself.
    pub manifest: Manifest,
    /// The sha256 that a lock file lists for it; checked once more before it is loaded.
    pub pinned: Option<String>,
}

impl Entry {
    /// A plugin named by its file.
    ///
    /// # Errors
    /// What [`preflight`] says.
    pub fn of_file(path: &Path) -> Result<Self, PreflightError> {
        Ok(Self { path: path.to_owned(), manifest: preflight(path)?, pinned: None })
    }
}

/// A file that looked like a plugin and is not usable.
#[derive(Debug)]
pub struct Unusable {
    /// Where it is.
    pub path: PathBuf,
    /// Why.
    pub reason: PreflightError,
}

/// What a scan found. Nothing was run.
#[derive(Debug, Default)]
pub struct Catalog {
    entries: Vec<Entry>,
    unusable: Vec<Unusable>,
    shadowed: Vec<Entry>,
    searched: Vec<(PathBuf, Option<String>)>,
}

impl Catalog {
    /// Reads every `.so` in these directories, in this order. The first of a name counts, later ones are shadowed.
    pub fn scan<P: AsRef<Path>>(directories: impl IntoIterator<Item = P>) -> Self {
        let mut catalog = Self::default();
        for directory in directories {
            let directory = directory.as_ref();
            let listed = std::fs::read_dir(directory).and_then(|entries| {
                entries.take(MAX_FILES).map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()
            });
            let mut paths = match listed {
                Ok(paths) => paths,
                Err(error) => {
                    catalog.searched.push((directory.to_owned(), Some(error.to_string())));
                    continue;
                }
            };
            // The system lists in no order; which of two files shadows the other should not depend on that.
            paths.sort();
            // An unreadable lock file locks everything out, rather than nothing.
            let lock = match Lock::of_directory(directory) {
                Ok(lock) => lock,
                Err(error) => {
                    catalog.searched.push((directory.to_owned(), Some(error)));
                    continue;
                }
            };
            for path in paths.into_iter().filter(|path| path.extension().is_some_and(|e| e == "so")) {
                catalog.add(path, lock.as_ref());
            }
            catalog.searched.push((directory.to_owned(), None));
        }
        catalog
    }

    /// Reads one directory as if it had no lock file.
    #[must_use]
    pub fn scan_unlocked(directory: &Path) -> Self {
        let mut catalog = Self::default();
        let entries = std::fs::read_dir(directory).into_iter().flatten().take(MAX_FILES).flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        for path in paths.into_iter().filter(|path| path.extension().is_some_and(|e| e == "so")) {
            catalog.add(path, None);
        }
        catalog
    }

    fn add(&mut self, path: PathBuf, lock: Option<&Lock>) {
        let checked = preflight(&path).and_then(|manifest| {
            let pinned = lock.map(|lock| lock.check(&path, &manifest)).transpose()?;
            Ok((manifest, pinned))
        });
        match checked {
            Ok((manifest, pinned)) => {
                let name = &manifest.plugin.name;
                let taken = self.entries.iter().any(|e| e.manifest.plugin.name == *name);
                let list = if taken { &mut self.shadowed } else { &mut self.entries };
                list.push(Entry { path, manifest, pinned });
            }
            Err(reason) => self.unusable.push(Unusable { path, reason }),
        }
    }

    /// The usable plugins.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Files that are not usable, with the reason.
    #[must_use]
    pub fn unusable(&self) -> &[Unusable] {
        &self.unusable
    }

    /// Usable plugins whose name an earlier directory already had.
    #[must_use]
    pub fn shadowed(&self) -> &[Entry] {
        &self.shadowed
    }

    /// The plugin of this name.
    ///
    /// # Errors
    /// [`PluginError::NotFound`], with everything that was looked at.
    pub fn find(&self, name: &str) -> Result<&Entry, PluginError> {
        self.entries.iter().find(|e| e.manifest.plugin.name == name).ok_or_else(|| {
            let trace = NoneFound {
                searched: self.searched.clone(),
                found: self.entries.iter().map(|e| e.manifest.plugin.name.clone()).collect(),
                unusable: self.unusable.iter().map(|u| (u.path.clone(), u.reason.to_string())).collect(),
            };
            PluginError::NotFound { name: name.to_owned(), trace }
        })
    }
}
