//! KV that is transferred through staging memory gives the answers of an aggregated worker, even when workers die or clients leave
//! during the transfer.

use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::cuda::OnBoth;
use host_tests::hold::Hold;
use host_tests::plugin_files;
use serde_json::json;

/// The layout of engines: if two ranks share a layer, the part of each head in each token is a separate piece.
const LAYER_FIRST: [&str; 2] = ["--kv-layout", "layer-kv-page-token-head-dim"];
/// Sends everything but aux rows through staging memory.
const ALWAYS: [&str; 2] = ["--staging", "always"];

struct Server {
    cluster: Cluster,
    _plugins: tempfile::TempDir,
}

impl Server {
    /// A synthetic server of four KV heads.
    fn start(plugin: &str, config: &str, synthetic: &str, flags: &[&str]) -> Self {
        Self::computing(&synthetic_executor(), plugin, config, synthetic, flags)
    }

    /// A server with these flags for its executor.
    fn computing(executor: &[String], plugin: &str, config: &str, synthetic: &str, flags: &[&str]) -> Self {
        let plugins = plugin_files::directory(&[plugin]);
        let directory = plugins.path().display().to_string();
        let always = ["--plugins", plugin, "--plugins-dir", &directory];
        let flags = always.iter().chain(flags).map(|flag| (*flag).to_owned());
        let flags: Vec<String> = executor.iter().cloned().chain(flags).collect();
        let workers = if flags.iter().any(|flag| flag == "aggregated") { 1 } else { 2 };
        let config = format!("{config}[synthetic]\nkv-heads = 4\n{synthetic}");
        let program = Path::new(env!("CARGO_BIN_EXE_host"));
        Self { cluster: Cluster::start(&Start { program, flags, config, workers }), _plugins: plugins }
    }

    fn shm(synthetic: &str, flags: &[&str]) -> Self {
        Self::start("shm", "", synthetic, flags)
    }

    fn metric(&self, role: &str, name: &str) -> f64 {
        self.cluster.metrics(&self.cluster.worker(role)).get(name).copied().unwrap_or(0.0)
    }

    fn staged(&self) -> f64 {
        self.metric("decode", "host_staged_received_bytes_total")
    }

    /// Waits until no page and no staging memory is held, and no request waits for staging memory.
    fn settles(&self) {
        self.cluster.wait("everything to be free", || {
            let free = |role| {
                ["host_staging_bytes_in_use", "host_staging_waiting"]
                    .iter()
                    .all(|name| self.metric(role, name) == 0.0)
            };
            self.cluster.all_free() && free("prefill") && free("decode")
        });
    }

    /// Asks for all prompts at once, so that batches mix.
    fn tokens(&self) -> Vec<Vec<u64>> {
        let prompts = prompts();
        std::thread::scope(|scope| {
            let asks: Vec<_> = prompts
                .iter()
                .map(|prompt| scope.spawn(|| self.cluster.generate(prompt, 8).unwrap().tokens))
                .collect();
            asks.into_iter().map(|ask| ask.join().unwrap()).collect()
        })
    }
}

fn synthetic_executor() -> [String; 2] {
    ["--executor", "synthetic"].map(str::to_owned)
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 7 + length) % 250).collect();
    [1, 15, 16, 17, 33, 64, 100, 200, 400].map(prompt).to_vec()
}

fn long_prompt() -> Vec<u32> {
    (0..1600).map(|token| token % 256).collect()
}

#[test]
fn staged_answers_are_those_of_an_aggregated_worker_for_every_layout() {
    let whole = Server::shm("", &["--role", "aggregated"]);
    let right = whole.tokens();
    for layout in host_core::layout::KvOrder::ALL {
        for memory in ["128MiB", "64KiB"] {
            let layout = layout.to_string();
            let flags = ["--kv-layout", &layout, "--staging-bytes", memory, "--chunk-tokens", "64"];
            let split = Server::shm("", &[&flags[..], &ALWAYS].concat());
            assert_eq!(split.tokens(), right, "{layout}, {memory}");
            split.settles();
            let direct = split.metric("prefill", "host_lane_bytes_total{kind=\"direct\"}");
            assert_eq!(direct, 256.0 * prompts().len() as f64, "aux rows: {layout}, {memory}");
            // A token has 4 KiB. The longest prompt alone is 25 times as large as the smaller memory.
            assert!(split.staged() >= 400.0 * 4096.0, "{layout}, {memory}");
            for name in ["host_staging_refused_total", "host_integrity_failures_total"] {
                assert_eq!(split.metric("decode", name), 0.0, "{name}, {layout}, {memory}");
            }
        }
    }
}

#[test]
fn pools_of_different_ranks_are_staged_where_it_pays_and_answer_as_an_aggregated_worker() {
    let right = Server::shm("", &["--role", "aggregated"]).tokens();
    staged_where_it_pays(&synthetic_executor(), &[("4", "2"), ("2", "4"), ("3", "2")], &right);
}

#[test]
fn pools_of_a_gpu_are_staged_where_it_pays_and_answer_as_a_cpu() {
    let model = OnBoth::new();
    let whole = Server::computing(&model.on("cpu"), "shm", "", "", &["--role", "aggregated"]);
    staged_where_it_pays(&model.on("cuda"), &[("2", "1")], &whole.tokens());
}

/// Compares the answers of workers with these numbers of ranks, for each way of staging, with those of another server.
fn staged_where_it_pays(executor: &[String], ranks: &[(&str, &str)], right: &[Vec<u64>]) {
    for (prefill, decode) in ranks {
        for (mode, staged) in [("auto", true), ("always", true), ("never", false)] {
            let ranks = ["--prefill-tp", prefill, "--decode-tp", decode];
            let flags = ["--staging", mode, "--chunk-tokens", "64"];
            let bytes: &[&str] = if staged { &["--staging-bytes", "1MiB"] } else { &[] };
            let flags = [&LAYER_FIRST[..], &ranks, &flags, bytes].concat();
            let split = Server::computing(executor, "shm", "", "", &flags);
            let how = format!("{prefill} to {decode}, {mode}");
            assert_eq!(split.tokens(), right, "{how}");
            split.settles();
            assert_eq!(split.staged() > 0.0, staged, "{how}");
            let failures = split.metric("decode", "host_integrity_failures_total");
            assert_eq!(failures + split.metric("decode", "host_staging_refused_total"), 0.0, "{how}");
        }
    }
}

#[test]
fn clients_that_leave_during_staged_transfers_leave_nothing_behind() {
    let flags =
        ["--staging-bytes", "64KiB", "--chunk-tokens", "32", "--pool-pages", "256", "--layer-groups", "2"];
    let hold = Hold::new();
    let synthetic = format!("prefill-token-us = 20\n{}", hold.prompts_from(256));
    let split = Server::shm(&synthetic, &[&flags[..], &ALWAYS].concat());
    let right = split.cluster.generate(&long_prompt()[..300], 4).unwrap().tokens;
    let failed = || split.metric("decode", "host_requests_failed_total");
    let is_active = || split.metric("decode", "host_requests_active") > 0.0;
    // Bytes that are staged before the clients leave. The part of a prompt before the hold has a MiB.
    for bytes in [1.0, 100_000.0, 800_000.0] {
        for is_held in [true, false] {
            // While prompts are held, no answer is complete before its client leaves. Without a hold, clients leave at any time.
            let held = is_held.then(|| hold.begin());
            let (staged_before, failed_before) = (split.staged(), failed());
            let clients: Vec<TcpStream> = (0..40).map(|_| ask(&split.cluster)).collect();
            split.cluster.wait("prompts to be staged", || split.staged() >= staged_before + bytes);
            if is_held {
                split.cluster.wait("a request that cannot end", is_active);
            }
            drop(clients);
            if let Some(held) = held {
                split.cluster.wait("requests to be given up", || failed() > failed_before);
                held.end();
            }
            split.settles();
        }
    }
    assert_eq!(split.cluster.generate(&long_prompt()[..300], 4).unwrap().tokens, right);
}

/// Sends a request. Dropping the connection gives it up.
fn ask(cluster: &Cluster) -> TcpStream {
    let parameters = json!({ "max_new_tokens": 4, "temperature": 0, "ignore_eos": true });
    let prompt = &long_prompt()[..500];
    let body = json!({ "input_ids": prompt, "sampling_params": parameters, "stream": true }).to_string();
    let mut connection = TcpStream::connect(cluster.url.trim_start_matches("http://")).unwrap();
    let head = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    write!(connection, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    connection
}

#[test]
fn a_worker_killed_during_a_staged_transfer_is_restarted_and_the_request_answered() {
    let flags = [&["--chunk-tokens", "16", "--staging-bytes", "64KiB"][..], &ALWAYS].concat();
    for role in ["prefill", "decode"] {
        let hold = Hold::new();
        let steady = format!("prefill-token-us = 500\n{}", hold.prompts_from(800));
        let split = Server::shm(&steady, &flags);
        let prompt = long_prompt();
        let right = split.cluster.generate(&prompt, 8).unwrap().tokens;
        let first = split.cluster.worker(role);
        let before = split.staged();
        std::thread::scope(|scope| {
            let held = hold.begin();
            let request = scope.spawn(|| split.cluster.generate(&prompt, 8));
            split.cluster.wait("some of the request to be staged", || split.staged() > before + 40_000.0);
            signal(split.cluster.pid(role).unwrap(), "KILL");
            held.end();
            // The router tries the request again on the restarted worker. The client does not notice.
            assert_eq!(request.join().unwrap().unwrap().tokens, right, "{role}");
        });
        split.cluster.wait_for_another(&first);
        split.settles();
    }
}

/// Tests in the group that runs one at a time, because they use other projects' libraries and programs.
mod external {
    use host_tests::{mooncake, nixl};

    use super::*;

    #[test]
    fn staged_answers_over_mooncake_are_those_of_an_aggregated_worker() {
        let Some(config) = mooncake::config() else { return };
        let right = Server::shm("", &["--role", "aggregated"]).tokens();
        let config = format!("[plugin.mooncake]\n{config}\n");
        let flags = [&LAYER_FIRST[..], &ALWAYS, &["--staging-bytes", "1MiB"]].concat();
        let split = Server::start("mooncake", &config, "", &flags);
        assert_eq!(split.tokens(), right);
        split.settles();
        assert!(split.staged() > 0.0);
    }

    #[test]
    fn staged_answers_over_nixl_are_those_of_an_aggregated_worker() {
        let Some(config) = nixl::config() else { return };
        let right = Server::shm("", &["--role", "aggregated"]).tokens();
        let config = format!("[plugin.nixl]\n{config}\n");
        let flags = [&LAYER_FIRST[..], &ALWAYS, &["--staging-bytes", "1MiB"]].concat();
        let split = Server::start("nixl", &config, "", &flags);
        assert_eq!(split.tokens(), right);
        split.settles();
        assert!(split.staged() > 0.0);
    }
}
