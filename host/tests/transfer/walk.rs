//! A model that is split over a prefill and a decode process answers like one aggregated worker, token for token.

use std::path::Path;

use host_tests::cluster::{Answer, Cluster, Start};
use host_tests::cuda::OnBoth;
use host_tests::plugin_files;

/// The program under test.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_host"))
}

fn text(flags: &[&str]) -> Vec<String> {
    flags.iter().map(|flag| (*flag).to_owned()).collect()
}

/// A server of a model with these chunk and batch sizes, aggregated or with prefill and decode workers.
fn start(
    role: Option<&str>,
    model: &[String],
    chunk: u32,
    batch: u32,
    plugins: &Path,
    more: &[&str],
) -> Cluster {
    let mut flags = model.to_vec();
    flags.extend(["--chunk-tokens".into(), chunk.to_string(), "--max-batch".into(), batch.to_string()]);
    flags.extend(["--plugins-dir".into(), plugins.display().to_string(), "--threads".into(), "2".into()]);
    flags.extend(text(&["--kv-memory", "16MiB"]));
    flags.extend(text(more));
    let workers = match role {
        Some(role) => {
            flags.extend(["--role".into(), role.to_owned()]);
            1
        }
        None => 2,
    };
    Cluster::start(&Start { program: program(), flags, config: String::new(), workers })
}

/// Prompts of lengths around the page size and the chunk sizes, from a fixed generator.
fn prompts() -> Vec<Vec<u32>> {
    let mut state = 0x1234_5678_u32;
    [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 200]
        .iter()
        .map(|length| {
            let mut token = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                state >> 16 & 0xff
            };
            (0..*length).map(|_| token()).collect()
        })
        .collect()
}

/// Asks for all prompts at once, so that batches mix.
fn answers(cluster: &Cluster, count: u32) -> Vec<Answer> {
    let prompts = prompts();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(|| cluster.generate(prompt, count).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_arrangement_gives_the_same_tokens() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("tiny");
    host_tests::model::tiny_qwen3(&model, 1).unwrap();
    let plugins = plugin_files::directory(&["shm"]);
    let models = [
        ("synthetic", text(&["--executor", "synthetic"])),
        ("tiny Qwen3", vec!["--model".into(), model.display().to_string()]),
    ];
    for (name, model) in &models {
        let mut reference = None;
        for role in [Some("aggregated"), None] {
            for (chunk, batch) in [(512, 64), (16, 4), (7, 1), (33, 2)] {
                let how = format!("{name}, chunk {chunk}, batch {batch}");
                let cluster = start(role, model, chunk, batch, plugins.path(), &[]);
                gives_the_same(&cluster, role, &how, &mut reference);
            }
        }
    }
}

/// Compares the tokens that a server gives with those of the first server.
fn gives_the_same(cluster: &Cluster, role: Option<&str>, how: &str, first: &mut Option<Vec<Vec<u64>>>) {
    let answers = answers(cluster, 12);
    let how = format!("{how}, {}", role.unwrap_or("1P1D over shm"));
    println!("{how}");
    for answer in &answers {
        assert_eq!(answer.tokens.len(), 12);
        assert_eq!(answer.transferred_bytes > 0, role.is_none(), "{how} moved {answer:?}");
    }
    let tokens: Vec<_> = answers.into_iter().map(|answer| answer.tokens).collect();
    assert_eq!(*first.get_or_insert_with(|| tokens.clone()), tokens, "{how}");
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn a_gpu_gives_the_tokens_of_the_cpu_in_every_arrangement() {
    let (model, plugins) = (OnBoth::new(), plugin_files::directory(&["shm"]));
    let mut reference = None;
    for (executor, role, chunk, batch) in [
        ("cpu", Some("aggregated"), 512, 64),
        ("cuda", Some("aggregated"), 512, 64),
        ("cuda", Some("aggregated"), 7, 1),
        ("cuda", None, 33, 2),
        ("cuda", None, 16, 4),
    ] {
        let how = format!("{executor}, chunk {chunk}, batch {batch}");
        let cluster = start(role, &model.on(executor), chunk, batch, plugins.path(), &[]);
        gives_the_same(&cluster, role, &how, &mut reference);
    }
}

/// Digests of a prompt's pages, as each worker logged them.
fn page_digests(cluster: &Cluster, tokens: usize) -> Vec<String> {
    let lines = cluster
        .log_lines()
        .into_iter()
        .filter(|line| line["target"] == "host::pages" && line["fields"]["tokens"] == tokens as u64);
    lines.map(|line| line["fields"]["digests"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn kv_bytes_are_equal_on_prefill_after_transfer_and_aggregated() {
    let directory = tempfile::tempdir().unwrap();
    let model = directory.path().join("tiny");
    host_tests::model::tiny_qwen3(&model, 1).unwrap();
    let model = ["--model".to_owned(), model.display().to_string()];
    equal_kv_bytes(&model, &model);
}

#[test]
fn kv_bytes_of_a_gpu_are_equal_on_prefill_after_transfer_and_to_those_of_a_cpu() {
    let model = OnBoth::new();
    equal_kv_bytes(&model.on("cuda"), &model.on("cpu"));
}

/// Compares pages of a prefill and a decode worker with those of an aggregated worker.
fn equal_kv_bytes(split: &[String], whole: &[String]) {
    let plugins = plugin_files::directory(&["shm"]);
    let log = ["--log-level", "info,host::pages=debug"];
    let split = start(None, split, 24, 8, plugins.path(), &log);
    let whole = start(Some("aggregated"), whole, 512, 8, plugins.path(), &log);
    for length in [16_usize, 75] {
        let prompt: Vec<u32> = (0..length as u32).map(|token| token * 13 % 250).collect();
        split.generate(&prompt, 4).unwrap();
        whole.generate(&prompt, 4).unwrap();
        let mut digests = Vec::new();
        split.wait("digests of both workers", || {
            digests = page_digests(&split, length);
            digests.len() == 2
        });
        whole.wait("the digests", || page_digests(&whole, length).len() == 1);
        digests.extend(page_digests(&whole, length));
        assert_eq!(digests[0].split(',').count(), length.div_ceil(16));
        assert!(digests.iter().all(|other| *other == digests[0]), "{digests:?}");
    }
}

/// A split synthetic server over the plugin that flips one byte of one transferred page.
fn start_corrupting(flips: u32, more: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["corrupting"]);
    let mut flags = text(&["--executor", "synthetic", "--plugins", "corrupting", "--kv-memory", "16MiB"]);
    flags.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    flags.extend(text(more));
    let config = format!("[plugin.corrupting]\nflip_write = 1\nflips = {flips}\n");
    (Cluster::start(&Start { program: program(), flags, config, workers: 2 }), plugins)
}

#[test]
fn one_flipped_byte_changes_the_synthetic_answer() {
    let plugins = plugin_files::directory(&["shm"]);
    let whole = start(Some("aggregated"), &text(&["--executor", "synthetic"]), 512, 8, plugins.path(), &[]);
    let (split, _plugins) = start_corrupting(1, &["--no-page-integrity"]);
    let prompt: Vec<u32> = (0..100).collect();
    let right = whole.generate(&prompt, 16).unwrap().tokens;
    let wrong = split.generate(&prompt, 16).unwrap().tokens;
    assert_ne!(right, wrong, "the executor did not notice a flipped byte");
    assert_eq!(right[0], wrong[0], "the first token is prefill's, whose pages were intact");
    // The plugin flips once. From then on answers are right.
    assert_eq!(split.generate(&prompt, 16).unwrap().tokens, right);
}

#[test]
fn with_page_integrity_a_flipped_byte_costs_a_second_transfer_and_no_answer() {
    let plugins = plugin_files::directory(&["shm"]);
    let whole = start(Some("aggregated"), &text(&["--executor", "synthetic"]), 512, 8, plugins.path(), &[]);
    let (split, _plugins) = start_corrupting(1, &[]);
    let prompt: Vec<u32> = (0..100).collect();
    let right = whole.generate(&prompt, 16).unwrap().tokens;
    assert_eq!(split.generate(&prompt, 16).unwrap().tokens, right);
    let metrics = split.metrics(&split.worker("decode"));
    assert_eq!(metrics.get("host_integrity_failures_total"), Some(&1.0), "{metrics:?}");
    split.wait("all pages to be free", || split.all_free());
}
