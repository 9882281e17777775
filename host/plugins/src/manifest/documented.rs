//! Tests that the page about the manifest lists exactly the keys that the host reads.

use std::collections::BTreeMap;

use semver::Version;

use super::*;

const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/plugins/manifest.md"));

/// A manifest in which every key is set. A new field must be added here, or this file does not build.
fn full() -> Manifest {
    let texts = |text: &str| vec![text.to_owned()];
    Manifest {
        manifest_version: 1,
        plugin: Identity {
            id: "com.acme.store".into(),
            name: "acme-store".into(),
            version: Version::new(1, 4, 0),
            description: "keeps pages".into(),
            built_on: texts("com.acme.base"),
            min_host: Some(Version::new(0, 1, 0)),
            threads: Some("own".into()),
        },
        api: Api { version: Version::new(0, 1, 0) },
        roles: vec![Role { kind: "tier".into(), memory: texts("dram"), capabilities: texts("settled") }],
        config: BTreeMap::from([(
            "KEY".to_owned(),
            ConfigKey {
                kind: "integer".into(),
                default: Some(toml::Value::Integer(1)),
                host_default: Some(HostDefault::SpaceMib),
                host_min: Some(1),
                host_max: Some(2),
                doc: "bytes".into(),
            },
        )]),
        companions: vec![CompanionManifest {
            name: "server".into(),
            program: "serverd".into(),
            arguments: texts("-v"),
            environment: BTreeMap::from([("A".to_owned(), "b".to_owned())]),
            ready: "127.0.0.1:1".into(),
        }],
        build: Build {
            panic: "unwind".into(),
            target: "t".into(),
            abi: Some("c".into()),
            rustc: "1".into(),
            compiler: Some("gcc".into()),
            symbol: "s".into(),
        },
    }
}

/// The tables of a manifest, by the headings of the page, for looking at or taking from.
fn tables(manifest: &mut toml::Table) -> Vec<(String, &mut toml::Table)> {
    let mut found = Vec::new();
    for (name, value) in manifest {
        let is_config = name == "config";
        match value {
            toml::Value::Table(table) => {
                match is_config {
                    true => found.extend(table.iter_mut().filter_map(|(key, value)| {
                        Some((format!("[config.{key}] "), value.as_table_mut()?))
                    })),
                    false => found.push((format!("[{name}] "), table)),
                }
            }
            toml::Value::Array(array) => {
                let tables = array.iter_mut().filter_map(toml::Value::as_table_mut);
                found.extend(tables.map(|table| (format!("[[{name}]] "), table)));
            }
            _ => {}
        }
    }
    found
}

/// The rows of the page: each key with its default.
fn rows() -> BTreeMap<&'static str, &'static str> {
    let rows = PAGE.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | "));
    rows.filter_map(|(key, rest)| Some((key, rest.split(" | ").nth(1)?))).collect()
}

#[test]
fn the_page_has_every_key_that_is_read() {
    let mut manifest: toml::Table = toml::Table::try_from(full()).unwrap();
    let mut keys: Vec<String> = vec!["manifest_version".to_owned()];
    for (heading, table) in tables(&mut manifest) {
        keys.extend(table.keys().map(|key| format!("{heading}{key}")));
    }
    keys.sort();
    let documented: Vec<&str> = rows().into_keys().collect();
    assert_eq!(keys, documented, "docs/plugins/manifest.md on the right");
}

#[test]
fn the_keys_that_the_page_says_are_required_are_and_the_others_are_not() {
    let text = toml::to_string(&full()).unwrap();
    assert_eq!(Manifest::parse(&text).as_ref(), Ok(&full()), "every key is read");
    for (key, default) in rows() {
        let mut manifest: toml::Table = text.parse().unwrap();
        let mut removed = manifest.remove(key);
        for (heading, table) in tables(&mut manifest) {
            removed = removed.or_else(|| table.remove(key.strip_prefix(&heading)?));
        }
        assert!(removed.is_some(), "{key} is in a manifest");
        let read = Manifest::parse(&manifest.to_string());
        let is_required = ["required", "written by the build"].contains(&default);
        assert_eq!(read.is_err(), is_required, "{key}, of which the page says {default:?}: {read:?}");
    }
}
