//! A worker whose storage does not answer yet is started again. The end of a worker with storage: pages on their way are stored. Storage that does not stop, or does not return from a call, is
//! named and left behind.

use std::path::Path;

use host_tests::caches::TRIES;
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

const PAGE_TOKENS: usize = 16;

fn start(config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["faulty-tier"]);
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--prefill-radix-cache"];
    // With a limit of 0 the watchdog never ends the worker in the middle of its work.
    let offload = [
        "--plugin-call-timeout",
        "0",
        "--hierarchical-cache",
        "--hicache-storage",
        "faulty-tier",
        "--pool-pages",
        "24",
    ];
    let mut all: Vec<String> = flags.iter().chain(&offload).map(|flag| (*flag).to_owned()).collect();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let config = format!("{TRIES}[plugin.faulty-tier]\n{config}");
    (Cluster::start(&Start { program, flags: all, config, workers: 1 }), plugins)
}

fn prompt(number: u32) -> Vec<u32> {
    (0..10 * PAGE_TOKENS as u32).map(|token| token * (number + 3) % 200).collect()
}

fn metric(cluster: &Cluster, name: &str) -> f64 {
    cluster.metrics(&cluster.worker("aggregated"))[name]
}

#[test]
fn a_worker_whose_storage_does_not_answer_yet_is_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let late = folder.path().join("late");
    std::fs::write(&late, "").unwrap();
    let plugins = plugin_files::directory(&["shm", "faulty-tier"]);
    let dir = plugins.path().display().to_string();
    // Without a role the supervisor starts both workers.
    let flags = ["--executor", "synthetic", "--hierarchical-cache", "--hicache-storage", "faulty-tier"];
    let caches =
        ["--prefill-radix-cache", "--decode-radix-cache", "--pool-pages", "24", "--plugins-dir", &dir];
    let start = Start {
        program: Path::new(env!("CARGO_BIN_EXE_host")),
        flags: flags.iter().chain(&caches).map(|flag| (*flag).to_owned()).collect(),
        config: format!("[plugin.faulty-tier]\nlate_file = {late:?}\n"),
        workers: 2,
    };
    let cluster = Cluster::start(&start);
    assert!(!late.exists(), "the first opening fails");
    cluster.wait("an answer", || cluster.generate(&prompt(0), 2).is_ok());
    assert!(cluster.log().contains("the storage does not answer yet"), "{}", cluster.log());
}

#[test]
fn what_is_on_its_way_to_storage_gets_there_before_a_worker_ends() {
    let (mut cluster, _plugins) = start("delay_ms = 200\n");
    cluster.generate(&prompt(0), 2).unwrap();
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    assert!(!cluster.log().contains("were not written"), "{}", cluster.log());
}

#[test]
fn what_storage_does_not_take_in_time_is_counted_in_the_log() {
    let (mut cluster, _plugins) = start("faults = \"hang-put\"\n");
    cluster.generate(&prompt(0), 2).unwrap();
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    let lines = cluster.log_lines();
    let said = |line: &&serde_json::Value| {
        line["fields"]["message"].as_str().is_some_and(|text| text.contains("were not written"))
    };
    let line = lines.iter().find(said).unwrap_or_else(|| panic!("{}", cluster.log()));
    assert_eq!(line["fields"]["tier"], "faulty-tier", "{line}");
    assert_eq!(line["fields"]["pages"], 10, "{line}");
}

#[test]
fn storage_that_does_not_stop_is_named_and_makes_the_process_end_with_an_error() {
    for (config, why) in [
        ("stop = \"fails\"\n", "something is in flight for ever"),
        ("stop = \"hangs\"\n", "has not returned after 4 s"),
        ("faults = \"block-put\"\n", "has not returned after 4 s"),
    ] {
        let (mut cluster, _plugins) = start(config);
        cluster.generate(&prompt(0), 2).unwrap();
        assert_eq!(cluster.interrupt(), Some(1), "{config}{}", cluster.log());
        let log = cluster.log();
        assert!(log.contains("a plugin did not stop") && log.contains("\"plugin\":\"faulty-tier\""), "{log}");
        assert!(log.contains(why), "{config}{log}");
    }
}

#[test]
fn storage_that_does_not_return_from_a_call_holds_up_no_copy_from_host_memory() {
    let (cluster, _plugins) = start("faults = \"block-put\"\n");
    let first = cluster.generate(&prompt(0), 2).unwrap();
    // The pool holds at most two prompts, so these three evict the first one's pages.
    for other in 1..4 {
        cluster.generate(&prompt(other), 2).unwrap();
    }
    cluster.wait("copies to host memory", || metric(&cluster, "host_hicache_saved_pages_total") == 40.0);
    assert_eq!(metric(&cluster, "host_hicache_loaded_pages_total"), 0.0);
    assert_eq!(cluster.generate(&prompt(0), 2).unwrap().tokens, first.tokens);
    assert_eq!(metric(&cluster, "host_hicache_loaded_pages_total"), 9.0);
    cluster.wait("all requests to end", || cluster.all_free());
}
