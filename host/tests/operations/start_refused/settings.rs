//! Settings that are wrong by themselves, contradict each other, or have no effect.

use super::refused;

#[test]
fn settings_that_contradict_are_refused_with_the_way_out() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().display().to_string();
    let config = directory.path().join("host.toml");
    std::fs::write(&config, "page-sise = 16\n").unwrap();
    let config = config.display().to_string();
    let offload = ["--executor", "synthetic", "--hierarchical-cache", "--decode-radix-cache"];
    let with = |more: &[&'static str]| [&offload[..], more].concat();
    let [policy, patience, small, large, store, twice] = [
        with(&["--hicache-write-policy", "sometimes"]),
        with(&["--hicache-prefetch-policy", "never"]),
        with(&["--hicache-memory", "1KiB"]),
        with(&["--hicache-memory", "100000GiB"]),
        with(&["--hicache-storage", "shm"]),
        with(&["--hicache-storage", "hicache-file,hicache-file"]),
    ];
    let long = "x".repeat(1025);
    let unnamed = directory.path().join("unnamed.toml");
    std::fs::write(&unnamed, "served-model-name = \"\"\n").unwrap();
    let unnamed = unnamed.display().to_string();
    let cases: [(&[&str], &[&str]); 30] = [
        (&policy, &["--hicache-write-policy", "sometimes", "write_back"]),
        (&patience, &["--hicache-prefetch-policy", "never", "wait_complete"]),
        (&small, &["--hicache-memory 1024", "32768"]),
        (&large, &["--hicache-memory", "214748364800000 bytes of host memory", "2 workers"]),
        (&store, &["no tier plugin is loaded"]),
        (&twice, &["--hicache-storage", "hicache-file", "twice"]),
        (
            &[
                "--executor",
                "synthetic",
                "--hierarchical-cache",
                "--no-decode-radix-cache",
                "--no-prefill-radix-cache",
            ],
            &["give --decode-radix-cache or --prefill-radix-cache, or give --no-hierarchical-cache"],
        ),
        (
            &["--executor", "synthetic", "--swa-full-tokens-ratio", "0.5"],
            &["a model without any: leave --swa-full-tokens-ratio out"],
        ),
        (&["--executor", "synthetic", "--served-model-name", ""], &["--served-model-name is empty"]),
        (&["--executor", "synthetic", "--served-model-name", "a,,b"], &["--served-model-name is empty"]),
        (
            &["--executor", "synthetic", "--served-model-name", &long],
            &["--served-model-name has 1025 bytes", "at most 1024"],
        ),
        (&["--executor", "synthetic", "--config", &unnamed], &["--served-model-name is empty"]),
        (&["--executor", "synthetic", "--hicache-memory", "1GiB"], &["--hicache-memory", "add it"]),
        (&["--executor", "synthetic", "--threads", "0"], &["--threads"]),
        (&["--executor", "synthetic", "--threads", "1000000"], &["--threads", "1024"]),
        (&[], &["--model", "hf download", "--executor synthetic"]),
        (&["--model", "/nowhere/at/all"], &["/nowhere/at/all", "no such file or folder"]),
        (&["--model", "Qwen/Qwen3-0.6B"], &["hf download Qwen/Qwen3-0.6B"]),
        (&["--executor", "synthetic", "--kv-memory", "256KiB"], &["holds 128 tokens", "524288 bytes"]),
        (&["--model", &empty], &["config.json"]),
        (&["--executor", "synthetic", "--page-size", "0"], &["--page-size"]),
        (&["--executor", "synthetic", "--kv-memory", "1KiB"], &["--kv-memory", "32768"]),
        (&["--executor", "synthetic", "--kv-memory", "lots"], &["lots", "512MiB"]),
        (&["--executor", "synthetic", "--kv-layout", "upside-down"], &["upside-down", "page-head-layer"]),
        (&["--executor", "synthetic", "--max-model-len", "999999999"], &["--max-model-len", "131072"]),
        (&["--executor", "synthetic", "--router", "http://127.0.0.1:1"], &["--router", "--role"]),
        (&["--executor", "synthetic", "--api-keys", "/nowhere"], &["--api-keys /nowhere", "host keys new"]),
        (&["--executor", "synthetic", "--tenant-header", "host"], &["--tenant-header \"host\"", "x-tenant"]),
        (&["--executor", "synthetic", "--allowed-hosts", "http://a"], &["--allowed-hosts", "without scheme"]),
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
        (&["--role", "aggregated", "--staging", "auto"], "--staging says nothing for an aggregated worker"),
        (
            &["--role", "aggregated", "--staging-bytes", "1MiB"],
            "--staging-bytes says nothing for an aggregated worker",
        ),
        (
            &["--role", "decode", "--hierarchical-cache", "--prefill-radix-cache", "--no-decode-radix-cache"],
            "--hierarchical-cache says nothing on this worker without --decode-radix-cache",
        ),
        (
            &[
                "--role",
                "prefill",
                "--hierarchical-cache",
                "--decode-radix-cache",
                "--no-prefill-radix-cache",
            ],
            "--hierarchical-cache says nothing on this worker without --prefill-radix-cache",
        ),
    ];
    for (flags, says) in cases {
        refused(&[&["--executor", "synthetic"], flags].concat(), &[says]);
    }
}

#[test]
fn a_routing_policy_that_is_none_is_refused_with_those_that_are() {
    for role in [&["--role", "router"][..], &["--role", "aggregated"], &[]] {
        let flags = [role, &["--executor", "synthetic", "--router-policy", "sticky"]].concat();
        refused(&flags, &["--router-policy", "sticky", "prefix, least-loaded, round-robin, random"]);
    }
}

#[test]
fn a_router_refuses_nonsense_for_its_workers_too() {
    let cases: [(&[&str], &[&str]); 5] = [
        (&["--served-model-name", ""], &["--served-model-name is empty"]),
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
