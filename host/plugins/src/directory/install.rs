//! Installing the file of a plugin.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::step::{Step, temporary};
use super::{ChangeError, Directory, PREVIOUS, is_signed, name_of, previous_of};
use crate::error::PreflightError;
use crate::file::{PluginFile, describe, preflight, whole};
use crate::lock::{Lock, Locked};
use crate::manifest::Manifest;
use crate::policy::Policy;
use crate::publishers::{NEXT_SIGNATURE, SIGNATURE, Signed, read_signature, signature_of};

/// How a file is installed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Replace another plugin, with another id, that has the same name.
    pub force: bool,
    /// List the file in `plugins.lock`.
    pub lock: bool,
}

/// The result of an installation.
#[derive(Clone, Debug)]
pub struct Installed {
    /// Path at which the file was installed.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// The sha256 of its bytes, in hexadecimal.
    pub sha256: String,
    /// Its signature, if the operator demands one.
    pub signed: Option<Signed>,
    /// Whether a signature lies beside it.
    pub has_signature: bool,
    /// The file that it replaced. `rollback` puts that file back.
    pub previous: Option<PathBuf>,
    /// Whether there is a `plugins.lock` that does not list the file.
    pub is_shut_out: bool,
}

/// A file that was written under a temporary name beside its target, and checked there.
struct Written {
    at: PathBuf,
    manifest: Manifest,
    locked: Locked,
    signature: Option<String>,
    signed: Option<Signed>,
}

impl Directory {
    /// Checks a plugin's file as if it were in this directory, and puts it there under the plugin's name, with the signature that
    /// lies beside it. Keeps the file that it replaces.
    ///
    /// # Errors
    /// When the file is refused here, or would replace another plugin. The directory is unchanged then.
    pub fn install(&self, file: &Path, options: Options) -> Result<Installed, ChangeError> {
        let (steps, installed) = self.prepare_install(file, options)?;
        let written = temporary(&installed.path, "new");
        self.run(&steps).inspect_err(|_| drop(std::fs::remove_file(written)))?;
        Ok(installed)
    }

    /// Writes the file beside its target, and returns the steps that put it in place.
    pub(super) fn prepare_install(
        &self,
        file: &Path,
        options: Options,
    ) -> Result<(Vec<Step>, Installed), ChangeError> {
        // The permissions of the copy count, not those of the source.
        let from = Policy { insecure_permissions: true, ..self.policy.clone() };
        let unusable = |source| ChangeError::unusable(file, source);
        let manifest = preflight(file, &from).map_err(unusable)?;
        let target = self.place_of(&manifest.plugin.name, file)?;
        // A target that cannot be read is not a plugin to protect: an operator mends a damaged file by replacing it.
        let before = describe(&target).ok();
        if let Some(there) =
            before.as_ref().filter(|there| there.plugin.id != manifest.plugin.id && !options.force)
        {
            return Err(ChangeError::OtherPlugin {
                path: target,
                there: there.plugin.id.clone(),
                file: file.to_owned(),
                new: manifest.plugin.id,
            });
        }
        let lock = self.read_lock()?;
        if options.lock && lock.is_none() {
            self.nothing_is_shut_out(&target, &manifest.plugin.name)?;
        }
        let written = self.write_beside(file, &target)?;
        // The file was read twice. Its place, and what it may replace, were decided by the first manifest.
        if written.manifest != manifest {
            drop(std::fs::remove_file(&written.at));
            return Err(ChangeError::Changed { path: file.to_owned() });
        }
        let planned = self.plan(&written, &target, before.as_ref(), lock.as_ref(), options.lock);
        let (steps, previous) = planned.inspect_err(|_| drop(std::fs::remove_file(&written.at)))?;
        let sha256 = written.locked.sha256;
        let installed = Installed {
            is_shut_out: !options.lock && lock.is_some_and(|lock| lock.check(&target, &sha256).is_err()),
            path: target,
            manifest: written.manifest,
            sha256,
            signed: written.signed,
            has_signature: written.signature.is_some(),
            previous,
        };
        Ok((steps, installed))
    }

    /// The path for a plugin of this name, so that a new version replaces the old one. Checks the name before it becomes a path.
    fn place_of(&self, name: &str, file: &Path) -> Result<PathBuf, ChangeError> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
            return Err(ChangeError::Name { path: file.to_owned(), name: name.to_owned() });
        }
        Ok(self.path.join(format!("{name}.so")))
    }

    /// Refuses to write the first lock for one plugin if there are others: a lock lists all files that may be loaded.
    fn nothing_is_shut_out(&self, target: &Path, name: &str) -> Result<(), ChangeError> {
        let failed = |source| ChangeError::Directory { path: self.path.clone(), source };
        let files = crate::catalog::candidates(&self.path).map_err(failed)?;
        let others: Vec<String> =
            files.iter().filter(|path| *path != target).map(|path| name_of(path)).collect();
        match others.is_empty() {
            true => Ok(()),
            false => Err(ChangeError::WouldShutOut { lock: self.lock_path(), name: name.to_owned(), others }),
        }
    }

    /// Writes the file beside its target, and runs there all checks of an installed file.
    fn write_beside(&self, file: &Path, target: &Path) -> Result<Written, ChangeError> {
        let at = temporary(target, "new");
        let failed = |source| ChangeError::File { path: at.clone(), source };
        let write = || -> Result<Written, ChangeError> {
            let source = whole(file).map_err(|source| ChangeError::unusable(file, source))?;
            let made = OpenOptions::new().write(true).create_new(true).mode(0o755).open(&at);
            let mut made: File = made.map_err(failed)?;
            made.write_all(&source).and_then(|()| made.sync_all()).map_err(failed)?;
            let unusable = |source| ChangeError::unusable(target, source);
            let opened = PluginFile::open(&at, &self.policy).map_err(unusable)?;
            let manifest = opened.manifest(&self.policy).map_err(unusable)?;
            let (signature, signed) = self.signature(&opened, file, &manifest)?;
            let mut locked = Locked::of(&at, &manifest).map_err(failed)?;
            locked.file = name_of(target);
            Ok(Written { at: at.clone(), manifest, locked, signature, signed })
        };
        write().inspect_err(|_| drop(std::fs::remove_file(&at)))
    }

    /// The signature beside the file that is installed, verified where there are publishers.
    fn signature(
        &self,
        opened: &PluginFile,
        file: &Path,
        manifest: &Manifest,
    ) -> Result<(Option<String>, Option<Signed>), ChangeError> {
        let unusable = |source| ChangeError::unusable(file, source);
        let at = signature_of(file, SIGNATURE);
        let bad = |problem| unusable(PreflightError::BadSignature { signature: at.clone(), problem });
        let text = match read_signature(&at) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(bad(format!("it cannot be read: {error}"))),
        };
        let Some(publishers) = &self.publishers else { return Ok((text, None)) };
        let Some(text) = text else {
            return Err(unusable(publishers.not_signed(at)));
        };
        let signed = publishers.verify_text(opened, &text).map_err(unusable)?.map_err(bad)?;
        publishers.check_id(&signed, &manifest.plugin.id).map_err(bad)?;
        Ok((Some(text), Some(signed)))
    }

    /// Returns the steps, and the path of the previous file if one is kept.
    fn plan(
        &self,
        written: &Written,
        target: &Path,
        before: Option<&Manifest>,
        lock: Option<&Lock>,
        is_locked: bool,
    ) -> Result<(Vec<Step>, Option<PathBuf>), ChangeError> {
        let failed = |source| ChangeError::File { path: target.to_owned(), source };
        let (previous, signature) = (previous_of(target), signature_of(target, SIGNATURE));
        let mut steps = Vec::new();
        // Installing the same bytes again keeps no previous file.
        let there = match before {
            Some(manifest) => Some(Locked::of(target, manifest).map_err(failed)?),
            None => None,
        };
        let kept = there.filter(|there| there.sha256 != written.locked.sha256);
        if kept.is_some() {
            steps.push(match is_signed(target) {
                true => Step::Link { from: signature.clone(), to: signature_of(&previous, SIGNATURE) },
                false => Step::Remove(signature_of(&previous, SIGNATURE)),
            });
            steps.push(Step::Link { from: target.to_owned(), to: previous.clone() });
        }
        let (mut first, mut last) = (None, None);
        if is_locked {
            let mut listed = lock.cloned().unwrap_or_else(|| Lock::empty(&self.path));
            // The replaced file stays listed only if the lock listed it before.
            let was_listed =
                kept.as_ref().filter(|kept| lock.is_none_or(|lock| lock.check(target, &kept.sha256).is_ok()));
            if let Some(kept) = &kept {
                listed.forget(&format!("{}{PREVIOUS}", kept.file), &kept.target);
            }
            listed.plugins.extend(
                was_listed.map(|kept| Locked { file: format!("{}{PREVIOUS}", kept.file), ..kept.clone() }),
            );
            // Lists both files while the new one takes the old one's place.
            let mut both = listed.clone();
            both.plugins.push(written.locked.clone());
            listed.forget(&written.locked.file, &written.locked.target);
            listed.plugins.push(written.locked.clone());
            first = lock.is_some().then_some(Step::Lock(both));
            last = Some(Step::Lock(listed));
        }
        steps.extend(first);
        let next = signature_of(target, NEXT_SIGNATURE);
        if let Some(text) = &written.signature {
            steps.push(Step::Write { path: next.clone(), text: text.clone() });
        }
        steps.push(Step::Rename { from: written.at.clone(), to: target.to_owned() });
        steps.push(match written.signature {
            Some(_) => Step::Rename { from: next, to: signature },
            None => Step::Remove(signature),
        });
        steps.extend(last);
        Ok((steps, kept.map(|_| previous)))
    }
}
