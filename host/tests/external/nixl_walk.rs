//! Prefill and decode over the real NIXL: the tokens are those of one aggregated worker, also when a worker dies on the way.

use std::path::Path;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::{nixl, plugin_files};

/// A synthetic server, or `None` if this machine has no NIXL.
fn start(flags: &[&str], synthetic: &str) -> Option<(Cluster, tempfile::TempDir)> {
    let config = nixl::config()?;
    let plugins = plugin_files::directory(&["nixl"]);
    let mut all =
        ["--executor", "synthetic", "--plugins", "nixl", "--kv-memory", "16MiB", "--retry-timeout", "600"]
            .map(str::to_owned)
            .to_vec();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let config = format!("[plugin.nixl]\n{config}\n[synthetic]\n{synthetic}");
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    Some((Cluster::start(&Start { program, flags: all, config, workers }), plugins))
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 7 + length) % 250).collect();
    [1, 15, 16, 17, 33, 64, 100, 200].map(prompt).to_vec()
}

/// Asks for all prompts at once, so that batches mix.
fn tokens(cluster: &Cluster) -> Vec<Vec<u64>> {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let asks: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, 12).unwrap().tokens))
            .collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    })
}

#[test]
fn a_split_server_over_nixl_answers_as_an_aggregated_one_with_and_without_caches() {
    let Some((whole, _plugins)) = start(&["--role", "aggregated"], "") else { return };
    let right = tokens(&whole);
    for caches in [&[][..], &["--decode-radix-cache", "--prefill-radix-cache"]] {
        for chunk in ["512", "16", "33"] {
            let flags = [caches, &["--chunk-tokens", chunk]].concat();
            let Some((split, _plugins)) = start(&flags, "") else { return };
            let moved = split.generate(&prompts()[7], 1).unwrap().transferred_bytes;
            assert!(moved > 0, "{flags:?} moved nothing");
            for round in 0..2 {
                assert_eq!(tokens(&split), right, "{flags:?}, round {round}");
            }
            split.wait("all requests to end", || split.all_free());
        }
    }
}

#[test]
fn a_conversation_over_nixl_moves_only_what_decode_lacks() {
    let flags = ["--decode-radix-cache", "--prefill-radix-cache"];
    let Some((split, _plugins)) = start(&flags, "") else { return };
    let page = split.generate(&[201; 16], 1).unwrap().transferred_bytes;
    let first: Vec<u32> = (0..160).map(|token| token * 7 % 200).collect();
    assert_eq!(split.generate(&first, 1).unwrap().transferred_bytes, 10 * page);
    // The bytes count when the sender learns that they have arrived, which may be after the answer.
    let counter = "host_plugin_counter_total{plugin=\"host.nixl\",name=\"bytes_written\"}";
    split.wait("the bytes to be counted", || {
        let written = split.metrics(&split.worker("prefill")).get(counter).copied();
        written.is_some_and(|bytes| bytes >= 11.0 * page as f64)
    });
    let second: Vec<u32> = first.iter().copied().chain(220..236).collect();
    assert_eq!(split.generate(&second, 1).unwrap().transferred_bytes, page);
}

#[test]
fn a_worker_killed_in_mid_transfer_over_nixl_costs_no_answer() {
    // 100 parts of one page each take three seconds, so the kill comes during the transfer.
    let cost = "prefill-token-us = 2000\n";
    for victim in ["prefill", "decode"] {
        let Some((split, _plugins)) = start(&["--chunk-tokens", "16"], cost) else { return };
        let prompt: Vec<u32> = (0..1600).map(|token| token % 256).collect();
        let right = split.generate(&prompt, 8).unwrap();
        let first = split.worker(victim);
        let prefill = split.worker("prefill");
        let sent = || split.metrics(&prefill).get("host_pages_sent_total").copied().unwrap_or(0.0);
        let before = sent();
        std::thread::scope(|scope| {
            let request = scope.spawn(|| split.generate(&prompt, 8));
            split.wait("some pages of the request to be sent", || sent() > before + 5.0);
            signal(split.pid(victim).unwrap(), "KILL");
            // The router tries the request again on the restarted worker. The client does not notice.
            assert_eq!(request.join().unwrap().unwrap().tokens, right.tokens, "{victim} was killed");
        });
        split.wait_for_another(&first);
        split.wait("the pages to come back", || split.all_free());
        assert_eq!(split.generate(&prompt, 8).unwrap().tokens, right.tokens);
    }
}
