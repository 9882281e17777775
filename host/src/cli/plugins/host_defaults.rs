//! Default values that the host supplies for keys of plugins.
//!
//! A manifest declares such keys (`host_default`), and the operator's values take precedence. So a plugin that needs a directory on
//! this machine works without a configuration.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use host_plugins::{Catalog, HostDefault};
use toml::{Table, Value};

use crate::cli::launch;
use crate::cli::settings::Settings;

/// Divisor: a store without a limit of its own may take the free space divided by this.
const PARTS_OF_FREE_SPACE: u64 = 4;

/// Fills in the keys that the storage tiers in these settings declare. Returns them in the form of `--set`.
pub fn fill(settings: &mut Settings, catalog: &Catalog, notes: &mut Vec<String>) -> Vec<String> {
    let mut supplied = Vec::new();
    for name in settings.stores().to_vec() {
        let Ok(entry) = catalog.find(&name) else { continue };
        let keys = |wanted: HostDefault| {
            let asks = entry.manifest.config.iter().find(|(_, key)| key.host_default == Some(wanted));
            asks.map(|(key, _)| key.clone())
        };
        let (Some(place), room) = (keys(HostDefault::CacheDirectory), keys(HostDefault::SpaceMib)) else {
            continue;
        };
        let table = settings.plugin.get(&name).and_then(Value::as_table).cloned().unwrap_or_default();
        if table.contains_key(&place) {
            continue;
        }
        let Some(directory) = cache_root().zip(identity(settings)).map(|(root, name)| root.join(name)) else {
            continue;
        };
        let mut table = table;
        table.insert(place.clone(), Value::String(directory.display().to_string()));
        supplied.push(format!("{name}.{place}={}", directory.display()));
        let mut bound = String::new();
        if let Some(room) = room.filter(|room| !table.contains_key(room))
            && let Some(mib) = share_of_space(&directory)
        {
            let key = &entry.manifest.config[&room];
            let mib = mib.max(key.host_min.unwrap_or(0)).min(key.host_max.unwrap_or(i64::MAX));
            table.insert(room.clone(), Value::Integer(mib));
            supplied.push(format!("{name}.{room}={mib}"));
            bound = format!(", at most {mib} MiB, about a quarter of what is free (--set {name}.{room}=MIB)");
        }
        notes.push(format!(
            "{name} keeps pages in {}{bound}; --set {name}.{place}=DIR chooses another place",
            directory.display()
        ));
        settings.plugin.insert(name, Value::Table(table));
    }
    supplied
}

/// `host/pages` in the user's cache directory. `None` if the environment names no directory.
fn cache_root() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache")))?;
    Some(cache.join("host").join("pages"))
}

/// The name of a folder for this model's KV: the model's name, and a digest of what makes its KV differ from that of other models.
/// `None` if the settings cannot work, which the checks report.
fn identity(settings: &Settings) -> Option<String> {
    let digest = launch::kv_identity(settings).ok()?;
    let hex: String = digest.0.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let plain =
        |letter: char| if letter.is_ascii_alphanumeric() || "._-".contains(letter) { letter } else { '_' };
    let name: String = settings.model_name().chars().take(64).map(plain).collect();
    Some(format!("{name}-{hex}"))
}

/// Size in MiB for a store in this directory: a part of the free space and of the space that the store already takes.
fn share_of_space(directory: &Path) -> Option<i64> {
    let there = directory.ancestors().find(|path| path.is_dir())?;
    let space = rustix::fs::statvfs(there).ok()?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    let taken = if there == directory { taken(directory) } else { 0 };
    i64::try_from((free.saturating_add(taken) / PARTS_OF_FREE_SPACE) >> 20).ok()
}

/// Bytes that the files in a directory and its subfolders take.
fn taken(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().filter_map(Result::ok);
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => taken(&entry.path()),
        Ok(metadata) => metadata.blocks().saturating_mul(512),
        Err(_) => 0,
    });
    bytes.fold(0, u64::saturating_add)
}

/// Makes the folders above a place that [`fill`] chose.
///
/// # Errors
/// When they cannot be made.
pub fn make_parents(table: &Table) -> std::io::Result<()> {
    let Some(root) = cache_root() else { return Ok(()) };
    let chosen = table.values().filter_map(Value::as_str).any(|value| Path::new(value).starts_with(&root));
    if !chosen {
        return Ok(());
    }
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_counts_what_the_store_has_already() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("a");
        std::fs::create_dir(&inside).unwrap();
        std::fs::write(inside.join("pages"), vec![1; 1 << 20]).unwrap();
        assert!(taken(folder.path()) >= 1 << 20);
        assert!(share_of_space(&folder.path().join("not/there")).is_some());
    }
}
