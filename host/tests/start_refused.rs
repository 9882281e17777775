//! A configuration that cannot work ends with exit code 2 and one message, before any worker starts.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a fixture that fails is a test that fails")]

mod plugin_support {
    pub mod fixture;
}

use std::path::Path;
use std::process::Command;

/// Runs the program to its end; exit code and what it said.
fn run(flags: &[&str]) -> (Option<i32>, String) {
    // A server that comes up after all is ended, and its exit code (124) fails the test.
    let host = env!("CARGO_BIN_EXE_host");
    let output =
        Command::new("timeout").args(["60", host]).args(flags).args(["--port", "0"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said + &String::from_utf8_lossy(&output.stdout))
}

fn refused(flags: &[&str], says: &[&str]) {
    let (code, said) = run(flags);
    println!("{flags:?}: {code:?}\n{said}");
    assert_eq!(code, Some(2), "{flags:?}: {said}");
    for part in says {
        assert!(said.contains(part), "{flags:?} does not say {part:?}: {said}");
    }
    assert!(!said.contains("worker ready") && !said.contains("panicked"), "{said}");
}

/// A synthetic server with plugins from a directory.
fn with_plugins(directory: &Path, plugins: &str, says: &[&str]) {
    let directory = directory.display().to_string();
    refused(&["--executor", "synthetic", "--plugins-dir", &directory, "--plugins", plugins], says);
}

#[test]
fn an_unknown_plugin_is_answered_with_what_was_found_where() {
    let directory = plugin_support::fixture::directory(&["shm"]);
    let place = directory.path().display().to_string();
    with_plugins(directory.path(), "nosuch", &["nosuch", "shm", &place]);
    with_plugins(directory.path(), "shm,nosuch,neither", &["nosuch", "neither"]);
}

#[test]
fn a_routing_policy_that_is_none_is_refused_with_those_that_are() {
    for role in [&["--role", "router"][..], &["--role", "aggregated"], &[]] {
        let flags = [role, &["--executor", "synthetic", "--router-policy", "sticky"]].concat();
        refused(&flags, &["--router-policy", "sticky", "prefix, least-loaded, round-robin, random"]);
    }
}

#[test]
fn a_file_that_is_no_plugin_is_refused_with_its_reason() {
    let good = plugin_support::fixture::plugin("shm");
    let whole = std::fs::read(good).unwrap();
    let cases: [(&str, &[u8], &str); 4] = [
        ("text", b"this is not a library", "ELF"),
        ("empty", b"", "empty"),
        ("truncated", &whole[..3000], "cut off"),
        ("truncated later", &whole[..500_000], "cut off"),
    ];
    for (name, bytes, says) in cases {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("shm.so"), bytes).unwrap();
        println!("{name}");
        with_plugins(directory.path(), "shm", &["shm.so", says]);
    }
}

#[test]
fn a_plugin_of_another_api_version_is_refused_with_both_versions() {
    let mut bytes = std::fs::read(plugin_support::fixture::plugin("shm")).unwrap();
    let ours = host_plugin_api::VERSION;
    let from = format!("[api]\nversion = \"{ours}\"").into_bytes();
    let at = bytes.windows(from.len()).position(|window| window == from).expect("the manifest's API version");
    bytes[at..at + from.len()].copy_from_slice(b"[api]\nversion = \"7.0.0\"");
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("shm.so"), bytes).unwrap();
    with_plugins(directory.path(), "shm", &["7.0.0", ours, "shm"]);
}

#[test]
fn a_missing_capability_is_refused_with_the_plugin_that_has_it() {
    let directory = plugin_support::fixture::directory(&["shm", "null"]);
    // The fixture declares less than a supervised, split server needs.
    with_plugins(directory.path(), "null", &["null", "shm", "because"]);
}

#[test]
fn a_plugin_that_the_server_would_never_call_is_refused_by_name() {
    let directory = plugin_support::fixture::directory(&["shm", "memory", "plain"]);
    with_plugins(
        directory.path(),
        "shm,memory,plain",
        &["\"memory\" would never be called", "its role is tier", "\"plain\"", "its role is allocator"],
    );
}

#[test]
fn settings_that_contradict_are_refused_with_the_way_out() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().display().to_string();
    let config = directory.path().join("host.toml");
    std::fs::write(&config, "page-sise = 16\n").unwrap();
    let config = config.display().to_string();
    let below = ["--executor", "synthetic", "--hierarchical-cache", "--decode-radix-cache"];
    let with = |more: &[&'static str]| [&below[..], more].concat();
    let [policy, patience, small, large, store] = [
        with(&["--hicache-write-policy", "sometimes"]),
        with(&["--hicache-prefetch-policy", "never"]),
        with(&["--hicache-memory", "1KiB"]),
        with(&["--hicache-memory", "100000GiB"]),
        with(&["--hicache-storage", "shm"]),
    ];
    let cases: [(&[&str], &[&str]); 19] = [
        (&policy, &["--hicache-write-policy", "sometimes", "write_back"]),
        (&patience, &["--hicache-prefetch-policy", "never", "wait_complete"]),
        (&small, &["--hicache-memory 1024", "32768"]),
        // Only the decode worker has something below its pool.
        (&large, &["--hicache-memory", "107374182400000 bytes of host memory", "2 workers"]),
        (&store, &["no tier plugin is loaded"]),
        (&["--executor", "synthetic", "--hierarchical-cache"], &["HierarchicalCache", "NoPrefixCache"]),
        (&["--executor", "synthetic", "--hicache-memory", "1GiB"], &["--hicache-memory", "add it"]),
        (&["--executor", "synthetic", "--threads", "0"], &["--threads"]),
        (&["--executor", "synthetic", "--threads", "1000000"], &["--threads", "1024"]),
        (&[], &["--model", "--executor synthetic"]),
        (&["--model", "/nowhere/at/all"], &["/nowhere/at/all"]),
        (&["--model", &empty], &["config.json"]),
        (&["--executor", "synthetic", "--page-size", "0"], &["--page-size"]),
        (&["--executor", "synthetic", "--kv-memory", "1KiB"], &["--kv-memory", "32768"]),
        (&["--executor", "synthetic", "--kv-memory", "lots"], &["lots", "512MiB"]),
        (&["--executor", "synthetic", "--kv-layout", "upside-down"], &["upside-down", "page-head-layer"]),
        (&["--executor", "synthetic", "--max-model-len", "999999999"], &["--max-model-len", "131072"]),
        (&["--executor", "synthetic", "--router", "http://127.0.0.1:1"], &["--router", "--role"]),
        (&["--config", &config], &["page-sise", "host.toml"]),
    ];
    for (flags, says) in cases {
        refused(flags, says);
    }
}

#[test]
fn settings_that_say_nothing_are_refused() {
    let cases: [(&[&str], &str); 8] = [
        (
            &["--staging", "never", "--staging-knee", "1KiB"],
            "--staging-knee says nothing with --staging never",
        ),
        (
            &["--staging", "never", "--staging-bytes", "1MiB"],
            "--staging-bytes says nothing with --staging never",
        ),
        (
            &["--staging", "always", "--staging-knee", "1KiB"],
            "--staging-knee says nothing with --staging always",
        ),
        (
            &["--staging-bytes", "0", "--staging-knee", "1KiB"],
            "--staging-knee says nothing with --staging-bytes 0",
        ),
        (&["--role", "aggregated", "--staging", "auto"], "--staging says nothing for an undivided worker"),
        (
            &["--role", "aggregated", "--staging-bytes", "1MiB"],
            "--staging-bytes says nothing for an undivided worker",
        ),
        (
            &["--role", "decode", "--hierarchical-cache", "--prefill-radix-cache"],
            "--hierarchical-cache says nothing on this worker without --decode-radix-cache",
        ),
        (
            &["--role", "prefill", "--hierarchical-cache", "--decode-radix-cache"],
            "--hierarchical-cache says nothing on this worker without --prefill-radix-cache",
        ),
    ];
    for (flags, says) in cases {
        refused(&[&["--executor", "synthetic"], flags].concat(), &[says]);
    }
}

#[test]
fn a_router_refuses_nonsense_for_its_workers_too() {
    let cases: [(&[&str], &[&str]); 4] = [
        (&["--tp", "0"], &["--tp is 0", "1 to 64"]),
        (&["--staging", "nonsense"], &["--staging", "nonsense"]),
        (&["--hicache-memory", "1GiB"], &["--hicache-memory", "add it"]),
        (&["--radix-eviction", "sometimes"], &["--radix-eviction", "sometimes"]),
    ];
    for (flags, says) in cases {
        refused(
            &[&["--role", "router", "--executor", "synthetic", "--control", "127.0.0.1:0"], flags].concat(),
            says,
        );
    }
}

#[test]
fn staging_memory_that_does_not_suit_the_ranks_and_the_model_is_refused_with_what_would() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("host.toml");
    // A page has 8 MiB, in blocks of 8 KiB.
    std::fs::write(&config, "[synthetic]\nlayers = 64\nkv-heads = 16\nhead-dim = 64\n").unwrap();
    let config = config.display().to_string();
    let cases: [(&[&str], &[&str]); 4] = [
        (
            &["--tp", "8", "--staging-bytes", "64KiB"],
            &["--staging-bytes", "8192 for each of 8 ranks", "at least 524288"],
        ),
        (
            &["--staging", "always", "--page-size", "256", "--staging-bytes", "128KiB"],
            &["--staging always", "65536 bytes", "raise --staging-bytes to 524288"],
        ),
        (
            &["--staging", "always", "--page-size", "65536"],
            &["--staging always", "16777216 bytes", "lower --page-size"],
        ),
        (
            &["--config", &config, "--role", "decode", "--kv-memory", "2GiB", "--staging-bytes", "64KiB"],
            &["65536 bytes", "4096 tokens into 262144 pieces", "raise it to 131072", "--max-model-len"],
        ),
    ];
    for (flags, says) in cases {
        refused(&[&["--executor", "synthetic"], flags].concat(), says);
    }
}

#[test]
fn steps_that_would_be_modelled_for_longer_than_a_minute_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let config = directory.path().join("host.toml");
    for (times, says) in [
        ("step-us = 9000000000000000000", "step-us (9000000000000000000)"),
        ("prefill-token-us = 9000000000000000000", "prefill-token-us (9000000000000000000)"),
        ("prefill-token-us = 200000", "a step of 512 prompt tokens and 64 sequences"),
        ("sequence-us = 1000000", "sequence-us (1000000)"),
    ] {
        std::fs::write(&config, format!("[synthetic]\n{times}\n")).unwrap();
        let config = config.display().to_string();
        refused(&["--executor", "synthetic", "--config", &config], &[says, "more than 60 s"]);
    }
}

#[test]
fn numbers_that_cannot_work_are_refused_with_their_bounds() {
    let cases: [(&[&str], &[&str]); 20] = [
        (&["--layer-groups", "0"], &["--layer-groups", "\"0\"", "auto, off or 2 to 32"]),
        (&["--layer-groups", "some"], &["--layer-groups", "\"some\"", "auto, off or 2 to 32"]),
        (&["--layer-groups", "5"], &["--layer-groups", "5 layer groups of a model of 4 layers"]),
        (&["--staging", "some"], &["--staging", "\"some\"", "auto, always or never"]),
        (&["--staging-bytes", "1KiB"], &["--staging-bytes", "1024 bytes", "64KiB to"]),
        (&["--staging-bytes", "x"], &["--staging-bytes", "is not a size"]),
        (&["--staging", "always", "--staging-bytes", "0"], &["--staging always needs memory"]),
        (&["--staging-knee", "0"], &["--staging-knee", "1 to 1GiB"]),
        (&["--staging-knee", "2GiB"], &["--staging-knee", "1 to 1GiB"]),
        (&["--default-max-tokens", "0"], &["--default-max-tokens", "1 to"]),
        (&["--max-running", "4294967295"], &["--max-running", "4294967295", "1 to 32768"]),
        (&["--max-batch", "0"], &["--max-batch", "1 to 16384"]),
        (&["--max-queued", "4000000000"], &["--max-queued", "1 to 1048576"]),
        (&["--chunk-tokens", "4294967295"], &["--chunk-tokens", "1 to 16777216"]),
        (&["--target-itl-ms", "0"], &["--target-itl-ms", "0.1 to 60000"]),
        (&["--target-itl-ms", "NaN"], &["--target-itl-ms", "0.1 to 60000"]),
        (&["--reserved-decode-tokens", "0"], &["--reserved-decode-tokens", "1 to"]),
        (&["--page-size", "4294967295"], &["--page-size", "1 to 65536"]),
        (&["--kv-memory", "100000GiB"], &["--kv-memory", "214748364800000 bytes", "bytes of memory"]),
        (&["--pool-pages", "4294967295"], &["--pool-pages", "bytes of memory"]),
    ];
    for (flags, says) in cases {
        for role in [&[][..], &["--role", "decode"], &["--role", "aggregated"]] {
            let says = if role.is_empty() { says } else { &says[..1] };
            refused(&[&["--executor", "synthetic"], role, flags].concat(), says);
        }
    }
}

#[test]
fn ranks_that_cannot_work_are_refused_with_their_bounds() {
    let directory = tempfile::tempdir().unwrap();
    host_tests::model::tiny_qwen3(directory.path(), 1).unwrap();
    let model = directory.path().display().to_string();
    let whole = ["--role", "aggregated", "--executor", "synthetic"];
    let cases: [(&[&str], &[&str]); 7] = [
        (&[&whole[..], &["--tp", "0"]].concat(), &["--tp is 0", "1 to 64"]),
        (&[&whole[..], &["--tp", "65"]].concat(), &["--tp is 65", "1 to 64"]),
        (&["--executor", "synthetic", "--decode-tp", "65"], &["--decode-tp is 65", "1 to 64"]),
        (&[&whole[..], &["--prefill-tp", "2"]].concat(), &["--prefill-tp", "use --tp"]),
        (
            &["--role", "aggregated", "--model", &model, "--tp", "5"],
            &["--tp is 5", "4 query heads", "at most 4"],
        ),
        (&["--model", &model, "--decode-tp", "8"], &["--decode-tp is 8", "4 query heads"]),
        // 8 ranks of 2 heads hold each head four times: 4 layers x 2 x 16 tokens x 128 bytes x 8.
        (
            &[&whole[..], &["--tp", "8", "--kv-memory", "64KiB"]].concat(),
            &["--kv-memory 64KiB holds no page", "131072 bytes"],
        ),
    ];
    for (flags, says) in cases {
        refused(flags, says);
    }
}

#[test]
fn addresses_that_others_cannot_reach_are_refused_with_the_way_out() {
    let worker = ["--executor", "synthetic", "--role", "decode"];
    let cases: [(&[&str], &[&str]); 11] = [
        (&["--router", "nonsense"], &["--router \"nonsense\"", "http://127.0.0.1:8001"]),
        (&["--router", "https://127.0.0.1:1"], &["http://"]),
        (&["--router", "http://127.0.0.1:1,nonsense"], &["--router \"nonsense\""]),
        (&["--router", "http://127.0.0.1:1,"], &["--router \"\""]),
        (&["--router", "http://127.0.0.1:1,http://127.0.0.1:1"], &["twice"]),
        (&["--router", "http://127.0.0.1"], &["names no port"]),
        (&["--router", "http://127.0.0.1:0"], &["names no port"]),
        (&["--router", "http://127.0.0.1:1/v1"], &["after the port"]),
        (&["--control", "0.0.0.0:0"], &["--control 0.0.0.0", "one of this machine's own"]),
        (&["--control", "[::]:0"], &["--control ::", "one of this machine's own"]),
        (
            &["--router", "http://192.0.2.1:8001"],
            &["192.0.2.1", "--control 127.0.0.1", "for example --control"],
        ),
    ];
    for (flags, says) in cases {
        refused(&[&worker[..], flags].concat(), says);
    }
}

#[test]
fn a_taken_port_is_refused() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let directory = plugin_support::fixture::directory(&["shm"]);
    let plugins = directory.path().display().to_string();
    let flags = ["--executor", "synthetic", "--plugins-dir", &plugins, "--port", &port];
    let output = Command::new(env!("CARGO_BIN_EXE_host")).args(flags).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(&port) && said.contains("--port"), "{said}");
}
