//! The manifest: what a plugin's file says of the plugin.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The manifest that a plugin file carries. Unknown keys are ignored, so that newer plugins can say more.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Manifest {
    /// Format of the manifest itself, which is 1.
    pub manifest_version: u32,
    /// The plugin's identity.
    pub plugin: Identity,
    /// The plugin API that it was built against.
    pub api: Api,
    /// The roles that it plays.
    #[serde(default, rename = "role")]
    pub roles: Vec<Role>,
    /// The keys of its configuration table.
    #[serde(default)]
    pub config: BTreeMap<String, ConfigKey>,
    /// Programs that it can have beside the workers.
    #[serde(default, rename = "companion")]
    pub companions: Vec<CompanionManifest>,
    /// How it was built.
    pub build: Build,
}

/// The identity of a plugin: [`Manifest::plugin`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Identity {
    /// The id, which no other plugin has.
    pub id: String,
    /// The name by which users select the plugin.
    pub name: String,
    /// Its own version.
    pub version: semver::Version,
    /// What the plugin does, in one line.
    #[serde(default)]
    pub description: String,
    /// Ids of plugins whose crates are linked into this file.
    #[serde(default)]
    pub built_on: Vec<String>,
    /// The oldest host with which it works.
    pub min_host: Option<semver::Version>,
    /// `own` or `none`: whether its instances run threads.
    pub threads: Option<String>,
}

/// The plugin API that a plugin was built against: [`Manifest::api`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Api {
    /// Version of the plugin API.
    pub version: semver::Version,
}

/// One role a plugin plays.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Role {
    /// `transfer`, `tier`, `allocator`, or a role that a newer host knows.
    pub kind: String,
    /// Kinds of memory: `dram`, `vram`.
    #[serde(default)]
    pub memory: Vec<String>,
    /// Capabilities that the role declares. See [`host_plugin_api::capability`].
    #[serde(default)]
    pub capabilities: Vec<String>,
}

/// One key of a plugin's configuration.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ConfigKey {
    /// `string`, `integer`, `float`, `boolean`, `array` or `table`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The value that applies when the key is absent.
    pub default: Option<toml::Value>,
    /// The value that the host supplies when the operator set none. `None` also for a word that this host does not know.
    #[serde(default, deserialize_with = "known_or_none")]
    pub host_default: Option<HostDefault>,
    /// The least number that the host may supply.
    #[serde(default)]
    pub host_min: Option<i64>,
    /// The largest number that the host may supply.
    #[serde(default)]
    pub host_max: Option<i64>,
    /// The meaning of the key.
    #[serde(default)]
    pub doc: String,
}

/// A value that depends on the machine and on the served model, so the host knows it and the plugin does not.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostDefault {
    /// A directory of this user's, one for each model whose KV differs: an absolute path.
    CacheDirectory,
    /// A share of the space that is free there, in MiB.
    SpaceMib,
}

/// Reads a host default, and gives `None` for words of a newer API.
fn known_or_none<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<HostDefault>, D::Error> {
    let value = toml::Value::deserialize(value)?;
    Ok(value.try_into().ok())
}

/// A program that the supervisor runs when `--start-companion` names it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct CompanionManifest {
    /// The name by which users select the program.
    pub name: String,
    /// Name of the program's file. The supervisor searches the active virtual environment and `PATH` for it.
    pub program: String,
    /// Arguments of the program. `{KEY}` in the arguments, the variables and the address is replaced by the value in the plugin's
    /// configuration, see docs/plugins/tier.md.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// Variables that are set in its environment.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// Address at which it takes connections once it is ready, empty if it takes none.
    #[serde(default)]
    pub ready: String,
}

/// How a plugin was built: [`Manifest::build`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Build {
    /// `unwind` or `abort`.
    pub panic: String,
    /// Target triple.
    pub target: String,
    /// `c` for the tables of functions of `host_plugin.h`, absent for those of Rust.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abi: Option<String>,
    /// Version of the Rust compiler, empty for a plugin in C.
    pub rustc: String,
    /// The compiler of a plugin in C.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiler: Option<String>,
    /// Name of the exported header.
    pub symbol: String,
}

impl Manifest {
    /// Reads a manifest.
    ///
    /// # Errors
    /// A sentence that names the key or the line.
    pub fn parse(text: &str) -> Result<Self, String> {
        let manifest: Self = toml::from_str(text).map_err(|e| one_line(&e.to_string()))?;
        if manifest.manifest_version != 1 {
            let version = manifest.manifest_version;
            return Err(format!("manifest_version is {version}, this host reads version 1"));
        }
        // Names appear in lines of the log, of metrics and of commands. A control character could make one line look like several.
        if let Some((key, text)) = manifest.names().find(|(_, text)| text.contains(char::is_control)) {
            return Err(format!("{key} is {text:?}, it must be without control characters"));
        }
        Ok(manifest)
    }

    /// All names and other short texts, with their keys.
    fn names(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let (plugin, build) = (&self.plugin, &self.build);
        let single = [
            ("[plugin] id", &plugin.id),
            ("[plugin] name", &plugin.name),
            ("[build] panic", &build.panic),
            ("[build] target", &build.target),
            ("[build] rustc", &build.rustc),
            ("[build] symbol", &build.symbol),
        ];
        let roles = self.roles.iter().flat_map(|role| {
            let lists = [("[[role]] memory", &role.memory), ("[[role]] capabilities", &role.capabilities)];
            let lists = lists.into_iter().flat_map(|(key, texts)| texts.iter().map(move |text| (key, text)));
            lists.chain([("[[role]] kind", &role.kind)])
        });
        let keys = self
            .config
            .iter()
            .flat_map(|(key, of)| [("a key of [config]", key), ("[config] type", &of.kind)]);
        let companions = self.companions.iter().flat_map(|companion| {
            let variables = companion.environment.keys().map(|name| ("[[companion]] environment", name));
            let names =
                [("[[companion]] name", &companion.name), ("[[companion]] program", &companion.program)];
            variables.chain(names).chain([("[[companion]] ready", &companion.ready)])
        });
        let bases = plugin.built_on.iter().map(|id| ("[plugin] built_on", id));
        let builds = [("[build] abi", &build.abi), ("[build] compiler", &build.compiler)];
        let builds = builds.into_iter().filter_map(|(key, text)| Some((key, text.as_ref()?)));
        let threads = plugin.threads.iter().map(|threads| ("[plugin] threads", threads));
        let all = single
            .into_iter()
            .chain(bases)
            .chain(threads)
            .chain(builds)
            .chain(roles)
            .chain(keys)
            .chain(companions);
        all.map(|(key, text)| (key, text.as_str()))
    }

    /// The role of this kind.
    #[must_use]
    pub fn role(&self, kind: &str) -> Option<&Role> {
        self.roles.iter().find(|role| role.kind == kind)
    }

    /// Whether the role of this kind declares a capability. Capabilities of the plugin's other roles do not count.
    #[must_use]
    pub fn declares(&self, kind: &str, capability: &str) -> bool {
        self.role(kind).is_some_and(|role| role.capabilities.iter().any(|declared| declared == capability))
    }

    /// Checks a configuration table against the declared keys, without asking the plugin.
    ///
    /// # Errors
    /// A sentence that names the key and what is allowed.
    pub fn check_config(&self, text: &str) -> Result<(), String> {
        let table: toml::Table = text.parse().map_err(|e: toml::de::Error| one_line(&e.to_string()))?;
        let mut wrong = Vec::new();
        for (key, value) in &table {
            let Some(declared) = self.config.get(key) else {
                let known = self.config.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
                let known =
                    if known.is_empty() { "it has no keys".to_owned() } else { format!("known: {known}") };
                wrong.push(format!("unknown key {key:?} ({known})"));
                continue;
            };
            let fits = declared.kind == value.type_str() || (declared.kind == "float" && value.is_integer());
            if !fits {
                let (is, kind) = (value.type_str(), &declared.kind);
                wrong.push(format!("key {key:?} is of type {is}, it must be of type {kind}"));
            }
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
    }
}

/// Joins the lines of a TOML error, which shows the position over several lines.
fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod documented;
