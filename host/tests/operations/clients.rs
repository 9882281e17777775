//! API keys, from the command that makes one to a request that is served with it, and clients that share a worker.

use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};

use host_tests::cluster::{Cluster, Start};
use serde_json::Value;

const HOST: &str = env!("CARGO_BIN_EXE_host");

fn keys_new(file: &Path, tenant: &str, flags: &[&str]) -> Output {
    Command::new(HOST).args(["keys", "new", tenant, "--file"]).arg(file).args(flags).output().unwrap()
}

/// Makes a key and returns it as printed.
fn key(file: &Path, tenant: &str, flags: &[&str]) -> String {
    let made = keys_new(file, tenant, flags);
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap().trim().to_owned()
}

/// Sends a request and asks `/health` with the same key. Returns the status and the answer of `/health`.
fn with_key(cluster: &Cluster, key: &str) -> (u16, Value) {
    let body = r#"{"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}"#;
    let (status, _answer) = cluster.ask_with_key(key, "/generate", Some(body)).unwrap();
    let (_status, health) = cluster.ask_with_key(key, "/health", None).unwrap();
    (status, serde_json::from_str(&health).unwrap())
}

#[test]
fn a_key_that_the_command_made_opens_the_server_and_nothing_else_does() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let (user, operator) = (key(&file, "team-a", &[]), key(&file, "ops", &["--admin"]));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains(&user) && !text.contains(&operator), "keys are written nowhere: {text}");
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--kv-memory", "4MiB", "--api-keys"];
    let mut flags: Vec<String> = flags.map(str::to_owned).to_vec();
    flags.push(file.display().to_string());
    let cluster =
        Cluster::start(&Start { program: Path::new(HOST), flags, config: String::new(), workers: 0 });
    cluster
        .wait("the worker to be ready", || cluster.health().is_some_and(|health| health["status"] == "ok"));
    assert_eq!(with_key(&cluster, "sk-other").0, 401);
    let (status, health) = with_key(&cluster, &user);
    assert_eq!((status, health.get("workers")), (200, None));
    let (status, health) = with_key(&cluster, &operator);
    assert_eq!(status, 200);
    assert_eq!(health["workers"].as_array().map(Vec::len), Some(1), "{health}");
}

#[test]
fn a_name_or_a_file_that_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    assert_eq!(keys_new(&file, "a b", &[]).status.code(), Some(2));
    assert!(!file.exists());
    std::fs::write(&file, "nonsense").unwrap();
    assert_eq!(keys_new(&file, "a", &[]).status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "nonsense");
}

/// Sends a request and does not read its answer.
fn begin(cluster: &Cluster, key: &str, tokens: u32) -> TcpStream {
    let address = cluster.url.strip_prefix("http://").unwrap();
    let body = format!(
        r#"{{"input_ids": [1, 2, 3], "sampling_params": {{"max_new_tokens": {tokens}, "ignore_eos": true}}}}"#
    );
    let mut connection = TcpStream::connect(address).unwrap();
    write!(
        connection,
        "POST /generate HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    connection.set_nonblocking(true).unwrap();
    connection
}

#[test]
fn a_client_with_one_request_is_served_before_the_backlog_of_one_with_many() {
    const MANY: usize = 60;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let (greedy, other) = (key(&file, "greedy", &[]), key(&file, "other", &[]));
    let operator = key(&file, "ops", &["--admin"]);
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--kv-memory", "64MiB"];
    let flags = flags.iter().chain(&["--max-batch", "1", "--max-running", "1", "--api-keys"]);
    let mut flags: Vec<String> = flags.map(|flag| (*flag).to_owned()).collect();
    flags.push(file.display().to_string());
    // Each of the long requests takes three seconds, all of them three minutes.
    let config = "[synthetic]\nstep-us = 2000\n".to_owned();
    let cluster = Cluster::start(&Start { program: Path::new(HOST), flags, config, workers: 0 });
    let health =
        || serde_json::from_str(&cluster.ask_with_key(&operator, "/health", None).unwrap().1).unwrap();
    cluster.wait("the worker to be ready", || {
        let health: Value = health();
        health["status"] == "ok"
    });
    let health: Value = health();
    let metrics = health["workers"][0]["metrics"].as_str().unwrap();
    let backlog: Vec<TcpStream> = (0..MANY).map(|_| begin(&cluster, &greedy, 1_500)).collect();
    cluster.wait("the backlog to be there", || {
        let text = host_tests::cluster::agent().get(format!("{metrics}/metrics")).call();
        let text = text.unwrap().body_mut().read_to_string().unwrap();
        let queued = text.lines().find_map(|line| line.strip_prefix("host_requests_queued "));
        // Some may have been answered already.
        queued.is_some_and(|queued| queued.parse::<usize>().unwrap() >= MANY / 2)
    });
    assert_eq!(with_key(&cluster, &other).0, 200);
    let answered = || backlog.iter().filter(|connection| connection.peek(&mut [0]).is_ok()).count();
    let before = answered();
    assert!(before < MANY / 2, "{before} of {MANY} were answered before it");
    // Once more, after the backlog has waited longer. The request that is being computed ends first, and one more may come before.
    assert_eq!(with_key(&cluster, &other).0, 200);
    let between = answered() - before;
    assert!(between < MANY / 6, "{between} of {MANY} were answered before the second");
}
