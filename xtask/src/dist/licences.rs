//! The third-party crates of a release, and their licences.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, ensure};
use serde_json::Value;

/// Licences under which a crate may be part of a release: permissive ones, and MPL-2.0, which asks for the source of its own
/// files.
const ACCEPTED: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MPL-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

const HEAD: &str = "\
# Works of others in this release

The program and its plugins contain these crates, and Rust's standard library (MIT OR Apache-2.0). Their licences' texts follow the
table. Each crate's source is what its version on crates.io is; none was changed.

| Crate | Version | Licence | Source |
| --- | --- | --- | --- |
";

/// The list of third-party crates and their licences.
pub struct Licences {
    /// The list as Markdown.
    pub text: String,
    /// Number of crates.
    pub crates: usize,
}

/// The version of a package of this workspace.
pub fn version(metadata: &Value, name: &str) -> anyhow::Result<String> {
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let package = packages.iter().find(|package| package["name"] == name && package["source"].is_null());
    let version = package.and_then(|package| package["version"].as_str());
    version.map(str::to_owned).with_context(|| format!("cargo metadata does not know {name}"))
}

/// Lists every third-party crate that the code of these packages links. Fails for a crate without a licence, or with one that is
/// not accepted.
pub fn of(metadata: &Value, roots: &[String]) -> anyhow::Result<Licences> {
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let by_id: BTreeMap<&str, &Value> =
        packages.iter().filter_map(|package| Some((package["id"].as_str()?, package))).collect();
    let mut others: Vec<&Value> = linked(metadata, &by_id, roots)?
        .into_iter()
        .filter_map(|id| by_id.get(id).copied())
        .filter(|package| !package["source"].is_null())
        .collect();
    let text = |package: &Value, field: &str| package[field].as_str().unwrap_or_default().to_owned();
    others.sort_by_key(|package| (text(package, "name"), text(package, "version")));

    let mut list = HEAD.to_owned();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut silent = Vec::new();
    for package in &others {
        let (name, version, licence) =
            (text(package, "name"), text(package, "version"), text(package, "license"));
        ensure!(
            is_satisfied(&licence, &ACCEPTED),
            "{name} {version} is under {licence:?}: leave it out, or accept that in xtask/src/dist/licences.rs and deny.toml"
        );
        let source = text(package, "repository");
        writeln!(list, "| {name} | {version} | {licence} | {source} |")?;
        let folder = package["manifest_path"].as_str().and_then(|path| Path::new(path).parent());
        let found = folder.map(files).transpose()?.unwrap_or_default();
        if found.is_empty() {
            silent.push(format!("{name} {version}"));
        }
        for text in found {
            texts.entry(text).or_default().push(format!("{name} {version}"));
        }
    }
    if !silent.is_empty() {
        writeln!(
            list,
            "\nWithout a text of their own, which the table's licence stands for: {}.",
            silent.join(", ")
        )?;
    }
    let mut texts: Vec<_> = texts.into_iter().collect();
    texts.sort_by(|(_, first), (_, second)| first.cmp(second));
    for (text, of) in texts {
        // The fence is longer than any fence in a licence.
        writeln!(list, "\n## {}\n\n``````text\n{}\n``````", of.join(", "), text.trim_matches('\n'))?;
    }
    Ok(Licences { text: list, crates: others.len() })
}

/// Ids of the crates that these packages link, themselves included: no tests, no build scripts, no macros.
fn linked<'a>(
    metadata: &'a Value,
    by_id: &BTreeMap<&'a str, &'a Value>,
    roots: &[String],
) -> anyhow::Result<BTreeSet<&'a str>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("cargo metadata resolved nothing")?;
    let nodes: BTreeMap<&str, &Value> =
        nodes.iter().filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let is_macro = |package: &Value| {
        let kinds = package["targets"].as_array().into_iter().flatten();
        kinds.filter_map(|target| target["kind"].as_array()).flatten().any(|kind| kind == "proc-macro")
    };
    let ours = |package: &Value| {
        package["source"].is_null() && roots.iter().any(|root| package["name"] == root.as_str())
    };
    let mut left: Vec<&str> = by_id.iter().filter(|(_, package)| ours(package)).map(|(id, _)| *id).collect();
    ensure!(left.len() == roots.len(), "cargo metadata knows {} of {} packages", left.len(), roots.len());
    let mut found = BTreeSet::new();
    while let Some(id) = left.pop() {
        if by_id.get(id).is_none_or(|package| is_macro(package)) || !found.insert(id) {
            continue;
        }
        let dependencies = nodes.get(id).and_then(|node| node["deps"].as_array()).into_iter().flatten();
        let linked = dependencies.filter(|dependency| {
            let kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            kinds.into_iter().any(|kind| kind["kind"].is_null())
        });
        left.extend(linked.filter_map(|dependency| dependency["pkg"].as_str()));
    }
    Ok(found)
}

/// The licences under which a crate may be part of a release.
#[cfg(test)]
pub fn accepted() -> BTreeSet<&'static str> {
    BTreeSet::from(ACCEPTED)
}

/// Whether an SPDX expression can be satisfied with these licences alone.
pub fn is_satisfied(expression: &str, accepted: &[&str]) -> bool {
    // `/` is an older form of `OR`. Of nested expressions, only `(A OR B) AND C` occurs.
    let plain = expression.replace('/', " OR ").replace(['(', ')'], " ");
    let alternative = |text: &str| {
        let licence = text.split(" WITH ").next().unwrap_or_default().trim();
        accepted.contains(&licence)
    };
    plain.split(" AND ").all(|part| part.split(" OR ").any(alternative))
}

/// The texts of a crate's licence files.
fn files(folder: &Path) -> anyhow::Result<Vec<String>> {
    let failed = || format!("{} cannot be read", folder.display());
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(failed)? {
        let entry = entry.with_context(failed)?;
        let name = entry.file_name().to_string_lossy().to_ascii_uppercase();
        let says = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT", "UNLICENSE"];
        if says.iter().any(|start| name.starts_with(start))
            && !name.ends_with(".RS")
            && entry.path().is_file()
        {
            paths.push(entry.path());
        }
    }
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let bytes = std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))?;
            Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn expressions_are_accepted_when_a_choice_of_accepted_licences_satisfies_them() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "Apache-2.0 OR GPL-3.0",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR MIT",
        ] {
            assert!(is_satisfied(good, &ACCEPTED), "{good}");
        }
        for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "AGPL-3.0 OR SSPL-1.0"] {
            assert!(!is_satisfied(bad, &ACCEPTED), "{bad}");
        }
    }

    #[test]
    fn what_is_linked_is_listed_and_what_only_builds_or_tests_is_not() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("LICENSE-MIT"), "Permission is granted").unwrap();
        let manifest = folder.path().join("Cargo.toml");
        let package = |name: &str, kind: &str, source: Value, licence: &str| {
            json!({"id": name, "name": name, "version": "1.0.0", "license": licence, "source": source,
                "manifest_path": manifest, "targets": [{"kind": [kind]}]})
        };
        let node = |id: &str, deps: &[(&str, Value)]| {
            let deps: Vec<_> =
                deps.iter().map(|(to, kind)| json!({"pkg": to, "dep_kinds": [{"kind": kind}]})).collect();
            json!({"id": id, "deps": deps})
        };
        let mut metadata = json!({
            "packages": [
                package("ours", "bin", Value::Null, "MIT"),
                package("linked", "lib", json!("registry"), "MIT"),
                package("deep", "lib", json!("registry"), "MIT OR Apache-2.0"),
                package("macro", "proc-macro", json!("registry"), "GPL-3.0"),
                package("build", "lib", json!("registry"), "GPL-3.0"),
                package("test", "lib", json!("registry"), "GPL-3.0"),
            ],
            "resolve": {"nodes": [
                node("ours", &[("linked", Value::Null), ("build", json!("build")), ("test", json!("dev"))]),
                node("linked", &[("deep", Value::Null), ("macro", Value::Null)]),
            ]},
        });
        let licences = of(&metadata, &["ours".to_owned()]).unwrap();
        assert_eq!(licences.crates, 2, "{}", licences.text);
        assert!(licences.text.contains("| linked | 1.0.0 | MIT |"), "{}", licences.text);
        let once = licences.text.matches("Permission is granted").count();
        assert!(once == 1 && licences.text.contains("## deep 1.0.0, linked 1.0.0"), "{}", licences.text);

        metadata["packages"][2]["license"] = json!("GPL-3.0");
        let error = of(&metadata, &["ours".to_owned()]).err().unwrap().to_string();
        assert!(error.starts_with("deep 1.0.0 is under \"GPL-3.0\""), "{error}");
    }
}
