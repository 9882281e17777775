//! `host plugins install`, `rollback`, `remove` and `lock`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use host_plugins::Policy;
use host_plugins::directory::{ChangeError, Directory, Installed, Options, find};

use crate::cli::Refused;
use crate::cli::output::say;

/// Checks a plugin and puts it into the first directory in one step. A running host keeps the old file.
pub fn run(policy: Policy, file: &Path, directories: &[PathBuf], options: Options) -> anyhow::Result<()> {
    let directory = first(directories)?;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("the directory {} cannot be made", directory.display()))?;
    let opened = Directory::open(directory, policy).map_err(refusal)?;
    let installed = opened.install(file, options).map_err(refusal)?;
    let Installed { path, manifest, sha256, signed, has_signature, previous, is_shut_out } = installed;
    say!("installed {} {} as {}", manifest.plugin.name, manifest.plugin.version, path.display());
    say!("sha256 {sha256}");
    match signed {
        Some(signed) => say!("signed by {}: {}", signed.publisher, signed.comment),
        None if has_signature => {
            say!("its signature was kept and not verified: name the publishers with --plugin-publishers");
        }
        None => {}
    }
    if let Some(previous) = previous {
        say!(
            "the file before is kept as {}: host plugins rollback {}",
            previous.display(),
            manifest.plugin.name
        );
    }
    let lock = opened.lock_path();
    if options.lock {
        say!("{} lists it", lock.display());
    } else if is_shut_out {
        say!("{} does not list it yet: install with --lock, or run host plugins lock", lock.display());
    }
    Ok(())
}

/// Puts the previous file of a plugin in the first directory back in place.
pub fn rollback(policy: Policy, name: &str, directories: &[PathBuf]) -> anyhow::Result<()> {
    let opened = Directory::open(first(directories)?, policy).map_err(refusal)?;
    let back = opened.rollback(name).map_err(refusal)?;
    say!("{name} is {} again, in {}", back.manifest.plugin.version, back.path.display());
    say!("sha256 {}", back.sha256);
    Ok(())
}

/// Removes a plugin from one of the directories.
pub fn remove(policy: Policy, name: &str, directories: &[PathBuf]) -> anyhow::Result<()> {
    let file = find(name, directories).map_err(refusal)?;
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Directory::open(directory, policy).and_then(|opened| opened.remove(&file)).map_err(refusal)?;
    say!("removed {}", file.display());
    Ok(())
}

/// Lists the usable files of the first directory in its lock file. Entries of other targets stay.
pub fn lock(policy: Policy, directories: &[PathBuf]) -> anyhow::Result<()> {
    let opened = Directory::open(first(directories)?, policy).map_err(refusal)?;
    let (lock, unusable) = opened.lock().map_err(refusal)?;
    say!("{} lists {} files", opened.lock_path().display(), lock.plugins.len());
    for file in unusable {
        say!("left out: {} {}", file.path.display(), file.reason);
    }
    Ok(())
}

fn refusal(error: ChangeError) -> anyhow::Error {
    if error.is_refusal() { Refused(error.to_string()).into() } else { error.into() }
}

fn first(directories: &[PathBuf]) -> anyhow::Result<&Path> {
    let none = || Refused("no plugin directory: name one with --plugins-dir".to_owned());
    Ok(directories.first().ok_or_else(none)?)
}
