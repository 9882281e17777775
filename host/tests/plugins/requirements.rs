//! A start that cannot work is refused with all violations and with alternatives that would work.

use std::process::Command;

use host_tests::plugin_files;
use host_tests::program::run_to_end;

/// Several problems at once: three installed transfer plugins of which none has all capabilities, and features that exclude each
/// other.
#[test]
fn a_start_is_refused_with_all_that_is_wrong_and_the_plugins_that_have_what_is_missing() {
    let directory = plugin_files::directory(&["null", "shm", "wire", "memory", "plain"]);
    let config = directory.path().join("host.toml");
    std::fs::write(&config, "[plugin.shm]\ncopy_threads = \"two\"\n[plugin.shmm]\nx = 1\n").unwrap();
    let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
    host.args(["--executor", "synthetic", "--role", "decode"])
        .args(["--plugins", "null,shm,nosuch", "--radix-eviction", "lfu", "--no-decode-radix-cache"])
        .args(["--router", "http://192.0.2.1:1", "--control", "192.0.2.7:0", "--page-size", "0"])
        .args(["--plugins-dir", directory.path().to_str().unwrap(), "--config", config.to_str().unwrap()]);
    let ended = run_to_end("host", &mut host);
    println!("{ended}");
    assert_eq!(ended.code(), Some(2), "{ended}");
    let said = ended.stderr;
    for part in [
        "--page-size is 0: it must be 1 to 65536",
        "no plugin is named \"nosuch\": searched ",
        "PdTransfer needs page_writes, because prefill writes pages into the decode worker's pool: plugin \"null\" \
         declares nothing; ",
        "PdTransfer needs only one transfer plugin, because a worker has one way to its peers, and two workers must \
         use the same: null, shm are named: choose one with --transfer NAME",
        "RemoteWorkers needs multi_host, because a worker's address is on another machine: plugin \"shm\" declares \
         page_writes, arrival_notification, settled, peer_restart, vram; ",
        "EvictionPolicy needs DecodeRadixCache or PrefillRadixCache, because there is nothing to evict from: give \
         --decode-radix-cache, or give --prefill-radix-cache, or leave --radix-eviction out",
        "the configuration of plugin \"shm\" is wrong: key \"copy_threads\" is of type string, it must be of type integer",
        "[plugin.shmm] configures no plugin that is named or installed",
    ] {
        assert!(said.contains(part), "{part:?} is missing in:\n{said}");
    }
}

#[test]
fn names_of_plugins_are_looked_for_also_where_none_is_opened() {
    let directory = plugin_files::directory(&["shm"]);
    let refused = |role: &str, flags: &[&str], part: &str| {
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        host.args(["--executor", "synthetic", "--port", "0", "--role", role]);
        host.args(["--plugins-dir", directory.path().to_str().unwrap()]).args(flags);
        let ended = run_to_end("host", &mut host);
        assert_eq!(ended.code(), Some(2), "{role}: {ended}");
        assert!(ended.stderr.contains(part), "{role}: {ended}");
    };
    for role in ["router", "aggregated"] {
        refused(role, &["--plugins", "shn"], "no plugin is named \"shn\"");
    }
    refused("aggregated", &["--decode-radix-cache"], "Aggregated needs the absence of DecodeRadixCache");
}
