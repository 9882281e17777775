//! Opens a tier by its plugin's name and with its configuration, like workers do.

use std::path::PathBuf;

use clap::Args;
use host_plugin_api::{Opening, capability};
use host_plugins::{Catalog, Entry, Manifest, open_tier};
use toml::{Table, Value};

use super::session::Session;
use crate::cli::Refused;
use crate::cli::plugins::{Directories, READ_ONLY, resolve};
use crate::cli::settings::set_key;

/// Help text of the commands that only read.
pub const READS: &str = "It may run beside workers. A plugin that has a setting read_only is opened with it and changes nothing; \
    another one does what it does for a worker, and may remove values that it finds damaged.";

/// Flags that name a tier and its configuration.
#[derive(Args, Debug)]
pub struct Tier {
    /// Plugin that stores the pages, by name [default: hicache-storage of --config]
    #[arg(long, value_name = "NAME")]
    plugin: Option<String>,

    /// The workers' configuration file, whose [plugin.NAME] table is the plugin's configuration
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// TOML file with the plugin's own configuration table
    #[arg(long, value_name = "FILE", conflicts_with = "config")]
    plugin_config: Option<PathBuf>,

    /// A key of the plugin's configuration, for example dir=/var/cache/host/pages or storage.directory=/pages. It wins over
    /// files, and may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Where plugins are
    #[command(flatten)]
    directories: Directories,
}

/// A plugin, with its configuration from the flags.
pub struct ConfiguredTier {
    entry: Entry,
    config: Table,
}

impl Tier {
    /// Finds the plugin and assembles its configuration. Runs none of its code.
    ///
    /// # Errors
    /// When the plugin is not found, is no tier, or its configuration cannot be read.
    pub fn find(&self) -> anyhow::Result<ConfiguredTier> {
        let mut settings = self.directories.settings();
        settings.config.clone_from(&self.config);
        settings.hicache_storage = self.plugin.clone().map(|name| vec![name]);
        let settings = resolve(settings.with_file()?)?.settings;
        let name = match settings.stores() {
            [name] => name.clone(),
            [] => {
                return Err(Refused(
                    "which tier? name its plugin with --plugin, for example hicache-file, or a --config with hicache-storage"
                        .into(),
                )
                .into());
            }
            several => {
                let names = several.join(", ");
                return Err(
                    Refused(format!("which tier? --config names {names}: choose one with --plugin")).into()
                );
            }
        };
        let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
        let entry = catalog.find(&name).map_err(|error| Refused(error.to_string()))?.clone();
        let role = entry.manifest.role("tier");
        role.ok_or_else(|| Refused(format!("plugin {name:?} is no storage tier, it has no role tier")))?;
        let mut config = match &self.plugin_config {
            None => match settings.plugin.get(&name) {
                None => Table::new(),
                Some(Value::Table(table)) => table.clone(),
                Some(_) => return Err(Refused(format!("[plugin.{name}] is not a table")).into()),
            },
            Some(path) => {
                let shown = path.display();
                let text = std::fs::read_to_string(path).map_err(|error| {
                    Refused(format!("the plugin's configuration {shown} cannot be read: {error}"))
                })?;
                text.parse().map_err(|error| {
                    Refused(format!("the plugin's configuration {shown} is no TOML: {error}"))
                })?
            }
        };
        for pair in &self.set {
            // The key may begin with the plugin's name, as for the server.
            let bare = pair.strip_prefix(&format!("{name}.")).unwrap_or(pair);
            set_key(&mut config, Some(&entry.manifest), bare, pair)?;
        }
        Ok(ConfiguredTier { entry, config })
    }
}

impl ConfiguredTier {
    /// Refuses a plugin that cannot list its keys.
    ///
    /// # Errors
    /// When the plugin does not declare that it can.
    pub fn that_lists(self) -> Result<Self, Refused> {
        let can = |can: &String| can == capability::SCAN;
        if self.entry.manifest.role("tier").is_some_and(|role| role.capabilities.iter().any(can)) {
            return Ok(self);
        }
        Err(Refused(format!(
            "plugin {:?} cannot list what it stores: it does not declare the capability scan; `host tier stat` may know how much \
             that is, and what is to be removed is removed with the store's own tools",
            self.entry.manifest.plugin.name
        )))
    }

    /// Opens the tier for reading: with `read_only` if the plugin has this setting and the operator did not set it.
    ///
    /// # Errors
    /// When the plugin does not open.
    pub fn open_to_read(&self) -> anyhow::Result<Session> {
        let mut config = self.config.clone();
        if self.entry.manifest.config.get(READ_ONLY).is_some_and(|key| key.kind == "boolean") {
            config.entry(READ_ONLY).or_insert(Value::Boolean(true));
        }
        self.open(&config)
    }

    /// Opens the tier as it is configured.
    ///
    /// # Errors
    /// When the plugin does not open.
    pub fn open_to_write(&self) -> anyhow::Result<Session> {
        self.open(&self.config)
    }

    fn open(&self, config: &Table) -> anyhow::Result<Session> {
        let opening = Opening { name: "host tier".to_owned(), config: config.to_string() };
        let tier = open_tier(&self.entry, &opening).map_err(|error| Refused(error.to_string()))?;
        Ok(Session::new(tier, &self.entry.manifest))
    }

    /// The plugin's manifest.
    pub fn plugin(&self) -> &Manifest {
        &self.entry.manifest
    }
}
