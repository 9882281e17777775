//! Requests that wait for the pages of another request, when that one fails or is aborted.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::hold::Hold;
use host_tests::plugin_files;
use serde_json::json;

const PROMPT: u32 = 504;
/// 504 tokens are 31 whole pages of 16 and half a page.
const WHOLE: f64 = 31.0;

/// Prompts wait before their first token until all requests have arrived.
fn held(hold: &Hold) -> String {
    format!("[synthetic]\n{}", hold.prompts_from(0))
}

fn start(flags: &[&str], config: &str, workers: usize) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut all = vec!["--plugins-dir".to_owned(), plugins.path().display().to_string()];
    all.extend(["--executor", "synthetic"].iter().chain(flags).map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
}

fn prompt() -> Vec<u32> {
    (0..PROMPT).map(|token| token * 7 % 200).collect()
}

fn right_answer() -> Vec<u64> {
    let (plain, _plugins) = start(&["--role", "aggregated"], "", 1);
    plain.generate(&prompt(), 6).unwrap().tokens
}

/// Waits until one request is active and `followers` requests wait for it.
fn all_wait(cluster: &Cluster, followers: f64) {
    let decode = cluster.worker("decode");
    cluster.wait("all other requests to wait for the first one", || {
        let metrics = cluster.metrics(&decode);
        metrics.get("host_requests_active") == Some(&1.0)
            && metrics.get("host_requests_queued") == Some(&followers)
    });
}

/// Sends a request and does not read its answer.
fn begin(cluster: &Cluster) -> TcpStream {
    let params = json!({"max_new_tokens": 6, "temperature": 0, "ignore_eos": true});
    let body = json!({"input_ids": prompt(), "sampling_params": params, "stream": true}).to_string();
    let mut connection = TcpStream::connect(cluster.url.trim_start_matches("http://")).unwrap();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).unwrap();
    connection.write_all(body.as_bytes()).unwrap();
    connection
}

#[test]
fn when_the_first_client_leaves_the_next_request_goes_ahead_for_all() {
    let right = right_answer();
    let hold = Hold::new();
    let (cluster, _plugins) = start(&["--decode-radix-cache", "--prefill-radix-cache"], &held(&hold), 2);
    std::thread::scope(|scope| {
        let held = hold.begin();
        let first = begin(&cluster);
        all_wait(&cluster, 0.0);
        let ask = || cluster.generate(&prompt(), 6).unwrap().tokens;
        let others: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        all_wait(&cluster, 8.0);
        drop(first);
        cluster.wait("the first request to be gone", || {
            cluster.metrics(&cluster.worker("decode")).get("host_requests_queued") == Some(&7.0)
        });
        held.end();
        for other in others {
            assert_eq!(other.join().unwrap(), right);
        }
    });
    cluster.wait("all requests to end", || cluster.all_free());
    let decode = cluster.metrics(&cluster.worker("decode"));
    assert_eq!(decode["host_requests_finished_total"], 8.0);
    assert_eq!(decode["host_shared_transfers_total"], 7.0);
    assert_eq!(decode["host_pages_received_total"], WHOLE + 8.0, "once, and eight times half a page");
}

#[test]
fn when_the_prefill_worker_dies_all_requests_that_wait_are_answered_by_the_next() {
    let right = right_answer();
    let hold = Hold::new();
    let flags = ["--decode-radix-cache", "--prefill-radix-cache", "--retry-timeout", "600"];
    let (cluster, _plugins) = start(&flags, &held(&hold), 2);
    std::thread::scope(|scope| {
        let held = hold.begin();
        let ask = || cluster.generate(&prompt(), 6).unwrap().tokens;
        let all: Vec<_> = (0..12).map(|_| scope.spawn(ask)).collect();
        all_wait(&cluster, 11.0);
        let before = cluster.worker("prefill");
        signal(cluster.pid("prefill").unwrap(), "KILL");
        cluster.wait_for_another(&before);
        all_wait(&cluster, 11.0);
        held.end();
        for one in all {
            assert_eq!(one.join().unwrap(), right);
        }
    });
    cluster.wait("all requests to end", || cluster.all_free());
    let decode = cluster.metrics(&cluster.worker("decode"));
    assert_eq!(decode["host_requests_finished_total"], 12.0);
    assert!(decode["host_shared_transfers_total"] > 0.0, "the second time no request waited: {decode:?}");
}
