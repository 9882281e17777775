//! Loads a plugin and opens an instance.

use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use host_plugin_api::abi::Root;
use host_plugin_api::{Opening, TransferBackend};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use semver::Version;

use super::catalog::Entry;
use super::error::PluginError;
use super::loaded_transfer::LoadedTransfer;
use super::manifest::Manifest;
use super::preflight::preflight;

/// Opens an instance of a plugin's transfer role.
///
/// The file is read again first, since it may have changed after the scan, and the configuration is compared with the
/// manifest; only then does code of the plugin run.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn open_transfer(entry: &Entry, opening: &Opening) -> Result<Arc<dyn TransferBackend>, PluginError> {
    let (path, plugin) = (&entry.path, &entry.manifest.plugin.name);
    if entry.manifest.role("transfer").is_none() {
        let roles = entry.manifest.roles.iter().map(|r| r.kind.clone()).collect();
        return Err(PluginError::NoRole { plugin: plugin.clone(), role: "transfer", roles });
    }
    let config = |problem| PluginError::Config { plugin: plugin.clone(), problem };
    entry.manifest.check_config(&opening.config).map_err(config)?;
    let again = preflight(path);
    let again = again.map_err(|e| PluginError::Preflight { path: path.clone(), source: Box::new(e) })?;
    if again != entry.manifest {
        return Err(PluginError::Changed { path: path.clone() });
    }
    let root = load(path, &entry.manifest)?;
    let opened = root.open_transfer(opening);
    let factory = |source| PluginError::Factory { plugin: plugin.clone(), path: path.clone(), source };
    Ok(Arc::new(LoadedTransfer::new(opened.map_err(factory)?)))
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
    Ok(root)
}
