//! Companions, programs that run beside the workers: started before them, started again, ended after them, and never left behind.

use std::net::TcpListener;
use std::path::Path;
use std::process::Command;

use host_tests::cluster::{Cluster, Start, runs, signal};
use host_tests::plugin_files;
use host_tests::program::run_to_end;
use host_tests::wait::until;

fn start(companion: &str) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let directory = plugins.path().display().to_string();
    let flags = ["--executor", "synthetic", "--plugins-dir", &directory, "--start-companion", "sleeper"];
    let cluster = Cluster::start(&Start {
        program: Path::new(env!("CARGO_BIN_EXE_host")),
        flags: flags.map(str::to_owned).to_vec(),
        config: format!("[companion.sleeper]\n{companion}"),
        workers: 2,
    });
    (cluster, plugins)
}

/// The names of companions and workers in log lines with this message, in order.
fn order(cluster: &Cluster, message: &str) -> Vec<String> {
    let lines = cluster.log_lines();
    let wanted = lines.iter().filter(|line| line["fields"]["message"] == message);
    wanted.filter_map(|line| line["fields"]["role"].as_str().map(str::to_owned)).collect()
}

/// Waits until the process has become `sleep`.
fn sleeps(cluster: &Cluster, pid: u32) {
    cluster.wait("it to be what it shall become", || {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.replace('\0', " ").trim().rsplit('/').next() == Some("sleep 100000")
    });
}

const SLEEP: &str = "program = \"sleep\"\narguments = [\"100000\"]\n";

#[test]
fn a_companion_starts_first_is_started_again_and_ends_with_the_supervisor() {
    let (mut cluster, _plugins) = start(SLEEP);
    assert_eq!(order(&cluster, "started")[0], "sleeper");
    let first = cluster.pid("sleeper").unwrap();
    sleeps(&cluster, first);
    signal(first, "KILL");
    cluster.wait("another companion", || cluster.pid("sleeper").is_some_and(|pid| pid != first));
    let second = cluster.pid("sleeper").unwrap();
    assert!(cluster.generate(&[1, 2, 3], 4).is_ok());
    assert_eq!(cluster.interrupt(), Some(0), "{}", cluster.log());
    assert!(!runs(second));
}

#[test]
fn a_companion_has_nothing_open_but_what_is_standard() {
    let (cluster, _plugins) = start(SLEEP);
    let companion = cluster.pid("sleeper").unwrap();
    sleeps(&cluster, companion);
    // It has none of the sockets that the router inherits. While it starts, it has its libraries open.
    until("nothing else to be open", || {
        let open = std::fs::read_dir(format!("/proc/{companion}/fd")).unwrap();
        let mut open: Vec<String> =
            open.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        open.sort();
        if open == ["0", "1", "2"] { Ok(()) } else { Err(format!("{open:?}")) }
    });
    assert!(cluster.generate(&[1, 2, 3], 4).is_ok());
}

#[test]
fn no_companion_outlives_a_supervisor_that_was_killed() {
    let (cluster, _plugins) = start(SLEEP);
    let companion = cluster.pid("sleeper").unwrap();
    signal(cluster.supervisor(), "KILL");
    cluster.wait("the companion to end", || !runs(companion));
}

#[test]
fn a_companion_that_cannot_be_kept_is_given_up_and_the_workers_serve_on() {
    let (cluster, _plugins) = start("program = \"true\"\n");
    cluster.wait("the companion to be given up", || cluster.log().contains("giving up"));
    assert!(cluster.generate(&[1, 2, 3], 4).is_ok());
    cluster.wait("both workers to be there", || cluster.workers().len() == 2);
}

#[test]
fn a_companion_that_cannot_work_is_refused_before_any_worker_starts() {
    let plugins = plugin_files::directory(&["shm"]);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    for (flags, config, says) in [
        (&["--start-companion", "unknown"][..], String::new(), "--start-companion unknown"),
        (
            &["--start-companion", "x"],
            "program = \"no-such-program\"".into(),
            "no-such-program, which is not there",
        ),
        (
            &["--start-companion", "x"],
            format!("program = \"sleep\"\nready = \"{address}\""),
            "something listens at",
        ),
        (&["--start-companion", "x", "--role", "aggregated"], SLEEP.into(), "leave --role out"),
        (&["--start-companion", "x"], "progam = \"sleep\"".into(), "progam"),
    ] {
        let file = plugins.path().join("host.toml");
        std::fs::write(&file, format!("[companion.x]\n{config}\n")).unwrap();
        let mut host = Command::new(env!("CARGO_BIN_EXE_host"));
        host.args(["--executor", "synthetic", "--port", "0", "--plugins-dir"]).arg(plugins.path());
        let ended = run_to_end("host", host.arg("--config").arg(&file).args(flags));
        let refused = ended.code() == Some(2) && ended.stderr.contains(says);
        assert!(refused, "{flags:?} {config}: {ended}");
        assert!(!ended.stderr.contains("started"), "{ended}");
    }
}
