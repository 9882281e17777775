//! Opens an instance of a plugin: checks its configuration, loads it, opens the instance and checks that it is usable.

use std::sync::Arc;

use host_plugin_api::{Opening, PoolAllocator, PoolOpening, StorageTier, TransferBackend, WAKES};
use rustix::fd::BorrowedFd;

use super::calls::{Call, Called, Note};
use super::catalog::Entry;
use super::error::PluginError;
use super::library::load_root;
use super::limits;
use super::loaded_allocator::LoadedAllocator;
use super::loaded_tier::LoadedTier;
use super::loaded_transfer::LoadedTransfer;
use super::root::Root;
use super::services::Services;

/// Opens an instance of a plugin's transfer role.
///
/// Before any code of the plugin runs, the file is read again, since it may have changed after the scan, and the configuration is
/// compared with the manifest.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn open_transfer(entry: &Entry, opening: &Opening) -> Result<Arc<dyn TransferBackend>, PluginError> {
    let _note = opening_of(entry);
    let opened = configured(entry, "transfer", &opening.config)?.open_transfer(opening);
    let opened = opened.map_err(|source| factory(entry, source))?;
    event_fd(entry, opened.event_fd())?;
    let loaded = LoadedTransfer::new(&entry.manifest.plugin.name, opened, &*services(entry)?);
    let loaded = loaded.map_err(|error| no_services(entry, error.to_string()))?;
    limits::of_transfer(&loaded).map_err(|problem| not_ready(entry, problem))?;
    Ok(Arc::new(loaded))
}

/// Opens an instance of a plugin's storage role, as [`open_transfer`] does.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn open_tier(entry: &Entry, opening: &Opening) -> Result<Arc<dyn StorageTier>, PluginError> {
    let _note = opening_of(entry);
    let opened = configured(entry, "tier", &opening.config)?.open_tier(opening);
    let opened = opened.map_err(|source| factory(entry, source))?;
    event_fd(entry, opened.event_fd())?;
    let loaded = LoadedTier::new(&entry.manifest.plugin.name, opened, &*services(entry)?);
    let loaded = loaded.map_err(|error| no_services(entry, error.to_string()))?;
    limits::of_tier(&loaded).map_err(|problem| not_ready(entry, problem))?;
    Ok(Arc::new(loaded))
}

/// Opens an instance of a plugin's allocator role, as [`open_transfer`] does.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn open_allocator(entry: &Entry, opening: &PoolOpening) -> Result<Arc<dyn PoolAllocator>, PluginError> {
    let _note = opening_of(entry);
    let opened = configured(entry, "allocator", &opening.config)?.open_allocator(opening);
    let opened = opened.map_err(|source| factory(entry, source))?;
    Ok(Arc::new(LoadedAllocator::new(&entry.manifest.plugin.name, opened)))
}

/// Notes that this thread opens a plugin. The note ends when the instance is open.
fn opening_of(entry: &Entry) -> Note {
    Called::plugin(&entry.manifest.plugin.name).enter(Call::Open)
}

/// Loads a plugin and has it check a configuration for one of its roles. It opens no instance.
///
/// # Errors
/// See [`PluginError`]: one variant per step.
pub fn check_config(entry: &Entry, role: &'static str, config: &str) -> Result<(), PluginError> {
    configured(entry, role, config).map(drop)
}

/// The loaded root, after everything that can be checked before an instance is opened.
fn configured(entry: &Entry, role: &'static str, config: &str) -> Result<Root, PluginError> {
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

fn factory(entry: &Entry, source: host_plugin_api::Error) -> PluginError {
    PluginError::Factory { plugin: entry.manifest.plugin.name.clone(), path: entry.path.clone(), source }
}

fn services(entry: &Entry) -> Result<Arc<Services>, PluginError> {
    Services::of(&entry.manifest.plugin.id).map_err(|problem| no_services(entry, problem))
}

fn no_services(entry: &Entry, problem: String) -> PluginError {
    PluginError::Services { plugin: entry.manifest.plugin.name.clone(), problem }
}

fn not_ready(entry: &Entry, problem: String) -> PluginError {
    PluginError::NotReady { plugin: entry.manifest.plugin.name.clone(), problem }
}

/// Checks that an instance's `event_fd` is -1, `WAKES` or an open descriptor. Waiting on another number would never end.
fn event_fd(entry: &Entry, fd: i32) -> Result<(), PluginError> {
    if fd == -1 || fd == WAKES {
        return Ok(());
    }
    let problem = if fd < 0 {
        format!("its event_fd answers {fd}, which means nothing: -1, {WAKES} or a descriptor does")
    } else {
        // SAFETY: only the descriptor's flags are read, which harms no descriptor.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        match rustix::io::fcntl_getfd(borrowed) {
            Ok(_flags) => return Ok(()),
            Err(error) => format!("its event_fd answers {fd}, which is no open descriptor ({error})"),
        }
    };
    Err(not_ready(entry, problem))
}
