//! Removing a plugin.

use std::path::{Path, PathBuf};

use super::step::Step;
use super::{ChangeError, Directory, name_of, previous_of};
use crate::catalog::candidates;
use crate::file::describe;
use crate::lock::sha256;
use crate::publishers::{NEXT_SIGNATURE, SIGNATURE, signature_of};
use crate::sidecar;

/// Finds the one file in these directories that has this path, or whose plugin has this name. A file that cannot be read counts as
/// a plugin with the name of the file.
///
/// # Errors
/// When there is no such file, or when there are several.
pub fn find(name: &str, directories: &[PathBuf]) -> Result<PathBuf, ChangeError> {
    let not_there = || ChangeError::NotThere {
        name: name.to_owned(),
        directories: directories.iter().map(|directory| directory.display().to_string()).collect(),
    };
    if name.contains('/') {
        let path = PathBuf::from(name);
        return if path.is_file() { Ok(path) } else { Err(not_there()) };
    }
    let is_it = |path: &PathBuf| match describe(path) {
        Ok(manifest) => manifest.plugin.name == name,
        Err(_unreadable) => path.file_stem().is_some_and(|stem| stem == name),
    };
    let files = directories.iter().filter_map(|directory| candidates(directory).ok()).flatten();
    let mut found: Vec<PathBuf> = files.filter(|path| !sidecar::is_one(path)).filter(is_it).collect();
    match (found.len(), found.pop()) {
        (1, Some(path)) => Ok(path),
        (_, None) => Err(not_there()),
        (_, Some(last)) => {
            found.push(last);
            let paths = found.iter().map(|path| path.display().to_string()).collect();
            Err(ChangeError::Several { name: name.to_owned(), paths })
        }
    }
}

impl Directory {
    /// Removes a plugin's file from this directory, with its previous file, their signatures and their entries in `plugins.lock`. A
    /// process that has loaded the file keeps it.
    ///
    /// # Errors
    /// When a side-car names the file or cannot be read, or a file cannot be removed.
    pub fn remove(&self, file: &Path) -> Result<(), ChangeError> {
        let file = self.path.join(name_of(file));
        let failed = |source| ChangeError::Directory { path: self.path.clone(), source };
        let real = file.canonicalize().map_err(|source| ChangeError::File { path: file.clone(), source })?;
        for side_car in
            candidates(&self.path).map_err(failed)?.into_iter().filter(|path| sidecar::is_one(path))
        {
            let named = sidecar::read(&side_car, &self.policy)
                .map_err(|problem| ChangeError::UnreadableSideCar { path: side_car.clone(), problem })?;
            if named.is_some_and(|named| named.path.canonicalize().is_ok_and(|path| path == real)) {
                return Err(ChangeError::SideCar { path: file, side_car });
            }
        }
        let previous = previous_of(&file);
        let mut steps =
            vec![Step::Remove(signature_of(&previous, SIGNATURE)), Step::Remove(previous.clone())];
        // Removes the file before its signature, so that the file never lies there without one.
        steps.push(Step::Remove(file.clone()));
        steps.extend([NEXT_SIGNATURE, SIGNATURE].map(|ending| Step::Remove(signature_of(&file, ending))));
        if let Some(mut lock) = self.read_lock()? {
            let target = describe(&file).map(|manifest| manifest.build.target);
            let target = target.unwrap_or_else(|_| host_plugin_api::note::BUILT_FOR.to_owned());
            let hash = sha256(&file).unwrap_or_default();
            for gone in [&file, &previous] {
                lock.forget(&name_of(gone), &target);
            }
            lock.plugins.retain(|locked| locked.file != name_of(&file) || locked.sha256 != hash);
            steps.push(Step::Lock(lock));
        }
        self.run(&steps)
    }
}
