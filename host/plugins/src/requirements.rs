//! Compares what a configuration needs with what plugins declare.
//!
//! Each row of [`RULES`] is a need of one feature: a capability of a plugin, or another feature. Needs are decided nowhere else,
//! and no code knows a plugin by name.

mod advice;
mod table;

use std::fmt;

pub use table::RULES;

use super::catalog::Catalog;
use super::manifest::Manifest;

/// A feature that a configuration can turn on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Feature {
    /// Prefill and decode on separate workers.
    PdTransfer,
    /// Prefill and decode in one worker, without a transfer.
    Aggregated,
    /// Decode workers keep prefixes and receive only what they lack.
    DecodeRadixCache,
    /// Prefill or aggregated workers keep prefixes and compute only the tokens that they lack.
    PrefillRadixCache,
    /// Prefill workers send pages of prefixes that they keep.
    CachedPagesSent,
    /// The operator named an eviction policy for a radix cache.
    EvictionPolicy,
    /// Pages are copied to host memory.
    HierarchicalCache,
    /// Pages move on to a storage tier.
    StorageCache,
    /// A model with sliding-window layers that have pools of their own.
    SlidingWindow,
    /// A model with layers that keep a state of fixed size.
    LayerState,
    /// The layers with a window have a fixed part of the pool.
    WindowRatio,
    /// Guesses at the next tokens of answers.
    Speculation,
    /// No prefix cache at all.
    NoPrefixCache,
    /// Workers on other machines.
    RemoteWorkers,
    /// Workers that are started again when they die.
    SupervisedRestart,
    /// KV pools in a GPU's memory, without staging memory.
    UnstagedGpuPools,
}

/// What a feature needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// A capability that all loaded plugins of a role must have. At least one such plugin must be loaded.
    Capability {
        /// The role's kind.
        role: &'static str,
        /// See [`host_plugin_api::capability`].
        name: &'static str,
    },
    /// At most one loaded plugin of a role.
    OnlyOne {
        /// The role's kind.
        role: &'static str,
    },
    /// Another feature that must be on, too.
    Also(Feature),
    /// Features of which one must be on, too.
    AnyOf(&'static [Feature]),
    /// Another feature that must be off.
    Without(Feature),
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Need::Capability { name, .. } => f.write_str(name),
            Need::OnlyOne { role } => write!(f, "only one {role} plugin"),
            Need::Also(feature) => write!(f, "{feature:?}"),
            Need::AnyOf(features) => {
                let names: Vec<_> = features.iter().map(|feature| format!("{feature:?}")).collect();
                f.write_str(&names.join(" or "))
            }
            Need::Without(feature) => write!(f, "the absence of {feature:?}"),
        }
    }
}

/// A row of the table of rules: the feature, what it needs and the reason.
pub struct Rule {
    /// The rule's name in `docs/plugins/rules.md` and in messages.
    pub name: &'static str,
    /// The feature that has the need.
    pub feature: Feature,
    /// What the feature needs.
    pub need: Need,
    /// The reason.
    pub reason: &'static str,
}

/// A need that is not met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The rule's name.
    pub rule: &'static str,
    /// The feature that has the need.
    pub feature: Feature,
    /// What the feature needs.
    pub need: Need,
    /// The reason.
    pub reason: &'static str,
    /// The plugin that lacks the capability, with the capabilities that it has. `None` if no plugin of the role is loaded.
    pub loaded: Option<(String, Vec<String>)>,
    /// Installed plugins that meet all needs of the requested features. For [`Need::OnlyOne`], the loaded plugins of the role.
    pub would_do: Vec<String>,
    /// Installed plugins that have this capability. They may lack others that are needed.
    pub have_it: Vec<String>,
}

impl Violation {
    /// Whether no plugin of the role is loaded, as opposed to a plugin that lacks a capability.
    #[must_use]
    pub fn is_for_want_of_a_plugin(&self) -> bool {
        self.loaded.is_none() && matches!(self.need, Need::Capability { .. })
    }

    /// The two features that exclude each other, if this is the violation.
    fn excludes(&self) -> Vec<Feature> {
        match self.need {
            Need::Without(other) => vec![self.feature, other],
            _ => Vec::new(),
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} needs {}, because {}: ", self.feature, self.need, self.reason)?;
        let role = match self.need {
            Need::Capability { role, .. } => role,
            Need::Also(_) | Need::AnyOf(_) | Need::Without(_) => {
                return f.write_str(&advice::advice(self.feature, self.need));
            }
            Need::OnlyOne { .. } => {
                return write!(f, "{} are named: choose one with --transfer NAME", self.would_do.join(", "));
            }
        };
        match &self.loaded {
            Some((name, has)) => {
                let has = if has.is_empty() { "nothing".to_owned() } else { has.join(", ") };
                write!(f, "plugin {name:?} declares {has}")?;
            }
            None => write!(f, "no {role} plugin is loaded")?,
        }
        // Allocators have no list of names: the operator chooses one with a flag.
        let flag = if role == "allocator" { "--allocator " } else { "" };
        match (self.would_do.is_empty(), self.have_it.is_empty()) {
            (false, _) => write!(f, "; use instead: {flag}{}", self.would_do.join(", ")),
            (true, false) => {
                write!(f, "; {} have it, but lack others that are needed", self.have_it.join(", "))
            }
            (true, true) if role == "allocator" => f.write_str(
                "; no installed plugin has it: put one that does into a directory of --plugins-dir",
            ),
            (true, true) => f.write_str("; no installed plugin has it"),
        }?;
        advice::off(self.feature).map_or(Ok(()), |off| write!(f, "; or {off}"))
    }
}

/// Checks all loaded plugins against all features, and the features against each other.
///
/// # Errors
/// Every violation, not only the first.
pub fn check(features: &[Feature], loaded: &[&Manifest], installed: &Catalog) -> Result<(), Vec<Violation>> {
    let needed: Vec<&Rule> = RULES.iter().filter(|rule| features.contains(&rule.feature)).collect();
    let mut violations = Vec::new();
    for rule in &needed {
        let plain = Violation {
            rule: rule.name,
            feature: rule.feature,
            need: rule.need,
            reason: rule.reason,
            loaded: None,
            would_do: Vec::new(),
            have_it: Vec::new(),
        };
        match rule.need {
            Need::Also(other) if !features.contains(&other) => violations.push(plain),
            Need::Without(other) if features.contains(&other) => violations.push(plain),
            Need::AnyOf(others) if !others.iter().any(|other| features.contains(other)) => {
                violations.push(plain)
            }
            Need::OnlyOne { role } => {
                let of_role = loaded.iter().filter(|m| m.role(role).is_some());
                let names: Vec<String> = of_role.map(|m| m.plugin.name.clone()).collect();
                if names.len() > 1 {
                    violations.push(Violation { would_do: names, ..plain });
                }
            }
            Need::Also(_) | Need::AnyOf(_) | Need::Without(_) => {}
            Need::Capability { role, name } => {
                let of_role: Vec<&Manifest> =
                    loaded.iter().copied().filter(|m| m.role(role).is_some()).collect();
                let lacking = of_role.iter().copied().filter(|m| !m.declares(role, name));
                let lacking: Vec<Option<&Manifest>> =
                    if of_role.is_empty() { vec![None] } else { lacking.map(Some).collect() };
                for plugin in lacking {
                    let loaded = plugin.map(|m| (m.plugin.name.clone(), capabilities(m, role)));
                    let (would_do, have_it) = alternatives(installed, &needed, role, name);
                    violations.push(Violation { loaded, would_do, have_it, ..plain.clone() });
                }
            }
        }
    }
    // Of two features that exclude each other the operator must turn one off first. Their needs of plugins are left out until then.
    let excluded: Vec<Feature> = violations.iter().flat_map(Violation::excludes).collect();
    violations.retain(|violation| {
        !(matches!(violation.need, Need::Capability { .. }) && excluded.contains(&violation.feature))
    });
    if violations.is_empty() { Ok(()) } else { Err(violations) }
}

/// Returns the names of the installed plugins that meet all needs of the role, and the names of those that have this capability.
fn alternatives(
    installed: &Catalog,
    needed: &[&Rule],
    wanted: &str,
    capability: &str,
) -> (Vec<String>, Vec<String>) {
    let all = |manifest: &&Manifest| {
        needed.iter().all(|rule| match rule.need {
            Need::Capability { role, name } if role == wanted => manifest.declares(role, name),
            _ => true,
        })
    };
    let candidates = || installed.entries().iter().map(|e| &e.manifest);
    let name = |m: &Manifest| m.plugin.name.clone();
    let of_role = |m: &&Manifest| m.role(wanted).is_some();
    let would_do = candidates().filter(of_role).filter(all).map(name).collect();
    let have_it = candidates().filter(|m| m.declares(wanted, capability)).map(name).collect();
    (would_do, have_it)
}

fn capabilities(manifest: &Manifest, role: &str) -> Vec<String> {
    manifest.role(role).map(|role| role.capabilities.clone()).unwrap_or_default()
}
