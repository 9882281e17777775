//! Plugins built from other versions of the plugin API: the fixture `null`, with a copy of the API that was changed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use crate::built::{repository, target};

/// A change of a file of `plugin-api/`: the file, the old text, the new text.
pub type Change<'a> = (&'a str, &'a str, &'a str);

/// Writes a file only when its content differs, so that cargo does not build it twice.
fn write(path: &Path, content: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    if std::fs::read_to_string(path).ok().as_deref() != Some(content) {
        std::fs::write(path, content).unwrap();
    }
}

fn copy(from: &Path, to: &Path, change: &dyn Fn(&str, String) -> String, folder: &str) {
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let place = if folder.is_empty() { name.clone() } else { format!("{folder}/{name}") };
        if path.is_dir() && !matches!(name.as_str(), "target" | "benches" | "tests") {
            copy(&path, &to.join(&name), change, &place);
        } else if path.is_file() {
            write(&to.join(&name), &change(&place, std::fs::read_to_string(&path).unwrap()));
        }
    }
}

/// A manifest with values in place of lines that take them from the workspace.
fn alone(manifest: String) -> String {
    let kept = manifest.split("[dev-dependencies]").next().unwrap().to_owned();
    kept.replace("rust-version.workspace = true\n", "")
        .replace("version.workspace = true", "version = \"0.1.0\"")
        .replace("edition.workspace = true", "edition = \"2024\"")
        .replace("license.workspace = true\n", "")
        .replace("publish.workspace = true", "publish = false")
        .replace("[lints]\nworkspace = true", "")
        .replace(
            "abi_stable.workspace = true",
            "abi_stable = { version = \"=0.11.3\", default-features = false }",
        )
        .replace("host-plugin-api.workspace = true", "host-plugin-api = { path = \"../API\" }")
}

/// `null`, built against a copy of the plugin API with these changes, each of which must apply.
///
/// # Panics
/// When a change does not apply, or the result does not build.
pub fn null_with(name: &str, changes: &[Change<'_>]) -> PathBuf {
    // Two tests may build the same variant.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let target = target().join("generated-plugins");
    let at = target.join("variants").join(name);
    let apply = |place: &str, text: String| {
        let text = if place == "Cargo.toml" { alone(text) } else { text };
        changes.iter().filter(|(file, ..)| *file == place).fold(text, |text, (file, from, to)| {
            assert!(text.contains(from), "{file} has no {from:?} to change");
            text.replacen(from, to, 1)
        })
    };
    // The copy has a folder of its own name, because cargo tells packages apart by their place in their workspace.
    let api = format!("plugin-api-{name}");
    copy(&repository().join("plugin-api"), &at.join(&api), &apply, "");
    // The package has a name of its own, because files of `cdylib`s carry no hash and would overwrite each other.
    let package = format!("null-{name}");
    let only_alone = |place: &str, text: String| match place {
        "Cargo.toml" => {
            let manifest = alone(text).replace("host-plugin-null", &package);
            manifest.replace("../API", &format!("../{api}")) + "\n[lib]\ncrate-type = [\"cdylib\"]\n"
        }
        _ => text,
    };
    copy(&repository().join("tests/plugins/null"), &at.join("null"), &only_alone, "");
    write(&at.join("Cargo.toml"), "[workspace]\nresolver = \"3\"\nmembers = [\"null\"]\n");
    // Uses the versions of this repository, which are on this machine.
    if !at.join("Cargo.lock").exists() {
        std::fs::copy(repository().join("Cargo.lock"), at.join("Cargo.lock")).unwrap();
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(&at).args(["build", "--quiet", "--offline"]).env("CARGO_TARGET_DIR", &target);
    let output = cargo.output().unwrap();
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    target.join("debug").join(format!("lib{}.so", package.replace('-', "_")))
}
