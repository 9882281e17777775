//! API keys, from the command that makes one to a request that is served with it.

use std::path::Path;
use std::process::{Command, Output};

use host_tests::cluster::{Cluster, Start};
use serde_json::Value;

const HOST: &str = env!("CARGO_BIN_EXE_host");

fn keys_new(file: &Path, tenant: &str, flags: &[&str]) -> Output {
    Command::new(HOST).args(["keys", "new", tenant, "--file"]).arg(file).args(flags).output().unwrap()
}

/// A key that was made, as it was printed.
fn key(file: &Path, tenant: &str, flags: &[&str]) -> String {
    let made = keys_new(file, tenant, flags);
    assert!(made.status.success(), "{made:?}");
    String::from_utf8(made.stdout).unwrap().trim().to_owned()
}

/// The status of a request, and what `/health` tells with the same key.
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
