//! An answer goes on when its workers die, or lose their GPU, in the middle of it. Its client reads the same tokens as otherwise.

use std::path::Path;

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::cuda::{LostGpus, OnBoth};
use host_tests::streaming::Events;
use host_tests::{plugin_files, streaming};
use serde_json::{Value, json};

/// Tokens of an answer that takes two seconds.
const TOKENS: usize = 120;
/// Tokens of an answer that takes half a minute, so that a test can act in the middle on any machine.
const LONG: usize = 1500;

/// A prefill and a decode worker whose steps sleep.
fn split(flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    start(flags, "[synthetic]\nstep-us = 20000\n")
}

fn start(flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let executor = ["--executor", "synthetic"].map(str::to_owned);
    computing(&executor, flags, config, &[])
}

/// Workers with these flags for their executor, and these variables.
fn computing(
    executor: &[String],
    flags: &[&str],
    config: &str,
    variables: &[(&str, &Path)],
) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut all = [executor, &["--retry-timeout", "600"].map(str::to_owned)].concat();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    let start = Start { program, flags: all, config: config.to_owned(), workers };
    (Cluster::start_with(&start, variables), plugins)
}

/// Reads a streamed answer of `count` tokens and returns its events. Calls `strike` when 20 tokens have arrived.
fn read(url: &str, sampling: &Value, count: usize, strike: impl FnOnce()) -> Vec<Value> {
    let mut sampling_params = sampling.clone();
    sampling_params["max_new_tokens"] = json!(count);
    sampling_params["ignore_eos"] = json!(true);
    let prompt: Vec<u32> = (0..100).collect();
    let body = json!({"input_ids": prompt, "stream": true, "sampling_params": sampling_params});
    let (mut events, mut strike) = (Vec::new(), Some(strike));
    for event in Events::of(&format!("{url}/generate"), &body).unwrap() {
        let event = event.unwrap();
        if streaming::tokens(&event).len() >= 20
            && let Some(strike) = strike.take()
        {
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

/// Number of answers that the router has resumed so far.
fn resumed(cluster: &Cluster) -> u64 {
    let (_, metrics) = cluster.get("/metrics").unwrap();
    let count = metrics.lines().find_map(|line| line.strip_prefix("host_resumed_total "));
    count.unwrap().parse().unwrap()
}

/// Whether the decode worker computes an answer now.
fn computes(cluster: &Cluster) -> bool {
    cluster.metrics(&cluster.worker("decode")).get("host_requests_active") == Some(&1.0)
}

/// Greedy, and drawn with a seed.
fn samplings() -> [Value; 2] {
    [json!({"temperature": 0}), json!({"temperature": 1.0, "sampling_seed": 7})]
}

#[test]
fn an_answer_goes_on_when_its_workers_are_killed() {
    let (cluster, _plugins) = split(&[]);
    for sampling in samplings() {
        let right = read(&cluster.url, &sampling, TOKENS, || {});
        for victims in [&["decode"][..], &["prefill"], &["decode", "prefill"]] {
            goes_on(&cluster, victims, &sampling, tokens(&right), |pid| signal(pid, "KILL"));
        }
    }
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn an_answer_of_a_gpu_goes_on_when_its_workers_are_killed_or_lose_the_gpu() {
    let Some(gpus) = LostGpus::none() else { return };
    let model = OnBoth::new();
    let (alone, _more) = computing(&model.on("cpu"), &["--role", "aggregated"], "", &[]);
    let (cluster, _plugins) = computing(&model.on("cuda"), &[], "", &[gpus.variable()]);
    let kill = |pid| signal(pid, "KILL");
    let lose = |pid| gpus.lose(pid);
    for (sampling, strike) in samplings().iter().zip([&kill as &dyn Fn(u32), &lose]) {
        let right = read(&alone.url, sampling, TOKENS, || {});
        goes_on(&cluster, &["decode"], sampling, tokens(&right), strike);
    }
    // A prefill worker without its GPU cannot connect to the new decode worker, and gets no batch. It ends nevertheless.
    let sampling = &samplings()[0];
    let right = read(&alone.url, sampling, TOKENS, || {});
    goes_on(&cluster, &["decode", "prefill"], sampling, tokens(&right), lose);
    // A worker without requests ends, too.
    let prefill = cluster.worker("prefill");
    gpus.lose(cluster.pid("prefill").unwrap());
    let prompt: Vec<u32> = (0..50).collect();
    assert_eq!(cluster.generate(&prompt, 8).unwrap().tokens, alone.generate(&prompt, 8).unwrap().tokens);
    cluster.wait_for_another(&prefill);
    let told = |what: &str| cluster.log().matches(what).count();
    assert!(told("the GPU is lost for this process") >= 2, "{}", cluster.log());
    cluster.wait("all pages to be free", || cluster.all_free());
}

/// Strikes the workers of these roles in the middle of an answer, by their process ids. The answer has the `right` tokens, and the
/// workers are started again.
fn goes_on(cluster: &Cluster, victims: &[&str], sampling: &Value, right: &Value, strike: impl Fn(u32)) {
    // On a slow machine an answer may be complete before the strike. Then the test repeats it.
    cluster.wait("an answer to be struck in the middle", || {
        let before: Vec<_> = victims.iter().map(|role| cluster.worker(role)).collect();
        let (earlier, mut is_under_way) = (resumed(cluster), false);
        let events = read(&cluster.url, sampling, TOKENS, || {
            for role in victims {
                strike(cluster.pid(role).unwrap());
            }
            is_under_way = victims.contains(&"decode") || computes(cluster);
        });
        assert_eq!(tokens(&events), right, "{victims:?} struck, {sampling}");
        let counts = events.iter().map(|event| event["output_ids"].as_array().unwrap().len());
        assert!(counts.is_sorted_by(|a, b| a <= b), "no token was told twice or taken back");
        let meta = &events.last().unwrap()["meta_info"];
        let said = (&meta["prompt_tokens"], &meta["completion_tokens"]);
        assert_eq!(said, (&json!(100), &json!(TOKENS)));
        // Decode already has the prompt's KV when prefill dies.
        let is_struck = is_under_way && (!victims.contains(&"decode") || resumed(cluster) > earlier);
        // A worker that has lost its GPU ends at its next batch, which may be this one.
        cluster.generate(&[1, 2, 3], 2).unwrap();
        for worker in &before {
            cluster.wait_for_another(worker);
        }
        is_struck
    });
}

#[test]
fn an_answer_goes_on_when_its_decode_worker_freezes_and_the_worker_serves_again_afterwards() {
    let [greedy, _drawn] = samplings();
    let (fast, _more) = start(&[], "");
    let right = read(&fast.url, &greedy, LONG, || {});
    drop(fast);
    let (cluster, _plugins) = split(&[]);
    let decode = cluster.pid("decode").unwrap();
    let events = read(&cluster.url, &greedy, LONG, || {
        signal(decode, "STOP");
        // After the router has given the worker up, it may go on. It is the only decode worker.
        cluster.wait("the frozen worker to be given up", || cluster.log().contains("trying again"));
        signal(decode, "CONT");
    });
    assert_eq!(tokens(&events), tokens(&right));
    assert!(resumed(&cluster) > 0, "the answer was whole before its worker froze");
    cluster.wait("all pages to be free", || cluster.workers().len() == 2 && cluster.all_free());
}

#[test]
fn without_resuming_the_client_is_told_that_its_answer_broke_off() {
    let (cluster, _plugins) = split(&["--no-resume"]);
    let [greedy, _drawn] = samplings();
    // The answer is broken off, so it does not take a minute.
    let strike = || signal(cluster.pid("decode").unwrap(), "KILL");
    let events = read(&cluster.url, &greedy, 2 * LONG, strike);
    let last = events.last().unwrap();
    assert_eq!(last["error"]["code"], "answer_broken", "{last}");
}
