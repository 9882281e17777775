//! An answer whose workers die in the middle of it goes on, and its client reads what it would have read anyway.

use std::path::Path;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::streaming::Events;
use host_tests::{plugin_files, streaming};
use serde_json::{Value, json};

const TOKENS: usize = 120;

/// A split server whose steps sleep, so that an answer of two seconds is struck in the middle, however slow the machine is.
fn split(flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut all = vec!["--executor".to_owned(), "synthetic".to_owned()];
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let config = "[synthetic]\nstep-us = 20000\n".to_owned();
    (Cluster::start(&Start { program, flags: all, config, workers: 2 }), plugins)
}

/// Reads a streamed answer. Once it has 20 tokens, `strike` is called. Returns the events.
fn read(url: &str, sampling: &Value, strike: impl FnOnce()) -> Vec<Value> {
    let mut sampling_params = sampling.clone();
    sampling_params["max_new_tokens"] = json!(TOKENS);
    sampling_params["ignore_eos"] = json!(true);
    let prompt: Vec<u32> = (0..100).collect();
    let body = json!({"input_ids": prompt, "stream": true, "sampling_params": sampling_params});
    let (mut events, mut strike) = (Vec::new(), Some(strike));
    for event in Events::of(url, &body).unwrap() {
        let event = event.unwrap();
        let tokens = streaming::tokens(&event).len();
        if tokens >= 20
            && let Some(strike) = strike.take()
        {
            assert!(tokens < TOKENS, "the answer was over before it could be struck");
            strike();
        }
        events.push(event);
    }
    events
}

fn tokens(events: &[Value]) -> &Value {
    let last = events.last().unwrap();
    assert_eq!(last["meta_info"]["finish_reason"]["type"], "length", "{last}");
    &last["output_ids"]
}

/// Greedy, and drawn with a seed.
fn samplings() -> [Value; 2] {
    [json!({"temperature": 0}), json!({"temperature": 1.0, "sampling_seed": 7})]
}

#[test]
fn an_answer_goes_on_when_its_workers_are_killed() {
    let (cluster, _plugins) = split(&[]);
    for sampling in samplings() {
        let right = read(&cluster.url, &sampling, || {});
        for victims in [&["decode"][..], &["prefill"], &["decode", "prefill"]] {
            let before: Vec<_> = victims.iter().map(|role| cluster.worker(role)).collect();
            let events = read(&cluster.url, &sampling, || {
                for role in victims {
                    signal(cluster.pid(role).unwrap(), "KILL");
                }
            });
            assert_eq!(tokens(&events), tokens(&right), "{victims:?} killed, {sampling}");
            let counts = events.iter().map(|event| event["output_ids"].as_array().unwrap().len());
            assert!(counts.is_sorted_by(|a, b| a <= b), "no token was told twice or taken back");
            let meta = &events.last().unwrap()["meta_info"];
            assert_eq!((&meta["prompt_tokens"], &meta["completion_tokens"]), (&json!(100), &json!(TOKENS)));
            for worker in &before {
                cluster.wait_for_another(worker);
            }
        }
    }
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn an_answer_goes_on_when_its_decode_worker_freezes_and_the_worker_serves_again_afterwards() {
    let (cluster, _plugins) = split(&[]);
    let [greedy, _drawn] = samplings();
    let right = read(&cluster.url, &greedy, || {});
    let decode = cluster.pid("decode").unwrap();
    let events = read(&cluster.url, &greedy, || {
        signal(decode, "STOP");
        // Once the router has given it up, it may go on: it is the only one.
        cluster.wait("the frozen worker to be given up", || cluster.log().contains("trying again"));
        signal(decode, "CONT");
    });
    assert_eq!(tokens(&events), tokens(&right));
    cluster.wait("all pages to be free", || cluster.workers().len() == 2 && cluster.all_free());
}

#[test]
fn without_resuming_the_client_is_told_that_its_answer_broke_off() {
    let (cluster, _plugins) = split(&["--no-resume"]);
    let [greedy, _drawn] = samplings();
    let events = read(&cluster.url, &greedy, || signal(cluster.pid("decode").unwrap(), "KILL"));
    let last = events.last().unwrap();
    assert_eq!(last["error"]["code"], "answer_broken", "{last}");
}
