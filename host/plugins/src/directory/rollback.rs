//! Rolling back to the previous file of a plugin.

use std::path::{Path, PathBuf};

use super::step::{Step, temporary};
use super::{ChangeError, Directory, PREVIOUS, is_signed, name_of, previous_of};
use crate::error::PreflightError;
use crate::file::{PluginFile, describe};
use crate::lock::{Lock, Locked};
use crate::manifest::Manifest;
use crate::publishers::{NEXT_SIGNATURE, SIGNATURE, signature_of};

/// The result of a rollback.
#[derive(Clone, Debug)]
pub struct RolledBack {
    /// Path at which the file was put back.
    pub path: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// The sha256 of its bytes, in hexadecimal.
    pub sha256: String,
}

impl Directory {
    /// Puts the previous file of the plugin of this name back in place. The current file becomes the previous one, so that a second
    /// rollback undoes the first.
    ///
    /// # Errors
    /// When no previous file is kept, or when it is refused here, by a check of the file or because `plugins.lock` does not list
    /// it.
    pub fn rollback(&self, name: &str) -> Result<RolledBack, ChangeError> {
        let (steps, back) = self.prepare_rollback(name)?;
        self.run(&steps)?;
        Ok(back)
    }

    /// Checks the previous file, and returns the steps that put it back.
    pub(super) fn prepare_rollback(&self, name: &str) -> Result<(Vec<Step>, RolledBack), ChangeError> {
        let target = self.path.join(format!("{name}.so"));
        let previous = previous_of(&target);
        if name.contains('/') || !previous.is_file() {
            return Err(ChangeError::NoneBefore { path: target });
        }
        let unusable = |source| ChangeError::unusable(&previous, source);
        let failed = |source| ChangeError::File { path: previous.clone(), source };
        let file = PluginFile::open(&previous, &self.policy).map_err(unusable)?;
        let manifest = file.manifest(&self.policy).map_err(unusable)?;
        if let Some(publishers) = &self.publishers {
            let signed = publishers.verify(&file).map_err(unusable)?;
            let bad = |problem| {
                unusable(PreflightError::BadSignature {
                    signature: signature_of(&previous, SIGNATURE),
                    problem,
                })
            };
            publishers.check_id(&signed, &manifest.plugin.id).map_err(bad)?;
        }
        let back = Locked { file: name_of(&target), ..Locked::of(&previous, &manifest).map_err(failed)? };
        let current = describe(&target).ok();
        let current = current.map(|current| Locked::of(&target, &current)).transpose().map_err(failed)?;
        if current.as_ref().is_some_and(|current| current.sha256 == back.sha256) {
            return Err(ChangeError::NoneBefore { path: target });
        }
        let lock = self.read_lock()?;
        if let Some(lock) = &lock {
            let listed = lock.check(&previous, &back.sha256);
            listed
                .or_else(|error| lock.check(&target, &back.sha256).map_err(|_other| error))
                .map_err(unusable)?;
        }
        let steps = steps(&target, &back, current.as_ref(), lock.as_ref());
        Ok((steps, RolledBack { path: target, manifest, sha256: back.sha256 }))
    }
}

/// The steps that exchange the two files and their signatures. A plugin lies at the target after each step.
fn steps(target: &Path, back: &Locked, current: Option<&Locked>, lock: Option<&Lock>) -> Vec<Step> {
    let (previous, swap) = (previous_of(target), temporary(target, "swap"));
    let (signature, next) = (signature_of(target, SIGNATURE), signature_of(target, NEXT_SIGNATURE));
    let previous_signature = signature_of(&previous, SIGNATURE);
    let (is_current_signed, is_back_signed) = (is_signed(target), is_signed(&previous));
    let (mut steps, mut last) = (Vec::new(), None);
    if let Some(lock) = lock {
        let before = format!("{}{PREVIOUS}", back.file);
        let was_listed = current.filter(|current| lock.check(target, &current.sha256).is_ok());
        let mut both = lock.clone();
        both.plugins.push(back.clone());
        let mut listed = lock.clone();
        listed.forget(&back.file, &back.target);
        listed.forget(&before, &back.target);
        listed.plugins.push(back.clone());
        listed.plugins.extend(was_listed.map(|current| Locked { file: before, ..current.clone() }));
        steps.push(Step::Lock(both));
        last = Some(Step::Lock(listed));
    }
    if is_back_signed {
        steps.push(Step::Link { from: previous_signature.clone(), to: next.clone() });
    }
    if current.is_some() {
        steps.push(Step::Link { from: target.to_owned(), to: swap.clone() });
    }
    steps.push(Step::Rename { from: previous.clone(), to: target.to_owned() });
    if current.is_some() {
        steps.push(Step::Rename { from: swap, to: previous });
    }
    steps.push(match is_current_signed && current.is_some() {
        true => Step::Rename { from: signature.clone(), to: previous_signature },
        false => Step::Remove(previous_signature),
    });
    steps.push(match is_back_signed {
        true => Step::Rename { from: next, to: signature },
        false => Step::Remove(signature),
    });
    steps.extend(last);
    steps
}
