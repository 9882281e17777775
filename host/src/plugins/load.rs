//! Loads a plugin and opens an instance.

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use host_plugin_api::abi::Root;
use host_plugin_api::{Opening, PoolAllocator, PoolOpening, StorageTier, TransferBackend};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use semver::Version;

use super::catalog::Entry;
use super::error::{PluginError, PreflightError};
use super::loaded_allocator::LoadedAllocator;
use super::loaded_tier::LoadedTier;
use super::loaded_transfer::LoadedTransfer;
use super::lock::sha256;
use super::manifest::Manifest;
use super::preflight::preflight;
use super::services::Services;

/// Opens an instance of a plugin's transfer role.
///
/// The file is read again first, since it may have changed after the scan, and the configuration is compared with the
/// manifest; only then does code of the plugin run.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn open_transfer(entry: &Entry, opening: &Opening) -> Result<Arc<dyn TransferBackend>, PluginError> {
    let opened = ready(entry, "transfer", &opening.config)?.open_transfer(opening);
    let opened = opened.map_err(|source| factory(entry, source))?;
    let loaded = LoadedTransfer::new(opened, &*services(entry)?);
    Ok(Arc::new(loaded.map_err(|error| no_services(entry, error.to_string()))?))
}

/// Opens an instance of a plugin's storage role, as [`open_transfer`] does.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn open_tier(entry: &Entry, opening: &Opening) -> Result<Arc<dyn StorageTier>, PluginError> {
    let opened = ready(entry, "tier", &opening.config)?.open_tier(opening);
    let opened = opened.map_err(|source| factory(entry, source))?;
    let loaded = LoadedTier::new(opened, &*services(entry)?);
    Ok(Arc::new(loaded.map_err(|error| no_services(entry, error.to_string()))?))
}

/// Opens an instance of a plugin's allocator role, as [`open_transfer`] does.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn open_allocator(entry: &Entry, opening: &PoolOpening) -> Result<Arc<dyn PoolAllocator>, PluginError> {
    let opened = ready(entry, "allocator", &opening.config)?.open_allocator(opening);
    Ok(Arc::new(LoadedAllocator::new(opened.map_err(|source| factory(entry, source))?)))
}

fn factory(entry: &Entry, source: host_plugin_api::Error) -> PluginError {
    PluginError::Factory { plugin: entry.manifest.plugin.name.clone(), path: entry.path.clone(), source }
}

fn services(entry: &Entry) -> Result<Arc<Services>, PluginError> {
    Services::of(&entry.manifest.plugin.id).map_err(|problem| no_services(entry, problem))
}

fn no_services(entry: &Entry, problem: String) -> PluginError {
    PluginError::Services { plugin: entry.manifest.plugin.name.clone(), problem }
}

/// The loaded root, after everything that can be checked before an instance is opened.
fn ready(entry: &Entry, role: &'static str, config: &str) -> Result<Root, PluginError> {
    let plugin = &entry.manifest.plugin.name;
    if entry.manifest.role(role).is_none() {
        let roles = entry.manifest.roles.iter().map(|r| r.kind.clone()).collect();
        return Err(PluginError::NoRole { plugin: plugin.clone(), role, roles });
    }
    let wrong = |problem| PluginError::Config { plugin: plugin.clone(), problem };
    entry.manifest.check_config(config).map_err(wrong)?;
    let root = load_root(entry)?;
    let refused = |source| PluginError::ConfigRefused { plugin: plugin.clone(), source };
    root.check_config(role, config).map_err(refused)?;
    Ok(root)
}

/// Loads a plugin, checks that it is what its note says, and offers it the host's services; opens nothing.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn load_root(entry: &Entry) -> Result<Root, PluginError> {
    let path = &entry.path;
    let refused = |e| PluginError::Preflight { path: path.clone(), source: Box::new(e) };
    let again = preflight(path).map_err(refused)?;
    if again != entry.manifest {
        return Err(PluginError::Changed { path: path.clone() });
    }
    if let Some(pinned) = &entry.pinned {
        let found = sha256(path).map_err(|e| refused(PreflightError::Unreadable(e)))?;
        if found != *pinned {
            return Err(PluginError::Changed { path: path.clone() });
        }
    }
    let root = load(path, &entry.manifest)?;
    // A plugin that is older than the services works without them.
    let _attached = root.attach(services(entry)?.object());
    Ok(root)
}

/// Loads the library, for good, and checks that its code agrees with its note.
fn load(path: &Path, noted: &Manifest) -> Result<Root, PluginError> {
    // NOW: an undefined symbol is an error here instead of a crash at the first call. LOCAL: two plugins may bring
    // different builds of one library.
    // SAFETY: the library's constructors run. That is what loading a plugin means: it is trusted code in our process,
    // and the preflight has excluded files that are damaged.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|e| PluginError::Open { path: path.to_owned(), message: e.to_string() })?;
    let symbol = &noted.build.symbol;
    // SAFETY: only the symbol's address is taken; it is used as what it is below, after it was checked.
    let header = unsafe { library.get::<*mut ()>(symbol.as_bytes()) };
    let header = header.ok().and_then(|s| NonNull::new(s.as_raw_ptr().cast::<()>()));
    // Never unloaded: references into it live on in what it returns and in its threads.
    std::mem::forget(library);
    let header =
        header.ok_or_else(|| PluginError::NoHeader { path: path.to_owned(), symbol: symbol.clone() })?;
    let host = Version::parse(host_plugin_api::VERSION).ok();
    let older = host.is_some_and(|host| noted.api.version < host);
    // SAFETY: the note of a plugin names the header that `export_plugin!` exports beside it, and the library stays.
    let root = unsafe { Root::from_header(header, older) };
    let root = root.map_err(|source| PluginError::Header { path: path.to_owned(), source })?;
    let described = Manifest::parse(root.describe());
    if described.as_ref() != Ok(noted) {
        let named = |m: &Manifest| format!("{} {}", m.plugin.id, m.plugin.version);
        let described = described.map_or_else(|e| format!("something unreadable ({e})"), |m| named(&m));
        return Err(PluginError::Mismatch { path: path.to_owned(), described, noted: named(noted) });
    }
    // Roles that a newer host knows are not this host's to check.
    let exported = root.roles();
    let declared = ["transfer", "tier", "allocator"].into_iter().filter(|role| noted.role(role).is_some());
    let declared: Vec<&str> = declared.collect();
    if exported.iter().any(|role| !declared.contains(role)) {
        return Err(PluginError::Roles { path: path.to_owned(), exported, declared });
    }
    Ok(root)
}
