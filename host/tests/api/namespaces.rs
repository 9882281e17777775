//! Salts and extra keys, from the HTTP API to the pages: equal prompts share what is cached only within a namespace.

use std::path::Path;

use host_tests::cluster::{Cluster, Start};
use host_tests::plugin_files;
use serde_json::{Value, json};

const PROMPT_TOKENS: u64 = 70;

fn start() -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut flags = vec!["--plugins-dir".to_owned(), plugins.path().display().to_string()];
    for flag in ["--executor", "synthetic", "--decode-radix-cache", "--prefill-radix-cache"] {
        flags.push(flag.into());
    }
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags, config: String::new(), workers: 2 }), plugins)
}

/// Posts a body with more fields, and returns the answer.
fn post(cluster: &Cluster, path: &str, mut body: Value, fields: &Value) -> Value {
    let more = fields.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    let (status, text) = cluster.post(path, &body.to_string()).unwrap();
    assert_eq!(status, 200, "{text}");
    serde_json::from_str(&text).unwrap()
}

/// Tokens of the answer, cached prompt tokens, bytes moved.
fn generate(cluster: &Cluster, fields: &Value) -> (Value, u64, u64) {
    let prompt: Vec<u64> = (0..PROMPT_TOKENS).collect();
    let params = json!({"max_new_tokens": 5, "temperature": 0, "ignore_eos": true});
    let answer = post(cluster, "/generate", json!({"input_ids": prompt, "sampling_params": params}), fields);
    let meta = &answer["meta_info"];
    let number = |name: &str| meta[name].as_u64().unwrap();
    (answer["output_ids"].clone(), number("cached_tokens"), number("transferred_bytes"))
}

#[test]
fn equal_prompts_share_cached_pages_only_within_a_namespace() {
    let (cluster, _plugins) = start();
    let (answer, cached, whole) = generate(&cluster, &json!({}));
    assert_eq!(cached, 0);
    let namespaces = [
        json!({"cache_salt": "a"}),
        json!({"cache_salt": "b"}),
        json!({"extra_key": "a"}),
        json!({"extra_key": "a", "cache_salt": "a"}),
    ];
    for fields in &namespaces {
        assert_eq!(
            generate(&cluster, fields),
            (answer.clone(), 0, whole),
            "{fields} is a namespace of its own"
        );
    }
    // Empty keys mean no namespace.
    for fields in namespaces.iter().chain(&[json!({}), json!({"cache_salt": "", "extra_key": null})]) {
        let (again, cached, moved) = generate(&cluster, fields);
        assert_eq!((again, cached), (answer.clone(), 64), "{fields} finds its own");
        assert!(moved < whole, "{fields}: {moved} of {whole} bytes moved");
    }
    // The trees of both workers hold the same number of namespaces.
    for role in ["prefill", "decode"] {
        let metrics = cluster.metrics(&cluster.worker(role));
        assert_eq!(metrics["host_cache_namespaces"], 5.0, "{role}");
    }
    assert_eq!(generate(&cluster, &json!({"no_cache": true})), (answer.clone(), 0, whole));
    assert_eq!(
        generate(&cluster, &json!({"cache_salt": "new", "no_cache": true})),
        (answer.clone(), 0, whole)
    );
    assert_eq!(generate(&cluster, &json!({"cache_salt": "new"})), (answer, 0, whole), "it left nothing");
    cluster.wait("all requests to end", || cluster.all_free());
}

#[test]
fn a_completion_takes_a_salt() {
    let (cluster, _plugins) = start();
    let text = "once upon a time in a land far away there was a cache of pages for each and every tenant";
    let cached = |fields: Value| {
        let body = json!({"prompt": text, "max_tokens": 2, "temperature": 0});
        let answer = post(&cluster, "/v1/completions", body, &fields);
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    assert_eq!(cached(json!({"cache_salt": "a"})), 0);
    assert_eq!(cached(json!({"extra_key": "a"})), 0);
    assert!(cached(json!({"cache_salt": "a"})) >= 64);
    assert_eq!(cached(json!({"cache_salt": "a", "no_cache": true})), 0);
}
