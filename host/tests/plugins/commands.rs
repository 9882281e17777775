//! `host plugins ..`, on the real program.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use host_tests::program::run_to_end;
use host_tests::{elf, plugin_files};

/// Exit code, standard output and standard error.
fn host(arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_host")).args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().expect("an exit code, no signal"), text(&output.stdout), text(&output.stderr))
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn list_shows_usable_shadowed_and_unusable_files() {
    let (first, second) = (plugin_files::directory(&["null"]), plugin_files::directory(&["null", "memory"]));
    std::fs::write(second.path().join("notes.so"), "hello").unwrap();
    let directories = format!("{},{}", path(first.path()), path(second.path()));
    let (code, said, _) = host(&["plugins", "list", "--plugins-dir", &directories]);
    assert_eq!(code, 0);
    assert!(said.contains("null") && said.contains("memory") && said.contains("tier"), "{said}");
    assert!(said.contains("shadowed") && said.contains("notes.so is not an ELF shared object"), "{said}");

    let (_, said, _) = host(&["plugins", "list", "--json", "--plugins-dir", &directories]);
    let list: serde_json::Value = serde_json::from_str(&said).unwrap();
    let states: Vec<_> =
        list["plugins"].as_array().unwrap().iter().map(|p| p["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["usable", "usable", "shadowed", "unusable"]);
    assert_eq!(list["plugins"][1]["manifest"]["role"][0]["kind"], "tier");
}

#[test]
fn inspect_tells_what_a_file_is_and_refuses_what_is_no_plugin() {
    let directory = plugin_files::directory(&["shm"]);
    let file = directory.path().join("shm.so");
    let (code, said, _) = host(&["plugins", "inspect", path(&file)]);
    assert_eq!(code, 0, "{said}");
    for part in
        ["shm 0.1.0 (host.shm)", "libc.so.6", "settled", "copy_threads: integer, default 1", "verdict"]
    {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
    let (code, said, _) = host(&["plugins", "inspect", "--json", path(&file)]);
    let all: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, all["manifest"]["plugin"]["name"].as_str()), (0, Some("shm")));
    assert_eq!(all["sha256"].as_str().unwrap().len(), 64);

    let text = directory.path().join("text.so");
    std::fs::write(&text, "hello").unwrap();
    let (code, _, said) = host(&["plugins", "inspect", path(&text)]);
    assert_eq!(code, 2);
    assert!(said.contains("text.so is not an ELF shared object"), "{said}");
}

#[test]
fn check_answers_2_with_all_violations_and_0_when_it_works() {
    let directory = plugin_files::directory(&["null", "shm"]);
    let check = |plugin: &str| {
        let directory = path(directory.path());
        host(&[
            "plugins",
            "check",
            "--executor",
            "synthetic",
            "--plugins-dir",
            directory,
            "--plugins",
            plugin,
        ])
    };
    assert_eq!(check("shm"), (0, "the configuration works\n".into(), String::new()));
    let (code, _, said) = check("null");
    assert_eq!(code, 2);
    for part in ["arrival_notification, because", "peer_restart, because", "use instead: shm"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
}

#[test]
fn rules_prints_every_row_with_its_reason() {
    let (code, said, _) = host(&["plugins", "rules"]);
    assert_eq!(code, 0);
    for rule in host_plugins::requirements::RULES {
        assert!(said.contains(rule.reason), "{}", rule.reason);
    }
    let (_, said, _) = host(&["plugins", "rules", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(rows.as_array().unwrap().len(), host_plugins::requirements::RULES.len());
}

#[test]
fn what_is_installed_and_locked_is_loaded_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let at = path(directory.path());
    let (code, said, error) =
        host(&["plugins", "install", path(&plugin_files::plugin("memory")), "--plugins-dir", at]);
    assert_eq!(code, 0, "{said}{error}");
    assert!(said.contains("installed memory 0.1.0"), "{said}");
    let list = || host(&["plugins", "list", "--plugins-dir", at]).1;
    assert!(list().contains("usable"), "{}", list());

    let (code, said, _) = host(&["plugins", "lock", "--plugins-dir", at]);
    assert_eq!(code, 0);
    assert!(said.contains("lists 1 files"), "{said}");
    assert!(list().contains("locked"), "{}", list());

    // A lock file that every user may change is not accepted.
    let lock = directory.path().join("plugins.lock");
    let mode = |mode| std::fs::set_permissions(&lock, PermissionsExt::from_mode(mode)).unwrap();
    mode(0o666);
    let (_, said, error) = host(&["plugins", "list", "--plugins-dir", at]);
    assert!(
        (said.clone() + &error).contains("plugins.lock cannot be read: it could be replaced by others"),
        "{said}{error}"
    );
    mode(0o644);

    // First a file that is not listed, then a listed file with other bytes.
    std::fs::copy(plugin_files::plugin("null"), directory.path().join("null.so")).unwrap();
    assert!(list().contains("null.so is not listed in"), "{}", list());
    let file = directory.path().join("memory.so");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert!(list().contains("plugins.lock pins"), "{}", list());

    // If the lock file cannot be read, no plugin is usable, and the command says so.
    std::fs::write(directory.path().join("plugins.lock"), "[[plugin]]\nid = 3\n").unwrap();
    assert!(list().contains("no usable plugin"), "{}", list());
    assert!(list().contains("plugins.lock is wrong: TOML parse error"), "{}", list());
    let (_, said, _) = host(&["plugins", "list", "--json", "--plugins-dir", at]);
    let all: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert!(all["unsearched"][0]["text"].as_str().unwrap().contains("plugins.lock is wrong"), "{said}");
}

#[test]
fn a_directory_that_is_not_there_is_said_not_to_be() {
    let (code, said, _) = host(&["plugins", "list", "--plugins-dir", "/nowhere/at-all"]);
    assert!(code == 0 && said.contains("/nowhere/at-all is left out: No such file"), "{said}");
}

/// The files are pipes without a writer: opening one as a file would wait for a writer.
#[test]
fn pipes_in_place_of_files_are_not_waited_for() {
    for (name, says) in [
        ("plugins.lock", "plugins.lock cannot be read: it is not a regular file"),
        ("a.plugin.toml", "a.plugin.toml says nothing of use about a plugin: it is not a regular file"),
        ("a.so", "a.so is not a regular file"),
    ] {
        let directory = plugin_files::directory(&["null"]);
        let pipe = directory.path().join(name);
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let mut list = Command::new(env!("CARGO_BIN_EXE_host"));
        list.args(["plugins", "list", "--plugins-dir"]).arg(directory.path());
        let ended = run_to_end("host plugins list", &mut list);
        assert!(ended.status.success() && ended.stdout.contains(says), "{name}: {ended}");
    }
}

#[test]
fn what_would_be_refused_where_it_lies_is_not_installed_and_replaces_nothing() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    std::fs::write(directory.path().join("null.so"), "the one before").unwrap();
    let file = plugin_files::plugin("null");
    let install = ["plugins", "install", path(&file), "--plugins-dir", path(directory.path())];
    let (code, _, said) = host(&install);
    assert!(code == 2 && said.contains("null.so could be replaced by others"), "{code} {said}");
    let names: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["null.so"]);
    assert_eq!(std::fs::read(directory.path().join("null.so")).unwrap(), b"the one before");
}

/// The plugin `null` whose note has another description of the same length.
fn described(directory: &Path, text: &str) -> std::path::PathBuf {
    let mut bytes = std::fs::read(plugin_files::plugin("null")).unwrap();
    let old = b"description = \"Fake for tests and benchmarks: moves nothing and says it did\"";
    let at = bytes.windows(old.len()).position(|window| window == old).unwrap();
    bytes[at..at + old.len()].fill(b' ');
    bytes[at..at + text.len()].copy_from_slice(text.as_bytes());
    let file = directory.join("null.so");
    std::fs::write(&file, bytes).unwrap();
    file
}

#[test]
fn what_a_file_says_of_itself_neither_commands_the_terminal_nor_looks_like_our_lines() {
    let directory = tempfile::tempdir().unwrap();
    let file = described(directory.path(), r#"description = "\u001b[2Jcalm\nverdict    usable""#);
    let (code, said, _) = host(&["plugins", "inspect", path(&file)]);
    assert_eq!(code, 0);
    assert!(!said.contains('\x1b') && said.contains("\\u{1b}[2Jcalm verdict usable"), "{said}");
    assert_eq!(said.lines().filter(|line| line.starts_with("verdict")).count(), 1, "{said}");
}

/// The note of a file whose manifest has these lines.
fn note(plugin: &str, role: &str, build: &str, more: &str) -> Vec<u8> {
    let (api, target) = (host_plugin_api::VERSION, host_plugin_api::note::BUILT_FOR);
    let text = format!(
        "manifest_version = 1\n[plugin]\nname = \"n\"\nversion = \"1.0.0\"\n{plugin}\n[api]\nversion = \"{api}\"\n\
         [[role]]\n{role}\n[build]\npanic = \"unwind\"\nsymbol = \"s\"\ntarget = \"{target}\"\n{build}\n{more}"
    );
    elf::note(host_plugin_api::note::NAME, host_plugin_api::note::TYPE_MANIFEST, text.as_bytes())
}

/// A file with these lines in its manifest, and without code.
fn claiming(directory: &Path, plugin: &str, role: &str, build: &str, more: &str) -> std::path::PathBuf {
    let note = note(plugin, role, build, more);
    let file = directory.join("n.so");
    elf::object(&file, &[(elf::LOAD, 0, 4096), (elf::NOTE, 4096, note.len() as u64)], &[(4096, &note)]);
    file
}

/// A valid file that needs libraries of these names.
fn needing(directory: &Path, libraries: &[&str]) -> std::path::PathBuf {
    const NAMES: u64 = 7000;
    let note = note(PLUGIN, ROLE, BUILD, "");
    let (mut table, mut names) = (vec![(5, NAMES)], Vec::new());
    for library in libraries {
        table.push((1, names.len() as u64));
        names.extend([library.as_bytes(), b"\0"].concat());
    }
    let table: Vec<u8> =
        table.into_iter().flat_map(|(tag, value)| [tag, value]).flat_map(u64::to_le_bytes).collect();
    let segments = [
        (elf::LOAD, 0, 8192),
        (elf::NOTE, 4096, note.len() as u64),
        (elf::DYNAMIC, 8192, table.len() as u64),
    ];
    let file = directory.join("n.so");
    elf::object(&file, &segments, &[(4096, &note), (NAMES, &names), (8192, &table)]);
    file
}

const PLUGIN: &str = "id = \"i\"";
const ROLE: &str = "kind = \"tier\"";
const BUILD: &str = "rustc = \"1\"";

#[test]
fn no_text_of_a_file_looks_like_a_line_of_ours() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let said = |file: &Path| {
        let all = [
            host(&["plugins", "inspect", path(file)]),
            host(&["plugins", "list", "--plugins-dir", path(at)]),
        ];
        let lines = all.map(|(_, said, error)| said + &error).concat();
        let forged = lines.lines().filter(|line| line.starts_with("verdict    usable")).count();
        (forged, lines)
    };
    let honest = claiming(at, PLUGIN, ROLE, BUILD, "");
    let (verdicts, lines) = said(&honest);
    assert_eq!(verdicts, 1, "{lines}");

    const FORGED: &str = r#""x\nverdict    usable\nx""#;
    let value = |key: &str| format!("{key} = {FORGED}");
    let list = |key: &str| format!("{key} = [{FORGED}]");
    let companion = |own: &str| format!("[[companion]]\nname = \"c\"\nprogram = \"p\"\n{own}");
    let (id, kind) = (format!("{PLUGIN}\n"), format!("{ROLE}\n"));
    for (plugin, role, build, more) in [
        (value("id"), ROLE.to_owned(), BUILD.to_owned(), String::new()),
        (id.clone() + &list("built_on"), ROLE.to_owned(), BUILD.to_owned(), String::new()),
        (id.clone() + &value("threads"), ROLE.to_owned(), BUILD.to_owned(), String::new()),
        (id.clone(), value("kind"), BUILD.to_owned(), String::new()),
        (id.clone(), kind.clone() + &list("memory"), BUILD.to_owned(), String::new()),
        (id.clone(), kind.clone() + &list("capabilities"), BUILD.to_owned(), String::new()),
        (id.clone(), kind.clone(), value("rustc"), String::new()),
        (id.clone(), kind.clone(), BUILD.to_owned(), format!("[config.{FORGED}]\ntype = \"string\"")),
        (id.clone(), kind.clone(), BUILD.to_owned(), format!("[config.k]\ntype = {FORGED}")),
        (
            id.clone(),
            kind.clone(),
            BUILD.to_owned(),
            format!("[[companion]]\nname = {FORGED}\nprogram = \"p\""),
        ),
        (id.clone(), kind.clone(), BUILD.to_owned(), companion(&value("ready"))),
    ] {
        let (forged, lines) = said(&claiming(at, &plugin, &role, &build, &more));
        assert_eq!(forged, 0, "{lines}");
        assert!(lines.contains("must be without control characters"), "{lines}");
    }
    // Free text may have several lines. It is shown on one line.
    for (plugin, more) in [
        (id.clone() + &value("description"), String::new()),
        (id.clone(), format!("[config.k]\ntype = \"string\"\n{}\n{}", value("doc"), value("default"))),
        (id.clone(), companion(&list("arguments"))),
    ] {
        let (verdicts, lines) = said(&claiming(at, &plugin, ROLE, BUILD, &more));
        assert_eq!(verdicts, 1, "{lines}");
    }
    // Names of needed libraries are also shown on one line.
    let file = needing(at, &["libx.so\nverdict    usable", "\u{1b}[2Jliby.so", "\u{9b}2J\u{202e}os.zbil"]);
    let (verdicts, lines) = said(&file);
    assert_eq!(verdicts, 1, "{lines}");
    let needs = "needs      libx.so\\nverdict    usable, \\u{1b}[2Jliby.so, \\u{9b}2J\\u{202e}os.zbil";
    assert!(lines.lines().any(|line| line == needs), "{lines}");
    let (_, json, _) = host(&["plugins", "inspect", path(&file), "--json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["needed_libraries"][2], "\u{9b}2J\u{202e}os.zbil");
    let honest = claiming(at, PLUGIN, ROLE, BUILD, "");
    // Names of files are also shown on one line.
    std::fs::write(at.join("a\nverdict    usable.so"), "text").unwrap();
    let (verdicts, lines) = said(&honest);
    assert!(verdicts == 1 && lines.contains("a\\nverdict"), "{lines}");
}

#[test]
fn a_plugin_replaces_another_one_of_its_name_only_by_force() {
    let (directory, from) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = path(directory.path());
    let installed = || std::fs::read(directory.path().join("n.so")).unwrap();
    let install = |id: &str, version: &str, flags: &[&str]| {
        let file = claiming(from.path(), &format!("id = {id:?}"), ROLE, &format!("rustc = {version:?}"), "");
        let (code, said, error) =
            host(&[&["plugins", "install", path(&file), "--plugins-dir", at], flags].concat());
        (code, said + &error, std::fs::read(file).unwrap())
    };
    let (code, said, first) = install("acme.n", "1", &[]);
    assert_eq!(code, 0, "{said}");
    let (code, said, _) = install("evil.n", "1", &[]);
    assert_eq!(code, 2, "{said}");
    for part in ["n.so is another plugin of this name", "\"acme.n\"", "\"evil.n\"", "--force"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(installed(), first);
    let (code, said, newer) = install("acme.n", "2", &[]);
    assert_eq!((code, installed() == newer), (0, true), "{said}");
    let (code, said, other) = install("evil.n", "1", &["--force"]);
    assert_eq!((code, installed() == other), (0, true), "{said}");
}

#[test]
fn every_wrong_key_of_a_configuration_is_said_at_once() {
    let directory = plugin_files::directory(&["shm"]);
    let config = directory.path().join("host.toml");
    std::fs::write(&config, "[plugin.shm]\nfoo = 1\nbar = 2\ncopy_threads = \"x\"\n").unwrap();
    let arguments = ["plugins", "check", "--executor", "synthetic", "--plugins", "shm"];
    let more = ["--plugins-dir", path(directory.path()), "--config", path(&config)];
    let (code, _, said) = host(&[&arguments[..], &more].concat());
    assert_eq!(code, 2);
    for part in ["unknown key \"foo\"", "unknown key \"bar\"", "\"copy_threads\" is of type string"] {
        assert!(said.contains(part), "{part:?} is not in:\n{said}");
    }
}

#[test]
fn a_file_is_named_from_where_one_is() {
    let directory = plugin_files::directory(&["null"]);
    let output = Command::new(env!("CARGO_BIN_EXE_host"))
        .current_dir(directory.path())
        .args(["plugins", "test", "--case", "load", "null.so"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.starts_with("pass     load"), "{said}");
}

#[test]
fn a_file_that_every_user_may_change_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let directory = plugin_files::directory(&["null"]);
    let file = directory.path().join("null.so");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    let (code, _, said) = host(&["plugins", "inspect", path(&file)]);
    assert_eq!(code, 2);
    assert!(said.contains("may be changed by every user"), "{said}");
}

#[test]
fn a_closed_output_ends_the_command_quietly() {
    let directory = plugin_files::directory(&["memory"]);
    let (at, file) = (directory.path(), directory.path().join("memory.so"));
    let list = ["plugins", "list", "--plugins-dir", path(at)];
    let json = ["plugins", "list", "--json", "--plugins-dir", path(at)];
    let inspect = ["plugins", "inspect", path(&file)];
    let test = ["plugins", "test", "--case", "manifest", path(&file)];
    for arguments in
        [&["plugins", "rules"][..], &["plugins", "test", "--list"], &list, &json, &inspect, &test]
    {
        // The reader closes the pipe before the program starts.
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let host = Command::new(env!("CARGO_BIN_EXE_host")).args(arguments).stdout(writer).output().unwrap();
        let said = String::from_utf8_lossy(&host.stderr);
        assert!(host.status.success() && said.is_empty(), "{arguments:?}: {} {said}", host.status);
    }
    // The exit code gives the result of a test even if its output is closed.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let text = at.join("text.so");
    std::fs::write(&text, "hello").unwrap();
    let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
    let host = host.args(["plugins", "test", path(&text)]).stdout(writer).output().unwrap();
    assert_eq!(host.status.code(), Some(2));
}

#[test]
fn bench_says_what_reading_loading_and_calling_cost() {
    let directory = plugin_files::directory(&["null", "memory", "plain"]);
    for (plugin, call) in
        [("null", "submit of 64 writes"), ("memory", "poll"), ("plain", "alloc and free of 512")]
    {
        let file = directory.path().join(format!("{plugin}.so"));
        let (code, said, error) = host(&["plugins", "bench", path(&file)]);
        assert_eq!(code, 0, "{said}{error}");
        for part in ["inspect ", "load ", "4096", call] {
            assert!(said.contains(part), "{part:?} is not in:\n{said}");
        }
    }
    let (_, said, _) = host(&["plugins", "bench", "--json", path(&directory.path().join("null.so"))]);
    let all: serde_json::Value = serde_json::from_str(&said).unwrap();
    let boundary = all["measured"]["boundary"].as_array().unwrap();
    assert_eq!(
        boundary.iter().map(|row| row["writes"].as_u64().unwrap()).collect::<Vec<_>>(),
        [1, 8, 64, 512, 4096]
    );
    assert!(boundary.iter().all(|row| row["abi_ns"].as_f64().unwrap() > 0.0), "{said}");
    assert!(all["measured"]["load_ms"].as_f64().unwrap() > 0.0, "{said}");

    let text = directory.path().join("text.so");
    std::fs::write(&text, "hello").unwrap();
    let (code, _, said) = host(&["plugins", "bench", path(&text)]);
    assert!(code == 2 && said.contains("text.so is not an ELF shared object"), "{said}");
}

#[test]
fn bench_takes_the_plugins_configuration_and_says_loudly_what_it_skips_without() {
    let directory = plugin_files::directory(&["hicache-file"]);
    let file = directory.path().join("hicache-file.so");
    let (code, said, error) = host(&["plugins", "bench", path(&file)]);
    assert_eq!(code, 0, "{said}{error}");
    assert!(said.contains("load ") && !said.contains("this plugin, ns per call"), "{said}");
    assert!(
        said.contains("NOT MEASURED: the role tier, because") && said.contains("dir is not set"),
        "{said}"
    );
    assert!(said.contains("--plugin-config FILE"), "{said}");

    let config = directory.path().join("config.toml");
    std::fs::write(&config, format!("dir = {:?}", directory.path().join("pages"))).unwrap();
    let (code, said, error) =
        host(&["plugins", "bench", "--json", "--plugin-config", path(&config), path(&file)]);
    let all: serde_json::Value = serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{error}"));
    let calls = all["measured"]["calls"].as_array().unwrap();
    assert!(code == 0 && calls.len() == 2 && calls.iter().all(|call| call["role"] == "tier"), "{said}");
    assert_eq!(all["measured"]["skipped"], serde_json::json!([]));

    // A given configuration must be right.
    for (wrong, says) in [
        ("dir = \"here\"", "absolute path"),
        ("dri = \"/here\"", "unknown key"),
        ("threads = 2", "dir is not set"),
    ] {
        std::fs::write(&config, wrong).unwrap();
        let (code, _, said) = host(&["plugins", "bench", "--plugin-config", path(&config), path(&file)]);
        assert!(code == 2 && said.contains(says), "{wrong}: {said}");
    }
}
