//! Both offload tiers, host memory and storage, with real processes: pages come back from both, and no answer changes.

use std::path::Path;

use host_tests::caches::{LOADED, RESTORES};
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

const PAGE_TOKENS: usize = 16;

/// A cache with offload tiers. A request waits until all its pages in the tiers are restored.
const PATIENT: [&str; 3] = ["--hierarchical-cache", "--hicache-prefetch-policy", "wait_complete"];

fn start(flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "memory", "hicache-file"]);
    let mut all = vec!["--executor".to_owned(), "synthetic".to_owned()];
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
}

/// Waits until a worker of this role has written so many pages to storage.
fn await_written(cluster: &Cluster, role: &str, pages: f64) {
    cluster.wait("pages to be written", || cluster.storage_pages(role, "written") == pages);
}

#[test]
fn after_a_flush_storage_serves_what_was_cached_and_only_the_rest_is_computed() {
    let flags = ["--role", "aggregated", "--prefill-radix-cache", "--hicache-storage", "memory"];
    let (cluster, _plugins) = start(&[&flags[..], &PATIENT].concat(), RESTORES);
    let prompt: Vec<u32> = (0..10 * PAGE_TOKENS as u32).map(|token| token * 7 % 200).collect();
    let first = cluster.generate(&prompt, 24).unwrap();
    // The last token drawn has no KV.
    let pages = (prompt.len() + 24 - 1) / PAGE_TOKENS;
    await_written(&cluster, "aggregated", pages as f64);
    let worker = cluster.worker("aggregated");
    let before = cluster.metrics(&worker)["host_prefill_tokens_total"];
    cluster.flush();
    let second = cluster.generate(&prompt, 24).unwrap();
    assert_eq!(second.tokens, first.tokens);
    let after = cluster.metrics(&worker);
    assert_eq!(
        after["host_prefill_tokens_total"] - before,
        PAGE_TOKENS as f64,
        "all but the last page is restored"
    );
    assert_eq!(after["host_hicache_promised_pages_total{tier=\"storage\"}"], 9.0);
    assert_eq!(after["host_hicache_loaded_pages_total"], 9.0);
    // The next turn finds the answer too.
    cluster.flush();
    let turn: Vec<u32> =
        prompt.iter().copied().chain(first.tokens.iter().map(|token| *token as u32)).chain(7..20).collect();
    let third = cluster.generate(&turn, 4).unwrap();
    let last = cluster.metrics(&worker);
    let computed = last["host_prefill_tokens_total"] - after["host_prefill_tokens_total"];
    assert_eq!(computed, (turn.len() - pages * PAGE_TOKENS) as f64, "what was answered is restored as well");
    cluster.flush();
    assert_eq!(cluster.generate(&turn, 4).unwrap().tokens, third.tokens);
    cluster.wait("all requests to end", || cluster.all_free());
}

#[test]
fn decode_restores_what_its_offload_tiers_have_and_is_sent_the_rest() {
    let flags = ["--decode-radix-cache", "--prefill-radix-cache", "--hicache-storage", "memory"];
    let (cluster, _plugins) = start(&[&flags[..], &PATIENT].concat(), RESTORES);
    let prompt: Vec<u32> = (0..10 * PAGE_TOKENS as u32 + 5).map(|token| token * 11 % 200).collect();
    let first = cluster.generate(&prompt, 4).unwrap();
    await_written(&cluster, "decode", 10.0);
    await_written(&cluster, "prefill", 10.0);
    cluster.flush();
    let second = cluster.generate(&prompt, 4).unwrap();
    assert_eq!(second.tokens, first.tokens);
    assert_eq!(second.transferred_bytes, first.transferred_bytes / 11, "the page that is not whole");
    let decode = cluster.metrics(&cluster.worker("decode"));
    assert_eq!(decode["host_hicache_promised_pages_total{tier=\"storage\"}"], 10.0);
    assert_eq!(decode["host_hicache_renegotiated_total"], 0.0);
    cluster.wait("all requests to end", || cluster.all_free());
}

#[test]
fn after_a_restart_of_everything_the_store_is_warm() {
    let store = tempfile::tempdir().unwrap();
    let config = format!("{RESTORES}[plugin.hicache-file]\n{LOADED}dir = {:?}\n", store.path().join("pages"));
    let prompt: Vec<u32> = (0..10 * PAGE_TOKENS as u32).map(|token| token * 7 % 200).collect();
    let offload = [&["--prefill-radix-cache", "--hicache-storage", "hicache-file"][..], &PATIENT].concat();
    let alone = [&["--role", "aggregated"][..], &offload].concat();
    let first = {
        let (cluster, _plugins) = start(&alone, &config);
        let first = cluster.generate(&prompt, 8).unwrap();
        await_written(&cluster, "aggregated", 10.0);
        first
    };
    // Three arrangements: the same worker after a restart, a pair that has not seen the prompt, and a pair with several ranks.
    let pair = [&["--decode-radix-cache"][..], &offload].concat();
    let ranks = [&["--prefill-tp", "2", "--decode-tp", "4"][..], &pair].concat();
    let roles = [
        (&alone, "aggregated"),
        (&pair, "decode"),
        (&pair, "prefill"),
        (&ranks, "decode"),
        (&ranks, "prefill"),
    ];
    for (flags, role) in roles {
        let (cluster, _plugins) = start(flags, &config);
        assert_eq!(cluster.generate(&prompt, 8).unwrap().tokens, first.tokens, "{role}");
        let restored = cluster.metrics(&cluster.worker(role))["host_hicache_loaded_pages_total"];
        // A worker that computes prompts keeps one token to compute.
        assert_eq!(restored, if role == "decode" { 10.0 } else { 9.0 }, "{role}");
        cluster.wait("all requests to end", || cluster.all_free());
    }
}

/// Number of pages of a tier with this end, on an aggregated worker.
fn pages_of(cluster: &Cluster, tier: &str, end: &str) -> f64 {
    let metrics = cluster.metrics(&cluster.worker("aggregated"));
    metrics[&format!("host_storage_pages_total{{tier=\"{tier}\",end=\"{end}\"}}")]
}

#[test]
fn every_tier_is_written_and_a_page_is_read_from_the_first_that_has_it() {
    let store = tempfile::tempdir().unwrap();
    // The setting names one tier or several.
    let several = "hicache-storage = [\"memory\", \"hicache-file\"]\n";
    let config =
        format!("{several}{RESTORES}[plugin.hicache-file]\n{LOADED}dir = {:?}\n", store.path().join("pages"));
    let flags = [&["--role", "aggregated", "--prefill-radix-cache"][..], &PATIENT].concat();
    let prompt: Vec<u32> = (0..10 * PAGE_TOKENS as u32).map(|token| token * 13 % 200).collect();
    let mut answers = Vec::new();
    // The memory of the second process is empty.
    for (memory, file) in [(9.0, 0.0), (0.0, 9.0)] {
        let (cluster, _plugins) = start(&flags, &config);
        if answers.is_empty() {
            answers.push(cluster.generate(&prompt, 2).unwrap().tokens);
            for tier in ["memory", "hicache-file"] {
                cluster.wait("pages to be written", || pages_of(&cluster, tier, "written") == 10.0);
            }
            cluster.flush();
        }
        answers.push(cluster.generate(&prompt, 2).unwrap().tokens);
        let read = ["memory", "hicache-file"].map(|tier| pages_of(&cluster, tier, "read"));
        assert_eq!(read, [memory, file]);
        cluster.wait("all requests to end", || cluster.all_free());
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

#[test]
fn answers_equal_those_without_under_every_policy_and_eviction() {
    let small = ["--pool-pages", "48", "--max-batch", "6", "--chunk-tokens", "64"];
    let (plain, _plugins) = start(&[&["--role", "aggregated"], &small[..]].concat(), "");
    let prompts: Vec<Vec<u32>> = (0..30_u32)
        .map(|number| {
            (0..40 + number * 7).map(|at| (at * (number % 5 + 3) + at / 60 * number) % 200).collect()
        })
        .collect();
    let ask_all = |cluster: &Cluster| -> Vec<Vec<u64>> {
        let mut answers = Vec::new();
        for _turn in 0..2 {
            for some in prompts.chunks(6) {
                std::thread::scope(|scope| {
                    let threads: Vec<_> = some
                        .iter()
                        .map(|prompt| scope.spawn(|| cluster.generate(prompt, 9).unwrap().tokens))
                        .collect();
                    answers.extend(threads.into_iter().map(|thread| thread.join().unwrap()));
                });
            }
        }
        answers
    };
    let expected = ask_all(&plain);
    for (write, prefetch) in [
        ("write_through", "timeout"),
        ("write_through_selective", "wait_complete"),
        ("write_back", "best_effort"),
    ] {
        let offload = ["--prefill-radix-cache", "--hierarchical-cache", "--hicache-storage", "memory"];
        let policies = ["--hicache-write-policy", write, "--hicache-prefetch-policy", prefetch];
        for divided in [&["--role", "aggregated"][..], &["--decode-radix-cache"]] {
            let (cluster, _plugins) = start(&[divided, &offload[..], &policies, &small].concat(), "");
            assert_eq!(ask_all(&cluster), expected, "{write}, {prefetch}, {divided:?}");
            cluster.wait("all requests to end", || cluster.all_free());
        }
    }
}
