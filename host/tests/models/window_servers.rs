//! Servers of models with sliding layers: every arrangement answers like one aggregated worker without caches, and its cost depends
//! on the window and not on the prompt.

use std::path::Path;

use host_tests::caches::RESTORES;
use host_tests::cluster::{Cluster, Start};
use host_tests::model::TinyModel;
use host_tests::plugin_files;
use serde_json::{Value, json};

const WINDOW: u32 = 40;
const PAGE: u32 = 16;
/// Seven layers, five of which slide: two in a page, so that a window part is three pages.
const SYNTHETIC: &str = "[synthetic]\nlayers = 7\nsliding-layers = 5\nwindow = 40\nkv-heads = 4\n";
const PARTS: u32 = 3;
/// Lengths: shorter than the window, equal, one more, and 60 windows.
const LENGTHS: [u32; 5] = [3, WINDOW - 1, WINDOW, WINDOW + 1, 60 * WINDOW];
const CACHES: [&str; 2] = ["--prefill-radix-cache", "--decode-radix-cache"];

fn start_model(model: &[&str], flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm", "swa", "memory"]);
    let mut all: Vec<String> = model.iter().chain(flags).map(|flag| (*flag).to_owned()).collect();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let config = if model.contains(&"synthetic") { SYNTHETIC } else { "" };
    let offload = if flags.contains(&"--hierarchical-cache") { RESTORES } else { "" };
    (Cluster::start(&Start { program, flags: all, config: format!("{config}{offload}"), workers }), plugins)
}

fn start(flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    start_model(&["--executor", "synthetic"], flags)
}

fn prompt(seed: u32, length: u32) -> Vec<u32> {
    (0..length).map(|token| (token * 7 + token * token / 50 + seed * 13) % 200).collect()
}

/// Tokens of a drawn (not greedy) answer.
fn answer(cluster: &Cluster, prompt: &[u32], tokens: u32) -> Value {
    let body = json!({
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": tokens, "temperature": 1.0, "sampling_seed": prompt.len(), "ignore_eos": true
        },
    });
    let (status, text) = cluster.post("/generate", &body.to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["output_ids"].as_array().map(Vec::len), Some(tokens as usize));
    answer["output_ids"].clone()
}

/// Asks for all answers at once.
fn answers(cluster: &Cluster, prompts: &[Vec<u32>], tokens: u32) -> Vec<Value> {
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(move || answer(cluster, prompt, tokens))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn counts(cluster: &Cluster, role: &str) -> impl Fn(&str) -> f64 {
    let metrics = cluster.metrics(&cluster.worker(role));
    move |name| metrics[&format!("host_{name}_total")]
}

#[test]
fn prompts_around_the_window_and_sixty_times_as_long_are_answered_alike_by_every_arrangement() {
    let prompts: Vec<Vec<u32>> =
        LENGTHS.into_iter().zip(1..).map(|(length, seed)| prompt(seed, length)).collect();
    // The synthetic model draws its tokens from pages, so their size affects the answers.
    let right = |page: &str| {
        let (aggregated, _plugins) = start(&["--role", "aggregated", "--page-size", page]);
        answers(&aggregated, &prompts, 60)
    };
    let (of_16, of_64) = (right("16"), right("64"));
    let arrangements: [(&[&str], &[Value]); 6] = [
        (&[], &of_16),
        (&CACHES, &of_16),
        (&["--role", "aggregated", "--prefill-radix-cache"], &of_16),
        (&["--prefill-tp", "4", "--decode-tp", "2"], &of_16),
        (&["--swa-full-tokens-ratio", "0.4", "--prefill-radix-cache"], &of_16),
        (&["--page-size", "64", "--chunk-tokens", "100", "--decode-radix-cache"], &of_64),
    ];
    for (flags, right) in arrangements {
        let (cluster, _plugins) = start(&[flags, &["--pool-pages", "400"]].concat());
        for round in 0..2 {
            assert_eq!(answers(&cluster, &prompts, 60), right, "{flags:?}, round {round}");
        }
        cluster.wait("all requests to end", || cluster.all_free());
    }
}

#[test]
fn a_prompt_brings_its_pages_and_one_window_whatever_its_length() {
    let (cluster, _plugins) = start(&["--pool-pages", "400"]);
    let page = cluster.generate(&prompt(1, PAGE), 1).unwrap().transferred_bytes / u64::from(1 + PARTS);
    for length in LENGTHS {
        let moved = cluster.generate(&prompt(2, length), 2).unwrap().transferred_bytes / page;
        let pages = length.div_ceil(PAGE);
        let window = pages - (length + 1).saturating_sub(WINDOW) / PAGE;
        assert_eq!(moved, u64::from(pages + PARTS * window), "{length} tokens");
    }
    cluster.wait("all requests to end", || cluster.all_free());
}

#[test]
fn a_prompt_with_no_room_for_its_windows_at_once_is_served_on_every_worker() {
    // The prompt has 150 pages. Window parts for all of them would be 450 more.
    let long = prompt(5, 60 * WINDOW);
    let (aggregated, _plugins) = start(&["--role", "aggregated"]);
    let right = answer(&aggregated, &long, 20);
    for flags in [&["--role", "aggregated"][..], &[]] {
        let (cluster, _plugins) = start(&[flags, &["--pool-pages", "166"]].concat());
        assert_eq!(answer(&cluster, &long, 20), right, "{flags:?}");
        cluster.wait("all requests to end", || cluster.all_free());
    }
}

#[test]
fn requests_that_lose_their_windows_answer_as_if_they_had_not() {
    let prompts: Vec<Vec<u32>> = (0..10).map(|request| prompt(request, 30 + request * 5)).collect();
    let (roomy, _plugins) = start(&["--role", "aggregated"]);
    let right = answers(&roomy, &prompts, 200);
    let tight = ["--pool-pages", "56", "--reserved-decode-tokens", "16", "--max-batch", "16"];
    for (role, flags) in [
        ("aggregated", &["--role", "aggregated"][..]),
        ("aggregated", &["--role", "aggregated", "--prefill-radix-cache"]),
        ("decode", &[]),
        ("decode", &CACHES),
    ] {
        let (cluster, _plugins) = start(&[flags, &tight].concat());
        assert_eq!(answers(&cluster, &prompts, 200), right, "{flags:?}");
        cluster.wait("all requests to end", || cluster.all_free());
        let count = counts(&cluster, role);
        assert!(count("retractions") > 0.0, "{flags:?}: pages never ran short");
        assert_eq!(count("requests_failed"), 0.0);
    }
}

#[test]
fn the_next_turn_of_a_conversation_is_computed_from_the_window_that_the_last_one_left() {
    let (aggregated, _plugins) = start(&["--role", "aggregated"]);
    for flags in [&["--role", "aggregated", "--prefill-radix-cache"][..], &CACHES] {
        let (cluster, _plugins) = start(&[flags, &["--pool-pages", "300"]].concat());
        let computes = if flags.contains(&"aggregated") { "aggregated" } else { "prefill" };
        let (mut conversation, mut before) = (prompt(9, 150), 0.0);
        for turn in 1..=4 {
            let answered = answer(&cluster, &conversation, 24);
            assert_eq!(answered, answer(&aggregated, &conversation, 24), "{flags:?}, turn {turn}");
            let all = cluster.settled(computes, f64::from(turn))["host_prefill_tokens_total"];
            let computed = all - before;
            before = all;
            // The pages of the last turn are reused up to the last whole page. Prefill computes the answer's tokens again.
            assert!(
                turn == 1 || computed <= 24.0 + 20.0 + 16.0,
                "{flags:?}, turn {turn}: {computed} computed"
            );
            conversation
                .extend(answered.as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32));
            conversation.extend(prompt(turn, 20));
        }
    }
}

#[test]
fn decode_restores_its_pages_from_the_offload_tiers_and_is_sent_the_window() {
    let flags = ["--decode-radix-cache", "--hierarchical-cache", "--hicache-storage", "memory"];
    let (cluster, _plugins) = start(&flags);
    // The next token sees positions 126 to 165, which lie on four pages.
    let prompt = prompt(3, 10 * PAGE + 5);
    let first = cluster.generate(&prompt, 4).unwrap();
    let page = first.transferred_bytes / u64::from(11 + PARTS * 4);
    let decode = cluster.worker("decode");
    cluster.wait("pages to be written", || cluster.storage_pages("decode", "written") == 10.0);
    cluster.flush();
    let second = cluster.generate(&prompt, 4).unwrap();
    assert_eq!(second.tokens, first.tokens);
    assert_eq!(
        second.transferred_bytes,
        u64::from(1 + PARTS * 4) * page,
        "the rest of a page, and the window"
    );
    cluster.wait("all requests to end", || cluster.all_free());
    assert_eq!(cluster.metrics(&decode)["host_hicache_promised_pages_total{tier=\"storage\"}"], 10.0);
}

#[test]
fn a_gemma3_is_answered_alike_by_every_arrangement() {
    let directory = tempfile::tempdir().unwrap();
    TinyModel { heads: 8, kv_heads: 4, ..TinyModel::gemma3() }.write(directory.path()).unwrap();
    let path = directory.path().display().to_string();
    let model = ["--model", &path, "--threads", "2"];
    let prompts: Vec<Vec<u32>> = [5, 19, 64, 130].into_iter().map(|length| prompt(length, length)).collect();
    let (aggregated, _plugins) = start_model(&model, &["--role", "aggregated"]);
    let right = answers(&aggregated, &prompts, 30);
    let arrangements: [&[&str]; 3] = [
        &CACHES,
        &["--prefill-tp", "4", "--decode-tp", "2"],
        &["--role", "aggregated", "--prefill-radix-cache"],
    ];
    for flags in arrangements {
        let (cluster, _plugins) = start_model(&model, &[flags, &["--pool-pages", "200"]].concat());
        for round in 0..2 {
            assert_eq!(answers(&cluster, &prompts, 30), right, "{flags:?}, round {round}");
        }
        cluster.wait("all requests to end", || cluster.all_free());
    }
}

/// Parts of a long prompt's window are evicted for another prompt. Then a request goes on from the middle of the long one.
fn forks(model: &[&str], flags: &[&str], long: u32, pool: &str) -> (Cluster, f64) {
    let (aggregated, _plugins) = start_model(model, &["--role", "aggregated"]);
    let (cluster, _plugins) = start_model(model, &[flags, &["--pool-pages", pool]].concat());
    let first = prompt(5, long);
    let fork = [&first[..long as usize / 2], &prompt(6, 100)].concat();
    for prompt in [&first, &prompt(7, long * 2 / 3)] {
        assert_eq!(answer(&cluster, prompt, 20), answer(&aggregated, prompt, 20), "{flags:?}");
    }
    let computes = if flags.contains(&"aggregated") { "aggregated" } else { "prefill" };
    let before = cluster.settled(computes, 2.0)["host_prefill_tokens_total"];
    assert_eq!(answer(&cluster, &fork, 20), answer(&aggregated, &fork, 20), "{flags:?}");
    let series = cluster.settled(computes, 3.0);
    let computed = series["host_prefill_tokens_total"] - before;
    assert!(computed < 100.0 + f64::from(PAGE), "{flags:?}: {computed} computed");
    (cluster, series["host_window_recomputed_tokens_total"])
}

#[test]
fn a_request_that_goes_on_where_the_window_is_gone_has_it_computed_and_nothing_else_of_what_is_cached() {
    let long = 60 * WINDOW;
    // The token at 1200 sees page 72 first. Five layers look back 39 tokens each, without the token itself.
    let again = f64::from(1200 - (72 * PAGE - 4 * (WINDOW - 1)) / PAGE * PAGE);
    for flags in [&["--role", "aggregated", "--prefill-radix-cache"][..], &CACHES] {
        let (cluster, found) = forks(&["--executor", "synthetic"], flags, long, "400");
        assert_eq!(found, again, "{flags:?}");
        if flags == CACHES {
            assert_eq!(counts(&cluster, "decode")("integrity_failures"), 0.0);
        }
    }
    let ranks = ["--prefill-radix-cache", "--prefill-tp", "4", "--decode-tp", "2", "--chunk-tokens", "50"];
    assert_eq!(forks(&["--executor", "synthetic"], &ranks, long, "400").1, again);
}

#[test]
fn a_gemma3_whose_window_is_gone_answers_as_one_that_kept_nothing() {
    let directory = tempfile::tempdir().unwrap();
    TinyModel { heads: 8, kv_heads: 4, ..TinyModel::gemma3() }.write(directory.path()).unwrap();
    let path = directory.path().display().to_string();
    let model = ["--model", &path, "--threads", "2"];
    for flags in [
        &["--role", "aggregated", "--prefill-radix-cache"][..],
        &CACHES,
        &["--prefill-radix-cache", "--prefill-tp", "4", "--decode-tp", "2", "--chunk-tokens", "50"],
    ] {
        let (_cluster, again) = forks(&model, flags, 600, "150");
        assert!(again > 0.0, "{flags:?}");
    }
}
