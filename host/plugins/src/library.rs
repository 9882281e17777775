//! Loads a plugin's file and checks its root.
//!
//! Each step has an error of its own. The steps before `dlopen` run no code of the plugin. A pinned or signed file is loaded from
//! sealed memory, which holds the bytes that were verified. Other files are loaded through the descriptor that was checked, so that
//! a file that replaces them meanwhile is not loaded. A file that searches for libraries beside itself is loaded from its own path,
//! because the system's loader needs that path. The last two are checked for changes again after loading.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use host_plugin_api::{abi, c as c_abi};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;
use semver::Version;

use super::c;
use super::catalog::Entry;
use super::error::{PluginError, PreflightError};
use super::file::{PluginFile, Stamp};
use super::libraries;
use super::manifest::Manifest;
use super::root::Root;
use super::services::Services;

/// The libraries that this process has loaded. It never unloads them.
#[derive(Default)]
struct Loaded {
    /// Files that were not sealed, by device and inode.
    places: HashMap<(u64, u64), LoadedFile>,
    /// Sealed copies, by sha256. Their descriptors stay open: the system's loader knows a library by its path, and would mistake
    /// another file with the same descriptor number for this one.
    sealed: HashMap<String, PathBuf>,
}

/// A file that was loaded.
#[derive(Clone)]
struct LoadedFile {
    /// The stamp of the file at that time.
    stamp: Stamp,
    /// The path that the system's loader got.
    from: PathBuf,
}

static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

fn with_loaded<R>(use_it: impl FnOnce(&mut Loaded) -> R) -> R {
    let mut loaded = LOADED.lock();
    use_it(loaded.get_or_insert_default())
}

/// Loads a plugin, compares its code with its note, and gives it the host's services. Opens no instance.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn load_root(entry: &Entry) -> Result<Root, PluginError> {
    let path = &entry.path;
    let refused = |e| PluginError::Preflight { path: path.clone(), source: Box::new(e) };
    // Opened again: the file may have changed since the scan.
    let file = PluginFile::open(path, &entry.policy).map_err(refused)?;
    for warning in &entry.warnings {
        tracing::warn!(plugin = entry.manifest.plugin.name, "{warning}");
    }
    let in_place = file.needs_its_place().map_err(refused)?;
    let root = match entry.verified() {
        Some(hash) if !in_place => {
            let from = sealed(&file, entry, hash)?;
            load(&from, path, &entry.manifest)?
        }
        _ => load_opened(file, entry, in_place)?,
    };
    let plugin = &entry.manifest.plugin;
    let services = Services::of(&plugin.id)
        .map_err(|problem| PluginError::Services { plugin: plugin.name.clone(), problem })?;
    match &root {
        // The error is ignored: a plugin that is older than the services works without them.
        Root::Rust(root) => drop(root.attach(services.object())),
        Root::C(root) => root.attach(&services),
    }
    Ok(root)
}

/// Path of sealed memory that holds the verified bytes.
fn sealed(file: &PluginFile, entry: &Entry, hash: &str) -> Result<PathBuf, PluginError> {
    let path = &entry.path;
    let refused = |e| PluginError::Preflight { path: path.clone(), source: Box::new(e) };
    let changed = || PluginError::Changed { path: path.clone() };
    with_loaded(|loaded| {
        if let Some(before) = loaded.sealed.get(hash) {
            // Two files with the same bytes are the same library.
            return Ok(before.clone());
        }
        let copy = file.sealed(hash).map_err(refused)?.map_err(|_other_bytes| changed())?;
        if copy.manifest(&entry.policy).map_err(refused)? != entry.manifest {
            return Err(changed());
        }
        let from = copy.path();
        std::mem::forget(copy.into_fd());
        loaded.sealed.insert(hash.to_owned(), from.clone());
        Ok(from)
    })
}

/// Loads the open file, or the file at its path if it searches for libraries beside itself. Checks for changes afterwards.
fn load_opened(file: PluginFile, entry: &Entry, in_place: bool) -> Result<Root, PluginError> {
    let path = &entry.path;
    let refused = |e| PluginError::Preflight { path: path.clone(), source: Box::new(e) };
    let changed = || PluginError::Changed { path: path.clone() };
    let (key, stamp) = ((file.stamp.device, file.stamp.inode), file.stamp);
    let before = with_loaded(|loaded| loaded.places.get(&key).cloned());
    if before.as_ref().is_some_and(|before| before.stamp != stamp) {
        return Err(PluginError::Overwritten { path: path.clone() });
    }
    if let Some(verified) = entry.verified()
        && file.sha256().map_err(refused)? != verified
    {
        return Err(changed());
    }
    if file.manifest(&entry.policy).map_err(refused)? != entry.manifest {
        return Err(changed());
    }
    if let Some(locked) = &entry.libraries {
        let found = libraries::beside(path).map_err(PreflightError::Unreadable).map_err(refused)?;
        if found != *locked {
            return Err(changed());
        }
    }
    let from = match (before, in_place) {
        (Some(before), _) => before.from,
        // The system's loader would search the system's folders for a name without a slash.
        (None, true) => std::path::absolute(path).map_err(|e| refused(PreflightError::Unreadable(e)))?,
        (None, false) => file.name_of_open().map_err(refused)?,
    };
    let root = load(&from, path, &entry.manifest)?;
    let now = if in_place { std::fs::metadata(path) } else { file.metadata() };
    if Stamp::of(&now.map_err(|e| refused(PreflightError::Unreadable(e)))?) != stamp {
        return Err(changed());
    }
    with_loaded(|loaded| {
        loaded.places.entry(key).or_insert_with(|| {
            if !in_place {
                // The descriptor stays open: the loader knows the library by the path with its number.
                std::mem::forget(file);
            }
            LoadedFile { stamp, from }
        });
    });
    Ok(root)
}

/// The text of an error and of its sources. The system's loader says in a source what is missing.
fn why(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", why(source)),
        None => error.to_string(),
    }
}

/// Loads the library and compares its code with its note. Never unloads it. `path` is for messages.
fn load(from: &Path, path: &Path, noted: &Manifest) -> Result<Root, PluginError> {
    // NOW: an undefined symbol is an error here instead of a crash at the first call. LOCAL: two plugins may bring different builds
    // of one library.
    // SAFETY: the library's constructors run. Loading a plugin means to trust its code, and the preflight has excluded damaged
    // files.
    let library = unsafe { Library::open(Some(from), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|e| PluginError::Open { path: path.to_owned(), message: why(&e) })?;
    let symbol = &noted.build.symbol;
    // SAFETY: only the symbol's address is taken here. Its content is checked below before it is used.
    let header = unsafe { library.get::<*mut ()>(symbol.as_bytes()) };
    let header = header.ok().and_then(|s| NonNull::new(s.as_raw_ptr().cast::<()>()));
    // The library is never unloaded, because its objects and threads keep references into it.
    std::mem::forget(library);
    let header =
        header.ok_or_else(|| PluginError::NoHeader { path: path.to_owned(), symbol: symbol.clone() })?;
    let (root, described) = match noted.build.abi.as_deref() {
        Some(c_abi::ABI) => {
            let wrong = |problem| PluginError::CTable { path: path.to_owned(), problem };
            // SAFETY: the note says that it is a plugin in C, whose symbol the preflight checked, and the library stays.
            let root = unsafe { c::Root::from_symbol(header, noted) }.map_err(wrong)?;
            let described = root.describe().map_err(wrong)?;
            (Root::C(Box::new(root)), Manifest::parse(&described))
        }
        _ => {
            let host = Version::parse(host_plugin_api::VERSION).ok();
            let older = host.is_some_and(|host| noted.api.version < host);
            // SAFETY: the note of a plugin names the header that `export_plugin!` exports beside it, and the library stays.
            let root = unsafe { abi::Root::from_header(header, older) };
            let root = root.map_err(|source| PluginError::Header { path: path.to_owned(), source })?;
            (Root::Rust(root), Manifest::parse(root.describe()))
        }
    };
    if described.as_ref() != Ok(noted) {
        let named = |m: &Manifest| format!("{} {}", m.plugin.id, m.plugin.version);
        let described = described.map_or_else(|e| format!("something unreadable ({e})"), |m| named(&m));
        return Err(PluginError::Mismatch { path: path.to_owned(), described, noted: named(noted) });
    }
    // Only the roles that this host knows are compared. A plugin for a newer host may have others.
    let exported = root.roles();
    let declared = ["transfer", "tier", "allocator"].into_iter().filter(|role| noted.role(role).is_some());
    let declared: Vec<&str> = declared.collect();
    if exported != declared {
        return Err(PluginError::Roles { path: path.to_owned(), exported, declared });
    }
    Ok(root)
}

#[cfg(test)]
mod tests {
    use host_tests::plugin_files;

    use super::*;
    use crate::Policy;
    use crate::catalog::Demands;

    #[test]
    fn the_file_that_was_checked_is_loaded_and_not_the_one_that_took_its_place() {
        let folder = plugin_files::directory(&["null", "memory"]);
        let at = |name: &str| folder.path().join(name);
        let entry = Entry::accepted(&at("null.so"), Policy::default(), &Demands::default(), None).unwrap();
        let checked = PluginFile::open(&at("null.so"), &Policy::default()).unwrap();
        std::fs::rename(at("memory.so"), at("null.so")).unwrap();
        let root = load_opened(checked, &entry, false).unwrap();
        assert_eq!(root.roles(), ["transfer"]);
        // The path now leads to the other file, which does not fit the entry.
        let other = PluginFile::open(&at("null.so"), &Policy::default()).unwrap();
        let error = load_opened(other, &entry, false).err().unwrap();
        assert!(matches!(error, PluginError::Changed { .. }), "{error}");
    }
}
