//! Workers on a GPU, for which a library stands in: their answers are those of workers on the CPU, whichever plugin transfers the
//! pages.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::cuda::{self, LostGpus};
use host_tests::model::{Family, TinyModel};
use host_tests::streaming::{Events, tokens};
use host_tests::{plugin_files, streaming};
use serde_json::json;

const HOST: &str = env!("CARGO_BIN_EXE_host");
/// A transfer plugin that reaches a GPU's memory, and one that does not.
const MOVERS: [&str; 2] = ["shm", "wire"];
/// Caches that are turned off unless a test's flags name them.
const CACHES: [&str; 2] = ["prefill-radix-cache", "decode-radix-cache"];

/// A model and plugins.
struct Fixture {
    model: tempfile::TempDir,
    plugins: tempfile::TempDir,
}

impl Fixture {
    fn new(family: Family) -> Self {
        let model = tempfile::tempdir().unwrap();
        TinyModel { family, layers: 2, seed: 3, ..TinyModel::default() }.write(model.path()).unwrap();
        Self { model, plugins: plugin_files::directory(&["shm", "wire", "memory"]) }
    }

    fn flags(&self, flags: &[&str]) -> Vec<String> {
        let mut all: Vec<String> = flags.iter().map(|flag| (*flag).to_owned()).collect();
        for (flag, folder) in [("--model", &self.model), ("--plugins-dir", &self.plugins)] {
            all.extend([flag.to_owned(), folder.path().display().to_string()]);
        }
        all.extend(["--no-warm-up", "--kv-memory", "4MiB"].map(str::to_owned));
        let is_off = |cache: &&&str| !flags.contains(&format!("--{cache}").as_str());
        all.extend(CACHES.iter().filter(is_off).map(|cache| format!("--no-{cache}")));
        all
    }

    fn start(&self, flags: &[&str]) -> Cluster {
        let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
        let (program, config) = (Path::new(HOST), String::new());
        let start = Start { program, flags: self.flags(flags), config, workers };
        Cluster::start_as_given(&start, &[])
    }

    /// Starts one worker for the router at this address.
    fn worker(&self, router: &str, role: &str, executor: &str, flags: &[&str]) -> Worker {
        self.worker_with(router, role, executor, flags, &[])
    }

    /// As [`worker`](Self::worker), with these variables.
    fn worker_with(
        &self,
        router: &str,
        role: &str,
        executor: &str,
        flags: &[&str],
        variables: &[(&str, &Path)],
    ) -> Worker {
        let own = ["--role", role, "--executor", executor, "--router", router, "--control", "127.0.0.1:0"];
        let mut command = Command::new(HOST);
        command.args(self.flags(&[&own, flags].concat())).envs(cuda::environment()).stdin(Stdio::null());
        command.envs(variables.iter().copied());
        Worker(command.spawn().unwrap())
    }

    /// A router that tries requests again for so many seconds, and its address for workers.
    fn router(&self, retry: &str) -> (Cluster, String) {
        let flags = self.flags(&["--role", "router", "--control", "127.0.0.1:0", "--retry-timeout", retry]);
        let start = Start { program: Path::new(HOST), flags, config: String::new(), workers: 0 };
        let cluster = Cluster::start_as_given(&start, &[]);
        let control = cluster.greeting.rsplit(' ').next().unwrap().to_owned();
        (cluster, control)
    }
}

/// A worker process, ended with the test.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            signal(self.0.id(), "TERM");
            self.0.wait().unwrap();
        }
    }
}

/// Answers to three prompts: shorter than a page, of some pages, and of several chunks.
fn answers(cluster: &Cluster) -> Vec<Vec<u64>> {
    let prompt =
        |(seed, length): (u32, u32)| (0..length).map(|at| (at * 7 + at * at / 5 + seed) % 200).collect();
    let prompts: Vec<Vec<u32>> = [(1, 5), (2, 70), (3, 130)].map(prompt).into();
    prompts.iter().map(|prompt| cluster.generate(prompt, 12).unwrap().tokens).collect()
}

#[test]
fn prefill_and_decode_on_a_gpu_answer_as_on_the_cpu() {
    for family in [Family::Qwen3, Family::Llama] {
        let fixture = Fixture::new(family);
        let right = answers(&fixture.start(&["--executor", "cpu", "--role", "aggregated"]));
        let alone = fixture.start(&["--executor", "cuda", "--role", "aggregated"]);
        assert_eq!(answers(&alone), right, "{family:?}");
        for mover in MOVERS {
            for flags in [
                &["--chunk-tokens", "64"][..],
                &["--prefill-tp", "2", "--kv-layout", "layer-kv-page-token-head-dim"],
            ] {
                let cluster = fixture.start(&[&["--executor", "cuda", "--plugins", mover], flags].concat());
                assert_eq!(answers(&cluster), right, "{family:?} {mover} {flags:?}");
                let staged = cluster.log().contains("does not reach the memory of a GPU");
                assert_eq!(staged, mover == "wire", "{}", cluster.log());
                cluster.wait("all requests to end", || cluster.all_free());
            }
        }
    }
}

#[test]
fn a_gpu_and_a_cpu_hand_over_to_each_other() {
    let fixture = Fixture::new(Family::Qwen3);
    let right = answers(&fixture.start(&["--executor", "cpu", "--role", "aggregated"]));
    let ways =
        MOVERS.into_iter().flat_map(|mover| [["cpu", "cuda"], ["cuda", "cpu"]].map(|both| (mover, both)));
    for (mover, executors) in ways {
        let (cluster, control) = fixture.router("600");
        let workers = [
            fixture.worker(&control, "prefill", executors[0], &["--plugins", mover]),
            fixture.worker(&control, "decode", executors[1], &["--plugins", mover]),
        ];
        cluster.wait("both to register", || cluster.workers().len() == 2);
        assert_eq!(answers(&cluster), right, "{mover} {executors:?}");
        cluster.wait("all requests to end", || cluster.all_free());
        drop(workers);
    }
}

#[test]
fn a_worker_whose_peer_has_no_staging_memory_is_not_paired_with_a_gpu() {
    let fixture = Fixture::new(Family::Qwen3);
    let (cluster, control) = fixture.router("2");
    let workers = [
        fixture.worker(&control, "prefill", "cuda", &["--plugins", "wire"]),
        fixture.worker(&control, "decode", "cpu", &["--plugins", "wire", "--staging", "never"]),
    ];
    cluster.wait("both to register", || cluster.workers().len() == 2);
    // On a busy machine a worker may be silent for a moment. Then the request fails for that reason.
    cluster.wait("a refusal of the pair", || {
        let failure = cluster.generate(&[1, 2, 3], 4).expect_err("pages have no way to go");
        failure.contains("go through staging memory")
    });
    drop(workers);
}

#[test]
fn what_left_a_gpus_pool_for_the_tiers_comes_back() {
    let fixture = Fixture::new(Family::Qwen3);
    let right = answers(&fixture.start(&["--executor", "cpu", "--role", "aggregated"]));
    let caches = ["--prefill-radix-cache", "--decode-radix-cache", "--hierarchical-cache"];
    let stores = ["--hicache-storage", "memory", "--hicache-prefetch-policy", "wait_complete"];
    let cluster = fixture.start(&[&["--executor", "cuda"], &caches[..], &stores].concat());
    assert_eq!(answers(&cluster), right);
    // The whole pages of prompts and answers. The last token of an answer has no KV.
    let pages = f64::from([16, 81, 141].map(|tokens| tokens / 16).iter().sum::<u32>());
    cluster.wait("pages to be written", || cluster.storage_pages("decode", "written") == pages);
    cluster.flush();
    assert_eq!(answers(&cluster), right, "from the tiers");
    let decode = cluster.metrics(&cluster.worker("decode"));
    assert!(decode["host_hicache_promised_pages_total{tier=\"storage\"}"] > 0.0);
    cluster.wait("all requests to end", || cluster.all_free());
}

#[test]
fn requests_of_a_worker_that_has_lost_its_gpu_go_on_on_another_worker() {
    const TOKENS: usize = 200;
    let prompt: Vec<u32> = (0..100).collect();
    let fixture = Fixture::new(Family::Qwen3);
    let alone = fixture.start(&["--executor", "cpu", "--role", "aggregated"]);
    let right = streaming::generate(&alone.url, &prompt, TOKENS).unwrap().tokens;
    let Some(gpus) = LostGpus::none() else { return };
    let (cluster, control) = fixture.router("600");
    let start = |role, name| {
        let flags = ["--plugins", "shm", "--name", name];
        (name, fixture.worker_with(&control, role, "cuda", &flags, &[gpus.variable()]))
    };
    let mut decode = [start("decode", "decode-a"), start("decode", "decode-b")];
    let prefill = start("prefill", "prefill-a");
    cluster.wait("all to register", || cluster.workers().len() == 3);

    let body = json!({
        "input_ids": prompt,
        "stream": true,
        "sampling_params": { "max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": true },
    });
    // On a slow machine the answer may be complete before the GPU is lost. Then the worker ends at a later one.
    let mut lost = None;
    cluster.wait("the decode worker without a GPU to end", || {
        let mut read = Vec::new();
        for event in Events::of(&format!("{}/generate", cluster.url), &body).unwrap() {
            let so_far = tokens(&event.unwrap());
            assert!(so_far.starts_with(&read), "no token was told twice or taken back");
            read = so_far;
            if read.len() >= 20 && lost.is_none() {
                let active = |worker: &&host_tests::cluster::Worker| {
                    worker.role == "decode"
                        && cluster.metrics(worker).get("host_requests_active") == Some(&1.0)
                };
                let computes = cluster.workers().iter().find(active).map(|worker| worker.name.clone());
                lost = decode.iter().position(|(name, _)| Some(*name) == computes.as_deref());
                lost.into_iter().for_each(|at| gpus.lose(decode[at].1.0.id()));
            }
        }
        assert_eq!(read, right);
        decode.iter_mut().any(|(_, worker)| worker.0.try_wait().unwrap().is_some())
    });

    // A worker without requests ends when it gets one. It is connected to the decode worker that is left.
    let mut prefill = [prefill, start("prefill", "prefill-b")];
    cluster.wait("the new worker to register", || cluster.workers().len() == 3);
    let (_, idle) = &mut prefill[0];
    gpus.lose(idle.0.id());
    cluster.wait("the prefill worker without a GPU to end", || {
        // Two at once, so that the router takes both prefill workers.
        std::thread::scope(|scope| {
            let ask = || streaming::generate(&cluster.url, &prompt, 20).unwrap().tokens;
            let asks = [scope.spawn(ask), scope.spawn(ask)];
            asks.into_iter().for_each(|ask| assert_eq!(ask.join().unwrap(), right[..20]));
        });
        idle.0.try_wait().unwrap().is_some()
    });
    let ended = decode.iter_mut().chain(&mut prefill).filter_map(|(_, worker)| worker.0.try_wait().unwrap());
    assert_eq!(ended.map(|status| status.code()).collect::<Vec<_>>(), [Some(1), Some(1)]);
    cluster.wait("all requests to end", || cluster.all_free());
}
