//! Compares what a configuration needs with what plugins declare.
//!
//! Everything that a feature needs of a plugin is a row of [`RULES`]; there is no other place that decides it, and none
//! that knows a plugin by name.

use std::fmt;

use host_plugin_api::capability as can;

use super::catalog::Catalog;
use super::manifest::Manifest;

/// Something a configuration turns on that needs abilities of the transfer plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Feature {
    /// Prefill and decode on separate workers.
    PdTransfer,
    /// Pages stay in a cache after their request: radix cache, hierarchical cache, retraction.
    PagesOutliveRequests,
    /// KV pools in device memory.
    DeviceMemory,
    /// Workers on other machines.
    RemoteWorkers,
    /// Workers that are started again when they die.
    SupervisedRestart,
}

/// A row of the table: the feature needs the capability, because.
pub struct Rule {
    /// Who needs it.
    pub feature: Feature,
    /// What, of every loaded transfer plugin.
    pub capability: &'static str,
    /// Why.
    pub reason: &'static str,
}

/// The table.
pub const RULES: &[Rule] = &[
    Rule {
        feature: Feature::PdTransfer,
        capability: can::PAGE_WRITES,
        reason: "prefill writes pages into the decode worker's pool",
    },
    Rule {
        feature: Feature::PdTransfer,
        capability: can::ARRIVAL_NOTIFICATION,
        reason: "decode must not read a page before its data is there",
    },
    Rule {
        feature: Feature::PagesOutliveRequests,
        capability: can::SETTLED,
        reason: "a page is reused only when no write to it can still land",
    },
    Rule { feature: Feature::DeviceMemory, capability: can::VRAM, reason: "the pools lie in device memory" },
    Rule {
        feature: Feature::RemoteWorkers,
        capability: can::MULTI_HOST,
        reason: "a worker's address is on another machine",
    },
    Rule {
        feature: Feature::SupervisedRestart,
        capability: can::PEER_RESTART,
        reason: "a worker that is started again must be reachable again",
    },
];

/// A need that a loaded plugin does not meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Who needs it.
    pub feature: Feature,
    /// What.
    pub capability: &'static str,
    /// Why.
    pub reason: &'static str,
    /// The plugin that lacks it, with what it has; `None` when no transfer plugin is loaded at all.
    pub loaded: Option<(String, Vec<String>)>,
    /// Installed plugins that would do for all the features asked for.
    pub would_do: Vec<String>,
    /// Installed plugins that have this capability but lack others that are needed.
    pub have_it: Vec<String>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} needs {}, because {}: ", self.feature, self.capability, self.reason)?;
        match &self.loaded {
            Some((name, has)) => {
                let has = if has.is_empty() { "nothing".to_owned() } else { has.join(", ") };
                write!(f, "plugin {name:?} declares {has}")?;
            }
            None => f.write_str("no transfer plugin is loaded")?,
        }
        match (self.would_do.is_empty(), self.have_it.is_empty()) {
            (false, _) => write!(f, "; use instead: {}", self.would_do.join(", ")),
            (true, false) => {
                write!(f, "; {} have it, but lack others that are needed", self.have_it.join(", "))
            }
            (true, true) => f.write_str("; no installed plugin has it"),
        }
    }
}

/// Checks all loaded transfer plugins against all features.
///
/// # Errors
/// Every violation, not only the first.
pub fn check(features: &[Feature], loaded: &[&Manifest], installed: &Catalog) -> Result<(), Vec<Violation>> {
    let needed: Vec<&Rule> = RULES.iter().filter(|rule| features.contains(&rule.feature)).collect();
    let transfer: Vec<&Manifest> = loaded.iter().copied().filter(|m| m.role("transfer").is_some()).collect();
    let candidates = || installed.entries().iter().map(|e| &e.manifest);
    let name = |m: &Manifest| m.plugin.name.clone();
    let mut violations = Vec::new();
    for rule in &needed {
        let lacking = transfer.iter().copied().filter(|m| !has(m, rule.capability));
        let lacking: Vec<Option<&Manifest>> =
            if transfer.is_empty() { vec![None] } else { lacking.map(Some).collect() };
        for plugin in lacking {
            let would_do = candidates().filter(|m| needed.iter().all(|rule| has(m, rule.capability)));
            let have_it = candidates().filter(|m| has(m, rule.capability));
            violations.push(Violation {
                feature: rule.feature,
                capability: rule.capability,
                reason: rule.reason,
                loaded: plugin.map(|m| (name(m), capabilities(m))),
                would_do: would_do.map(name).collect(),
                have_it: have_it.map(name).collect(),
            });
        }
    }
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

/// Whether the plugin's transfer role declares it; what its other roles can do does not help a transfer.
fn has(manifest: &Manifest, capability: &str) -> bool {
    manifest.role("transfer").is_some_and(|role| role.capabilities.iter().any(|c| c == capability))
}

fn capabilities(manifest: &Manifest) -> Vec<String> {
    manifest.role("transfer").map(|role| role.capabilities.clone()).unwrap_or_default()
}
