//! The sources of `host-plugin-api` and of the kits with which this program was built, for use without a checkout.

use toml::{Table, Value};

/// A crate that is written into a new one.
pub struct Carried {
    /// Its name.
    pub name: &'static str,
    /// Its folder in a new crate.
    pub folder: &'static str,
    /// Its folder in the checkout, relative to that of the API.
    pub beside_api: &'static str,
    manifest: &'static str,
    /// Paths and texts of its files, without Cargo.toml.
    sources: &'static [(&'static str, &'static str)],
}

macro_rules! carried {
    ($name:literal, $folder:literal, $at:literal, $beside:literal, $list:literal) => {
        Carried {
            name: $name,
            folder: $folder,
            beside_api: $beside,
            manifest: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../", $at, "/Cargo.toml")),
            sources: include!(concat!(env!("OUT_DIR"), "/", $list)),
        }
    };
}

/// The API, on which every plugin depends.
pub const API: Carried = carried!("host-plugin-api", "plugin-api", "plugin-api", "", "plugin_api.rs");
/// The kit on which tiers are built.
pub const TIER_KIT: Carried =
    carried!("host-tier-kit", "tier-kit", "plugins/tier-kit", "../plugins/tier-kit", "tier_kit.rs");
/// The kit on which transfer backends are built.
pub const TRANSFER_KIT: Carried = carried!(
    "host-transfer-kit",
    "transfer-kit",
    "plugins/transfer-kit",
    "../plugins/transfer-kit",
    "transfer_kit.rs"
);

const WORKSPACE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));

impl Carried {
    /// Paths and texts of all its files, Cargo.toml first. `api` replaces its dependency on the API, if it has one.
    ///
    /// # Errors
    /// When the manifests that this program carries cannot be parsed.
    pub fn files(&self, api: Option<&Value>) -> Result<Vec<(&'static str, String)>, toml::de::Error> {
        let mut manifest = self.alone()?;
        let dependencies = manifest.get_mut("dependencies").and_then(Value::as_table_mut);
        if let (Some(api), Some(dependencies)) = (api, dependencies) {
            dependencies.insert(API.name.to_owned(), api.clone());
        }
        let head = format!(
            "# The crate {}, as the host that wrote it was built with it. Written by `host plugins new`.\n\n",
            self.name
        );
        let manifest = ("Cargo.toml", format!("{head}{manifest}"));
        let sources = self.sources.iter().map(|(path, text)| (*path, (*text).to_owned()));
        Ok([manifest].into_iter().chain(sources).collect())
    }

    /// The oldest compiler that builds it, in the form of Cargo's versions.
    ///
    /// # Errors
    /// As for [`files`](Self::files).
    pub fn rust_version(&self) -> Result<String, toml::de::Error> {
        let manifest = self.alone()?;
        let version = manifest.get("package").and_then(|package| package.get("rust-version")?.as_str());
        Ok(version.unwrap_or(env!("CARGO_PKG_RUST_VERSION")).to_owned())
    }

    fn alone(&self) -> Result<Table, toml::de::Error> {
        Ok(alone(self.manifest.parse()?, &WORKSPACE.parse()?))
    }
}

/// Makes a manifest independent of its workspace. Writes out inherited values. Leaves out tests, benchmarks and lints, which need
/// the workspace, and values that only a registry reads.
fn alone(mut manifest: Table, workspace: &Table) -> Table {
    let inherited = |table: &str, key: &str| workspace.get("workspace")?.get(table)?.get(key).cloned();
    for left_out in ["dev-dependencies", "bench", "lints"] {
        manifest.remove(left_out);
    }
    for table in ["package", "dependencies"] {
        let entries = manifest.get_mut(table).and_then(Value::as_table_mut);
        for (key, value) in entries.into_iter().flatten() {
            let is_inherited = value.get("workspace").and_then(Value::as_bool) == Some(true);
            if let Some(written) = inherited(table, key).filter(|_written| is_inherited) {
                *value = written;
            }
        }
    }
    if let Some(package) = manifest.get_mut("package").and_then(Value::as_table_mut) {
        package.remove("include");
    }
    manifest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_alone_names_no_workspace_and_keeps_its_dependencies() {
        let manifest = r#"
            [package]
            name = "a"
            edition.workspace = true
            include = ["/src"]
            [dependencies]
            b.workspace = true
            c = "1"
            [dev-dependencies]
            d.workspace = true
            [lints]
            workspace = true
        "#;
        let workspace = r#"
            [workspace.package]
            edition = "2024"
            [workspace.dependencies]
            b = { version = "=0.1.0", default-features = false }
        "#;
        let expected = r#"
            [package]
            name = "a"
            edition = "2024"
            [dependencies]
            b = { version = "=0.1.0", default-features = false }
            c = "1"
        "#;
        let alone = alone(manifest.parse().unwrap(), &workspace.parse().unwrap());
        assert_eq!(alone, expected.parse::<Table>().unwrap());
    }

    #[test]
    fn what_is_carried_is_the_whole_crate() {
        let api = Value::String("0.2".to_owned());
        let carried = [
            (API, &["README.md", "build.rs", "doc/wire.rs", "src/abi/root.rs"][..], host_plugin_api::VERSION),
            (TIER_KIT, &["src/queue.rs"], "0.1.0"),
            (TRANSFER_KIT, &["src/threaded.rs", "src/wire/message.rs"], "0.1.0"),
        ];
        for (carried, some, version) in carried {
            let files = carried.files(Some(&api).filter(|_| carried.name != API.name)).unwrap();
            let names: Vec<_> = files.iter().map(|(path, _)| *path).collect();
            for name in ["Cargo.toml", "LICENSE-MIT", "LICENSE-APACHE", "src/lib.rs"].iter().chain(some) {
                assert!(names.contains(name), "{name} of {names:?}");
            }
            let manifest = &files[0].1;
            assert!(!manifest.contains("workspace") && !manifest.contains("plugins/"), "{manifest}");
            assert!(manifest.contains(&format!("version = {version:?}")), "{manifest}");
            assert_eq!(
                manifest.contains("host-plugin-api = \"0.2\""),
                carried.name != API.name,
                "{manifest}"
            );
        }
    }
}
