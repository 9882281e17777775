//! `host batch`: a file of requests, ended in the middle and taken up again.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use host_tests::cluster::{Cluster, Start};
use host_tests::hold::Hold;
use host_tests::wait::until;
use serde_json::{Value, json};

const HOST: &str = env!("CARGO_BIN_EXE_host");
const REQUESTS: usize = 40;
/// Number of requests with short prompts, which come first.
const SHORT: usize = 8;

fn server(config: &str) -> Cluster {
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--kv-memory", "4MiB"];
    let flags = flags.map(str::to_owned).to_vec();
    let config = config.to_owned();
    let cluster = Cluster::start(&Start { program: Path::new(HOST), flags, config, workers: 0 });
    cluster
        .wait("the worker to be ready", || cluster.health().is_some_and(|health| health["status"] == "ok"));
    cluster
}

fn request(id: &str, prompt: &str) -> String {
    let body = json!({"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": true});
    json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body}).to_string() + "\n"
}

fn command(folder: &Path, url: &str) -> Command {
    let mut command = Command::new(HOST);
    command.args(["batch", "--url", url, "--concurrency", "2", "--input"]).arg(folder.join("in.jsonl"));
    command.arg("--output").arg(folder.join("out.jsonl"));
    command
}

fn batch(folder: &Path, url: &str) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command(folder, url).output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// The lines that were written to their end.
fn answers(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("out.jsonl")).unwrap_or_default();
    let whole = &text[..text.rfind('\n').map_or(0, |at| at + 1)];
    whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_job_that_is_killed_goes_on_and_every_request_has_one_answer() {
    // The model has one token for each byte of a prompt.
    let hold = Hold::new();
    let cluster = server(&format!("[synthetic]\n{}", hold.prompts_from(50)));
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let prompt = |number: usize| format!("{number:0>width$}", width = if number < SHORT { 1 } else { 100 });
    let requests: String =
        (0..REQUESTS).map(|number| request(&number.to_string(), &prompt(number))).collect();
    std::fs::write(at.join("in.jsonl"), requests).unwrap();
    // The long prompts are held, so the job is killed in the middle.
    let held = hold.begin();
    let mut first = command(at, &cluster.url).stderr(Stdio::null()).spawn().unwrap();
    until("some answers", || if answers(at).len() >= 4 { Ok(()) } else { Err("too few") });
    first.kill().unwrap();
    first.wait().unwrap();
    held.end();
    let earlier = answers(at);
    assert!(earlier.len() < REQUESTS, "it was not killed in the middle");
    // Appends part of a line, as if the job had been killed while it wrote.
    let written = std::fs::read_to_string(at.join("out.jsonl")).unwrap();
    std::fs::write(at.join("out.jsonl"), format!("{written}{{\"id\":\"batch_r")).unwrap();

    let (code, said) = batch(at, &cluster.url);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(&format!("{} of {REQUESTS} requests done, 0 failed", earlier.len())), "{said}");
    let all = answers(at);
    assert_eq!(all[..earlier.len()], earlier, "what was answered stays");
    let ids: BTreeSet<&str> = all.iter().map(|line| line["custom_id"].as_str().unwrap()).collect();
    assert_eq!((ids.len(), all.len()), (REQUESTS, REQUESTS));
    for line in &all {
        let response = &line["response"];
        assert_eq!((&response["status_code"], &line["error"]), (&json!(200), &Value::Null), "{line}");
        assert!(!response["request_id"].as_str().unwrap().is_empty(), "{line}");
        assert_eq!(response["body"]["usage"]["completion_tokens"], 16, "{line}");
    }
    // A further run has nothing to do.
    assert_eq!(batch(at, &cluster.url).0, Some(0));
    assert_eq!(answers(at).len(), REQUESTS);
}

#[test]
fn an_answer_that_is_no_success_fails_the_job_and_the_others_are_there() {
    let cluster = server("");
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("in.jsonl"), request("good", "a") + &request("bad", "")).unwrap();
    for _ in 0..2 {
        let (code, said) = batch(at, &cluster.url);
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains("1 of 2 requests failed"), "{said}");
        let mut statuses: Vec<_> =
            answers(at).iter().map(|line| line["response"]["status_code"].as_u64().unwrap()).collect();
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 400]);
    }
}

#[test]
fn a_wrong_file_is_refused_before_anything_is_sent() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("in.jsonl"), request("a", "a") + &request("a", "b")).unwrap();
    // No server runs there, and the check needs none.
    let (code, said) = batch(at, "http://127.0.0.1:1");
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("line 2") && said.contains("is already used in line 1"), "{said}");
    assert!(!at.join("out.jsonl").exists());
}
