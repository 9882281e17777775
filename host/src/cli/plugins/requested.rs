//! The plugins that the settings request, and the roles that each is requested for.

use super::features;
use crate::cli::settings::Settings;
use host_plugins::requirements::Feature;
use host_plugins::{Catalog, Manifest};

/// Requests of the settings to plugins, and the plugins that are installed.
pub struct Requested {
    /// The features that the configuration turns on.
    pub features: Vec<Feature>,
    /// The installed plugins. Empty if no plugin is requested.
    pub catalog: Catalog,
    /// Plugins that are opened, by name, each once.
    pub names: Vec<String>,
    /// The plugin that allocates pages, if there is one.
    allocator: Option<String>,
    /// Whether this process opens a plugin, or the settings name one.
    pub any: bool,
}

impl Requested {
    /// Reads the settings, the model as far as features depend on it, and the directories with plugins.
    pub fn of(settings: &Settings) -> Self {
        let features = features::of(settings);
        // A process that opens no plugin scans no directories. Plugins that the settings name are searched in any case.
        let any = opens(&features) || names(settings);
        let (directories, mut names) = match any {
            true => (settings.plugins_dirs(), settings.plugins()),
            false => (Vec::new(), Vec::new()),
        };
        let catalog = Catalog::scan_with(settings.plugin_policy(), directories);
        let allocator = allocator(settings, &features, &catalog);
        names.extend(allocator.clone().filter(|name| !names.contains(name)));
        Self { features, catalog, names, allocator, any }
    }

    /// Whether this plugin hands out pages.
    pub fn allocates(&self, plugin: &Manifest) -> bool {
        self.allocator.as_ref() == Some(&plugin.plugin.name)
    }

    /// The manifest with only the roles for which the plugin will be opened.
    pub fn played(&self, settings: &Settings, plugin: &Manifest) -> Manifest {
        roles_played(settings, plugin, self.allocates(plugin))
    }
}

/// Whether a feature needs a plugin.
fn opens(features: &[Feature]) -> bool {
    [Feature::PdTransfer, Feature::SlidingWindow, Feature::LayerState]
        .iter()
        .any(|feature| features.contains(feature))
}

/// Whether the settings name a plugin.
fn names(settings: &Settings) -> bool {
    !settings.stores().is_empty() || settings.allocator.is_some() || settings.plugins.is_some()
}

/// The plugin that allocates pages, if there is one.
///
/// It is the named plugin. For a model with windows it is by default `swa`, if that is installed. If such a model has no allocator,
/// the compatibility table refuses the configuration and names plugins that would do.
fn allocator(settings: &Settings, features: &[Feature], catalog: &Catalog) -> Option<String> {
    let standard = || {
        let name = settings.window_allocator();
        let slides = features.contains(&Feature::SlidingWindow);
        (slides && catalog.find(&name).is_ok()).then_some(name)
    };
    settings.allocator.clone().or_else(standard)
}

/// The manifest with only the roles for which the plugin will be opened.
///
/// A transfer plugin that could also store or allocate does not do so if another plugin is named for that. A plugin that is named
/// only for storage or allocation transfers nothing.
fn roles_played(settings: &Settings, manifest: &Manifest, allocates: bool) -> Manifest {
    let mut played = manifest.clone();
    let name = &manifest.plugin.name;
    let stores = settings.stores().contains(name);
    let moves = !(stores || allocates) || settings.movers().contains(name);
    played.roles.retain(|role| match role.kind.as_str() {
        "tier" => stores,
        "allocator" => allocates,
        "transfer" => moves,
        _ => true,
    });
    played
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plugin_plays_the_roles_that_it_is_named_for() {
        let text = "manifest_version = 1\n[plugin]\nid = \"x.both\"\nname = \"both\"\nversion = \"1.0.0\"\n\
                    [api]\nversion = \"1.0.0\"\n[[role]]\nkind = \"transfer\"\n[[role]]\nkind = \"tier\"\n\
                    [build]\npanic = \"unwind\"\ntarget = \"t\"\nrustc = \"r\"\nsymbol = \"s\"\n";
        let manifest = Manifest::parse(text).unwrap();
        for (plugins, storage, played) in [
            (Some("both"), None, &["transfer"][..]),
            (Some("both"), Some("both"), &["transfer", "tier"]),
            (Some("wire"), Some("both"), &["tier"]),
            (None, Some("both"), &["tier"]),
            (Some("both"), Some("other"), &["transfer"]),
        ] {
            let settings = Settings {
                plugins: plugins.map(|name| vec![name.to_owned()]),
                hicache_storage: storage.map(|name| vec![name.to_owned()]),
                ..Settings::default()
            };
            let roles = roles_played(&settings, &manifest, false).roles;
            let roles: Vec<&str> = roles.iter().map(|role| role.kind.as_str()).collect();
            assert_eq!(roles, played, "--plugins {plugins:?} --hicache-storage {storage:?}");
        }
    }
}
