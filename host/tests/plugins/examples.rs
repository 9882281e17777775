//! The examples in Rust, each a workspace of its own: they build, pass their tests, keep the contract, and serve a conversation.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("test.toml");
    let pages = folder.path().join("tested");
    std::fs::write(&config, format!("dir = {pages:?}\nsize_limit_mib = 256\n")).unwrap();
    let tested = kit(&file, &["--plugin-config", config.to_str().unwrap()]);
    assert!(tested.status.success() && said(&tested).contains(", 0 did not"), "{}", said(&tested));
    let plugins = plugin_files::directory(&["shm"]);
    std::fs::copy(&file, plugins.path().join("sqlite.so")).unwrap();
    let right = right(plugins.path(), 3);
    let served = || {
        let config = format!("{RESTORES}[plugin.sqlite]\ndir = {:?}\n", folder.path().join("served"));
        let caches = ["--role", "aggregated", "--prefill-radix-cache", "--plugins", "sqlite"];
        start(plugins.path(), 1, &caches, config)
    };
    let count = |cluster: &Cluster, end: &str| {
        let metrics = cluster.metrics(&cluster.worker("aggregated"));
        let of_sqlite = |key: &str| {
            key.starts_with("host_storage_pages_total{")
                && key.contains("tier=\"sqlite\"")
                && key.contains(&format!("end=\"{end}\""))
        };
        metrics.iter().filter(|(key, _)| of_sqlite(key)).map(|(_, pages)| *pages).sum::<f64>()
    };
    let mut first = served();
    assert_eq!(conversation(&first, 3), right);
    first.wait("pages to be written", || count(&first, "written") >= 8.0);
    assert_eq!(first.interrupt(), Some(0));
    let second = served();
    assert_eq!(conversation(&second, 3), right);
    assert!(count(&second, "read") > 0.0, "no page was restored");
}
