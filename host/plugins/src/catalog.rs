//! The plugins in some directories.

use std::path::{Path, PathBuf};

use super::error::{NoneFound, PluginError, PreflightError};
use super::file::PluginFile;
use super::libraries::LockedLibrary;
use super::lock::Lock;
use super::manifest::Manifest;
use super::policy::Policy;
use super::publishers::{Publishers, SIGNATURE, Signed, signature_of};
use super::{libraries, sidecar};

/// Limit of the libraries and side-cars in one directory.
const MAX_FILES: usize = 4096;

/// The libraries and side-cars of a directory, sorted, so that it does not depend on the system which of two files shadows the
/// other.
pub(super) fn candidates(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "so") || sidecar::is_one(&path) {
            if paths.len() == MAX_FILES {
                let text = format!("it holds more than {MAX_FILES} libraries");
                return Err(std::io::Error::other(text));
            }
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// A usable plugin file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Path of the file.
    pub path: PathBuf,
    /// The manifest in the file.
    pub manifest: Manifest,
    /// The sha256 that a lock file or a side-car lists for the file. The host loads it from memory that holds these bytes.
    pub pinned: Option<String>,
    /// The signature, if the operator demands one. The host loads the file from memory that holds the bytes that were verified.
    pub signed: Option<Signed>,
    /// The libraries beside the plugin that a lock file lists. The list is empty for a signed file, and `None` for a file that is
    /// neither listed nor signed.
    pub(super) libraries: Option<Vec<LockedLibrary>>,
    /// Warnings for the operator about an accepted file.
    pub warnings: Vec<String>,
    /// The policy under which the scan accepted the file. Loading uses the same policy.
    pub(super) policy: Policy,
}

/// What a directory and the operator demand of a file, in addition to the checks that all plugins must pass.
#[derive(Clone, Copy, Default)]
pub(super) struct Demands<'a> {
    pub lock: Option<&'a Lock>,
    pub publishers: Option<&'a Publishers>,
}

impl Entry {
    /// Reads a plugin that the operator named by its file. The operator trusts that file, so a file that other users could change
    /// only gives a warning.
    ///
    /// # Errors
    /// The errors of [`preflight`](crate::preflight()).
    pub fn of_file(path: &Path) -> Result<Self, PreflightError> {
        let policy = Policy { insecure_permissions: true, ..Policy::default() };
        Self::accepted(path, policy, &Demands::default(), None)
    }

    /// Reads a plugin and checks its signature, its entry in the lock and its pin (with the file that states the pin), as far as
    /// they are demanded.
    pub(super) fn accepted(
        path: &Path,
        policy: Policy,
        demands: &Demands<'_>,
        pin: Option<(&Path, &str)>,
    ) -> Result<Self, PreflightError> {
        let file = PluginFile::open(path, &policy)?;
        let signed = demands.publishers.map(|publishers| publishers.verify(&file)).transpose()?;
        let (mut pinned, mut libraries) = (None, None);
        if demands.lock.is_some() || pin.is_some() {
            // Takes the hash of the bytes that were verified. A file that changes between two reads could pass both checks
            // otherwise.
            let found = signed.as_ref().map_or_else(|| file.sha256(), |signed| Ok(signed.sha256.clone()))?;
            if let Some(lock) = demands.lock {
                libraries = Some(lock.check(path, &found)?);
            }
            if let Some((says, pinned)) = pin.filter(|(_, pinned)| *pinned != found) {
                return Err(PreflightError::WrongHash {
                    lock: says.to_owned(),
                    pinned: pinned.to_owned(),
                    found,
                });
            }
            pinned = Some(found);
        }
        let manifest = file.manifest(&policy)?;
        if let (Some(publishers), Some(signed)) = (demands.publishers, &signed) {
            publishers.check_id(signed, &manifest.plugin.id).map_err(|problem| {
                PreflightError::BadSignature { signature: signature_of(path, SIGNATURE), problem }
            })?;
            if libraries.is_none() {
                libraries = Some(none_beside(path)?);
            }
        }
        let mut warnings = file.warnings;
        if manifest.build.panic == "abort" {
            warnings.push("a defect in it ends this process: it was built with panic = \"abort\"".to_owned());
        }
        Ok(Self { path: path.to_owned(), manifest, pinned, signed, libraries, warnings, policy })
    }

    /// The sha256 of the bytes that were pinned or signed, in hexadecimal.
    pub(super) fn verified(&self) -> Option<&str> {
        self.pinned.as_deref().or(self.signed.as_ref().map(|signed| signed.sha256.as_str()))
    }
}

/// No libraries, when a signed file is loaded with none but the system's: no signature covers others.
fn none_beside(path: &Path) -> Result<Vec<LockedLibrary>, PreflightError> {
    let beside = libraries::beside(path).map_err(PreflightError::Unreadable)?;
    match beside.is_empty() {
        true => Ok(beside),
        false => {
            Err(PreflightError::UnsignedLibraries(beside.into_iter().map(|library| library.file).collect()))
        }
    }
}

/// A file that looked like a plugin and is not usable.
#[derive(Debug)]
pub struct Unusable {
    /// Where it is.
    pub path: PathBuf,
    /// The reason.
    pub reason: PreflightError,
}

/// The result of a scan. A scan runs no code of plugins.
#[derive(Debug, Default)]
pub struct Catalog {
    entries: Vec<Entry>,
    unusable: Vec<Unusable>,
    shadowed: Vec<Entry>,
    searched: Vec<(PathBuf, Option<String>)>,
    policy: Policy,
}

impl Catalog {
    /// Reads every `.so` and every side-car in these directories, in this order. The first plugin of a name counts and shadows
    /// later ones.
    pub fn scan<P: AsRef<Path>>(directories: impl IntoIterator<Item = P>) -> Self {
        Self::scan_with(Policy::default(), directories)
    }

    /// Reads directories and accepts the files that the policy allows.
    pub fn scan_with<P: AsRef<Path>>(policy: Policy, directories: impl IntoIterator<Item = P>) -> Self {
        let mut catalog = Self { policy, ..Self::default() };
        let publishers = catalog.policy.publishers.as_deref().map(Publishers::read).transpose();
        for directory in directories {
            let directory = directory.as_ref();
            // If the file of publishers cannot be read, no plugin is accepted.
            let publishers = match &publishers {
                Ok(publishers) => publishers.as_ref(),
                Err(error) => {
                    catalog.searched.push((directory.to_owned(), Some(error.clone())));
                    continue;
                }
            };
            let paths = match candidates(directory) {
                Ok(paths) => paths,
                Err(error) => {
                    catalog.searched.push((directory.to_owned(), Some(error.to_string())));
                    continue;
                }
            };
            // If the lock file cannot be read, no plugin of the directory is accepted.
            let lock = match Lock::of_directory(directory, &catalog.policy) {
                Ok(lock) => lock,
                Err(error) => {
                    catalog.searched.push((directory.to_owned(), Some(error)));
                    continue;
                }
            };
            catalog.add_all(&paths, &Demands { lock: lock.as_ref(), publishers });
            catalog.searched.push((directory.to_owned(), None));
        }
        catalog
    }

    /// Reads one directory as if it had no lock file.
    #[must_use]
    pub fn scan_unlocked(policy: Policy, directory: &Path) -> Self {
        let mut catalog = Self { policy, ..Self::default() };
        let publishers = catalog.policy.publishers.as_deref().map(Publishers::read).transpose();
        match (candidates(directory), publishers) {
            (Ok(paths), Ok(publishers)) => {
                catalog.add_all(&paths, &Demands { lock: None, publishers: publishers.as_ref() });
            }
            (Err(error), _) => catalog.searched.push((directory.to_owned(), Some(error.to_string()))),
            (_, Err(error)) => catalog.searched.push((directory.to_owned(), Some(error))),
        }
        catalog
    }

    /// The plugins among a directory's files.
    fn add_all(&mut self, paths: &[PathBuf], demands: &Demands<'_>) {
        let mut named = Vec::new();
        for car in paths.iter().filter(|path| sidecar::is_one(path)) {
            match sidecar::read(car, &self.policy) {
                Ok(Some(file)) => {
                    let pin = file.sha256.as_deref().map(|hash| (car.as_path(), hash));
                    self.add(&file.path, demands, pin);
                    named.extend(file.path.canonicalize());
                }
                Ok(None) => {}
                Err(problem) => {
                    let reason = PreflightError::BadSideCar(problem);
                    self.unusable.push(Unusable { path: car.clone(), reason });
                }
            }
        }
        // Files that a side-car names were added above, as the side-car says.
        let left = |path: &&PathBuf| !path.canonicalize().is_ok_and(|path| named.contains(&path));
        for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "so")).filter(left) {
            self.add(path, demands, None);
        }
    }

    fn add(&mut self, path: &Path, demands: &Demands<'_>, pin: Option<(&Path, &str)>) {
        match Entry::accepted(path, self.policy.clone(), demands, pin) {
            Ok(entry) => {
                let name = &entry.manifest.plugin.name;
                let taken = self.entries.iter().any(|e| e.manifest.plugin.name == *name);
                let list = if taken { &mut self.shadowed } else { &mut self.entries };
                list.push(entry);
            }
            Err(reason) => self.unusable.push(Unusable { path: path.to_owned(), reason }),
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

    /// Takes the list of files that are not usable.
    #[must_use]
    pub fn into_unusable(self) -> Vec<Unusable> {
        self.unusable
    }

    /// Usable plugins that an earlier plugin of the same name shadows.
    #[must_use]
    pub fn shadowed(&self) -> &[Entry] {
        &self.shadowed
    }

    /// Directories in which no file was read, with the reason.
    pub fn unsearched(&self) -> impl Iterator<Item = (&Path, &str)> {
        self.searched.iter().filter_map(|(directory, why)| Some((directory.as_path(), why.as_deref()?)))
    }

    /// The plugin of this name.
    ///
    /// # Errors
    /// [`PluginError::NotFound`], with all directories and files that were read.
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
