//! Logs a short summary of what a process starts.

use super::launch::{self, Plan};
use super::plugins::Requested;
use super::settings::{ExecutorName, RoleName, Settings};
use host_plugins::{Catalog, Entry};

/// Logs what these settings start: the model, its memory, the plugin of each role, and the `notes` on features that are on.
///
/// Called after all checks.
pub fn log(settings: &Settings, notes: &[String]) {
    let requested = Requested::of(settings);
    let plan = launch::plan(settings).ok();
    let model = plan.as_ref().map(|plan| model(settings, plan));
    for line in model.into_iter().chain(plugins(settings, &requested)) {
        tracing::info!("{line}");
    }
    for note in notes {
        tracing::info!("{note}");
    }
    if let Some(warning) = plan.and_then(|plan| short_pool(settings, &plan)) {
        tracing::warn!("{warning}");
    }
}

fn model(settings: &Settings, plan: &Plan) -> String {
    let from = match (settings.executor(), &settings.model) {
        (ExecutorName::Cpu, Some(path)) => path.display().to_string(),
        (ExecutorName::Cuda, Some(path)) => format!("{} on GPU {}", path.display(), settings.cuda_device()),
        _ => "the synthetic executor, which computes no model".to_owned(),
    };
    let pool: u64 = plan.layouts.iter().map(|layout| layout.bytes() as u64).sum();
    format!(
        "model {} ({from}), context {} tokens; KV pool of each worker: {}, {} MiB",
        settings.model_name(),
        plan.shape.max_positions,
        match plan.shape.sliding {
            // Windows take pages of the same pool, so the number of requests that fit depends on their lengths.
            Some(_) =>
                format!("one request of {} tokens, or several that hold no more pages", plan.pool_tokens),
            None => format!("{} tokens", plan.pool_tokens),
        },
        pool >> 20
    )
}

/// A line for each role that a plugin plays, and one for installed plugins that are not used.
fn plugins(settings: &Settings, requested: &Requested) -> Vec<String> {
    let said = |entry: &Entry, role: &str| {
        let plugin = &entry.manifest.plugin;
        format!("{role}: {} {} ({})", plugin.name, plugin.version, entry.path.display())
    };
    let mut lines = Vec::new();
    for name in &requested.names {
        let Ok(entry) = requested.catalog.find(name) else { continue };
        let played = requested.played(settings, &entry.manifest);
        for (kind, role) in
            [("transfer", "transfer backend"), ("tier", "storage tier"), ("allocator", "pool allocator")]
        {
            if kind == "transfer" && settings.role == Some(RoleName::Aggregated) {
                // An aggregated worker sends no pages.
                continue;
            }
            lines.extend(played.role(kind).map(|_| said(entry, role)));
        }
    }
    // When no plugin is requested, the directories were not scanned yet.
    let installed =
        (!requested.any).then(|| Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs()));
    let installed = installed.as_ref().unwrap_or(&requested.catalog);
    let idle = installed.entries().iter().map(|entry| entry.manifest.plugin.name.as_str());
    let idle: Vec<&str> = idle.filter(|name| !requested.names.iter().any(|used| used == name)).collect();
    if !idle.is_empty() {
        lines.push(format!("available and not used: {}; --plugins puts them to work", idle.join(", ")));
    }
    lines
}

/// A warning if the pool is too small for the model's whole context.
fn short_pool(settings: &Settings, plan: &Plan) -> Option<String> {
    if settings.max_model_len.is_some() || u64::from(plan.max_tokens) >= plan.shape.max_positions as u64 {
        return None;
    }
    Some(format!(
        "prompt and answer are cut at {} tokens, because the KV pool holds no more; the model's context is {}: raise {}, \
         or say --max-model-len",
        plan.max_tokens,
        plan.shape.max_positions,
        if settings.pool_pages.is_some() { "--pool-pages" } else { "--kv-memory" }
    ))
}
