//! Clients that leave, processes that die, wrong input: nothing is lost, and every request is answered.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use host_tests::cluster::{Cluster, PATIENCE, Start, runs, signal};
use host_tests::cuda::OnBoth;
use host_tests::hold::Hold;
use host_tests::plugin_files;
use host_tests::wait::until;
use serde_json::json;

/// A page of a prompt takes some milliseconds, so that pages are in flight when a worker is killed.
const STEADY: &str = "prefill-token-us = 500\n";

/// A synthetic server with a prefill and a decode worker. `synthetic` is its cost model.
fn split(flags: &[&str], synthetic: &str) -> (Cluster, tempfile::TempDir) {
    computing(&["--executor", "synthetic"].map(str::to_owned), flags, &format!("[synthetic]\n{synthetic}"))
}

/// Workers with these flags for their executor.
fn computing(executor: &[String], flags: &[&str], config: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let mut all = executor.to_vec();
    all.extend(["--plugins-dir".into(), plugins.path().display().to_string()]);
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    let workers = if flags.contains(&"aggregated") { 1 } else { 2 };
    (Cluster::start(&Start { program, flags: all, config: config.to_owned(), workers }), plugins)
}

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Streams an answer and closes the connection after `events` events. Returns true if the answer was read to its end.
fn stream(url: &str, prompt: &[u32], count: u64, events: Option<usize>) -> bool {
    let address = url.trim_start_matches("http://");
    let body = json!({
        "input_ids": prompt,
        "sampling_params": { "max_new_tokens": count, "temperature": 0, "ignore_eos": true },
        "stream": true,
    })
    .to_string();
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).unwrap();
    connection.write_all(body.as_bytes()).unwrap();
    let mut text = String::new();
    let mut chunk = [0; 1024];
    loop {
        if events.is_some_and(|events| text.matches("data:").count() >= events) {
            return false;
        }
        match connection.read(&mut chunk) {
            Ok(0) => return text.contains("[DONE]"),
            Ok(count) => text.push_str(&String::from_utf8_lossy(&chunk[..count])),
            // This process was stopped and continued.
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::Interrupted, "{error}"),
        }
    }
}

/// Resident bytes, open descriptors and threads of a process.
fn footprint(pid: u32) -> (u64, usize, usize) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).unwrap().count();
    (kib << 10, count("fd"), count("task"))
}

/// Sends requests of random lengths at once. About half of the clients close the connection at a random moment.
fn storm(cluster: &Cluster, requests: u32, seed: u64) -> usize {
    let mut random = Random(seed);
    let plans: Vec<_> = (0..requests)
        .map(|_| {
            let prompt: Vec<u32> = (0..=random.below(300)).map(|_| random.below(256) as u32).collect();
            let count = 1 + random.below(40);
            let leave = (random.below(2) == 0).then(|| random.below(count) as usize);
            (prompt, count, leave)
        })
        .collect();
    let whole = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (prompt, count, leave) in &plans {
            let whole = &whole;
            scope.spawn(move || {
                let complete = stream(&cluster.url, prompt, *count, *leave);
                assert_eq!(complete, leave.is_none(), "an answer of {count} tokens ended early");
                whole.fetch_add(usize::from(complete), Ordering::Relaxed);
            });
        }
    });
    whole.into_inner()
}

#[test]
fn two_hundred_requests_with_random_aborts_leave_every_page_free_and_no_process_larger() {
    // The pool is so small that requests queue for pages. Steps are so slow that closed connections hit every stage.
    let cost = "step-us = 300\nprefill-token-us = 5\n";
    let small = ["--pool-pages", "256", "--chunk-tokens", "64", "--max-batch", "16"];
    let (cluster, _plugins) = split(&[&small[..], &["--layer-groups", "4"]].concat(), cost);
    let seed = 0x5eed_0001;
    println!("seed {seed:#x}");
    let settle = || cluster.wait("all pages to be free", || cluster.all_free());
    let roles = ["router", "prefill", "decode"];
    let footprints = || roles.map(|role| footprint(cluster.pid(role).unwrap()));
    let at_rest = footprints();
    // The first storms warm up: thread stacks, allocator arenas, connection buffers.
    for warm in 1..=2 {
        assert!(storm(&cluster, 200, seed + warm) > 0);
        settle();
    }
    let before = footprints();
    for round in 0..4 {
        assert!(storm(&cluster, 200, seed + 10 + round) > 0);
        settle();
    }
    let grown = footprints();
    println!("at rest {at_rest:?}\nbefore {before:?}\nafter  {grown:?}");
    for ((role, before), after) in roles.iter().zip(&before).zip(&grown) {
        assert!(after.0 < before.0 + (16 << 20), "{role} grew from {} to {} bytes", before.0, after.0);
    }
    // A server may close a connection some time after its client has left.
    cluster.wait("the descriptors of the storms to be closed", || {
        footprints().iter().zip(&before).all(|(now, before)| now.1 <= before.1 + 8)
    });
    // The number of threads depends on what runs at once. Idle threads end some seconds later.
    cluster.wait("the threads of the storms to end", || {
        footprints().iter().zip(&at_rest).all(|(now, at_rest)| now.2 <= at_rest.2 + 2)
    });
    // Some requests were aborted during a transfer, not only in the queue.
    cluster.wait("requests that were given up to be counted", || {
        cluster.workers().iter().any(|worker| {
            cluster.metrics(worker).get("host_requests_failed_total").is_some_and(|count| *count > 0.0)
        })
    });
}

/// A prompt of a hundred pages.
fn long() -> Vec<u32> {
    (0..1600).map(|token| token % 256).collect()
}

#[test]
fn random_aborts_on_a_gpu_leave_every_page_free_and_change_no_answer() {
    let model = OnBoth::new();
    let (alone, _more) = computing(&model.on("cpu"), &["--role", "aggregated"], "");
    let small = ["--pool-pages", "64", "--chunk-tokens", "64", "--max-batch", "16"];
    let (cluster, _plugins) = computing(&model.on("cuda"), &small, "");
    let seed = 0x5eed_0002;
    println!("seed {seed:#x}");
    for round in 0..2 {
        assert!(storm(&cluster, 30, seed + round) > 0);
        cluster.wait("all pages to be free", || cluster.all_free());
    }
    let prompt = &long()[..150];
    assert_eq!(cluster.generate(prompt, 20).unwrap().tokens, alone.generate(prompt, 20).unwrap().tokens);
}

#[test]
fn a_prefill_worker_killed_mid_transfer_is_reported_restarted_and_its_request_answered() {
    // 50 pages, in two parts each, are sent before the hold, so the kill comes during the transfer.
    let hold = Hold::new();
    let synthetic = format!("{STEADY}{}", hold.prompts_from(800));
    let (cluster, _plugins) = split(&["--chunk-tokens", "16", "--layer-groups", "2"], &synthetic);
    let right = cluster.generate(&long(), 8).unwrap().tokens;
    prefill_killed_mid_transfer(&cluster, &hold, &long(), &right);
}

#[test]
fn a_prefill_worker_on_a_gpu_killed_mid_transfer_is_restarted_and_its_request_answered() {
    let model = OnBoth::new();
    let (alone, _more) = computing(&model.on("cpu"), &["--role", "aggregated"], "");
    let (cluster, _plugins) =
        computing(&model.on("cuda"), &["--chunk-tokens", "16", "--layer-groups", "2"], "");
    let prompt = &long()[..800];
    let right = alone.generate(prompt, 8).unwrap().tokens;
    // The prompt takes a second, of which the first pages are a tenth, so nothing holds it.
    prefill_killed_mid_transfer(&cluster, &Hold::new(), prompt, &right);
}

/// Kills the prefill worker while it sends this prompt's pages. `right` is the answer.
fn prefill_killed_mid_transfer(cluster: &Cluster, hold: &Hold, prompt: &[u32], right: &[u64]) {
    let first = cluster.worker("prefill");
    let pages_sent = |worker| {
        let metrics = cluster.metrics(worker);
        metrics.get("host_pages_sent_total").copied().unwrap_or(0.0)
    };
    let before = pages_sent(&first);
    std::thread::scope(|scope| {
        let held = hold.begin();
        let request = scope.spawn(|| cluster.generate(prompt, 8));
        cluster.wait("some pages of the request to be sent", || pages_sent(&first) > before + 5.0);
        signal(cluster.pid("prefill").unwrap(), "KILL");
        held.end();
        // The router tries the request again on the restarted worker. The client does not notice.
        assert_eq!(request.join().unwrap().unwrap().tokens, right);
    });
    cluster.wait_for_another(&first);
    assert!(pages_sent(&cluster.worker("prefill")) < before + 200.0);
    cluster.wait("decode's pages to come back", || cluster.all_free());
    let reported = cluster.log_lines().iter().any(|line| {
        line["fields"]["role"] == "prefill"
            && line["fields"]["message"].as_str().is_some_and(|text| text.contains("ended by itself"))
    });
    assert!(reported, "the supervisor did not report the kill:\n{}", cluster.log());
}

#[test]
fn a_killed_decode_worker_is_restarted_and_the_request_answered_or_failed_within_the_deadline() {
    let hold = Hold::new();
    let (cluster, _plugins) = split(&["--chunk-tokens", "16"], &hold.prompts_from(800));
    let prompt = long();
    let right = cluster.generate(&prompt, 8).unwrap();
    std::thread::scope(|scope| {
        let held = hold.begin();
        let request = scope.spawn(|| cluster.generate(&prompt, 8));
        let decode = cluster.worker("decode");
        cluster.wait("the request to hold pages", || {
            cluster.metrics(&decode).get("host_kv_pages{state=\"held\"}").is_some_and(|held| *held > 0.0)
        });
        signal(cluster.pid("decode").unwrap(), "KILL");
        held.end();
        // The client gets no token before the transfer is complete, so the router can try the request again.
        assert_eq!(request.join().unwrap().unwrap().tokens, right.tokens);
    });
    cluster.wait("all pages to be free", || cluster.workers().len() == 2 && cluster.all_free());
}

#[test]
fn a_killed_router_answers_again_at_the_same_address() {
    let (cluster, _plugins) = split(&[], "");
    let right = cluster.generate(&[1, 2, 3], 4).unwrap();
    signal(cluster.pid("router").unwrap(), "KILL");
    cluster.wait("the router to know both workers again", || cluster.workers().len() == 2);
    assert_eq!(cluster.generate(&[1, 2, 3], 4).unwrap(), right);
}

#[test]
fn a_frozen_prefill_worker_costs_seconds_and_no_page() {
    let hold = Hold::new();
    let (cluster, _plugins) = split(&["--chunk-tokens", "16"], &hold.prompts_from(800));
    let prompt = long();
    let right = cluster.generate(&prompt[..40], 8).unwrap();
    let prefill = cluster.pid("prefill").unwrap();
    std::thread::scope(|scope| {
        let _held = hold.begin();
        let request = scope.spawn(|| cluster.generate(&prompt, 8));
        let decode = cluster.worker("decode");
        cluster.wait("the request to hold pages", || {
            cluster.metrics(&decode).get("host_kv_pages{state=\"held\"}").is_some_and(|held| *held > 0.0)
        });
        // All pages before the held ones are sent: 50 of this prompt, and 3 of the one before.
        let sender = cluster.worker("prefill");
        cluster.wait("what is computed to be sent", || {
            cluster.metrics(&sender).get("host_pages_sent_total").is_some_and(|sent| *sent >= 53.0)
        });
        signal(prefill, "STOP");
        // The router gives the worker up when its heartbeats stop, long before a timeout. No other worker can serve the request, so
        // the client gets an error.
        let answer = request.join().unwrap();
        let why = answer.expect_err("a frozen worker answered");
        assert!(why.starts_with("503"), "{why}");
    });
    cluster.wait("decode's pages to come back", || {
        let decode = cluster.workers().into_iter().find(|worker| worker.role == "decode");
        // A worker that was stopped within a write continues it later. Until then no proof is possible that the pages are free.
        let within_a_write = cluster.log().contains("cannot prove that nothing is in flight");
        let states = if within_a_write { &["held"][..] } else { &["held", "quarantined"] };
        decode.is_some_and(|decode| {
            let metrics = cluster.metrics(&decode);
            states
                .iter()
                .all(|state| metrics.get(&format!("host_kv_pages{{state=\"{state}\"}}")) == Some(&0.0))
        })
    });
    signal(prefill, "CONT");
    cluster.wait("the worker to be there again", || cluster.workers().len() == 2);
    cluster.wait("an answer", || {
        cluster.generate(&prompt[..40], 8).is_ok_and(|answer| answer.tokens == right.tokens)
    });
    cluster.wait("all pages to be free", || cluster.all_free());
}

#[test]
fn ctrl_c_ends_all_processes_and_so_does_the_death_of_the_supervisor() {
    for how in ["INT", "KILL"] {
        let (mut cluster, _plugins) = split(&[], "");
        let children: Vec<u32> =
            ["router", "prefill", "decode"].iter().map(|role| cluster.pid(role).unwrap()).collect();
        assert!(children.iter().all(|pid| runs(*pid)));
        if how == "INT" {
            assert_eq!(cluster.interrupt(), Some(0), "log:\n{}", cluster.log());
            let log = cluster.log();
            assert!(!log.contains("ended by itself") && !log.contains("panicked"), "{log}");
        } else {
            signal(cluster.supervisor(), "KILL");
        }
        cluster.wait("all children to end", || children.iter().all(|pid| !runs(*pid)));
    }
}

#[test]
fn a_signal_to_all_processes_at_once_lets_requests_end_and_starts_nothing_again() {
    let (mut cluster, _plugins) = split(&[], "step-us = 20000\n");
    let children: Vec<u32> =
        ["router", "prefill", "decode"].iter().map(|role| cluster.pid(role).unwrap()).collect();
    let url = cluster.url.clone();
    let request = std::thread::spawn(move || stream(&url, &[1, 2, 3], 40, None));
    let decode = cluster.worker("decode");
    cluster.wait("the request to decode", || {
        cluster.metrics(&decode).get("host_decode_tokens_total").is_some_and(|tokens| *tokens > 1.0)
    });
    for pid in &children {
        signal(*pid, "TERM");
    }
    assert_eq!(cluster.interrupt(), Some(0), "log:\n{}", cluster.log());
    assert!(request.join().unwrap(), "the answer ended early; log:\n{}", cluster.log());
    let log = cluster.log();
    assert!(!log.contains("ended by itself"), "{log}");
    assert!(children.iter().all(|pid| !runs(*pid)));
}

#[test]
fn a_worker_is_restarted_after_the_programs_file_was_replaced() {
    let plugins = plugin_files::directory(&["shm"]);
    let program = plugins.path().join("host");
    std::fs::copy(env!("CARGO_BIN_EXE_host"), &program).unwrap();
    // The system refuses to run a copy while a child that another test forked still has it open for writing.
    until("the copy to run", || match Command::new(&program).arg("--help").output() {
        Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => Err(error),
        output => Ok(output.unwrap()),
    });
    let flags = ["--executor", "synthetic", "--plugins-dir", &plugins.path().display().to_string()];
    let flags = flags.map(str::to_owned).to_vec();
    let cluster = Cluster::start(&Start { program: &program, flags, config: String::new(), workers: 2 });
    let first = cluster.worker("prefill");
    std::fs::remove_file(&program).unwrap();
    signal(cluster.pid("prefill").unwrap(), "KILL");
    cluster.wait_for_another(&first);
    assert!(cluster.generate(&[1, 2, 3], 4).is_ok());
}

#[test]
fn wrong_input_is_answered_with_a_sentence_and_loses_nothing() {
    let (cluster, _plugins) = split(&["--pool-pages", "32", "--max-model-len", "500"], "");
    let long: Vec<u32> = vec![7; 501];
    let cases = [
        ("/v1/completions", "{\"model\":".to_owned(), 400, "JSON"),
        ("/v1/completions", json!({"model": "other", "prompt": "x"}).to_string(), 404, "other"),
        (
            "/v1/completions",
            json!({"model": "synthetic", "prompt": "x", "max_tokens": 0}).to_string(),
            400,
            "max_tokens",
        ),
        (
            "/v1/completions",
            json!({"model": "synthetic", "prompt": "x", "max_tokens": -3}).to_string(),
            400,
            "max_tokens",
        ),
        (
            "/v1/completions",
            json!({"model": "synthetic", "prompt": "x", "max_tokens": 600}).to_string(),
            400,
            "500",
        ),
        ("/v1/completions", json!({"model": "synthetic", "prompt": ""}).to_string(), 400, "prompt"),
        ("/v1/completions", json!({"model": "synthetic", "prompt": long}).to_string(), 400, "501"),
        ("/v1/completions", json!({"model": "synthetic", "prompt": [1, 2, 99999]}).to_string(), 400, "99999"),
        ("/v1/completions", json!({"model": "synthetic", "prompt": "x", "n": 0}).to_string(), 400, "n"),
        (
            "/v1/completions",
            json!({"model": "synthetic", "prompt": "x", "temperature": -1}).to_string(),
            400,
            "temperature",
        ),
        ("/generate", json!({"input_ids": long}).to_string(), 400, "501"),
        ("/nowhere", "{}".to_owned(), 404, "/nowhere"),
    ];
    for (path, body, status, says) in cases {
        let (code, text) = cluster.post(path, &body).unwrap();
        println!("{path} {}: {code} {text}", &body[..body.len().min(60)]);
        assert_eq!(code, status, "{path} {body}: {text}");
        assert!(text.contains("\"error\"") && text.contains(says), "{path} {body}: {text}");
        assert!(cluster.generate(&[1, 2, 3], 2).is_ok(), "after {path} {body}");
    }
    cluster.wait("all pages to be free", || cluster.all_free());
}
