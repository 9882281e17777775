//! `host plugins install` and `host plugins lock`.

use std::path::{Path, PathBuf};

use anyhow::Context;
use host_plugins::lock::{FILE, Lock, Locked, write_if};
use host_plugins::{Catalog, Policy};
use host_plugins::{describe, preflight};

use crate::cli::Refused;
use crate::cli::output::say;

/// Checks a plugin and puts it into the first directory, whole or not at all. A running host keeps the old file. Another
/// plugin that only has the name is replaced with `force`.
pub fn run(policy: Policy, file: &Path, directories: &[PathBuf], force: bool) -> anyhow::Result<()> {
    let refused = |path: &Path, error| Refused(format!("{} {error}", path.display()));
    // Permissions are checked of the file in its directory, not of the one that it is copied from.
    let from = Policy { insecure_permissions: true, ..policy };
    let manifest = preflight(file, from).map_err(|error| refused(file, error))?;
    let directory = first(directories)?;
    std::fs::create_dir_all(directory)
        .with_context(|| format!("the directory {} cannot be made", directory.display()))?;
    // By the plugin's name, so that a new version takes the old one's place. Names are checked before they become paths.
    let name = &manifest.plugin.name;
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    if name.is_empty() || name.len() > 64 || !name.chars().all(plain) {
        let text =
            format!("{} names itself {name:?}: use letters, digits, - and _, 64 at most", file.display());
        return Err(Refused(text).into());
    }
    let target = directory.join(format!("{name}.so"));
    // What is there and cannot be read is no plugin that is lost: replacing it is how a damaged file is mended.
    let before = describe(&target).ok().filter(|before| before.plugin.id != manifest.plugin.id);
    if let Some(before) = before.filter(|_| !force) {
        let text = format!(
            "{} is another plugin of this name: its id is {:?}, that of {} is {:?}; install into another directory, or replace it \
             with --force",
            target.display(),
            before.plugin.id,
            file.display(),
            manifest.plugin.id
        );
        return Err(Refused(text).into());
    }
    let content = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
    let accept = |written: &Path| preflight(written, policy).map_err(|error| refused(&target, error).into());
    let written = write_if(&target, &content, 0o755, accept).map_err(|error: anyhow::Error| {
        let text = format!("{} cannot be written", target.display());
        if error.is::<Refused>() { error } else { error.context(text) }
    })?;
    let locked = Locked::of(&target, &written)?;
    say!("installed {} {} as {}", name, locked.version, target.display());
    say!("sha256 {}", locked.sha256);
    match Lock::of_directory(directory).map_err(Refused)? {
        Some(lock) if lock.check(&target, &locked.sha256).is_err() => {
            say!("{} does not list it yet: run host plugins lock", directory.join(FILE).display());
        }
        _ => {}
    }
    Ok(())
}

/// Lists the usable files of the first directory in its lock file. Entries of other targets stay.
pub fn lock(policy: Policy, directories: &[PathBuf]) -> anyhow::Result<()> {
    let directory = first(directories)?;
    let mut lock = Lock::of_directory(directory).map_err(Refused)?.unwrap_or_default();
    let unlocked = Catalog::scan_unlocked(policy, directory);
    let mut files = Vec::new();
    for entry in unlocked.entries().iter().chain(unlocked.shadowed()) {
        files.push(Locked::of(&entry.path, &entry.manifest)?);
    }
    let mut targets: Vec<String> = files.iter().map(|locked| locked.target.clone()).collect();
    targets.push(host_plugin_api::note::BUILT_FOR.to_owned());
    targets.sort();
    targets.dedup();
    for target in targets {
        let own = files.iter().filter(|locked| locked.target == target).cloned().collect();
        lock.replace(&target, own);
    }
    lock.write(directory).with_context(|| format!("{} cannot be written", directory.join(FILE).display()))?;
    say!("{} lists {} files", directory.join(FILE).display(), lock.plugins.len());
    for file in unlocked.unusable() {
        say!("left out: {} {}", file.path.display(), file.reason);
    }
    Ok(())
}

fn first(directories: &[PathBuf]) -> anyhow::Result<&Path> {
    let none = || Refused("no plugin directory: name one with --plugins-dir".to_owned());
    Ok(directories.first().ok_or_else(none)?)
}
