//! The counters after a known run, and a description of every series.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;

const PAGE: u32 = 16;

fn start(flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    start_with(flags, "", 2)
}

fn start_with(flags: &[&str], config: &str, workers: usize) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "memory"]);
    let mut all = vec!["--plugins-dir".to_owned(), plugins.path().display().to_string()];
    all.extend(["--executor", "synthetic"].iter().chain(flags).map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn a_known_run_is_counted_as_it_was() {
    let (cluster, _plugins) = start(&["--decode-radix-cache", "--prefill-radix-cache"]);
    // Each answer is one token, which has no KV. So the cached pages are the whole pages of the prompts.
    let ask = |prompt: &[u32]| cluster.generate(prompt, 1).unwrap().transferred_bytes;
    let page = u64::from(ask(&tokens(180..181)) as u32);
    assert_eq!(ask(&tokens(0..40)), 3 * page, "nothing is there");
    assert_eq!(ask(&tokens(0..70)), 3 * page, "two pages of five are there");
    assert_eq!(ask(&tokens(0..64)), 0, "all four are there");
    let decode = cluster.settled("decode", 4.0);
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
    let prefill = cluster.settled("prefill", 4.0);
    // At least one token is computed, so of 64 tokens only three pages are used.
    let prefix = f64::from(2 * PAGE + 3 * PAGE);
    for (name, value) in [
        ("host_prefix_promised_tokens_total{tier=\"device\"}", prefix),
        ("host_prefix_delivered_tokens_total{tier=\"device\"}", prefix),
        ("host_transfers_total{kind=\"full\"}", 0.0),
        ("host_transfer_saved_bytes_total", 0.0),
        ("host_pages_sent_total", 7.0),
        // Includes four aux rows.
        ("host_lane_bytes_total{kind=\"direct\"}", (7 * page + 4 * 256) as f64),
        ("host_prefill_tokens_total", 1.0 + 40.0 + 38.0 + 16.0),
    ] {
        expect(&prefill, name, value);
    }
}

/// Checks each worker's series after ten pages went to the offload tiers and came back.
#[test]
fn what_offload_tiers_move_is_counted_page_by_page_and_byte_by_byte_on_every_worker() {
    const PAGES: u32 = 10;
    let offload = ["--prefill-radix-cache", "--hierarchical-cache", "--hicache-storage", "memory"];
    let offload = [&offload[..], &["--hicache-prefetch-policy", "wait_complete"]].concat();
    let pair = [&["--decode-radix-cache"][..], &offload].concat();
    let alone = [&["--role", "aggregated"][..], &offload].concat();
    let mut page = 0.0;
    for (flags, roles) in [(&pair, &["decode", "prefill"][..]), (&alone, &["aggregated"])] {
        let (cluster, _plugins) = start_with(flags, RESTORES, roles.len());
        let prompt = tokens(0..PAGES * PAGE + 5);
        let first = cluster.generate(&prompt, 4).unwrap();
        if roles.len() > 1 {
            page = first.transferred_bytes as f64 / f64::from(PAGES + 1);
        }
        for role in roles {
            cluster.wait("all pages to be written", || {
                cluster.storage_pages(role, "written") == f64::from(PAGES)
            });
        }
        cluster.flush();
        assert_eq!(cluster.generate(&prompt, 4).unwrap().tokens, first.tokens);
        for role in roles {
            let series = cluster.settled(role, 2.0);
            let pages = f64::from(PAGES);
            for (name, value) in [
                ("host_hicache_copied_bytes_total{way=\"save\"}", pages * page),
                ("host_hicache_copied_bytes_total{way=\"load\"}", pages * page),
                ("host_hicache_queue_pages{way=\"save\"}", 0.0),
                ("host_hicache_queue_pages{way=\"load\"}", 0.0),
                ("host_hicache_writing_back_pages", 0.0),
                ("host_hicache_promised_pages_total{tier=\"storage\"}", pages),
                ("host_hicache_promised_pages_total{tier=\"host\"}", 0.0),
                ("host_hicache_restored_pages_total{tier=\"storage\"}", pages),
                ("host_hicache_restored_pages_total{tier=\"host\"}", 0.0),
                ("host_prefix_promised_tokens_total{tier=\"device\"}", 0.0),
                ("host_prefix_promised_tokens_total{tier=\"offload\"}", pages * f64::from(PAGE)),
                ("host_prefix_delivered_tokens_total{tier=\"device\"}", 0.0),
                ("host_prefix_delivered_tokens_total{tier=\"offload\"}", pages * f64::from(PAGE)),
                ("host_storage_pages_total{tier=\"memory\",end=\"asked\"}", 2.0 * pages),
                ("host_storage_pages_total{tier=\"memory\",end=\"found\"}", pages),
                ("host_storage_resting{tier=\"memory\"}", 0.0),
                ("host_storage_queue_pages{tier=\"memory\",way=\"ask\"}", 0.0),
                // Each of the two requests asks once.
                ("host_storage_answer_seconds_count{tier=\"memory\"}", 2.0),
            ] {
                assert_eq!(series.get(name), Some(&value), "{role}: {name} in {series:?}");
            }
            let bytes =
                |way: &str| series[&format!("host_storage_bytes_total{{tier=\"memory\",way=\"{way}\"}}")];
            assert_eq!(bytes("read"), bytes("write"), "{role}");
            let sealed = bytes("read") / pages;
            assert!(
                sealed > page && sealed < 1.2 * page,
                "{role}: {sealed} bytes for a page of {page} and its seals"
            );
            for name in [
                "host_hicache_copy_seconds_count{way=\"save\"}",
                "host_hicache_copy_seconds_count{way=\"load\"}",
                "host_storage_read_seconds_count{tier=\"memory\"}",
                "host_storage_write_seconds_count{tier=\"memory\"}",
            ] {
                assert!(series[name] > 0.0, "{role}: {name} in {series:?}");
            }
        }
    }
}

#[test]
fn every_series_is_described_in_docs_metrics_md_and_no_other_is() {
    let (cluster, _plugins) = start(&["--decode-radix-cache"]);
    cluster.generate(&[1, 2, 3], 2).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let page = std::fs::read_to_string(path).unwrap();
    // The first column of a table names a series.
    let described: BTreeSet<String> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split(['`', '{']).next())
        .map(str::to_owned)
        .collect();
    let mut exposed = BTreeSet::new();
    let workers = ["prefill", "decode"].map(|role| cluster.worker(role).metrics);
    let urls = workers.into_iter().chain([cluster.url.clone()]);
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
