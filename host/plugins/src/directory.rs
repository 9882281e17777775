//! Changes of a plugin directory: installing a file, rolling back to the previous file, removing a plugin, and locking the files.
//!
//! A plugin has up to five files: itself, its signature, the previous file, the signature of that file, and `plugins.lock`. No
//! system call changes all of them at once. So a change is a list of steps, and each step replaces one whole file. The order is
//! such that the plugin is usable after each step, in its old version or in the new one. While one file takes the place of the
//! other, the lock lists both, and the signature of either is accepted.
//!
//! ```text
//! NAME.so                    the plugin
//! NAME.so.minisig            its signature
//! NAME.so.previous           the file before, which `rollback` puts back
//! NAME.so.previous.minisig   its signature
//! ```

mod error;
mod install;
mod remove;
mod rollback;
mod step;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use super::catalog::{Catalog, Unusable};
use super::file::preflight;
use super::lock::{FILE, Lock, Locked};
use super::policy::Policy;
use super::publishers::{Publishers, SIGNATURE, signature_of};

pub use error::ChangeError;
pub use install::{Installed, Options};
pub use remove::find;
pub use rollback::RolledBack;
use step::{Step, run};

/// Ending of the name of the previous file, after the plugin's name.
pub const PREVIOUS: &str = ".previous";

/// A plugin directory that is opened for a change. Other processes of this host wait.
pub struct Directory {
    path: PathBuf,
    policy: Policy,
    publishers: Option<Publishers>,
    /// Holds the system's lock.
    _alone: File,
}

impl Directory {
    /// Opens a directory to be changed. Waits for another process that changes it, and removes temporary files of a change that was
    /// interrupted.
    ///
    /// # Errors
    /// When the directory cannot be read, or the publishers of the policy cannot.
    pub fn open(path: &Path, policy: Policy) -> Result<Self, ChangeError> {
        let failed = |source| ChangeError::Directory { path: path.to_owned(), source };
        let publishers = policy.publishers.as_deref().map(Publishers::read).transpose();
        let publishers = publishers.map_err(ChangeError::Publishers)?;
        let alone = File::open(path).map_err(failed)?;
        // Some file systems, for instance on networks, have no such locks. There operators must not run two changes at once.
        let _held = flock(&alone, FlockOperation::LockExclusive).is_ok();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if step::is_left_behind(&entry.file_name().to_string_lossy()) {
                std::fs::remove_file(entry.path()).map_err(failed)?;
            }
        }
        Ok(Self { path: path.to_owned(), policy, publishers, _alone: alone })
    }

    /// Writes `plugins.lock` with the usable files of the directory and their previous files. Keeps entries of other targets.
    ///
    /// # Errors
    /// When a file cannot be read, or the lock cannot be read or written.
    pub fn lock(&self) -> Result<(Lock, Vec<Unusable>), ChangeError> {
        let mut lock = self.read_lock()?.unwrap_or_else(|| Lock::empty(&self.path));
        let unlocked = Catalog::scan_unlocked(self.policy.clone(), &self.path);
        if let Some((_, why)) = unlocked.unsearched().next() {
            let source = io::Error::other(why.to_owned());
            return Err(ChangeError::Directory { path: self.path.clone(), source });
        }
        let mut files = Vec::new();
        for entry in unlocked.entries().iter().chain(unlocked.shadowed()) {
            let locked = Locked::of(&entry.path, &entry.manifest);
            files.push(locked.map_err(|source| ChangeError::File { path: entry.path.clone(), source })?);
            let previous = previous_of(&entry.path);
            if let Ok(manifest) = preflight(&previous, &self.policy) {
                let locked = Locked::of(&previous, &manifest);
                files.push(locked.map_err(|source| ChangeError::File { path: previous, source })?);
            }
        }
        let mut targets: Vec<String> = files.iter().map(|locked| locked.target.clone()).collect();
        targets.push(host_plugin_api::note::BUILT_FOR.to_owned());
        targets.sort();
        targets.dedup();
        for target in targets {
            let own = files.iter().filter(|locked| locked.target == target).cloned().collect();
            lock.replace(&target, own);
        }
        self.run(&[Step::Lock(lock.clone())])?;
        Ok((lock, unlocked.into_unusable()))
    }

    /// The directory's `plugins.lock`.
    #[must_use]
    pub fn lock_path(&self) -> PathBuf {
        self.path.join(FILE)
    }

    fn read_lock(&self) -> Result<Option<Lock>, ChangeError> {
        Lock::of_directory(&self.path, &self.policy).map_err(ChangeError::Lock)
    }

    fn run(&self, steps: &[Step]) -> Result<(), ChangeError> {
        run(&self.path, steps)
    }
}

/// The path of the file that is kept as the previous one of this file.
fn previous_of(file: &Path) -> PathBuf {
    signature_of(file, PREVIOUS)
}

/// Whether a signature lies beside this file.
fn is_signed(file: &Path) -> bool {
    signature_of(file, SIGNATURE).is_file()
}

/// A file's name without its directory.
fn name_of(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests;
