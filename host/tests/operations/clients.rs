//! API keys, from the command that makes one to a request that is served with it, and clients that share a worker.

use std::io::Write as _;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};

use host_tests::cluster::{Cluster, Start, agent};
use host_tests::hold::Hold;
use serde_json::{Value, json};

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

/// Sends a request with a prompt and an answer of so many tokens. Dropping the connection gives it up.
fn begin(cluster: &Cluster, key: &str, prompt: usize, answer: u32) -> TcpStream {
    let address = cluster.url.strip_prefix("http://").unwrap();
    let sampling = json!({ "max_new_tokens": answer, "ignore_eos": true });
    let body = json!({ "input_ids": vec![1; prompt], "sampling_params": sampling }).to_string();
    let mut connection = TcpStream::connect(address).unwrap();
    write!(
        connection,
        "POST /generate HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    connection
}

/// The worker computes one request at a time. Of the client with many, one request runs until its connection is dropped, the next
/// one is short, and then it is the other client's turn. In a wrong order a request comes first that does not end.
#[test]
fn a_client_with_one_request_is_served_before_the_backlog_of_one_with_many() {
    /// Tokens of an answer that takes longer than a test waits: half an hour.
    const ENDLESS: u32 = 20_000;
    /// Requests whose prompts are held.
    const HELD: usize = 20;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let (greedy, other) = (key(&file, "greedy", &[]), key(&file, "other", &[]));
    let operator = key(&file, "ops", &["--admin"]);
    let flags = ["--role", "aggregated", "--executor", "synthetic", "--kv-memory", "64MiB"];
    let flags = flags.iter().chain(&["--max-batch", "1", "--max-running", "1", "--api-keys"]);
    let mut flags: Vec<String> = flags.map(|flag| (*flag).to_owned()).collect();
    flags.push(file.display().to_string());
    let hold = Hold::new();
    let config = format!("[synthetic]\nstep-us = 100000\n{}", hold.prompts_from(16));
    let cluster = Cluster::start(&Start { program: Path::new(HOST), flags, config, workers: 0 });
    let health =
        || serde_json::from_str(&cluster.ask_with_key(&operator, "/health", None).unwrap().1).unwrap();
    cluster.wait("the worker to be ready", || {
        let health: Value = health();
        health["status"] == "ok"
    });
    let health: Value = health();
    let metrics = health["workers"][0]["metrics"].as_str().unwrap();
    let one_runs_and_wait = |waiting: usize| {
        cluster.wait(&format!("one request to run and {waiting} to wait"), || {
            let text = agent().get(format!("{metrics}/metrics")).call();
            let text = text.unwrap().body_mut().read_to_string().unwrap();
            let has = |line: String| text.lines().any(|other| other == line);
            has("host_requests_active 1".to_owned()) && has(format!("host_requests_queued {waiting}"))
        });
    };
    let _held = hold.begin();
    // Each waits until the one before is there, because the requests of one client go in the order of their arrival.
    let mut backlog: Vec<TcpStream> = Vec::new();
    for answer in [ENDLESS, 2, ENDLESS, 2] {
        backlog.push(begin(&cluster, &greedy, 3, answer));
        one_runs_and_wait(backlog.len() - 1);
    }
    let _behind: Vec<TcpStream> = (0..HELD).map(|_| begin(&cluster, &greedy, 40, 2)).collect();
    let mut waiting = 3 + HELD;
    for endless in [0, 1] {
        one_runs_and_wait(waiting);
        std::thread::scope(|scope| {
            let served = scope.spawn(|| with_key(&cluster, &other).0);
            one_runs_and_wait(waiting + 1);
            drop(backlog.remove(endless));
            assert_eq!(served.join().unwrap(), 200);
        });
        // The short one was served, and the next endless one runs.
        waiting -= 2;
    }
}
