//! Settings of sampling over every arrangement of workers: the tokens are the same.

use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start, signal};
use host_tests::model::tiny_qwen3;
use host_tests::streaming::Events;
use host_tests::{plugin_files, streaming};
use serde_json::{Value, json};

const TOKENS: usize = 60;
/// Flags of a pool that is too small for all requests at once.
const TINY_POOL: [&str; 8] =
    ["--pool-pages", "24", "--reserved-decode-tokens", "8", "--max-batch", "16", "--chunk-tokens", "32"];

/// Flags of workers that speculate.
const SPECULATES: [&str; 2] = ["--speculate", "ngram"];

/// Flags of an executor, and the folder of its model if it has one.
struct Computes {
    flags: Vec<String>,
    _model: Option<tempfile::TempDir>,
}

impl Computes {
    fn synthetic() -> Self {
        Self { flags: vec!["--executor".into(), "synthetic".into()], _model: None }
    }

    fn tiny_model() -> Self {
        let folder = tempfile::tempdir().unwrap();
        tiny_qwen3(folder.path(), 7).unwrap();
        Self { flags: vec!["--model".into(), folder.path().display().to_string()], _model: Some(folder) }
    }

    fn start(&self, flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
        let plugins = plugin_files::directory(&["shm", "memory"]);
        let mut all = self.flags.clone();
        all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
        all.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
        let program = Path::new(env!("CARGO_BIN_EXE_host"));
        (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
    }
}

/// Each setting alone, greedy and drawn, and all together.
fn settings() -> Vec<Value> {
    let each = [
        json!({"presence_penalty": 1.5}),
        json!({"frequency_penalty": 0.8}),
        json!({"repetition_penalty": 1.7}),
        json!({"logit_bias": {"70": 3.5, "71": -100, "72": 2}}),
        json!({"allowed_token_ids": [65, 66, 67, 68, 69, 70, 71, 72]}),
        // With two letters, the same sequences repeat often enough to be guessed, and many guesses are wrong.
        json!({"allowed_token_ids": [65, 66]}),
        json!({"min_tokens": 40, "stop_token_ids": (32..127).step_by(3).collect::<Vec<u32>>()}),
        json!({"min_p": 0.4}),
    ];
    let mut all = Vec::new();
    for setting in &each {
        for temperature in [0.0, 1.0] {
            let mut setting = setting.clone();
            setting["temperature"] = json!(temperature);
            all.push(setting);
        }
    }
    all.push(json!({"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2,
        "logit_bias": {"70": 1}, "min_p": 0.05, "top_k": 40, "top_p": 0.95, "min_tokens": 20,
        "stop_token_ids": [75, 80, 85, 90, 95]}));
    all
}

fn body(request: usize, setting: &Value) -> Value {
    let prompt: Vec<usize> = (0..40 + request).map(|token| 33 + (token * 7 + request) % 90).collect();
    let mut params = setting.clone();
    params["max_new_tokens"] = json!(TOKENS);
    params["sampling_seed"] = json!(100 + request);
    params["ignore_eos"] = json!(true);
    json!({"input_ids": prompt, "sampling_params": params})
}

fn tokens(cluster: &Cluster, request: usize, setting: &Value) -> Value {
    let (status, text) = cluster.post("/generate", &body(request, setting).to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["output_ids"].clone()
}

/// Asks for all of them at once.
fn all_tokens(cluster: &Cluster) -> Vec<Value> {
    let settings = settings();
    std::thread::scope(|scope| {
        let clients: Vec<_> = settings
            .iter()
            .enumerate()
            .map(|(request, setting)| scope.spawn(move || tokens(cluster, request, setting)))
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn are_equal_over_all_arrangements(computes: &Computes) {
    let (alone, _plugins) = computes.start(&["--role", "aggregated"], "");
    let settings = settings();
    let right: Vec<Value> =
        settings.iter().enumerate().map(|(request, setting)| tokens(&alone, request, setting)).collect();
    let plain: Vec<Value> =
        (0..settings.len()).map(|request| tokens(&alone, request, &json!({"temperature": 0}))).collect();
    let changed = right.iter().zip(&plain).filter(|(shaped, plain)| shaped != plain).count();
    assert!(changed > settings.len() / 2, "only {changed} of {} settings change anything", settings.len());
    let caches: &[&str] = &["--decode-radix-cache", "--prefill-radix-cache", "--hierarchical-cache"];
    for (flags, config) in [
        (&[][..], ""),
        (caches, RESTORES),
        (&["--tp", "2"], ""),
        (&[&["--role", "aggregated"], &TINY_POOL[..]].concat(), ""),
        (&[caches, &TINY_POOL[..]].concat(), RESTORES),
        (&[&["--tp", "2"], &SPECULATES[..]].concat(), ""),
        (&[&["--role", "aggregated"], &SPECULATES[..], &TINY_POOL[..]].concat(), ""),
        (&[caches, &SPECULATES[..], &TINY_POOL[..]].concat(), RESTORES),
    ] {
        let (cluster, _plugins) = computes.start(flags, config);
        for round in 0..2 {
            for (request, (found, right)) in all_tokens(&cluster).iter().zip(&right).enumerate() {
                assert_eq!(found, right, "{flags:?}, round {round}: {}", settings[request]);
            }
        }
        let role = if flags.contains(&"aggregated") { "aggregated" } else { "decode" };
        let metrics = cluster.metrics(&cluster.worker(role));
        if flags.contains(&"--pool-pages") {
            assert!(metrics["host_retractions_total"] > 0.0, "{flags:?}: no request was preempted");
        }
        let guesses = ["host_drafted_tokens_right_total", "host_drafted_tokens_total"];
        let [right, guessed] = guesses.map(|name| metrics[name]);
        let speculates = flags.contains(&"--speculate");
        assert_eq!(
            right > 0.0 && guessed > right,
            speculates,
            "{flags:?}: {right} of {guessed} guesses right"
        );
        cluster.wait("all requests to end", || cluster.all_free());
    }
}

#[test]
fn the_tokens_are_the_same_over_all_arrangements() {
    are_equal_over_all_arrangements(&Computes::synthetic());
}

#[test]
fn the_tokens_of_a_model_are_the_same_over_all_arrangements() {
    are_equal_over_all_arrangements(&Computes::tiny_model());
}

#[test]
fn the_tokens_are_the_same_when_the_worker_dies_in_the_middle() {
    let computes = Computes::synthetic();
    let (cluster, _plugins) = computes.start(&[], "[synthetic]\nstep-us = 20000\n");
    for setting in [
        json!({"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
        json!({"temperature": 0, "min_tokens": 50, "stop_token_ids": (32..127).step_by(2).collect::<Vec<u32>>()}),
    ] {
        let right = tokens(&cluster, 1, &setting);
        assert!(right.as_array().unwrap().len() > 40, "{right}");
        let mut body = body(1, &setting);
        body["stream"] = json!(true);
        let decode = cluster.worker("decode");
        let (mut last, mut struck) = (Value::Null, false);
        for event in Events::of(&format!("{}/generate", cluster.url), &body).unwrap() {
            last = event.unwrap();
            if !struck && streaming::tokens(&last).len() >= 15 {
                struck = true;
                signal(cluster.pid("decode").unwrap(), "KILL");
            }
        }
        assert!(struck);
        assert_eq!(last["output_ids"], right, "{setting}");
        cluster.wait_for_another(&decode);
    }
}

#[test]
fn n_answers_share_their_prompts_pages_and_equal_single_ones() {
    let computes = Computes::synthetic();
    let (cluster, _plugins) = computes.start(&["--decode-radix-cache", "--prefill-radix-cache"], "");
    let prompt: Vec<u32> = (0..400).map(|token| 33 + token % 90).collect();
    let ask = |n: u32, seed: u32| {
        let params = json!({"n": n, "temperature": 1.0, "sampling_seed": seed, "max_new_tokens": 12, "ignore_eos": true});
        let body = json!({"input_ids": prompt, "sampling_params": params});
        let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
        assert_eq!(status, 200, "{text}");
        serde_json::from_str::<Value>(&text).unwrap()
    };
    let four = ask(4, 50);
    let moved = |answer: &Value| answer["meta_info"]["transferred_bytes"].as_u64().unwrap();
    let first = moved(&four[0]);
    for number in 1..4 {
        // Only the part that fills no page is transferred for each answer.
        assert!(
            moved(&four[number]) < first / 4,
            "answer {number} moved {} of {first} bytes",
            moved(&four[number])
        );
    }
    for number in 0..4 {
        let single = ask(1, 50 + number);
        assert_eq!(single["output_ids"], four[number as usize]["output_ids"], "answer {number}");
    }
}

#[test]
fn a_stop_string_ends_a_request_as_finished_on_its_workers() {
    let computes = Computes::synthetic();
    let (cluster, _plugins) = computes.start(&[], "");
    let plain = json!({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 40, "temperature": 0}});
    let (_, text) = cluster.post("/generate", &plain.to_string()).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    let stop: String = answer["text"].as_str().unwrap().chars().skip(4).take(2).collect();
    let mut stopped = plain.clone();
    stopped["sampling_params"]["stop"] = json!([stop]);
    stopped["sampling_params"]["max_new_tokens"] = json!(100_000);
    let (_, text) = cluster.post("/generate", &stopped.to_string()).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["meta_info"]["finish_reason"], json!({"type": "stop", "matched": stop}), "{answer}");
    for role in ["prefill", "decode"] {
        cluster.wait("the request to be counted as finished", || {
            cluster.metrics(&cluster.worker(role)).get("host_requests_finished_total") == Some(&2.0)
        });
        assert_eq!(cluster.metrics(&cluster.worker(role))["host_requests_failed_total"], 0.0, "{role}");
    }
    cluster.wait("all requests to end", || cluster.all_free());
    // The log has one line for each request, with its outcome and figures.
    let line = |line: &Value| line["fields"]["message"] == "request" && line["fields"]["outcome"] == "ok";
    let lines = || cluster.log_lines().into_iter().filter(line).collect::<Vec<Value>>();
    cluster.wait("a line for each request", || lines().len() >= 2);
    let lines = lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert_eq!(
        (&lines[1]["fields"]["status"], &lines[1]["fields"]["prompt_tokens"]),
        (&json!(200), &json!(3))
    );
}
