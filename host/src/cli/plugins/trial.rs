//! Opens plugins like a worker with these settings, checks whether they fit its model, and shuts them down again.

use std::sync::Arc;

use host_core::Instance;
use host_core::layout::KvShape;
use host_plugin_api::{StorageTier, TransferBackend};
use host_plugins::{Catalog, Entry};
use host_wire::random::random_u64;
use host_worker::{OffloadTiers, fit};
use toml::{Table, Value};

use super::{OpenedTransfer, READ_ONLY, open_tier, open_transfer};
use crate::cli::settings::{RoleName, Settings};
use crate::cli::{Refused, launch};

/// Deadline of a shutdown, in milliseconds.
const SHUTDOWN_MS: u64 = 5000;

/// Opens a worker's transfer plugin and storage tiers, offers them memory like a worker, and compares their limits with the model's
/// sizes. Reads no weights and starts no worker.
///
/// A tier that has the setting `read_only` is opened with it. A plugin whose companion is to be started is left out, because its
/// server does not run yet.
///
/// # Errors
/// With a sentence for each plugin that does not open or does not fit.
pub fn try_out(settings: &Settings) -> Result<(), Refused> {
    let plan = launch::plan(settings)?;
    let shape = plan.layouts.first().map(|layout| layout.shape);
    let shape = shape.ok_or_else(|| Refused("a worker has at least one rank".to_owned()))?;
    let random =
        random_u64().map_err(|error| Refused(format!("no random name to open plugins by: {error}")))?;
    let instance = Instance(random);
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let waits = |name: &str| catalog.find(name).is_ok_and(|entry| waits_for_a_companion(settings, entry));
    let mut wrong = Vec::new();
    if settings.role != Some(RoleName::Aggregated) && !settings.movers().iter().any(|name| waits(name)) {
        wrong.extend(transfer(settings, instance).err().map(|error| format!("{error:#}")));
    }
    let names: Vec<&String> = stores(settings).iter().filter(|name| !waits(name)).collect();
    wrong.extend(tiers(settings, &catalog, &names, instance, &shape));
    if wrong.is_empty() { Ok(()) } else { Err(Refused(wrong.join("\n"))) }
}

/// The storage tiers that a worker with these settings opens.
fn stores(settings: &Settings) -> &[String] {
    let (prefill, decode) = (settings.prefill_radix_cache(), settings.decode_radix_cache());
    let cached = match settings.role {
        None => prefill || decode,
        Some(RoleName::Prefill | RoleName::Aggregated) => prefill,
        Some(RoleName::Decode) => decode,
        Some(RoleName::Router) => false,
    };
    if cached && settings.hierarchical_cache() { settings.stores() } else { &[] }
}

fn waits_for_a_companion(settings: &Settings, entry: &Entry) -> bool {
    let started = settings.start_companion.as_deref().unwrap_or_default();
    entry.manifest.companions.iter().any(|companion| started.contains(&companion.name))
}

fn transfer(settings: &Settings, instance: Instance) -> anyhow::Result<()> {
    let OpenedTransfer { name, backends, .. } = open_transfer(settings, instance, 1)?;
    for backend in backends {
        let tried = fit::try_out_transfer(&name, &*backend);
        if TransferBackend::shutdown(&*backend, SHUTDOWN_MS).is_err() {
            // A drop would shut the instance down a second time.
            std::mem::forget(backend);
        }
        tried?;
    }
    Ok(())
}

/// The problems of these tiers.
fn tiers(
    settings: &Settings,
    catalog: &Catalog,
    names: &[&String],
    instance: Instance,
    shape: &KvShape,
) -> Vec<String> {
    let (mut opened, mut wrong) = (Vec::new(), Vec::new());
    for name in names {
        // If a tier does not open read-only because it does not exist yet, it is opened and made like a worker does.
        let looked =
            reading(settings, catalog, name).and_then(|reading| open_tier(&reading, name, instance).ok());
        match looked.map_or_else(|| open_tier(settings, name, instance), Ok) {
            Ok(tier) => opened.push(((*name).clone(), tier)),
            Err(error) => wrong.push(format!("{error:#}")),
        }
    }
    let tiers = OffloadTiers { tiers: opened };
    wrong.extend(tiers.try_out(shape).err().map(|error| format!("{error:#}")));
    for (_name, tier) in tiers.tiers {
        let tier: Arc<dyn StorageTier> = tier;
        if tier.shutdown(SHUTDOWN_MS).is_err() {
            std::mem::forget(tier);
        }
    }
    wrong
}

/// The settings with which this tier changes nothing. `None` if it has no such setting, or the operator set it.
fn reading(settings: &Settings, catalog: &Catalog, name: &str) -> Option<Settings> {
    let key = catalog.find(name).ok()?.manifest.config.get(READ_ONLY)?;
    let mut settings = settings.clone();
    let table = settings.plugin.entry(name.to_owned()).or_insert_with(|| Value::Table(Table::new()));
    let table =
        table.as_table_mut().filter(|table| key.kind == "boolean" && !table.contains_key(READ_ONLY))?;
    table.insert(READ_ONLY.to_owned(), Value::Boolean(true));
    Some(settings)
}
