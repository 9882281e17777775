//! A worker with several tensor-parallel ranks answers like a worker with one, token for token and byte for byte.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use host::cli::launch;
use host::cli::settings::{RoleName, Settings};
use host_core::radix::NamespaceKey;
use host_core::request::{FailureCode, Request};
use host_core::{Batch, Room, Sampling, SequenceOutput};
use host_executor::{Executor, ExecutorError, KvMemory, LayersDone, ModelShape};
use host_tests::cluster::{Cluster, PATIENCE, Start};
use host_tests::cuda::OnBoth;
use host_tests::model::TinyModel;
use host_tests::plugin_files;
use host_wire::Answer;
use host_worker::{RankParts, Worker};

fn text(flags: &[&str]) -> Vec<String> {
    flags.iter().map(|flag| (*flag).to_owned()).collect()
}

/// A server with these flags.
fn start(model: &[String], how: &[&str]) -> Cluster {
    let mut flags = model.to_vec();
    flags.extend(text(how));
    flags.extend(text(&[
        "--threads",
        "3",
        "--pool-pages",
        "256",
        "--chunk-tokens",
        "40",
        "--max-batch",
        "4",
    ]));
    flags.extend(text(&["--log-level", "info,host::pages=debug"]));
    let workers = if how.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    Cluster::start(&Start { program, flags, config: String::new(), workers })
}

/// A model that eight ranks can share: eight query heads, two KV heads.
fn model(directory: &Path) -> Vec<String> {
    TinyModel { heads: 8, layers: 2, ..TinyModel::default() }.write(directory).unwrap();
    vec!["--model".to_owned(), directory.display().to_string()]
}

/// Digests of the prompts' pages from the workers' logs, each with the length of its prompt.
fn page_digests(cluster: &Cluster) -> Vec<(u64, String)> {
    let lines = cluster.log_lines();
    let lines = lines.iter().filter(|line| line["target"] == "host::pages").map(|line| &line["fields"]);
    let mut digests: Vec<_> = lines
        .map(|line| (line["tokens"].as_u64().unwrap(), line["digests"].as_str().unwrap().to_owned()))
        .collect();
    digests.sort();
    digests
}

/// Tokens of prompts of lengths around the page size, requested at once, and the digests of the pages of each.
type FoundData = (Vec<Vec<u64>>, Vec<(u64, String)>);

fn ask(cluster: &Cluster) -> FoundData {
    let lengths = [1, 15, 16, 17, 50, 100, 130];
    let prompts = lengths.map(|length| (0..length).map(|token| (token * 37 + length) % 250).collect());
    let tokens: Vec<Vec<u64>> = std::thread::scope(|scope| {
        let ask = |prompt: &Vec<u32>| cluster.generate(prompt, 10).unwrap().tokens;
        let threads: Vec<_> = prompts.iter().map(|prompt| scope.spawn(move || ask(prompt))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(tokens.iter().all(|tokens| tokens.len() == 10));
    // Counts also a worker that missed a heartbeat.
    let workers = cluster.health().unwrap()["workers"].as_array().unwrap().len();
    cluster.wait("all digests", || page_digests(cluster).len() == workers * prompts.len());
    cluster.wait("all pages to be free", || cluster.all_free());
    // Prefill and decode log equal digests if they hold equal pages.
    let mut digests = page_digests(cluster);
    digests.dedup();
    (tokens, digests)
}

fn models(directory: &Path) -> [(&'static str, Vec<String>); 2] {
    [("synthetic", text(&["--executor", "synthetic"])), ("tiny Qwen3", model(directory))]
}

#[test]
fn every_number_of_ranks_gives_the_same_tokens_and_pages() {
    let directory = tempfile::tempdir().unwrap();
    for (name, model) in models(directory.path()) {
        let mut reference = None;
        for ranks in ["1", "2", "3", "4", "8"] {
            let found = ask(&start(&model, &["--role", "aggregated", "--tp", ranks]));
            match &reference {
                None => reference = Some(found),
                Some(reference) => assert_eq!(*reference, found, "{name}, {ranks} ranks"),
            }
        }
    }
}

#[test]
fn kv_moves_between_any_numbers_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    for (name, model) in models(directory.path()) {
        let reference = ask(&start(&model, &["--role", "aggregated"]));
        let ranks = [("1", "2"), ("2", "1"), ("2", "3"), ("4", "4"), ("8", "2"), ("3", "8")];
        moves_between(name, &model, &ranks, &reference);
    }
}

#[test]
fn kv_on_a_gpu_moves_between_numbers_of_ranks_and_equals_that_of_a_cpu() {
    let model = OnBoth::new();
    let reference = ask(&start(&model.on("cpu"), &["--role", "aggregated"]));
    moves_between("on a GPU", &model.on("cuda"), &[("2", "2"), ("1", "2"), ("2", "1")], &reference);
}

/// Compares what prefill and decode workers with these numbers of ranks answer and hold with that of another server.
fn moves_between(name: &str, model: &[String], ranks: &[(&str, &str)], reference: &FoundData) {
    let plugins = plugin_files::directory(&["shm"]);
    let plugins = plugins.path().display().to_string();
    for (prefill, decode) in ranks {
        let how = ["--plugins-dir", &plugins, "--prefill-tp", prefill, "--decode-tp", decode];
        let cluster = start(model, &how);
        for (role, ranks) in [("prefill", prefill), ("decode", decode)] {
            let found = cluster.metrics(&cluster.worker(role)).get("host_ranks").copied();
            assert_eq!(found, Some(ranks.parse().unwrap()), "{role}");
        }
        assert_eq!(ask(&cluster), *reference, "{name}, {prefill} to {decode} ranks");
    }
}

/// An executor that panics once after a given layer.
struct Fragile {
    inner: Box<dyn Executor>,
    /// The layer after which the next batch panics, or 0 for none.
    breaks_behind: Arc<AtomicUsize>,
}

impl Executor for Fragile {
    fn shape(&self) -> &ModelShape {
        self.inner.shape()
    }

    fn forward_by_layer(
        &mut self,
        kv: &mut KvMemory,
        batch: &Batch,
        layers_done: &mut LayersDone<'_>,
    ) -> Result<Vec<SequenceOutput>, ExecutorError> {
        let breaks_behind = self.breaks_behind.swap(0, Ordering::SeqCst);
        self.inner.forward_by_layer(kv, batch, &mut |layers| {
            assert!(layers != breaks_behind, "told to panic behind layer {layers}");
            layers_done(layers);
        })
    }
}

#[test]
fn a_rank_that_panics_costs_the_batch_and_neither_the_worker_nor_a_page() {
    let directory = tempfile::tempdir().unwrap();
    model(directory.path());
    let settings = Settings {
        model: Some(directory.path().to_owned()),
        role: Some(RoleName::Aggregated),
        tp: Some(3),
        threads: Some(3),
        pool_pages: Some(64),
        ..Settings::default()
    };
    let mut parts = launch::parts(&settings, RoleName::Aggregated).unwrap();
    assert_eq!(parts.ranks.len(), 3);
    let mut breaks = Vec::new();
    let fragile = |part: RankParts| {
        let breaks_behind = Arc::new(AtomicUsize::new(0));
        breaks.push(breaks_behind.clone());
        RankParts { executor: Box::new(Fragile { inner: part.executor, breaks_behind }), ..part }
    };
    parts.ranks = std::mem::take(&mut parts.ranks).into_iter().map(fragile).collect();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (worker, mut outgoing) = Worker::start(parts, runtime.handle()).unwrap();
    runtime.spawn(async move { while outgoing.recv().await.is_some() {} });
    let ask = |room| {
        let request = Request {
            room: Room(room),
            prompt: (0..50).collect(),
            answered: 0,
            max_new_tokens: 8,
            stop_tokens: Vec::new(),
            ignore_stop: true,
            sampling: Sampling::GREEDY,
            priority: 0,
            client: 0,
            prefill: None,
            namespace: NamespaceKey::default(),
            no_cache: false,
            scores: None,
            names: Vec::new(),
        };
        runtime.block_on(async {
            let mut answers = worker.handle().submit(request).await;
            let mut all = Vec::new();
            while let Some(answer) = answers.recv().await {
                all.push(answer);
            }
            all
        })
    };
    let tokens = |answers: &[Answer]| -> Vec<u32> {
        let token = |answer: &Answer| match answer {
            Answer::Token(sampled) => Some(sampled.token),
            _ => None,
        };
        answers.iter().filter_map(token).collect()
    };
    let right = ask(1);
    assert_eq!(tokens(&right).len(), 8);
    for (room, rank) in [(2, 0), (3, 1), (4, 2)] {
        breaks[rank].store(1 + rank % 2, Ordering::SeqCst);
        let failed = ask(10 + room);
        let Some(Answer::Failed(failure)) = failed.last() else { panic!("{failed:?}") };
        assert_eq!(failure.code, FailureCode::Executor);
        let says = format!("rank {rank}: the executor panicked: told to panic behind layer {}", 1 + rank % 2);
        assert!(failure.message.contains(&says), "{failure:?}");
        assert_eq!(tokens(&ask(20 + room)), tokens(&right));
    }
    // The counters are published after the last answer.
    let pool = || worker.handle().stats().pool;
    let freed = async {
        while (pool().held, pool().quarantined) != (0, 0) {
            tokio::task::yield_now().await;
        }
    };
    let freed = runtime.block_on(async { tokio::time::timeout(PATIENCE, freed).await });
    assert!(freed.is_ok(), "pages are held for good: {:?}", pool());
    worker.stop().unwrap();
}
