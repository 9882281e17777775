//! KV between workers with different numbers of tensor-parallel ranks and different layouts: the tokens are those of one aggregated
//! worker, whatever is lost, damaged or given up during the transfer.

use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use host_tests::cluster::{Cluster, Start, Worker, signal};
use host_tests::hold::Hold;
use host_tests::model::TinyModel;
use host_tests::plugin_files;
use host_tests::program::Program;
use serde_json::json;

const HOST: &str = env!("CARGO_BIN_EXE_host");
const PAGE_FIRST: &str = "page-head-layer-kv-token-dim";
const LAYER_FIRST: &str = "layer-kv-page-token-head-dim";
/// Ranks of prefill and decode.
const RANKS: [(u32, u32); 6] = [(1, 1), (4, 2), (2, 4), (4, 1), (1, 4), (3, 2)];

/// Settings that all workers of a test share.
struct Setting {
    /// Flags of the executor and the model.
    model: Vec<String>,
    plugin: &'static str,
    /// Contents of the configuration file.
    config: String,
    plugins: tempfile::TempDir,
    _model: tempfile::TempDir,
}

impl Setting {
    fn new(plugin: &'static str, config: &str, tiny: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let model = if tiny {
            let tiny = TinyModel { heads: 16, kv_heads: 8, layers: 2, ..TinyModel::default() };
            tiny.write(directory.path()).unwrap();
            vec!["--model".into(), directory.path().display().to_string()]
        } else {
            vec!["--executor".into(), "synthetic".into()]
        };
        let config = format!("[synthetic]\nkv-heads = 8\n{config}");
        Self { model, plugin, config, plugins: plugin_files::directory(&[plugin]), _model: directory }
    }

    fn synthetic(config: &str) -> Self {
        Self::new("shm", config, false)
    }

    fn flags(&self, more: &[&str]) -> Vec<String> {
        let mut flags = self.model.clone();
        flags.extend(["--plugins", self.plugin, "--pool-pages", "256", "--threads", "2"].map(str::to_owned));
        flags.extend(["--plugins-dir".into(), self.plugins.path().display().to_string()]);
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        flags
    }

    fn start(&self, more: &[&str], workers: usize) -> Cluster {
        let start =
            Start { program: Path::new(HOST), flags: self.flags(more), config: self.config.clone(), workers };
        Cluster::start(&start)
    }

    /// Starts prefill and decode with these numbers of ranks, and a router, with one command.
    fn split(&self, (prefill, decode): (u32, u32), more: &[&str]) -> Cluster {
        let (prefill, decode) = (prefill.to_string(), decode.to_string());
        self.start(&[&["--prefill-tp", &prefill, "--decode-tp", &decode], more].concat(), 2)
    }

    /// The answers of an aggregated worker with one rank.
    fn right(&self, prompts: &[Vec<u32>]) -> Vec<Vec<u64>> {
        tokens(&self.start(&["--role", "aggregated"], 1), prompts)
    }
}

/// Workers that were started by hand, and their router.
struct ByHand<'a> {
    setting: &'a Setting,
    cluster: Cluster,
    control: String,
    workers: Vec<Program>,
    directory: tempfile::TempDir,
}

impl<'a> ByHand<'a> {
    fn new(setting: &'a Setting) -> Self {
        let cluster = setting.start(&["--role", "router", "--control", "127.0.0.1:0"], 0);
        let control = cluster.greeting.rsplit(' ').next().unwrap().to_owned();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("host.toml"), &setting.config).unwrap();
        Self { setting, cluster, control, workers: Vec::new(), directory }
    }

    fn worker(&mut self, role: &str, ranks: u32, layout: &str) {
        let config = self.directory.path().join("host.toml");
        let (ranks, name) = (ranks.to_string(), format!("{role}-{ranks}"));
        let flags = [
            &["--role", role, "--name", &name, "--tp", &ranks, "--kv-layout", layout][..],
            &["--router", &self.control, "--control", "127.0.0.1:0"],
            &["--decode-radix-cache", "--prefill-radix-cache", "--chunk-tokens", "40"],
        ];
        let mut worker = Command::new(HOST);
        worker.args(self.setting.flags(&flags.concat())).arg("--config").arg(config);
        self.workers.push(Program::start(&name, &mut worker));
    }

    fn ready(&self) {
        self.cluster.wait("all workers to be there", || self.cluster.workers().len() == self.workers.len());
    }
}

impl Drop for ByHand<'_> {
    fn drop(&mut self) {
        // A test that fails has already printed the workers' output.
        if !std::thread::panicking() {
            for worker in &mut self.workers {
                worker.end();
            }
        }
    }
}

fn prompts() -> Vec<Vec<u32>> {
    let prompt = |length: u32| (0..length).map(|token| (token * 37 + length) % 250).collect();
    [1, 15, 16, 17, 50, 100, 130].map(prompt).to_vec()
}

/// Asks for all prompts at once, so that batches mix.
fn tokens(cluster: &Cluster, prompts: &[Vec<u32>]) -> Vec<Vec<u64>> {
    std::thread::scope(|scope| {
        let asks: Vec<_> = prompts
            .iter()
            .map(|prompt| scope.spawn(|| cluster.generate(prompt, 10).unwrap().tokens))
            .collect();
        asks.into_iter().map(|ask| ask.join().unwrap()).collect()
    })
}

/// A counter of a worker, summed over its labels.
fn count(cluster: &Cluster, worker: &Worker, name: &str) -> f64 {
    let metrics = cluster.metrics(worker);
    metrics.iter().filter(|(series, _)| series.starts_with(name)).map(|(_, value)| value).sum()
}

/// Checks every pair of rank numbers with these layouts of prefill and decode: cold, from the caches, and with longer prompts.
fn every_pair(setting: &Setting, layouts: (&str, &str), ranks: &[(u32, u32)]) {
    let cold = prompts();
    let longer: Vec<Vec<u32>> =
        cold.iter().map(|prompt| prompt.iter().copied().chain(0..40).collect()).collect();
    let right = [setting.right(&cold), setting.right(&longer)];
    for ranks in ranks {
        let mut servers = ByHand::new(setting);
        servers.worker("prefill", ranks.0, layouts.0);
        servers.worker("decode", ranks.1, layouts.1);
        servers.ready();
        let cluster = &servers.cluster;
        let decode = cluster.worker("decode");
        for (round, (prompts, right)) in
            [(&cold, &right[0]), (&cold, &right[0]), (&longer, &right[1])].into_iter().enumerate()
        {
            assert_eq!(tokens(cluster, prompts), *right, "{ranks:?}, {layouts:?}, round {round}");
            cluster.wait("all pages to be free", || cluster.all_free());
        }
        assert_eq!(count(cluster, &decode, "host_integrity_failures_total"), 0.0);
        assert!(count(cluster, &decode, "host_pages_received_total") >= 25.0, "{ranks:?} moved nothing");
        assert!(count(cluster, &decode, "host_prefix_promised_tokens_total") > 100.0, "nothing was cached");
    }
}

#[test]
fn workers_of_any_numbers_of_ranks_answer_as_an_aggregated_one() {
    every_pair(&Setting::synthetic(""), (PAGE_FIRST, PAGE_FIRST), &RANKS);
}

#[test]
fn layer_first_pools_of_any_numbers_of_ranks_answer_as_an_aggregated_worker() {
    every_pair(&Setting::synthetic(""), (LAYER_FIRST, LAYER_FIRST), &RANKS);
}

#[test]
fn pools_of_different_layouts_and_ranks_answer_as_an_aggregated_worker() {
    every_pair(&Setting::synthetic(""), (PAGE_FIRST, LAYER_FIRST), &RANKS);
    every_pair(&Setting::synthetic(""), (LAYER_FIRST, PAGE_FIRST), &[(4, 2), (1, 4)]);
}

#[test]
fn a_model_on_any_numbers_of_ranks_answers_as_on_one() {
    let setting = Setting::new("shm", "", true);
    every_pair(&setting, (PAGE_FIRST, PAGE_FIRST), &RANKS);
    every_pair(&setting, (PAGE_FIRST, LAYER_FIRST), &[(4, 2), (3, 2)]);
}

#[test]
fn one_prefill_worker_serves_decode_workers_of_different_ranks_and_layouts() {
    let setting = Setting::synthetic("");
    let prompts: Vec<Vec<u32>> =
        (0..24).map(|i| (0..30 + i).map(|token| (token * 7 + i * 3) % 250).collect()).collect();
    let right = setting.right(&prompts);
    let mut servers = ByHand::new(&setting);
    servers.worker("prefill", 4, PAGE_FIRST);
    servers.worker("decode", 2, PAGE_FIRST);
    servers.worker("decode", 3, LAYER_FIRST);
    servers.ready();
    let cluster = &servers.cluster;
    for _ in 0..2 {
        assert_eq!(tokens(cluster, &prompts), right);
    }
    let health = cluster.health().unwrap();
    assert_eq!(health["refused_pairs"], json!([]));
    let plugins: Vec<_> = (0..3).map(|worker| &health["workers"][worker]["transfer_plugins"]).collect();
    assert_eq!(plugins, [&json!(["shm"]); 3], "one name for all ranks");
    for worker in cluster.workers() {
        assert!(count(cluster, &worker, "host_requests_finished_total") > 0.0, "{} was idle", worker.name);
    }
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn one_byte_that_flips_on_any_rank_costs_a_second_transfer_and_no_answer() {
    let prompt: Vec<u32> = (0..100).collect();
    let right = Setting::synthetic("").right(std::slice::from_ref(&prompt));
    for rank in 0..4 {
        let config = format!("[plugin.corrupting]\nonly = \".{rank}\"\nflip_write = 2\n");
        let setting = Setting::new("corrupting", &config, false);
        // With the second write of rank 0 the flip may hit the aux row, which has its own checksum.
        let split = setting.split((4, 2), &["--chunk-tokens", "40"]);
        assert_eq!(tokens(&split, std::slice::from_ref(&prompt)), right, "rank {rank}");
        let failures = count(&split, &split.worker("decode"), "host_integrity_failures_total");
        assert_eq!(failures, 1.0, "rank {rank}");
        split.wait("all pages to be free", || split.all_free());
    }
}

#[test]
fn a_worker_of_several_ranks_killed_in_mid_transfer_costs_no_answer_and_no_page() {
    // 50 parts of one page each are sent before the hold, so the kill comes during the transfer.
    let hold = Hold::new();
    let setting = Setting::synthetic(&format!("prefill-token-us = 500\n{}", hold.prompts_from(800)));
    let prompt: Vec<u32> = (0..1600).map(|token| token % 256).collect();
    for victim in ["prefill", "decode"] {
        let split = setting.split((4, 2), &["--chunk-tokens", "16"]);
        let right = split.generate(&prompt, 8).unwrap();
        let first = split.worker(victim);
        let prefill = split.worker("prefill");
        let sent = || count(&split, &prefill, "host_pages_sent_total");
        let before = sent();
        std::thread::scope(|scope| {
            let held = hold.begin();
            let request = scope.spawn(|| split.generate(&prompt, 8));
            split.wait("some pages of the request to be sent", || sent() > before + 5.0);
            signal(split.pid(victim).unwrap(), "KILL");
            held.end();
            assert_eq!(request.join().unwrap().unwrap().tokens, right.tokens, "{victim} was killed");
        });
        split.wait_for_another(&first);
        split.wait("the pages to come back", || split.all_free());
        assert_eq!(split.generate(&prompt, 8).unwrap().tokens, right.tokens);
    }
}

/// Sends a request and returns its connection. Dropping the connection abandons the request.
fn abandon(cluster: &Cluster, prompt: &[u32]) -> TcpStream {
    let parameters = json!({ "max_new_tokens": 200, "temperature": 0, "ignore_eos": true });
    let body = json!({ "input_ids": prompt, "sampling_params": parameters, "stream": true }).to_string();
    let mut connection = TcpStream::connect(cluster.url.trim_start_matches("http://")).unwrap();
    let head = "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    write!(connection, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    connection
}

#[test]
fn requests_given_up_at_any_time_leave_no_page_behind_on_any_side() {
    let hold = Hold::new();
    let config = format!("prefill-token-us = 20\nstep-us = 300\n{}", hold.prompts_from(32));
    let setting = Setting::synthetic(&config);
    // The pages that are sent before the clients leave, and whether every prompt is held behind its second page until then. Without
    // a hold, clients leave at any time, and on a slow machine perhaps after their answers.
    let rounds = [(1.0, false), (11.0, false), (21.0, false), (31.0, false), (1.0, true)];
    for ranks in [(4, 2), (2, 4)] {
        let split =
            setting.split(ranks, &["--chunk-tokens", "16", "--max-batch", "8", "--layer-groups", "4"]);
        let right = split.generate(&[9; 70], 8).unwrap().tokens;
        let sent = || count(&split, &split.worker("prefill"), "host_pages_sent_total");
        let failed = || count(&split, &split.worker("decode"), "host_requests_failed_total");
        let is_active = || count(&split, &split.worker("decode"), "host_requests_active") > 0.0;
        for (round, (some, is_held)) in (0_u32..).zip(rounds) {
            let held = is_held.then(|| hold.begin());
            let prompts = (0..24).map(|i| (0..40 + 20 * i).map(|t| (t * 3 + i + round) % 250).collect());
            let (sent_before, failed_before) = (sent(), failed());
            let connections: Vec<TcpStream> =
                prompts.map(|prompt: Vec<u32>| abandon(&split, &prompt)).collect();
            split.wait("transfers to be under way", || sent() >= sent_before + some);
            if is_held {
                split.wait("a request that cannot end", is_active);
            }
            drop(connections);
            if let Some(held) = held {
                split.wait("requests to be given up", || failed() > failed_before);
                held.end();
            }
            split.wait("all pages to be free", || split.all_free());
        }
        assert_eq!(split.generate(&[9; 70], 8).unwrap().tokens, right);
    }
}

/// Tests in the group that runs one at a time, because they use other projects' libraries and programs.
mod external {
    use host_tests::{mooncake, nixl};

    use super::*;

    #[test]
    fn ranks_exchange_pages_over_nixl() {
        let Some(library) = nixl::config() else { return };
        let setting = Setting::new("nixl", &format!("[plugin.nixl]\n{library}"), false);
        every_pair(&setting, (PAGE_FIRST, PAGE_FIRST), &RANKS);
        every_pair(&setting, (PAGE_FIRST, LAYER_FIRST), &[(4, 2), (1, 4)]);
    }

    #[test]
    fn ranks_exchange_pages_over_mooncake() {
        let Some(config) = mooncake::config() else { return };
        let setting = Setting::new("mooncake", &format!("[plugin.mooncake]\n{config}"), false);
        every_pair(&setting, (PAGE_FIRST, PAGE_FIRST), &[(4, 2), (2, 4)]);
        every_pair(&setting, (PAGE_FIRST, LAYER_FIRST), &[(4, 2)]);
    }

    #[test]
    fn two_prefill_workers_of_different_ranks_fill_one_decode_worker_over_nixl() {
        let Some(library) = nixl::config() else { return };
        let setting = Setting::new("nixl", &format!("[plugin.nixl]\n{library}"), false);
        let prompts: Vec<Vec<u32>> =
            (0..24).map(|i| (0..30 + i).map(|token| (token * 7 + i * 3) % 250).collect()).collect();
        let right = setting.right(&prompts);
        let mut servers = ByHand::new(&setting);
        servers.worker("prefill", 4, PAGE_FIRST);
        servers.worker("prefill", 3, LAYER_FIRST);
        servers.worker("decode", 2, PAGE_FIRST);
        servers.ready();
        let cluster = &servers.cluster;
        for _ in 0..2 {
            assert_eq!(tokens(cluster, &prompts), right);
        }
        for worker in cluster.workers() {
            assert!(
                count(cluster, &worker, "host_requests_finished_total") > 0.0,
                "{} was idle",
                worker.name
            );
        }
        cluster.wait("all pages to be free", || cluster.all_free());
    }
}
