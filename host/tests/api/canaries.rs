//! No log line of a router or a worker has a prompt, an answer or a key, even with the most verbose logging. Lines of the audit log
//! are there with the least.

use std::path::Path;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::model::tiny_qwen3;
use host_tests::plugin_files;
use host_tests::streaming::{Ended, Events, whole};
use serde_json::{Value, json};

const HOST: &str = env!("CARGO_BIN_EXE_host");
/// A text that is part of all data that is secret, or may be.
const CANARY: &str = "c4n4ry";
/// Token ids that no line counts up by chance.
const TOKENS: [u32; 6] = [201, 33, 207, 41, 211, 57];

/// All lines of this program and of its libraries.
const VERBOSE: &str = "trace,host=trace";

struct Server {
    cluster: Cluster,
    _plugins: tempfile::TempDir,
    _model: tempfile::TempDir,
}

/// A server of the tiny model.
fn serve(level: &str) -> Server {
    let model = tempfile::tempdir().unwrap();
    tiny_qwen3(model.path(), 5).unwrap();
    let flags = ["--model", model.path().to_str().unwrap()].map(str::to_owned);
    start(level, &flags, "", model)
}

/// A server whose answers take long enough that a worker is killed in the middle of one.
fn serve_slowly(level: &str) -> Server {
    let flags = ["--executor", "synthetic"].map(str::to_owned);
    start(level, &flags, "[synthetic]\nstep-us = 20000\n", tempfile::tempdir().unwrap())
}

fn start(level: &str, flags: &[String], config: &str, model: tempfile::TempDir) -> Server {
    let plugins = plugin_files::directory(&["shm", "memory"]);
    let own = ["--plugins-dir", plugins.path().to_str().unwrap(), "--log-level", level];
    let caches = ["--prefill-radix-cache", "--hicache-storage", "memory"];
    let own = own.into_iter().chain(caches).map(str::to_owned);
    let flags = flags.iter().cloned().chain(own).collect();
    let start = Start { program: Path::new(HOST), flags, config: config.to_owned(), workers: 2 };
    Server { cluster: Cluster::start(&start), _plugins: plugins, _model: model }
}

/// Requests that are answered, each with its path. Parts of some answers are canaries, too.
fn right() -> Vec<(&'static str, Value)> {
    let word = json!({"enum": [CANARY]});
    let object = json!({"type": "object", "properties": {CANARY: word}, "required": [CANARY], "additionalProperties": false});
    let tools = json!([{"type": "function", "function": {"name": CANARY, "description": CANARY, "parameters": object}}]);
    let prompt = format!("{CANARY} {CANARY}");
    let messages = json!([{"role": "user", "content": prompt}]);
    let chat = "/v1/chat/completions";
    let greedy = json!({"temperature": 0, "max_new_tokens": 60});
    let mut held = greedy.clone();
    held["regex"] = json!(format!("{CANARY}-[a-z]{{9}}"));
    vec![
        (
            "/generate",
            json!({"text": prompt, "cache_salt": prompt, "session_id": prompt, "rid": prompt, "sampling_params": greedy}),
        ),
        ("/generate", json!({"text": prompt, "sampling_params": held})),
        ("/generate", json!({"input_ids": TOKENS.repeat(40), "sampling_params": greedy})),
        ("/v1/completions", json!({"prompt": prompt, "stop": prompt, "bad_words": [prompt], "user": prompt})),
        (
            chat,
            json!({"messages": messages, "max_tokens": 60,
                "response_format": {"type": "json_schema", "json_schema": {"name": CANARY, "schema": object}}}),
        ),
        (chat, json!({"messages": messages, "max_tokens": 60, "tools": tools, "tool_choice": "none"})),
    ]
}

/// Requests that a router or a worker refuses.
fn wrong() -> Vec<(&'static str, Value)> {
    let held = |grammar: Value| json!({"text": CANARY, "sampling_params": grammar});
    vec![
        ("/generate", held(json!({"regex": format!("{CANARY}(")}))),
        ("/generate", held(json!({"json_schema": format!("{{\"type\": \"{CANARY}\"}}")}))),
        ("/generate", held(json!({"ebnf": format!("root ::= {CANARY}")}))),
        ("/v1/completions", json!({"prompt": CANARY, "model": CANARY})),
        ("/v1/completions", json!({"prompt": CANARY, CANARY: CANARY})),
        ("/v1/completions", json!({"prompt": CANARY.repeat(9000)})),
    ]
}

/// Reads a stream, in which no event is an error.
fn ends_well(events: Events) {
    for event in events {
        let event = event.unwrap();
        assert!(!event["error"].is_object(), "{event}");
    }
}

#[test]
fn workers_and_routers_log_no_prompt_answer_or_grammar() {
    let Server { cluster, .. } = &serve(VERBOSE);
    let url = |path: &str| format!("{}{path}", cluster.url);
    for (path, mut body) in right() {
        let answer = whole(&url(path), &body);
        assert!(answer.is_ok(), "{path} {body}: {answer:?}");
        body["stream"] = json!(true);
        ends_well(Events::of(&url(path), &body).unwrap());
    }
    for (path, body) in wrong() {
        let refused = whole(&url(path), &body);
        assert!(matches!(refused, Err(Ended::Refused(_))), "{path} {body}: {refused:?}");
    }
    has_no_canary(cluster);
}

#[test]
fn workers_that_go_on_with_an_answer_log_nothing_of_it() {
    let Server { cluster, .. } = &serve_slowly(VERBOSE);
    let prompt: Vec<u32> = CANARY.bytes().map(u32::from).chain(TOKENS.repeat(20)).collect();
    let settings = json!({"temperature": 0, "ignore_eos": true, "max_new_tokens": 200});
    let body =
        json!({"input_ids": prompt, "cache_salt": CANARY, "stream": true, "sampling_params": settings});
    // Found before, because it is read from a long log.
    let (before, victim) = (cluster.worker("decode"), cluster.pid("decode").unwrap());
    let mut events = Events::of(&format!("{}/generate", cluster.url), &body).unwrap();
    events.next().unwrap().unwrap();
    signal(victim, "KILL");
    ends_well(events);
    cluster.wait_for_another(&before);
    let (_, metrics) = cluster.get("/metrics").unwrap();
    assert!(metrics.contains("\nhost_resumed_total 1\n"), "it was not killed in the middle of the answer");
    has_no_canary(cluster);
}

/// Checks that the log has lines of router and workers, and nothing secret.
fn has_no_canary(cluster: &Cluster) {
    let log = cluster.log().to_ascii_lowercase();
    let tokens = TOKENS.map(|token| token.to_string());
    for canary in [CANARY.to_owned(), tokens.join(", "), tokens.join(",")] {
        let leak = log.lines().find(|line| line.contains(&canary));
        assert_eq!(leak, None);
    }
    for target in ["host_front", "host_worker"] {
        assert!(log.contains(&format!("\"target\":\"{target}")), "{target} logged nothing");
    }
    assert!(log.contains("\"level\":\"trace\""), "not everything was logged");
    assert!(!log.contains("\"target\":\"tokenizers"), "it logs prompts, one character after the other");
}

#[test]
fn the_audit_log_is_there_at_any_level() {
    let Server { cluster, .. } = &serve("error");
    let (status, _) = cluster.post("/flush_cache", "{}").unwrap();
    assert_eq!(status, 200);
    let lines = cluster.log_lines();
    for said in ["an operator's request", "the operator's request is answered"] {
        let line = lines.iter().find(|line| line["target"] == "audit" && line["fields"]["message"] == said);
        assert!(line.is_some_and(|line| line["span"]["path"] == "/flush_cache"), "{said}: {lines:?}");
    }
    assert!(lines.iter().all(|line| line["target"] == "audit" || line["level"] == "ERROR"), "{lines:?}");
}
