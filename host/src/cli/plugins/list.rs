//! `host plugins list`.

use std::path::PathBuf;

use host_plugins::{Catalog, Entry, Policy};
use serde_json::{Value, json};

use crate::cli::output::{self, say};

/// Prints the plugins in the directories. Runs none of their code.
pub fn run(policy: Policy, directories: &[PathBuf], as_json: bool) -> anyhow::Result<()> {
    let catalog = Catalog::scan_with(policy, directories);
    let shadowed = catalog.shadowed();
    if as_json {
        let of = |entry: &Entry, state: &str| {
            json!({
                "state": state,
                "path": entry.path,
                "sha256_pinned": entry.pinned,
                "signed_by": entry.signed.as_ref().map(|signed| &signed.publisher),
                "warnings": entry.warnings,
                "manifest": entry.manifest,
            })
        };
        let usable = catalog.entries().iter().map(|e| of(e, "usable"));
        let shadowed = shadowed.iter().map(|e| of(e, "shadowed"));
        let unusable = catalog.unusable().iter().map(
            |u| json!({"state": "unusable", "path": u.path, "reason": u.reason.reason(), "text": u.reason.to_string()}),
        );
        let all: Vec<Value> = usable.chain(shadowed).chain(unusable).collect();
        let unsearched: Vec<Value> =
            catalog.unsearched().map(|(path, why)| json!({"path": path, "text": why})).collect();
        let all = json!({"directories": directories, "unsearched": unsearched, "plugins": all});
        output::json(&all)?;
        return Ok(());
    }
    let line = |entry: &Entry, state: &str| -> anyhow::Result<()> {
        let m = &entry.manifest;
        let roles: Vec<_> = m.roles.iter().map(|role| role.kind.as_str()).collect();
        say!(
            "{:<16} {:<8} {:<20} api {:<7} {state:<9} {}{}",
            m.plugin.name,
            m.plugin.version,
            roles.join(","),
            m.api.version,
            entry.path.display(),
            entry
                .signed
                .as_ref()
                .map(|signed| format!(", signed by {}", signed.publisher))
                .unwrap_or_default()
        );
        Ok(())
    };
    for entry in catalog.entries() {
        line(entry, if entry.pinned.is_some() { "locked" } else { "usable" })?;
    }
    for entry in shadowed {
        line(entry, "shadowed")?;
    }
    for file in catalog.unusable() {
        say!("{} {}", file.path.display(), file.reason);
    }
    for (directory, why) in catalog.unsearched() {
        say!("{} is left out: {why}", directory.display());
    }
    if catalog.entries().is_empty() {
        let searched: Vec<_> = directories.iter().map(|d| d.display().to_string()).collect();
        say!("no usable plugin in {}", searched.join(", "));
    }
    Ok(())
}
