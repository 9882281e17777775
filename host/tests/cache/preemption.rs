//! Answers that outgrow the KV pool, with real processes: requests are preempted and go on, and no answer changes.

use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::cuda::OnBoth;
use host_tests::plugin_files;
use serde_json::{Value, json};

/// Requests that run at once, and the tokens of each answer.
#[derive(Clone, Copy)]
struct Load {
    requests: u32,
    tokens: u32,
}

/// A pool of 768 tokens, enough for two whole requests. Twelve run at once.
const TINY: [&str; 8] =
    ["--pool-pages", "48", "--reserved-decode-tokens", "16", "--max-batch", "16", "--chunk-tokens", "64"];

/// A server with these flags for its executor.
fn start(executor: &[String], flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "memory"]);
    let config = if flags.contains(&"--hierarchical-cache") { RESTORES } else { "" };
    let mut all = executor.to_vec();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
}

/// Tokens and log probabilities of a drawn (not greedy) answer.
fn answer(cluster: &Cluster, tokens: u32, request: u32) -> (Value, Value) {
    let prompt: Vec<u32> = (0..30 + request * 3).map(|token| (token * 7 + request) % 200).collect();
    let body = json!({
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": 40 + request, "ignore_eos": true
        },
    });
    let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    (answer["output_ids"].clone(), answer["text"].clone())
}

/// Asks for all answers at once.
fn answers_at_once(cluster: &Cluster, load: Load) -> Vec<(Value, Value)> {
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..load.requests)
            .map(|request| scope.spawn(move || answer(cluster, load.tokens, request)))
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

#[test]
fn answers_that_outgrow_the_pool_equal_those_that_had_room() {
    let synthetic = ["--executor", "synthetic"].map(str::to_owned);
    let arrangements: [(&str, &[&str]); 7] = [
        ("aggregated", &["--role", "aggregated"]),
        ("aggregated", &["--role", "aggregated", "--prefill-radix-cache"]),
        ("decode", &[]),
        ("decode", &["--decode-radix-cache", "--prefill-radix-cache"]),
        ("aggregated", &["--role", "aggregated", "--prefill-radix-cache", "--hierarchical-cache"]),
        ("decode", &["--decode-radix-cache", "--hierarchical-cache"]),
        // Host memory holds 32 of about 240 pages, so storage has more of them. With much less, pages in transit to and from
        // storage would fill it, and it would be luck whether any page comes back in time.
        (
            "decode",
            &[
                "--decode-radix-cache",
                "--hierarchical-cache",
                "--hicache-memory",
                "1MiB",
                "--hicache-storage",
                "memory",
                "--hicache-prefetch-policy",
                "wait_complete",
            ],
        ),
    ];
    let arrangements = arrangements.map(|(role, flags)| (role, [flags, TINY.as_slice()].concat()));
    outgrow(Load { requests: 12, tokens: 300 }, &synthetic, &synthetic, &arrangements);
}

#[test]
fn answers_of_a_gpu_that_outgrow_its_pool_equal_those_of_a_cpu_that_had_room() {
    let model = OnBoth::new();
    let tiny = ["--pool-pages", "24", "--reserved-decode-tokens", "16", "--chunk-tokens", "64"];
    let flags = [&tiny[..], &["--decode-radix-cache", "--hierarchical-cache"]].concat();
    let load = Load { requests: 6, tokens: 100 };
    outgrow(load, &model.on("cpu"), &model.on("cuda"), &[("decode", flags)]);
}

/// Compares the answers of a server with much room with those of servers with little room. They have these flags for their
/// executors. Of each of the others, a role and its flags are given.
fn outgrow(load: Load, roomy: &[String], tiny: &[String], arrangements: &[(&str, Vec<&str>)]) {
    let (roomy, _plugins) = start(roomy, &["--role", "aggregated"]);
    let right: Vec<_> = (0..load.requests).map(|request| answer(&roomy, load.tokens, request)).collect();
    for (tokens, _) in &right {
        assert_eq!(tokens.as_array().map(Vec::len), Some(load.tokens as usize));
    }
    for (role, flags) in arrangements {
        let (cluster, _plugins) = start(tiny, flags);
        for round in 0..2 {
            let answers = answers_at_once(&cluster, load);
            for (request, (answer, right)) in answers.iter().zip(&right).enumerate() {
                assert_eq!(answer, right, "{flags:?}, round {round}, request {request}");
            }
        }
        let metrics = cluster.metrics(&cluster.worker(role));
        let count = |name: &str| metrics[&format!("host_{name}_total")];
        let counted = format!(
            "{role} {flags:?}: {} preemptions, {} tokens found again, {} of them in offload tiers, {} computed again",
            count("retractions"),
            count("restored_tokens"),
            count("restored_offload_tokens"),
            count("recomputed_tokens")
        );
        println!("{counted}");
        assert!(count("retractions") > 0.0, "pages never ran short: {counted}");
        assert!(count("recomputed_tokens") > 0.0, "{counted}");
        let offload = flags.contains(&"--hierarchical-cache");
        assert_eq!(count("restored_offload_tokens") > 0.0, offload, "{counted}");
        if flags.contains(&"--hicache-storage") {
            let stored = metrics["host_hicache_restored_pages_total{tier=\"storage\"}"];
            assert!(stored > 0.0, "nothing came back from storage: {counted}");
        }
        assert_eq!(count("requests_failed"), 0.0, "{counted}");
        cluster.wait("all requests to end", || cluster.all_free());
    }
}
