//! Log probabilities of prompts over every arrangement of workers: they are the same, and so is the answer behind them.

use host_tests::caches::RESTORES;
use host_tests::cluster::Cluster;
use serde_json::{Value, json};

use super::settings::{Computes, TINY_POOL};

/// Prompts that begin alike in pairs, so that caches have a part of most of them.
fn bodies() -> Vec<Value> {
    let prompt = |number: usize| -> Vec<usize> {
        (0..150 + number)
            .map(|token| 33 + (token * 7 + if token < 100 { number / 2 } else { number }) % 90)
            .collect()
    };
    let body = |number| {
        json!({"prompt": prompt(number), "echo": true, "logprobs": 3, "max_tokens": 20, "ignore_eos": true, "seed": number,
            "temperature": 1.0})
    };
    (0..6).map(body).collect()
}

fn told(cluster: &Cluster, body: &Value) -> Value {
    let (status, text) = cluster.post("/v1/completions", &body.to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["choices"][0].clone()
}

/// Asks for all of them at once.
fn all_told(cluster: &Cluster, bodies: &[Value]) -> Vec<Value> {
    std::thread::scope(|scope| {
        let clients: Vec<_> = bodies.iter().map(|body| scope.spawn(move || told(cluster, body))).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

fn are_equal_over_all_arrangements(computes: &Computes) {
    let bodies = bodies();
    let (alone, _plugins) = computes.start(&["--role", "aggregated"], "");
    let right: Vec<Value> = bodies.iter().map(|body| told(&alone, body)).collect();
    for (choice, body) in right.iter().zip(&bodies) {
        let length = body["prompt"].as_array().unwrap().len();
        let logprobs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!((logprobs.len(), &logprobs[0]), (length + 20, &Value::Null));
        let of_prompt: std::collections::BTreeSet<String> =
            logprobs[1..length].iter().map(ToString::to_string).collect();
        assert!(of_prompt.len() > length / 2, "they depend on what comes before: {of_prompt:?}");
        // The answer is the one without them.
        let mut plain = body.clone();
        (plain["echo"], plain["logprobs"]) = (json!(false), json!(null));
        assert!(choice["text"].as_str().unwrap().ends_with(told(&alone, &plain)["text"].as_str().unwrap()));
    }
    let caches: &[&str] = &["--decode-radix-cache", "--prefill-radix-cache", "--hierarchical-cache"];
    for (flags, config) in [
        (&["--chunk-tokens", "32"][..], ""),
        (caches, RESTORES),
        (&["--tp", "2"], ""),
        (&[&["--role", "aggregated"], &TINY_POOL[..]].concat(), ""),
        (&[caches, &TINY_POOL[..]].concat(), RESTORES),
        (&["--role", "aggregated", "--speculate", "ngram"], ""),
    ] {
        let (cluster, _plugins) = computes.start(flags, config);
        for round in 0..2 {
            for (request, (found, right)) in all_told(&cluster, &bodies).iter().zip(&right).enumerate() {
                assert_eq!(found, right, "{flags:?}, round {round}: request {request}");
            }
        }
        cluster.wait("all requests to end", || cluster.all_free());
    }
}

#[test]
fn log_probabilities_of_prompts_are_the_same_over_all_arrangements() {
    are_equal_over_all_arrangements(&Computes::synthetic());
}

#[test]
fn log_probabilities_of_prompts_of_a_model_are_the_same_over_all_arrangements() {
    are_equal_over_all_arrangements(&Computes::tiny_model());
}
