//! Workers that join and leave under load: no request is lost, and no answer changes.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use host_tests::cluster::{Cluster, Start, runs, signal};
use host_tests::wait::until;
use host_tests::{plugin_files, streaming};
use host_wire::endpoint::{Credentials, channel};
use host_wire::proto::worker_client::WorkerClient;
use host_wire::proto::{DrainRequest, GenerateRequest, Namespace, Sampling, generate_event};

use super::by_hand::{Worker, router};

const HOST: &str = env!("CARGO_BIN_EXE_host");
/// Slow steps, so that answers of [`TOKENS`] tokens last longer than what a test does meanwhile.
const STEADY: &str = "[synthetic]\nstep-us = 1000\n";
const TOKENS: usize = 60;
/// Even slower steps, so that an answer does not end before a test has acted, also on a slow machine. These steps sleep.
const SLOW: &str = "[synthetic]\nstep-us = 30000\n";
/// Tokens for 45 seconds of [`SLOW`] steps.
const LONG: usize = 1500;
const CLIENTS: u32 = 4;

fn prompt(client: u32) -> Vec<u32> {
    (0..40 + client).map(|token| (token * 7 + client) % 256).collect()
}

/// Runs `act` while clients send requests without a pause. Every answer must equal the one before `act`.
fn under_load<T>(url: &str, act: impl FnOnce() -> T) -> T {
    let right: Vec<_> = (0..CLIENTS)
        .map(|client| streaming::generate(url, &prompt(client), TOKENS).unwrap().tokens)
        .collect();
    let (stop, answered) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (stop, answered, right) = (&stop, &answered, &right[client as usize]);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let answer = streaming::generate(url, &prompt(client), TOKENS);
                    let answer = answer.unwrap_or_else(|error| panic!("a request was lost: {error}"));
                    assert_eq!(&answer.tokens, right, "client {client}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let more = |than: usize| {
            until("more answers", || {
                let answered = answered.load(Ordering::Relaxed);
                if answered > than { Ok(()) } else { Err(answered) }
            });
        };
        // If one client fails, the others end, too.
        let _stopped = Stop(&stop);
        more(0);
        let acted = act();
        more(answered.load(Ordering::Relaxed) + CLIENTS as usize);
        acted
    })
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn drain(url: &str, worker: &str) {
    let output = Command::new(HOST).args(["drain", worker, "--url", url]).output().unwrap();
    let (said, failed) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{failed}");
    assert!(said.contains(&format!("{worker} has ended")), "{said}{failed}");
}

#[test]
fn a_cluster_is_rolled_worker_by_worker_under_load() {
    let plugins = plugin_files::directory(&["shm"]);
    let (cluster, control) = router();
    let start = |role: &str, name: &str| {
        Worker::start_with(plugins.path(), role, &control, &[&format!("--name={name}")], STEADY)
    };
    let mut old = [start("prefill", "p-old"), start("decode", "d-old")];
    cluster.wait("both to register", || cluster.workers().len() == 2);
    let _new = under_load(&cluster.url, || {
        let new = [start("prefill", "p-new"), start("decode", "d-new")];
        cluster.wait("all to register", || cluster.workers().len() == 4);
        for (worker, name) in old.iter_mut().zip(["p-old", "d-old"]) {
            drain(&cluster.url, name);
            assert!(worker.0.wait().unwrap().success(), "{name} ends well");
        }
        new
    });
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn answers_that_outlast_the_drain_go_on_on_another_worker() {
    let (fast, plugins) = split(&[], "");
    let right = streaming::generate(&fast.url, &prompt(0), LONG).unwrap().tokens;
    drop(fast);
    let (cluster, control) = router();
    let start = |role: &str, name: &str, steps: &str| {
        let flags = [&format!("--name={name}"), "--drain-timeout=0"];
        Worker::start_with(plugins.path(), role, &control, &flags, steps)
    };
    let _prefill = start("prefill", "p", SLOW);
    let mut old = start("decode", "d-old", SLOW);
    cluster.wait("both to register", || cluster.workers().len() == 2);
    let worker = cluster.worker("decode");
    let tokens = || cluster.metrics(&worker).get("host_decode_tokens_total").copied().unwrap_or(0.0);
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| streaming::generate(&cluster.url, &prompt(0), LONG).unwrap().tokens);
        cluster.wait("some tokens", || tokens() > 5.0);
        // The new worker has no slow steps, so it computes the rest soon.
        let _new = start("decode", "d-new", "");
        cluster.wait("the new worker to register", || cluster.workers().len() == 3);
        signal(old.0.id(), "TERM");
        assert!(old.0.wait().unwrap().success());
        assert_eq!(answer.join().unwrap(), right);
    });
    let (_, metrics) = cluster.get("/metrics").unwrap();
    assert!(metrics.contains("host_resumed_total 1\n"), "{metrics}");
}

#[test]
fn a_worker_ends_only_when_its_answers_are_read() {
    let plugins = plugin_files::directory(&["shm"]);
    let (cluster, control) = router();
    let flags = ["--name=w", "--drain-timeout=600"];
    let mut worker = Worker::start_with(plugins.path(), "aggregated", &control, &flags, "");
    cluster.wait("it to register", || cluster.workers().len() == 1);
    let at = cluster.worker("aggregated");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(1).build().unwrap();
    let tokens = runtime.block_on(async {
        let channel = channel(&at.address.parse().unwrap(), &Credentials::None).unwrap();
        let mut client = WorkerClient::new(channel);
        // Of about 300 KiB, a call may have 16 KiB unread. The rest waits in the worker.
        let request = GenerateRequest {
            room: 1,
            request_id: "unread".to_owned(),
            prompt: prompt(0),
            max_new_tokens: LONG as u32,
            ignore_stop: true,
            sampling: Some(Sampling { top_p: 1.0, logprobs: Some(20), ..Sampling::default() }),
            namespace: Some(Namespace::default()),
            ..GenerateRequest::default()
        };
        let mut answer = client.generate(request).await.unwrap().into_inner();
        until("the worker to have computed it", || {
            let metrics = cluster.metrics(&at);
            let [active, tokens] =
                ["host_requests_active", "host_decode_tokens_total"].map(|name| metrics[name]);
            let is_done = active == 0.0 && tokens >= (LONG - 1) as f64;
            if is_done { Ok(()) } else { Err(format!("{active} active, {tokens} tokens")) }
        });
        let instance = u64::from_str_radix(&at.instance, 16).unwrap();
        client.drain(DrainRequest { instance }).await.unwrap();
        cluster.wait("the router to know", || cluster.workers().is_empty());
        assert!(worker.0.try_wait().unwrap().is_none(), "it has ended with an answer that is not read");
        let mut tokens = 0;
        while let Some(event) = answer.message().await.unwrap() {
            tokens += usize::from(matches!(event.event, Some(generate_event::Event::Token(_))));
        }
        tokens
    });
    assert_eq!(tokens, LONG);
    assert!(worker.0.wait().unwrap().success());
}

/// Starts a router, a prefill and a decode worker on this machine.
fn split(more: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let flags = ["--executor", "synthetic", "--plugins-dir", &plugins.path().display().to_string()];
    let flags = flags.iter().chain(more).map(|flag| (*flag).to_owned()).collect();
    let start = Start { program: Path::new(HOST), flags, config: config.to_owned(), workers: 2 };
    (Cluster::start(&start), plugins)
}

#[test]
fn the_only_workers_of_a_machine_are_drained_and_started_again_under_load() {
    let (cluster, _plugins) = split(&["--retry-timeout", "600"], STEADY);
    under_load(&cluster.url, || {
        for role in ["decode", "prefill"] {
            let before = cluster.worker(role);
            drain(&cluster.url, &before.name);
            cluster.wait_for_another(&before);
        }
    });
    let log = cluster.log();
    assert!(!log.contains("ended by itself"), "{log}");
}

#[test]
fn workers_have_served_a_dummy_request_before_they_are_live() {
    let plugins = plugin_files::directory(&["shm"]);
    let directory = plugins.path().display().to_string();
    let flags = ["--executor", "synthetic", "--kv-memory", "4MiB", "--plugins-dir", &directory];
    let flags = flags.map(str::to_owned).to_vec();
    let start = Start { program: Path::new(HOST), flags, config: String::new(), workers: 2 };
    let cluster = Cluster::start_as_given(&start, &[]);
    for worker in cluster.workers() {
        // Prefill may end its part of the request a moment after the answer.
        cluster.wait("the dummy request", || {
            cluster.metrics(&worker).get("host_requests_finished_total").is_some_and(|count| *count >= 1.0)
        });
        // The worker learns it with the next heartbeat.
        cluster.wait("the worker to be ready", || {
            let ready = host_tests::cluster::agent().get(format!("{}/health/ready", worker.metrics)).call();
            ready.is_ok_and(|ready| ready.status() == 200)
        });
    }
    // The supervisor learns it from each of its children.
    cluster.wait("all parts to be ready", || {
        let is_ready = |role: &str| {
            let says = |line: &serde_json::Value| {
                line["fields"]["message"] == "ready" && line["fields"]["role"] == role
            };
            cluster.log_lines().iter().any(says)
        };
        ["router", "prefill", "decode"].into_iter().all(is_ready)
    });
    // The dummy request stays in no cache.
    cluster.wait("all pages to be free", || cluster.all_free());
    let cached = |worker| cluster.metrics(worker)["host_kv_pages{state=\"cached\"}"];
    assert!(cluster.workers().iter().all(|worker| cached(worker) == 0.0));
    assert_eq!(cluster.get("/health/ready").unwrap().0, 200);
}

#[test]
fn a_second_signal_ends_everything_at_once() {
    // The drain would wait for an answer that takes a minute.
    let (mut cluster, _plugins) = split(&["--drain-timeout", "600"], SLOW);
    let children = ["router", "prefill", "decode"].map(|role| cluster.pid(role).unwrap());
    let url = cluster.url.clone();
    let request = std::thread::spawn(move || streaming::generate(&url, &prompt(0), 2000));
    let decode = cluster.worker("decode");
    cluster.wait("the request to decode", || {
        cluster.metrics(&decode).get("host_decode_tokens_total").is_some_and(|tokens| *tokens > 1.0)
    });
    signal(cluster.supervisor(), "TERM");
    cluster.wait("the first to be heard", || cluster.log().contains("stopping: the router drains first"));
    assert_ne!(cluster.interrupt(), None);
    assert!(request.join().unwrap().is_err(), "the answer was given the time to end");
    cluster.wait("all children to end", || children.iter().all(|pid| !runs(*pid)));
}
