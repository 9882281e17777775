//! The source of `host-plugin-api` as this program was built with it, for where there is no checkout.

use toml::{Table, Value};

/// The folder of it in a new crate.
pub const FOLDER: &str = "plugin-api";

/// Its files other than Cargo.toml: path and text.
const SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/plugin_api.rs"));

const MANIFEST: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../plugin-api/Cargo.toml"));
const WORKSPACE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"));

const HEAD: &str = "# The crate host-plugin-api, as the host that wrote it was built with it. Written by `host plugins new`.\n\n";

/// Paths and texts of all its files, Cargo.toml first.
///
/// # Errors
/// When the program was built from manifests that cannot be read.
pub fn files() -> Result<Vec<(&'static str, String)>, toml::de::Error> {
    let manifest = ("Cargo.toml", format!("{HEAD}{}", manifest()?));
    let sources = SOURCES.iter().map(|(path, text)| (*path, (*text).to_owned()));
    Ok([manifest].into_iter().chain(sources).collect())
}

/// The oldest compiler that builds it, as Cargo writes versions.
///
/// # Errors
/// As [`files`].
pub fn rust_version() -> Result<String, toml::de::Error> {
    let manifest = manifest()?;
    let version = manifest.get("package").and_then(|package| package.get("rust-version")?.as_str());
    Ok(version.unwrap_or(env!("CARGO_PKG_RUST_VERSION")).to_owned())
}

fn manifest() -> Result<Table, toml::de::Error> {
    Ok(alone(MANIFEST.parse()?, &WORKSPACE.parse()?))
}

/// A manifest without its workspace: what it inherits is written out; tests, benchmarks and lints, which need the workspace, and
/// what only a registry reads are left out.
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
        let files = files().unwrap();
        let names: Vec<_> = files.iter().map(|(path, _)| *path).collect();
        for name in [
            "Cargo.toml",
            "README.md",
            "LICENSE-MIT",
            "build.rs",
            "doc/wire.rs",
            "src/lib.rs",
            "src/abi/root.rs",
        ] {
            assert!(names.contains(&name), "{name} of {names:?}");
        }
        assert!(!files[0].1.contains("workspace"), "{}", files[0].1);
        assert!(files[0].1.contains(&format!("version = {:?}", host_plugin_api::VERSION)), "{}", files[0].1);
    }
}
