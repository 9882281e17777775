//! Windows in the offload tiers, with real processes: workers go on behind windows that they restored from host memory and storage,
//! and no answer changes.

use std::path::Path;

use host_tests::caches::{LOADED, RESTORES, sum};
use host_tests::cluster::{Cluster, Start};
use host_tests::model::TinyModel;
use host_tests::plugin_files;

const PAGE: usize = 16;
const WINDOW: usize = 40;
/// Seven layers, five of which slide: two in a page, so that a window part is three pages.
const SYNTHETIC: &str = "[synthetic]\nlayers = 7\nsliding-layers = 5\nwindow = 40\nkv-heads = 4\n";
const PARTS: usize = 3;
/// A request waits until all its pages in the tiers are restored.
const PATIENT: [&str; 3] = ["--hierarchical-cache", "--hicache-prefetch-policy", "wait_complete"];
const ALONE: [&str; 3] = ["--role", "aggregated", "--prefill-radix-cache"];
const PAIR: [&str; 2] = ["--prefill-radix-cache", "--decode-radix-cache"];
const RANKS: [&str; 4] = ["--prefill-tp", "4", "--decode-tp", "2"];

fn start(flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "swa", "memory", "hicache-file", "faulty-tier"]);
    let mut all: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    if !flags.contains(&"--model") {
        all.extend(["--executor".into(), "synthetic".into()]);
    }
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let offload = if flags.contains(&"--hierarchical-cache") { RESTORES } else { "" };
    (Cluster::start(&Start { program, flags: all, config: format!("{config}{offload}"), workers }), plugins)
}

fn prompt(seed: usize, length: usize) -> Vec<u32> {
    (0..length).map(|token| ((token * 7 + token * token / 50 + seed * 13) % 200) as u32).collect()
}

/// The tokens that a worker without any cache answers.
fn right(model: &[&str], config: &str, prompt: &[u32], tokens: u32) -> Vec<u64> {
    let (plain, _plugins) = start(&[model, &["--role", "aggregated"]].concat(), config);
    plain.generate(prompt, tokens).unwrap().tokens
}

fn count(cluster: &Cluster, role: &str, series: &str) -> f64 {
    cluster.metrics(&cluster.worker(role))[series]
}

/// Waits until pages are written, then empties the pools and host memory.
fn flush(cluster: &Cluster) {
    cluster.await_written();
    cluster.flush();
}

fn and(prompt: &[u32], answer: &[u64], more: usize) -> Vec<u32> {
    prompt
        .iter()
        .copied()
        .chain(answer.iter().map(|token| *token as u32))
        .chain((0..more as u32).map(|token| token * 3))
        .collect()
}

/// Number of pages whose window parts the next token after `pages` whole pages sees.
fn seen(pages: usize) -> usize {
    pages - (pages * PAGE + 1).saturating_sub(WINDOW) / PAGE
}

#[test]
fn after_a_flush_storage_serves_pages_and_a_window_and_only_the_rest_is_computed() {
    let prompt = prompt(1, 20 * PAGE);
    for (flags, role) in
        [(&ALONE[..], "aggregated"), (&PAIR, "prefill"), (&[&PAIR[..], &RANKS].concat(), "prefill")]
    {
        // All workers share one store.
        let store = tempfile::tempdir().unwrap();
        let config =
            format!("{SYNTHETIC}[plugin.hicache-file]\n{LOADED}dir = {:?}\n", store.path().join("pages"));
        let flags = [flags, &PATIENT, &["--hicache-storage", "hicache-file"]].concat();
        let (cluster, _plugins) = start(&flags, &config);
        let first = cluster.generate(&prompt, 24).unwrap();
        assert_eq!(first.tokens, right(&[], SYNTHETIC, &prompt, 24), "{flags:?}");
        flush(&cluster);
        let before = count(&cluster, role, "host_prefill_tokens_total");
        assert_eq!(cluster.generate(&prompt, 24).unwrap().tokens, first.tokens, "{flags:?}");
        let computed = count(&cluster, role, "host_prefill_tokens_total") - before;
        assert_eq!(computed, PAGE as f64, "{flags:?}: all but the last page is restored");
        // The first request found no pages, so only the second one counts.
        let windows = (PARTS * seen(19)) as f64;
        assert_eq!(count(&cluster, role, "host_hicache_promised_window_pages_total"), windows);
        let promised = count(&cluster, role, "host_hicache_promised_pages_total{tier=\"storage\"}");
        assert_eq!(promised, 19.0 + windows, "{flags:?}");
        assert_eq!(count(&cluster, role, "host_hicache_loaded_pages_total"), promised);
        // The next turn. With split workers, decode computed the answer and prefill computes this prompt.
        let turn = and(&prompt, &first.tokens, 20);
        let expected = right(&[], SYNTHETIC, &turn, 12);
        flush(&cluster);
        // Decode has stored all its pages. Prefill learns of them from the store.
        let workers = if role == "aggregated" { 1 } else { 2 };
        cluster.wait("all workers to know the same pages", || {
            let known = |worker| sum(&cluster.metrics(worker), "host_plugin_", "name=\"pages\"");
            let known: Vec<f64> = cluster.workers().iter().map(known).collect();
            known.len() == workers && known.iter().all(|pages| *pages == known[0])
        });
        let before = count(&cluster, role, "host_prefill_tokens_total");
        assert_eq!(cluster.generate(&turn, 12).unwrap().tokens, expected, "{flags:?}");
        let computed = count(&cluster, role, "host_prefill_tokens_total") - before;
        let whole = (prompt.len() + 23) / PAGE * PAGE;
        assert_eq!(computed, (turn.len() - whole) as f64, "{flags:?}: the answer is restored as well");
        cluster.await_written();
    }
}

#[test]
fn after_a_restart_of_everything_windows_are_warm_for_any_number_of_ranks() {
    let store = tempfile::tempdir().unwrap();
    let config =
        format!("{SYNTHETIC}[plugin.hicache-file]\n{LOADED}dir = {:?}\n", store.path().join("pages"));
    let prompt = prompt(2, 20 * PAGE + 3);
    let offload = [&PATIENT[..], &["--hicache-storage", "hicache-file"]].concat();
    let expected = right(&[], SYNTHETIC, &prompt, 20);
    let ranks = [&PAIR[..], &RANKS].concat();
    for (life, (flags, role)) in
        [(&PAIR[..], "prefill"), (&ALONE[..], "aggregated"), (&ranks[..], "prefill"), (&PAIR[..], "prefill")]
            .into_iter()
            .enumerate()
    {
        let (cluster, _plugins) = start(&[flags, &offload].concat(), &config);
        assert_eq!(cluster.generate(&prompt, 20).unwrap().tokens, expected, "{flags:?}, life {life}");
        let computed = if life == 0 { prompt.len() } else { 3 };
        assert_eq!(
            count(&cluster, role, "host_prefill_tokens_total"),
            computed as f64,
            "{flags:?}, life {life}"
        );
        cluster.await_written();
    }
}

#[test]
fn a_gemma3_goes_on_behind_windows_from_storage() {
    let directory = tempfile::tempdir().unwrap();
    TinyModel { heads: 8, kv_heads: 4, ..TinyModel::gemma3() }.write(directory.path()).unwrap();
    let path = directory.path().display().to_string();
    let model = ["--model", &path, "--threads", "2"];
    let prompt = prompt(3, 130);
    let expected = right(&model, "", &prompt, 20);
    let turn = and(&prompt, &expected, 9);
    let next = right(&model, "", &turn, 8);
    for (flags, role) in
        [(&ALONE[..], "aggregated"), (&PAIR, "prefill"), (&[&PAIR[..], &RANKS].concat(), "prefill")]
    {
        // The policy restores pages even if the cost model is against it: a tiny model computes in almost no time.
        let flags = [&model[..], flags, &PATIENT, &["--hicache-storage", "memory"]].concat();
        let (cluster, _plugins) = start(&flags, "");
        for round in 0..3 {
            assert_eq!(cluster.generate(&prompt, 20).unwrap().tokens, expected, "{flags:?}, round {round}");
            flush(&cluster);
            assert_eq!(cluster.generate(&turn, 8).unwrap().tokens, next, "{flags:?}, round {round}");
            flush(&cluster);
        }
        assert!(count(&cluster, role, "host_storage_pages_total{tier=\"memory\",end=\"written\"}") > 8.0);
        cluster.await_written();
    }
}

#[test]
fn storage_that_damages_forgets_lies_and_fails_changes_no_answer() {
    let prompts: Vec<Vec<u32>> = (0..8)
        .map(|number| [prompt(number % 3, 6 * PAGE), prompt(number + 5, 40 + number * 9)].concat())
        .collect();
    let ask = |cluster: &Cluster| -> Vec<Vec<u64>> {
        std::thread::scope(|scope| {
            let clients: Vec<_> = prompts
                .iter()
                .map(|prompt| scope.spawn(|| cluster.generate(prompt, 20).unwrap().tokens))
                .collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        })
    };
    let (plain, _plugins) = start(&["--role", "aggregated"], SYNTHETIC);
    let expected = ask(&plain);
    let ranks = [&PAIR[..], &RANKS].concat();
    for (flags, faults) in [
        (&ALONE[..], "flip truncate foreign"),
        (&PAIR[..], "fail forget lie refuse"),
        (&ranks[..], "flip truncate foreign"),
    ] {
        let config = format!(
            "{SYNTHETIC}[plugin.faulty-tier]\nfaults = {faults:?}\nevery = 211\nseed = 7\ndelay_ms = 1\n"
        );
        let offload = ["--hierarchical-cache", "--hicache-storage", "faulty-tier"];
        let (cluster, _plugins) = start(&[flags, &offload].concat(), &config);
        for turn in 0..3 {
            assert_eq!(ask(&cluster), expected, "{faults} in turn {turn} with {flags:?}");
            flush(&cluster);
        }
        let role = if flags.contains(&"aggregated") { "aggregated" } else { "prefill" };
        assert!(
            count(&cluster, role, "host_hicache_promised_window_pages_total") > 0.0,
            "{faults}, {flags:?}"
        );
    }
}
