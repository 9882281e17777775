//! A plugin that does not return from a call: the worker logs the plugin and the call, and ends, so that a new process replaces it.
//! Pages that peers held for it become free.

use std::path::Path;

use host_tests::caches::TRIES;
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

use crate::worker_death::last_words_of_a_worker;

fn prompt(number: u32) -> Vec<u32> {
    (0..160).map(|token| token * (number + 3) % 200).collect()
}

fn start(plugins: &[&str], flags: &[&str], config: &str, workers: usize) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(plugins);
    let common = ["--executor", "synthetic", "--plugin-call-timeout", "6", "--pool-pages", "64"];
    let common = [&common[..], &["--retry-timeout", "600"]].concat();
    let mut all: Vec<String> = common.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let cluster = Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers });
    (cluster, plugins)
}

/// Whether a line of the log names a call that did not return.
fn names(line: &serde_json::Value) -> bool {
    line["fields"]["message"] == "a plugin does not return from a call"
}

/// The plugin, the call and the thread that the log names for the call that did not return.
fn named(cluster: &Cluster) -> Option<[String; 3]> {
    let lines = cluster.log_lines();
    let line = lines.iter().find(|line| names(line))?;
    let of = |field: &str| line["fields"][field].as_str().unwrap_or_default().to_owned();
    Some(["plugin", "call", "thread"].map(of))
}

#[test]
fn a_worker_whose_transfer_plugin_hangs_is_replaced_and_its_peers_pages_are_free_again() {
    let folder = tempfile::tempdir().unwrap();
    let hang = folder.path().join("hang");
    let config = format!("[plugin.corrupting]\nflip_write = 0\nhang_file = {hang:?}\n");
    let (cluster, _plugins) =
        start(&["corrupting"], &["--plugins", "corrupting", "--staging", "never"], &config, 2);
    let before = cluster.generate(&prompt(0), 8).unwrap();
    let (prefill, decode) = (cluster.worker("prefill"), cluster.worker("decode"));

    std::fs::write(&hang, "").unwrap();
    let during = std::thread::scope(|scope| {
        let request = scope.spawn(|| cluster.generate(&prompt(0), 8));
        cluster.wait("the call to be named", || named(&cluster).is_some());
        std::fs::remove_file(&hang).unwrap();
        request.join().unwrap()
    });
    assert_eq!(named(&cluster).unwrap(), ["corrupting", "submit", "transfer-0"], "{}", cluster.log());
    let slow = |line: &serde_json::Value| {
        let text = line["fields"]["message"].as_str().unwrap_or_default();
        text.starts_with("plugin \"corrupting\": submit has taken ") && text.contains(" s for the peer \"")
    };
    // Only lines before the first worker's end count: the next worker may have met the file, too.
    let lines = cluster.log_lines();
    assert_eq!(
        lines.iter().take_while(|line| !names(line)).filter(|line| slow(line)).count(),
        1,
        "told once: {}",
        cluster.log()
    );
    assert!(
        cluster.log().contains("plugin \"corrupting\" has not returned from submit for "),
        "the error that ended the process: {}",
        cluster.log()
    );
    cluster.wait_for_another(&prefill);
    assert_eq!(during.unwrap().tokens, before.tokens, "tried again, on the new worker");
    assert_eq!(cluster.generate(&prompt(1), 8).unwrap().tokens.len(), 8);
    cluster.wait("all pages to be free", || cluster.all_free());
    assert_eq!(cluster.worker("decode").instance, decode.instance, "its peer went on");
}

#[test]
fn a_worker_whose_storage_hangs_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let block = folder.path().join("block");
    let config = format!("{TRIES}[plugin.faulty-tier]\nfaults = \"block-put\"\nblock_file = {block:?}\n");
    let flags = ["--prefill-radix-cache", "--hierarchical-cache", "--hicache-storage", "faulty-tier"];
    let (cluster, _plugins) = start(&["shm", "faulty-tier"], &flags, &config, 2);
    let before = cluster.generate(&prompt(0), 2).unwrap();
    let prefill = cluster.worker("prefill");

    std::fs::write(&block, "").unwrap();
    cluster.generate(&prompt(1), 2).unwrap();
    cluster.wait("the call to be named", || named(&cluster).is_some());
    std::fs::remove_file(&block).unwrap();
    assert_eq!(named(&cluster).unwrap(), ["faulty-tier", "put", "storage"], "{}", cluster.log());
    cluster.wait_for_another(&prefill);
    assert_eq!(cluster.generate(&prompt(0), 2).unwrap().tokens, before.tokens);
}

#[test]
fn a_worker_started_by_hand_ends_with_the_plugin_and_the_call() {
    let said = last_words_of_a_worker("plugin-call-timeout = 5\n[plugin.panicking]\nin = \"nowhere\"\n");
    let last = said.lines().last().unwrap_or_default();
    assert!(last.contains("host: plugin \"panicking\" has not returned from poll for "), "{said}");
}
