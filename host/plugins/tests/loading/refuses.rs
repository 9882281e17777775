//! Every way in which a file can fail to be a usable plugin, each in a process of its own: the outcome is a sentence.

use std::path::Path;
use std::process::Command;

use host_plugin_api::Opening;
use host_plugins::{Catalog, PluginError, Policy, open_transfer};
use host_test_peer::process::{Role, command, said};
use host_tests::plugin_files;
use host_tests::skip::skipped;

/// The output of another process that loads `name` from a directory. The process must not crash.
fn load(directory: &Path, name: &str) -> String {
    said(name, command(Role::Load).arg(directory).arg(name))
}

#[test]
fn a_good_plugin_opens_from_a_stripped_file_too() {
    let directory = plugin_files::directory(&["null"]);
    assert_eq!(load(directory.path(), "null"), "opened true");
    let file = directory.path().join("null.so");
    match Command::new("strip").arg(&file).status() {
        Ok(status) => {
            assert!(status.success(), "strip: {status}");
            assert_eq!(load(directory.path(), "null"), "opened true");
        }
        Err(error) => skipped(&format!("a stripped plugin: strip cannot be run: {error}")),
    }
}

#[test]
fn files_that_are_no_plugin_are_listed_with_their_reason() {
    let null = std::fs::read(plugin_files::plugin("null")).unwrap();
    let truncated = |length: usize| null[..length].to_vec();
    let mut aarch64 = null.clone();
    aarch64[18..20].copy_from_slice(&183u16.to_le_bytes());
    let mut program = null.clone();
    program[16..18].copy_from_slice(&2u16.to_le_bytes());
    let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/libc.so.6", "/usr/lib/libc.so.6"];
    let library = libc.iter().find_map(|path| std::fs::read(path).ok()).expect("a libc somewhere");
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("empty", Vec::new(), "unusable not_elf | is not an ELF shared object: it is empty"),
        ("text", b"[plugin]\nname = \"text\"\n".to_vec(), "is not an ELF shared object: it starts with"),
        ("header-only", truncated(40), "unusable truncated | is cut off: it needs 64 bytes and has 40"),
        ("no-segments", truncated(64), "unusable truncated | is cut off"),
        ("200-kb", truncated(200_000), "unusable truncated | is cut off"),
        ("3-kb", truncated(3000), "unusable truncated | is cut off"),
        ("machine", aarch64, "was built for aarch64, this host runs on x86_64"),
        ("program", program, "is an ELF file of type 2"),
        ("library", library, "is a library but not a plugin: it carries no HOSTPLUG note"),
    ];
    for (name, content, expected) in cases {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(format!("{name}.so")), content).unwrap();
        let said = load(directory.path(), name);
        assert!(said.contains(expected), "{name}: {said}");
        assert!(said.starts_with("not_found | no plugin is named"), "{name}: {said}");
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("directory.so")).unwrap();
    assert!(load(directory.path(), "x").contains("unusable not_a_file | is not a regular file"));
}

#[test]
fn every_cut_of_a_plugin_is_refused_or_complete() {
    let null = std::fs::read(plugin_files::plugin("null")).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("cut.so");
    let (mut refused, mut accepted) = (0, 0);
    for length in (0..null.len()).step_by(4099) {
        std::fs::write(&file, &null[..length]).unwrap();
        if host_plugins::preflight(&file, &Policy::default()).is_err() {
            refused += 1;
            continue;
        }
        // An accepted cut lies behind the last segment, where there is only data for debuggers and linkers.
        accepted += 1;
        if accepted % 64 == 1 {
            assert_eq!(load(directory.path(), "null"), "opened true", "cut at {length}");
        }
    }
    assert!(refused > 50, "only {refused} cuts were refused");
}

/// Changes the manifest in the note. The note comes before the copy with which the code describes itself.
fn with_note_changed(from: &str, to: &str) -> tempfile::TempDir {
    assert_eq!(from.len(), to.len());
    let directory = plugin_files::directory(&["null"]);
    let file = directory.path().join("null.so");
    let mut bytes = std::fs::read(&file).unwrap();
    let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|w| w == what);
    let note = find(&bytes, b"HOSTPLUG\0\0\0\0manifest_version").expect("the note");
    let at = note + find(&bytes[note..note + 2000], from.as_bytes()).expect("the text in the note");
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    std::fs::remove_file(&file).unwrap();
    std::fs::write(&file, bytes).unwrap();
    directory
}

/// The API version that the macro writes into a fixture's manifest today.
const API: &str = "[api]\nversion = \"0.2.0\"";

#[test]
fn manifests_that_do_not_fit_are_refused_with_what_would() {
    let cases = [
        (
            API,
            "[api]\nversion = \"9.1.0\"",
            "unusable api_version | was built for plugin API 9.1.0, this host speaks 0.2.0: build it again with host-plugin-api 0.2",
        ),
        (API, "[api]\nversion = \"0.1.5\"", "plugin API 0.1.5"),
        (API, "[api]\nversion = \"x.1.0\"", "unusable bad_manifest"),
        ("manifest_version = 1", "manifest_version = 2", "manifest_version is 2, this host reads version 1"),
        ("manifest_version = 1", "manifest_version = \"", "unusable bad_manifest"),
        ("panic = \"unwind\"", "panic = \"abort\" ", "unusable panic_abort"),
        ("id = \"host.test.null\"", "id = \"host.evil.null\"", "mismatch | "),
        (
            "kind = \"transfer\"",
            "kind = \"conveyer\"",
            "no_role | plugin \"null\" has no transfer role, only: conveyer",
        ),
        (
            "symbol = \"host_plugin_host_plugin_null\"",
            "symbol = \"host_plugin_host_plugin_nope\"",
            "no_header | ",
        ),
    ];
    for (from, to, expected) in cases {
        let directory = with_note_changed(from, to);
        let said = load(directory.path(), "null");
        assert!(said.contains(expected), "{to}: {said}");
    }
}

#[test]
fn an_absent_plugin_is_answered_with_where_and_what_was_looked_at() {
    let directory = plugin_files::directory(&["null", "panicking"]);
    std::fs::write(directory.path().join("notes.so"), "hello").unwrap();
    let catalog = Catalog::scan([directory.path(), Path::new("/nowhere/at/all")]);
    let error = catalog.find("wire").unwrap_err();
    let text = error.to_string();
    for part in [
        "\"wire\"",
        &directory.path().display().to_string(),
        "/nowhere/at/all (",
        "null, panicking",
        "notes.so",
    ] {
        assert!(text.contains(part), "{part} is missing in: {text}");
    }
    assert!(
        Catalog::default().find("x").unwrap_err().to_string().contains("no plugin directory is configured")
    );
}

#[test]
fn the_first_directory_wins_and_a_replaced_file_is_noticed() {
    let (first, second) =
        (plugin_files::directory(&["null"]), plugin_files::directory(&["null", "panicking"]));
    let catalog = Catalog::scan([first.path(), second.path()]);
    let entry = catalog.find("null").unwrap();
    assert!(entry.path.starts_with(first.path()));
    assert_eq!(catalog.shadowed().len(), 1);
    std::fs::copy(second.path().join("panicking.so"), first.path().join("other")).unwrap();
    std::fs::rename(first.path().join("other"), &entry.path).unwrap();
    let opening = Opening { name: "a".into(), config: String::new() };
    let error = open_transfer(entry, &opening).err().unwrap();
    assert!(matches!(error, PluginError::Changed { .. }), "{error}");
    std::fs::remove_file(&entry.path).unwrap();
    assert_eq!(open_transfer(entry, &opening).err().unwrap().reason(), "unreadable");
}
