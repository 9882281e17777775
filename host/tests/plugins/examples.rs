//! The examples: they build, pass their tests, keep the contract, and serve a conversation. Those in Rust are workspaces of their own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use host_tests::c_plugins::{Compiler, include};
use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use host_tests::skip::skipped;

use super::new::{cargo, repository, said, target};

/// Builds an example and runs its tests, in the folder that generated crates share. `None` if a crate that it needs is neither on
/// this machine nor to be had from a registry.
fn built(name: &str) -> Option<PathBuf> {
    let at = repository().join("examples").join(name);
    let fetched = Command::new(env!("CARGO")).current_dir(&at).args(["fetch", "--locked"]).output().unwrap();
    let offline = Command::new(env!("CARGO"))
        .current_dir(&at)
        .args(["metadata", "--locked", "--offline", "--format-version", "1"])
        .output()
        .unwrap();
    if !fetched.status.success() && !offline.status.success() {
        skipped(&format!("examples/{name}: its crates cannot be had: {}", said(&fetched)));
        return None;
    }
    cargo(&at, &["test", "--locked"]);
    cargo(&at, &["build", "--locked"]);
    Some(target().join("debug").join(format!("libhost_{}.so", name.replace('-', "_"))))
}

fn kit(file: &Path, more: &[&str]) -> Output {
    let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
    host.args(["plugins", "test", "--patience", "30"]).args(more).arg(file).output().unwrap()
}

/// The answers of a conversation over these plugins. Each prompt is the previous one with its answer and more tokens.
fn conversation(cluster: &Cluster, turns: u32) -> Vec<Vec<u64>> {
    let mut text: Vec<u32> = (0..64).collect();
    let answers = (0..turns).map(|turn| {
        let answer = cluster.generate(&text, 8).unwrap().tokens;
        text.extend(answer.iter().map(|token| u32::try_from(*token).unwrap()));
        text.extend(turn..turn + 24);
        answer
    });
    answers.collect()
}

fn start(plugins: &Path, workers: usize, more: &[&str], config: String) -> Cluster {
    let flags = ["--executor", "synthetic", "--kv-memory", "64MiB"];
    let mut flags: Vec<String> = flags.iter().chain(more).map(|flag| (*flag).to_owned()).collect();
    flags.extend(["--plugins-dir".into(), plugins.display().to_string()]);
    Cluster::start(&Start { program: Path::new(env!("CARGO_BIN_EXE_host")), flags, config, workers })
}

/// The answers of an aggregated worker without any cache.
fn right(plugins: &Path, turns: u32) -> Vec<Vec<u64>> {
    conversation(&start(plugins, 1, &["--role", "aggregated"], String::new()), turns)
}

#[test]
fn the_transfer_backend_over_tcp_has_300_lines_keeps_the_contract_and_serves_a_conversation() {
    let sources = repository().join("examples/tcp-transfer/src");
    let files = std::fs::read_dir(sources).unwrap().map(|entry| entry.unwrap().path());
    let lines: usize = files.map(|file| std::fs::read_to_string(file).unwrap().lines().count()).sum();
    assert!(lines < 300, "the README says fewer than 300 lines, and there are {lines}");
    let Some(file) = built("tcp-transfer") else { return };
    let tested = kit(&file, &[]);
    assert!(tested.status.success() && said(&tested).contains(", 0 did not"), "{}", said(&tested));
    let plugins = plugin_files::directory(&["shm"]);
    std::fs::copy(&file, plugins.path().join("tcp.so")).unwrap();
    let caches = ["--plugins", "tcp", "--decode-radix-cache", "--prefill-radix-cache"];
    let cluster = start(plugins.path(), 2, &caches, String::new());
    assert_eq!(conversation(&cluster, 4), right(plugins.path(), 4));
    let moved = cluster.generate(&[7; 100], 2).unwrap().transferred_bytes;
    assert!(moved > 0, "no page went over TCP");
}

#[test]
fn the_tier_over_sqlite_has_200_lines_keeps_the_contract_and_restores_a_conversation_after_a_restart() {
    let source = std::fs::read_to_string(repository().join("examples/sqlite-tier/src/lib.rs")).unwrap();
    assert!(source.lines().count() < 200, "the README says fewer than 200 lines");
    let Some(file) = built("sqlite-tier") else { return };
    keeps_pages("sqlite", &file);
}

/// Runs the kit on a storage tier, and a conversation that it restores after a restart.
fn keeps_pages(name: &str, file: &Path) {
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("test.toml");
    let pages = folder.path().join("tested");
    std::fs::write(&config, format!("dir = {pages:?}\nsize_limit_mib = 256\n")).unwrap();
    let tested = kit(file, &["--plugin-config", config.to_str().unwrap()]);
    assert!(tested.status.success() && said(&tested).contains(", 0 did not"), "{}", said(&tested));
    let plugins = plugin_files::directory(&["shm"]);
    std::fs::copy(file, plugins.path().join(format!("{name}.so"))).unwrap();
    let right = right(plugins.path(), 3);
    let served = || {
        let config = format!("{RESTORES}[plugin.{name}]\ndir = {:?}\n", folder.path().join("served"));
        let caches = ["--role", "aggregated", "--prefill-radix-cache", "--plugins", name];
        start(plugins.path(), 1, &caches, config)
    };
    let count = |cluster: &Cluster, end: &str| {
        let metrics = cluster.metrics(&cluster.worker("aggregated"));
        let of_tier = |key: &str| {
            key.starts_with("host_storage_pages_total{")
                && key.contains(&format!("tier=\"{name}\""))
                && key.contains(&format!("end=\"{end}\""))
        };
        metrics.iter().filter(|(key, _)| of_tier(key)).map(|(_, pages)| *pages).sum::<f64>()
    };
    let mut first = served();
    assert_eq!(conversation(&first, 3), right);
    first.wait("pages to be written", || count(&first, "written") >= 8.0);
    assert_eq!(first.interrupt(), Some(0));
    let second = served();
    assert_eq!(conversation(&second, 3), right);
    assert!(count(&second, "read") > 0.0, "no page was restored");
}

/// LMDB's library, and the folder of its header unless the compiler finds it: those that `cargo xtask test` names, or the system's.
fn lmdb() -> Option<(PathBuf, Option<PathBuf>)> {
    let named = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let (Some(library), Some(header)) = (named("LMDB_LIBRARY"), named("LMDB_HEADER")) {
        return Some((library, header.parent().map(Path::to_owned)));
    }
    let gcc = Command::new("gcc").arg("-print-file-name=liblmdb.so").output().ok()?;
    let library = PathBuf::from(String::from_utf8(gcc.stdout).ok()?.trim());
    (library.is_absolute() && Path::new("/usr/include/lmdb.h").exists()).then_some((library, None))
}

#[test]
fn the_tier_over_lmdb_has_300_lines_keeps_the_contract_as_each_compiler_builds_it_and_restores_a_conversation()
 {
    let example = repository().join("examples/lmdb-tier");
    let source = std::fs::read_to_string(example.join("lmdb_tier.cpp")).unwrap();
    assert!(source.lines().count() < 300, "the README says fewer than 300 lines");
    let Some((library, include_lmdb)) = lmdb() else {
        skipped("examples/lmdb-tier: LMDB is not on this machine; `cargo xtask test` brings Debian's");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    for compiler in Compiler::all() {
        let file = folder.path().join(format!("{compiler:?}.so"));
        let mut command = compiler.command(true).unwrap();
        command.args(["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", "-fPIC", "-shared"]);
        command.args(["-fvisibility=hidden", "-pthread", "-I"]).arg(include());
        if let Some(folder) = &include_lmdb {
            command.arg("-isystem").arg(folder);
        }
        command.arg(format!("-DMANIFEST=\"{}\"", example.join("plugin.toml").display()));
        command.arg(example.join("lmdb_tier.cpp")).arg(&library).arg("-o").arg(&file);
        command.arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display()));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{command:?}: {}", said(&output));
        keeps_pages("lmdb", &file);
    }
}
