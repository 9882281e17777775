//! Every way known to us in which a plugin file can fail, each in a process of its own: the outcome is a sentence that
//! says what to do, never a signal.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "plugin_support/damaged.rs"]
mod damaged;
#[path = "plugin_support/fixture.rs"]
mod fixture;
#[path = "plugin_support/variant.rs"]
mod variant;

use std::path::{Path, PathBuf};
use std::process::Command;

use damaged::*;
use host::plugins::{Catalog, Entry, Policy, open_transfer};
use host_plugin_api::{Opening, Tag, VERSION};

/// Opens one file after the other in one process, and says how each went.
#[test]
#[ignore = "the other process of the last test below"]
fn one_after_the_other() {
    let Ok(files) = std::env::var("FILES") else { return };
    for file in files.split(':') {
        let opening = Opening { name: "test".into(), config: String::new() };
        match open_transfer(&Entry::of_file(Path::new(file)).unwrap(), &opening) {
            Ok(backend) => println!("@ settled {}", backend.settled(Tag(1))),
            Err(error) => println!("@ {} | {error}", error.reason()),
        }
    }
}

/// Finds the only plugin of a directory as the host would, opens it, uses it, and says how that went.
#[test]
#[ignore = "the other process of the tests below"]
fn child() {
    let Ok(directory) = std::env::var("DIRECTORY") else { return };
    let policy = Policy { panic_abort: std::env::var("MAY_ABORT").is_ok(), ..Policy::default() };
    let catalog = Catalog::scan_with(policy, [&directory]);
    for file in catalog.unusable() {
        println!("@ {} | {}", file.reason.reason(), file.reason);
    }
    let Some(entry) = catalog.entries().first() else {
        if catalog.unusable().is_empty() {
            println!("@ not_found | {}", catalog.find("x").unwrap_err());
        }
        return;
    };
    if let Ok(then) = std::env::var("AFTER_SCAN") {
        assert!(Command::new("sh").args(["-c", &then]).current_dir(&directory).status().unwrap().success());
    }
    let open = || open_transfer(entry, &Opening { name: "test".into(), config: String::new() });
    let backend = match open() {
        Ok(backend) => backend,
        Err(error) => return println!("@ {} | {error}", error.reason()),
    };
    if let Ok(then) = std::env::var("AFTER_LOAD") {
        assert!(Command::new("sh").args(["-c", &then]).current_dir(&directory).status().unwrap().success());
        match open() {
            Ok(_again) => println!("@ again opened"),
            Err(error) => println!("@ again {} | {error}", error.reason()),
        }
    }
    assert_eq!(backend.settled(Tag(1)), 1);
    backend.shutdown(1000).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let from = if maps.contains("/memfd:") { "sealed memory" } else { "its place" };
    println!("@ opened from {from}, api {}", entry.manifest.api.version);
}

/// One way to fail: how the directory comes to be, in what environment it is loaded, and what is said.
struct Row {
    name: &'static str,
    make: fn(&Path),
    environment: &'static [(&'static str, &'static str)],
    /// The label, and parts of the sentence.
    says: &'static [&'static str],
}

const fn row(name: &'static str, make: fn(&Path), says: &'static [&'static str]) -> Row {
    Row { name, make, environment: &[], says }
}

const MALFORMED: &str = "MALFORMED";

/// The table. Rows of code that runs on behalf of a loaded plugin (panics in calls) are in
/// `plugin_panics_are_contained`, and those of the ABI's versions in the test below.
const ROWS: &[Row] = &[
    row("no file at all", |_| {}, &["not_found |", "searched ", "plugins there: none"]),
    row("empty", |at| put(at, b""), &["not_elf |", "it is empty"]),
    row("text", |at| put(at, b"not a library at all"), &["not_elf |", "it starts with \"not a library"]),
    row("random bytes", |at| put(at, &noise(5000)), &["not_elf |"]),
    row(
        "random bytes behind an ELF header",
        |at| put(at, &[&null()[..64], &noise(5000)].concat()),
        &["truncated |"],
    ),
    row(
        "cut within the header",
        |at| put(at, &null()[..40]),
        &["truncated |", "needs 64 bytes and has 40", "copy it again"],
    ),
    row("cut at 3 kB", |at| put(at, &null()[..3000]), &["truncated |", "has 3000"]),
    row("cut at 200 kB", |at| put(at, &null()[..200_000]), &["truncated |"]),
    row("cut at 300 kB", |at| put(at, &null()[..300_000]), &["truncated |"]),
    row(
        "for another machine",
        |at| put(at, &aarch64()),
        &["wrong_machine |", "built for aarch64, this host runs on"],
    ),
    row(
        "for another C library",
        |at| put(at, &noted("-gnu\"", "-musl\"")),
        &["wrong_target |", "linux-musl"],
    ),
    row("a library without a note", |at| put(at, &libc()), &["no_note |", "not a plugin", "export_plugin!"]),
    row(
        "a symbol that nothing defines",
        |at| put(at, &undefined()),
        &["open |", "the system cannot load", "undefined symbol"],
    ),
    Row {
        name: "a constructor of the root that fails",
        make: |at| put_plugin(at, "malformed"),
        environment: &[(MALFORMED, "root fails")],
        says: &["constructor |", "the root's constructor has no licence"],
    },
    Row {
        name: "a constructor of the root that panics",
        make: |at| put_plugin(at, "malformed"),
        environment: &[(MALFORMED, "root panics")],
        says: &["constructor |", "panicked"],
    },
    row(
        "the same file, well",
        |at| put_plugin(at, "malformed"),
        &["roles |", "exports the roles [], but its manifest declares [\"transfer\"]", "and no more"],
    ),
    row(
        "another API major",
        |at| put(at, &noted(&format!("[api]\nversion = \"{VERSION}"), "[api]\nversion = \"1.0.0")),
        &["api_version |", "plugin API 1.0.0", "build it again"],
    ),
    row(
        "a host that is too old",
        |at| {
            put(
                at,
                &noted(
                    "description = \"Fake for tests and benchmarks: moves nothing and says it did\"",
                    "min_host = \"9.0.0\"",
                ),
            )
        },
        &["host_too_old |", "needs host 9.0.0 or newer", "update the host"],
    ),
    row(
        "threads that are neither own nor none",
        |at| {
            put(
                at,
                &noted(
                    "description = \"Fake for tests and benchmarks: moves nothing and says it did\"",
                    "threads = \"many\"",
                ),
            )
        },
        &["bad_manifest |", "threads is \"many\", it must be own or none"],
    ),
    row(
        "built with panic = \"abort\"",
        |at| put(at, &noted("panic = \"unwind\"", "panic = \"abort\"")),
        &["panic_abort |", "--plugins-may-abort"],
    ),
    Row {
        name: "built with panic = \"abort\", and accepted",
        make: |at| put(at, &everywhere("panic = \"unwind\"", "panic = \"abort\" ")),
        environment: &[("MAY_ABORT", "1")],
        says: &["opened from its place"],
    },
    row(
        "may be changed by everybody",
        |at| {
            put_plugin(at, "null");
            mode(&at.join("plugin.so"), 0o666)
        },
        &["permissions |", "may be changed by every user", "chmod o-w", "--insecure-plugin-permissions"],
    ),
    row(
        "in a directory that everybody may change",
        |at| {
            put_plugin(at, "null");
            mode(at, 0o777)
        },
        &["permissions |", "may be changed by every user"],
    ),
    row(
        "in a sticky directory",
        |at| {
            put_plugin(at, "null");
            mode(at, 0o1777)
        },
        &["opened from its place"],
    ),
    row(
        "a link into such a directory",
        link_into_open_directory,
        &["permissions |", "may be changed by every user"],
    ),
    row(
        "pinned and the same",
        |at| {
            put_plugin(at, "null");
            pin(at, None)
        },
        &["opened from sealed memory"],
    ),
    row(
        "pinned and not the same",
        |at| {
            put_plugin(at, "null");
            pin(at, Some("00"))
        },
        &["wrong_hash |", "null.plugin.toml pins 00", "restore the file"],
    ),
    Row {
        name: "pinned, replaced after the scan by other bytes",
        make: |at| {
            put_plugin(at, "null");
            pin(at, None)
        },
        environment: &[("AFTER_SCAN", "cp plugin.so other && printf x >> other && mv other plugin.so")],
        says: &["changed |", "replaced since it was scanned"],
    },
    Row {
        name: "pinned, written over in place after it was loaded",
        make: |at| {
            put_plugin(at, "null");
            pin(at, None)
        },
        environment: &[("AFTER_LOAD", "head -c 300000 /dev/zero > plugin.so")],
        says: &["again opened", "opened from sealed memory"],
    },
    // With the same bytes: other ones end the process at the next call, which nobody can prevent; that the next start
    // of an instance notices is what can be had.
    Row {
        name: "written over in place after it was loaded",
        make: |at| put_plugin(at, "null"),
        environment: &[(
            "AFTER_LOAD",
            "cp plugin.so same && dd if=same of=plugin.so conv=notrunc status=none",
        )],
        says: &["again overwritten |", "host plugins install", "opened from its place"],
    },
    Row {
        name: "replaced by rename after it was loaded",
        make: |at| put_plugin(at, "null"),
        environment: &[("AFTER_LOAD", "cp plugin.so other && mv other plugin.so")],
        says: &["again opened", "opened from its place"],
    },
    row(
        "a side-car that is no TOML",
        |at| std::fs::write(at.join("a.plugin.toml"), "file = ").unwrap(),
        &["bad_side_car |"],
    ),
    row(
        "a side-car for other targets only",
        |at| {
            std::fs::write(
                at.join("a.plugin.toml"),
                "manifest_version = 1\n[[file]]\ntarget = \"m68k-unknown-linux-gnu\"\npath = \"a.so\"\n",
            )
            .unwrap()
        },
        &["not_found |"],
    ),
    row(
        "a side-car that names what is not there",
        |at| std::fs::write(at.join("a.plugin.toml"), side_car("sub/a.so", None)).unwrap(),
        &["unreadable |", "No such file"],
    ),
    row("a side-car that names a file elsewhere", side_car_elsewhere, &["opened from sealed memory"]),
];

/// What another process says that loads what is in the directory; it must end by itself.
fn load(name: &str, directory: &Path, environment: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env("DIRECTORY", directory)
        .env_remove(MALFORMED)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {}\n{text}{errors}", output.status);
    text.lines().filter_map(|line| Some(line.split_once("@ ")?.1)).collect::<Vec<_>>().join("\n")
}

fn check(name: &str, said: &str, says: &[&str]) {
    println!("{name:<52} {said}");
    for part in says {
        assert!(said.contains(part), "{name}: {part:?} is not in: {said}");
    }
    assert!(said.lines().all(|line| line.len() < 1000), "{name}: a sentence is shorter: {said}");
}

#[test]
fn every_row_of_the_table_ends_in_its_sentence() {
    for Row { name, make, environment, says } in ROWS {
        let directory = tempfile::tempdir().unwrap();
        make(directory.path());
        check(name, &load(name, directory.path(), environment), says);
    }
}

#[test]
fn files_of_another_user_are_refused() {
    let directory = fixture::directory(&["null"]);
    let file = directory.path().join("null.so");
    // Only root may give files away, and only root's tests can see this.
    if std::os::unix::fs::chown(&file, Some(4242), None).is_ok() {
        let said = load("another user", directory.path(), &[]);
        check("another user's file", &said, &["permissions |", "belongs to user 4242", "chown it"]);
    }
}

/// A constructor that aborts runs before anybody can check anything, so it is looked for in another process.
#[test]
fn a_file_that_aborts_while_it_is_loaded_ends_one_case_of_the_kit() {
    let file = fixture::plugin("malformed");
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .args(["plugins", "test", "--case", "load"])
        .arg(&file)
        .env(MALFORMED, "aborts on load")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.starts_with("crash    load"), "{said}");
}

/// A method and a root field at the ends.
const APPENDED: &[variant::Change<'_>] = &[
    ("Cargo.toml", "version = \"0.1.", "version = \"0.1.99"),
    (
        "src/abi.rs",
        "    #[sabi(last_prefix_field)]\n    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()>;\n}\n\n/// A transfer backend",
        "    #[sabi(last_prefix_field)]\n    fn shutdown(&self, deadline_ms: u64) -> AbiResult<()>;\n    /// New.\n    fn appended(&self) -> i32 {\n        1\n    }\n}\n\n/// A transfer backend",
    ),
    (
        "src/abi/root.rs",
        "    pub check_config: ROption<CheckConfig>,\n}\n\nimpl RootModule",
        "    pub check_config: ROption<CheckConfig>,\n    /// New.\n    #[sabi(missing_field(default))]\n    pub appended: ROption<CheckConfig>,\n}\n\nimpl RootModule",
    ),
    (
        "src/abi/root.rs",
        "attach, check_config }.leak_into_prefix()",
        "attach, check_config, appended: ROption::RNone }.leak_into_prefix()",
    ),
];

/// Plugins of other versions of the ABI, built here from a changed copy of the API.
#[test]
fn changed_types_are_named_in_one_line_and_appended_ones_are_allowed() {
    let rows: [(&str, &[variant::Change<'_>], &[&str]); 5] = [
        ("unchanged", &[], &["opened from its place, api 0.1."]),
        (
            "a field widened",
            &[
                (
                    "src/transfer.rs",
                    "    /// Bytes, at least 1.\n    pub length: u32,\n    /// Generation of the target region that the host means.\n    pub target_generation: u32,",
                    "    /// Bytes, at least 1.\n    pub length: u64,\n    /// Generation of the target region that the host means.\n    pub target_generation: u32,",
                ),
                ("src/transfer.rs", "size_of::<Write>() == 32", "size_of::<Write>() == 40"),
            ],
            &["layout |", "Write", "length", "u64", "build it again"],
        ),
        (
            "a method inserted",
            &[
                (
                    "src/abi.rs",
                    "    fn release(&self, prepared: PreparedId) -> AbiResult<()>;\n    /// See [`TransferBackend::submit`]",
                    "    fn release(&self, prepared: PreparedId) -> AbiResult<()>;\n    /// New.\n    fn inserted(&self) -> i32;\n    /// See [`TransferBackend::submit`]",
                ),
                (
                    "src/abi/guard.rs",
                    "    fn submit(&self, submission: &Submission, writes: RSlice",
                    "    fn inserted(&self) -> i32 {\n        1\n    }\n    fn submit(&self, submission: &Submission, writes: RSlice",
                ),
            ],
            &["layout |", "inserted", "build it again"],
        ),
        (
            "a method and a root field appended by a newer plugin",
            APPENDED,
            &["opened from its place, api 0.1.99"],
        ),
        (
            "no layouts to check",
            &[("src/abi/root.rs", "constructor, CheckTypeLayout::Yes)", "constructor, CheckTypeLayout::No)")],
            &["no_layout |", "no type layouts to check"],
        ),
    ];
    for (name, changes, says) in rows {
        let file: PathBuf = variant::null_with(&name.replace(' ', "-"), changes);
        let directory = tempfile::tempdir().unwrap();
        std::fs::copy(file, directory.path().join("plugin.so")).unwrap();
        check(name, &load(name, directory.path(), &[]), says);
    }
}

/// The host is the newer side: the golden file was built when the root had two fields.
#[test]
#[cfg(target_arch = "x86_64")]
fn what_was_appended_since_is_missing_in_an_older_plugin_and_nobody_minds() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/null-0.1.0-x86_64.so");
    let directory = tempfile::tempdir().unwrap();
    std::fs::copy(golden, directory.path().join("plugin.so")).unwrap();
    check("an older plugin", &load("golden", directory.path(), &[]), &["opened from its place, api 0.1.0"]);
}

/// What processes say that open these files one after the other; they must end by themselves.
fn open_all(files: &[&str]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_after_the_other", "--ignored", "--nocapture"])
        .env("FILES", files.join(":"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{files:?}: {}\n{said}", output.status);
    said
}

/// The layout check remembers what it saw, over all plugins of a process. What one appended must not bar another.
#[test]
#[cfg(target_arch = "x86_64")]
fn older_newer_and_equal_plugins_live_in_one_process_in_whatever_order_they_come() {
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/null-0.1.0-x86_64.so");
    let newer = variant::null_with("a-method-and-a-root-field-appended-by-a-newer-plugin", APPENDED);
    let (newer, equal) = (newer.display().to_string(), fixture::plugin("null").display().to_string());
    let (newer, equal) = (newer.as_str(), equal.as_str());
    for order in
        [[golden, equal, newer], [newer, golden, equal], [equal, newer, golden], [newer, equal, golden]]
    {
        let said = open_all(&order);
        let settled = said.lines().filter(|line| line.contains("@ settled 1")).count();
        assert!(settled == 3, "{order:?}: {said}");
    }
}

/// Two that extended the API without us, each in its own way: the first one wins, also over a host that knows neither.
#[test]
fn the_second_of_two_forks_of_the_api_is_refused_with_what_both_appended() {
    let one = variant::null_with("a-method-and-a-root-field-appended-by-a-newer-plugin", APPENDED);
    let replacements: Vec<String> =
        APPENDED.iter().map(|(_, _, to)| to.replace("appended", "forked")).collect();
    let forked: Vec<(&str, &str, &str)> =
        APPENDED.iter().zip(&replacements).map(|((file, from, _), to)| (*file, *from, to.as_str())).collect();
    let other = variant::null_with("a-fork", &forked);
    let said = open_all(&[&one.display().to_string(), &other.display().to_string()]);
    check(
        "a fork of the API",
        &said.lines().filter_map(|line| Some(line.split_once("@ ")?.1)).collect::<Vec<_>>().join("\n"),
        &["settled 1\nforked |", "a plugin that was loaded before", " in one, ", "forked", "appended"],
    );
}
