//! What is counted after a known run, and that every series is described.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

mod plugin_support {
    pub mod fixture;
}

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use host_tests::cluster::{Cluster, Start};

const PAGE: u32 = 16;

fn start(flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_support::fixture::directory(&["shm"]);
    let mut all = vec!["--plugins-dir".to_owned(), plugins.path().display().to_string()];
    all.extend(["--executor", "synthetic"].iter().chain(flags).map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: String::new(), workers: 2 }), plugins)
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// A worker's series once its count of finished requests says that nothing more comes.
fn settled(cluster: &Cluster, role: &str, finished: f64) -> BTreeMap<String, f64> {
    let worker = cluster.worker(role);
    cluster.wait("all requests to be counted", || {
        cluster.all_free() && cluster.metrics(&worker).get("host_requests_finished_total") == Some(&finished)
    });
    cluster.metrics(&worker)
}

#[test]
fn a_known_run_is_counted_as_it_was() {
    let (cluster, _plugins) = start(&["--decode-radix-cache", "--prefill-radix-cache"]);
    // Each answer is one token, which has no KV, so what is cached are the prompts' whole pages.
    let ask = |prompt: &[u32]| cluster.generate(prompt, 1).unwrap().transferred_bytes;
    let page = u64::from(ask(&tokens(180..181)) as u32);
    assert_eq!(ask(&tokens(0..40)), 3 * page, "nothing is there");
    assert_eq!(ask(&tokens(0..70)), 3 * page, "two pages of five are there");
    assert_eq!(ask(&tokens(0..64)), 0, "all four are there");
    let decode = settled(&cluster, "decode", 4.0);
    let expect = |series: &BTreeMap<String, f64>, name: &str, value: f64| {
        assert_eq!(series.get(name), Some(&value), "{name} in {series:?}");
    };
    let prefix = f64::from(2 * PAGE + 4 * PAGE);
    for (name, value) in [
        ("host_prefix_promised_tokens_total{tier=\"device\"}", prefix),
        ("host_prefix_delivered_tokens_total{tier=\"device\"}", prefix),
        ("host_transfers_total{kind=\"full\"}", 2.0),
        ("host_transfers_total{kind=\"delta\"}", 1.0),
        ("host_transfers_total{kind=\"full_hit\"}", 1.0),
        ("host_transfer_saved_bytes_total", (6 * page) as f64),
        ("host_pages_received_total", 1.0 + 3.0 + 3.0),
        ("host_pages_evicted_total", 0.0),
        ("host_retractions_total", 0.0),
        ("host_shared_transfers_total", 0.0),
        ("host_pages_shared_total", 0.0),
        ("host_cache_locks", 0.0),
        ("host_kv_pages_locked", 0.0),
        ("host_kv_pages{state=\"cached\"}", 4.0),
        ("host_cache_namespaces", 1.0),
    ] {
        expect(&decode, name, value);
    }
    let prefill = settled(&cluster, "prefill", 4.0);
    // One token at least is computed, so of 64 tokens three pages are used.
    let prefix = f64::from(2 * PAGE + 3 * PAGE);
    for (name, value) in [
        ("host_prefix_promised_tokens_total{tier=\"device\"}", prefix),
        ("host_prefix_delivered_tokens_total{tier=\"device\"}", prefix),
        ("host_transfers_total{kind=\"full\"}", 0.0),
        ("host_transfer_saved_bytes_total", 0.0),
        ("host_pages_sent_total", 7.0),
        // Four aux rows among them.
        ("host_lane_bytes_total{kind=\"direct\"}", (7 * page + 4 * 256) as f64),
        ("host_prefill_tokens_total", 1.0 + 40.0 + 38.0 + 16.0),
    ] {
        expect(&prefill, name, value);
    }
}

#[test]
fn every_series_is_described_in_docs_metrics_md_and_no_other_is() {
    let (cluster, _plugins) = start(&["--decode-radix-cache"]);
    cluster.generate(&[1, 2, 3], 2).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let page = std::fs::read_to_string(path).unwrap();
    // Tables name a series in the first column.
    let described: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(['`', '{']).next())
        // The exposition names a counter's family without its ending.
        .map(|name| name.strip_suffix("_total").unwrap_or(name).to_owned())
        .collect();
    let mut exposed = BTreeSet::new();
    let urls = cluster.workers().into_iter().map(|worker| worker.address).chain([cluster.url.clone()]);
    for url in urls {
        let text = host_tests::cluster::agent()
            .get(format!("{url}/metrics"))
            .call()
            .unwrap()
            .body_mut()
            .read_to_string()
            .unwrap();
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        exposed.extend(types.filter_map(|line| line.split(' ').next()).map(str::to_owned));
    }
    assert!(exposed.len() > 30, "{exposed:?}");
    assert_eq!(exposed, described);
}
