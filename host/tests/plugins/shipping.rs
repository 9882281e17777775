//! The way of a plugin from a vendor to a directory and back, as an operator sees it.

use std::path::{Path, PathBuf};
use std::process::Command;

use host_tests::signing::Publisher;
use host_tests::{elf, plugin_files};

/// Runs `host plugins`. Returns the exit code and all output.
fn plugins(arguments: &[&str]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_host")).arg("plugins").args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().expect("an exit code, no signal"), text(&output.stdout) + &text(&output.stderr))
}

/// The document that a command prints.
fn json(arguments: &[&str]) -> serde_json::Value {
    let output = Command::new(env!("CARGO_BIN_EXE_host")).arg("plugins").args(arguments).output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}"))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A vendor's folder with two builds of the plugin `memory`, and an operator's empty folder.
struct Place {
    folder: tempfile::TempDir,
    directory: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let bytes = std::fs::read(plugin_files::plugin("memory")).unwrap();
        std::fs::write(folder.path().join("one.so"), &bytes).unwrap();
        std::fs::write(folder.path().join("two.so"), [bytes, b"newer".to_vec()].concat()).unwrap();
        let directory = folder.path().join("plugins");
        Self { folder, directory }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A command on the operator's directory.
    fn run(&self, arguments: &[&str]) -> (i32, String) {
        plugins(&[arguments, &["--plugins-dir", text(&self.directory)]].concat())
    }

    fn install(&self, name: &str, flags: &[&str]) -> (i32, String) {
        self.run(&[&["install", text(&self.at(name))], flags].concat())
    }

    fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(&self.directory).unwrap();
        let mut files: Vec<String> =
            files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        files.sort();
        files
    }
}

#[test]
fn a_locked_directory_is_upgraded_rolled_back_and_cleared_without_another_command() {
    let place = Place::new();
    let (code, said) = place.install("one.so", &["--lock"]);
    assert!(code == 0 && said.contains("plugins.lock lists it"), "{said}");
    let is_locked = || place.run(&["list"]).1.contains("locked");
    assert!(is_locked());
    let (code, said) = place.run(&["rollback", "memory"]);
    assert!(code == 2 && said.contains("no file before") && said.contains("is kept"), "{said}");
    let (code, said) = place.install("two.so", &["--lock"]);
    assert!(code == 0 && said.contains("host plugins rollback memory") && is_locked(), "{said}");
    let installed = || std::fs::read(place.directory.join("memory.so")).unwrap();
    assert_eq!(installed(), std::fs::read(place.at("two.so")).unwrap());
    let (code, said) = place.run(&["rollback", "memory"]);
    assert!(code == 0 && said.contains("memory is 0.1.0 again") && is_locked(), "{said}");
    assert_eq!(installed(), std::fs::read(place.at("one.so")).unwrap());
    assert_eq!(place.files(), ["memory.so", "memory.so.previous", "plugins.lock"]);

    // Without `--lock` the lock file shuts the new file out, and the command says so.
    let (code, said) = place.install("two.so", &[]);
    assert!(code == 0 && said.contains("does not list it yet: install with --lock"), "{said}");
    let (code, said) = place.run(&["remove", "memory"]);
    assert!(code == 0 && said.contains("removed"), "{said}");
    assert_eq!(place.files(), ["plugins.lock"]);
    let (code, said) = place.run(&["remove", "memory"]);
    assert!(code == 2 && said.contains("no plugin \"memory\" is in"), "{said}");
}

#[test]
fn of_a_plugin_in_several_directories_none_is_removed() {
    let (first, second) = (plugin_files::directory(&["null"]), plugin_files::directory(&["null"]));
    let directories = format!("{},{}", text(first.path()), text(second.path()));
    let (code, said) = plugins(&["remove", "null", "--plugins-dir", &directories]);
    assert!(code == 2 && said.contains("name the one file to remove"), "{said}");
    let file = second.path().join("null.so");
    let (code, said) = plugins(&["remove", text(&file), "--plugins-dir", &directories]);
    assert!(code == 0 && !file.exists() && first.path().join("null.so").exists(), "{said}");
}

#[test]
fn with_publishers_only_what_one_of_them_signed_is_installed_and_usable() {
    let place = Place::new();
    let (acme, other) = (Publisher::new("acme"), Publisher::new("other"));
    let keys = place.at("keys");
    let asking = ["--plugin-publishers", text(&keys)];
    std::fs::write(&keys, acme.entry("plugins = [\"host.test.*\"]")).unwrap();

    let (code, said) = place.install("one.so", &asking);
    assert!(code == 2 && said.contains("one.so is not signed") && place.files().is_empty(), "{said}");
    other.sign(&place.at("one.so"));
    let (code, said) = place.install("one.so", &asking);
    assert!(code == 2 && said.contains("a key that no publisher in") && place.files().is_empty(), "{said}");
    acme.sign(&place.at("one.so"));
    let (code, said) = place.install("one.so", &asking);
    assert!(code == 0 && said.contains("signed by acme: for tests"), "{said}");
    assert_eq!(place.files(), ["memory.so", "memory.so.minisig"]);
    let list = || place.run(&[&["list"][..], &asking].concat());
    assert!(list().1.contains("signed by acme"), "{}", list().1);
    let listed = json(&[&["list", "--json", "--plugins-dir", text(&place.directory)][..], &asking].concat());
    assert_eq!(listed["plugins"][0]["signed_by"], "acme");

    // An unsigned file in the directory is listed with the reason.
    std::fs::copy(plugin_files::plugin("null"), place.directory.join("null.so")).unwrap();
    assert!(list().1.contains("null.so is not signed"), "{}", list().1);
    // A server refuses it too.
    let check = ["check", "--executor", "synthetic", "--plugins", "null"];
    let (code, said) = place.run(&[&check[..], &asking].concat());
    assert!(code == 2 && said.contains("null.so is not signed"), "{said}");
    // Signatures with a removed key are not valid any more.
    std::fs::write(&keys, other.entry("")).unwrap();
    assert!(list().1.contains("memory.so has a signature that does not count"), "{}", list().1);
    std::fs::write(&keys, "publisher = 1").unwrap();
    assert!(list().1.contains("keys are wrong") && list().1.contains("no usable plugin"), "{}", list().1);
}

#[test]
fn without_publishers_a_signature_is_kept_and_said_not_to_be_verified() {
    let place = Place::new();
    Publisher::new("acme").sign(&place.at("one.so"));
    let (code, said) = place.install("one.so", &[]);
    assert!(code == 0 && said.contains("kept and not verified"), "{said}");
    let (code, said) = place.install("two.so", &[]);
    // The signature of the old file goes with that file.
    assert_eq!(
        (code, place.files()),
        (
            0,
            vec![
                "memory.so".to_owned(),
                "memory.so.previous".to_owned(),
                "memory.so.previous.minisig".to_owned(),
            ]
        ),
        "{said}"
    );
}

#[test]
fn a_plugin_for_a_newer_c_library_is_refused_with_both_versions_before_it_lies_there() {
    let place = Place::new();
    let file = place.at("one.so");
    let (code, said) = plugins(&["inspect", text(&file)]);
    assert!(code == 0 && said.contains(" or newer, this machine has 2."), "{said}");
    elf::need_glibc(&file, "2.99");
    // The system's loader refuses this file, too.
    let preloaded = Command::new("/bin/sh").args(["-c", ":"]).env("LD_PRELOAD", &file).output().unwrap();
    let loader = String::from_utf8_lossy(&preloaded.stderr);
    assert!(loader.contains("GLIBC_2.99"), "{loader}");

    let (code, said) = plugins(&["inspect", text(&file)]);
    assert_eq!(code, 2, "{said}");
    for part in ["glibc      2.99 or newer", "verdict    not usable as it is", "needs glibc 2.99 or newer"] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    let all = json(&["inspect", "--json", text(&file)]);
    assert_eq!((&all["glibc"]["needed"], &all["reason"]), (&"2.99".into(), &"glibc_too_old".into()));
    let newest =
        all["needed_versions"].as_array().unwrap().iter().find(|needed| needed["version"] == "GLIBC_2.99");
    assert!(newest.unwrap()["library"].as_str().unwrap().starts_with("lib"), "{all}");

    let (code, said) = place.install("one.so", &[]);
    assert!(code == 2 && said.contains("needs glibc 2.99 or newer, this machine has 2."), "{said}");
    assert!(place.files().is_empty(), "{:?}", place.files());
    // If the file is copied there, it is not usable, and a configuration that names it does not start.
    std::fs::copy(&file, place.directory.join("memory.so")).unwrap();
    assert!(place.run(&["list"]).1.contains("memory.so needs glibc 2.99"));
    let (code, said) =
        place.run(&["check", "--executor", "synthetic", "--plugins", "shm", "--hicache-storage", "memory"]);
    assert!(code == 2 && said.contains("memory.so needs glibc 2.99"), "{said}");
    // A file that cannot be loaded can still be removed.
    let (code, said) = place.run(&["remove", "memory"]);
    assert!(code == 0 && place.files().is_empty(), "{said}");
}
