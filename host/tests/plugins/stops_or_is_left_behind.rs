//! A plugin that never returns from its shutdown is named in the log, and the process ends all the same, with the memory in
//! place that the plugin goes on using.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use host_tests::plugin_files;

#[test]
fn a_worker_ends_although_its_plugin_does_not_stop() {
    let directory = plugin_files::directory(&["calling"]);
    let config = directory.path().join("host.toml");
    std::fs::write(&config, "[plugin.calling]\nstubborn = true\ntext = \"from within\"\n").unwrap();
    // No router answers there. The worker keeps trying, and needs none to stop.
    let mut worker = Command::new("timeout")
        .args(["60", env!("CARGO_BIN_EXE_host"), "--role", "decode", "--executor", "synthetic"])
        .args(["--router", "http://127.0.0.1:9", "--plugins", "calling", "--pool-pages", "64"])
        .arg("--plugins-dir")
        .arg(directory.path())
        .arg("--config")
        .arg(&config)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    let mut lines = BufReader::new(worker.stderr.take().unwrap()).lines();
    for line in lines.by_ref() {
        let line = line.unwrap();
        said += &format!("{line}\n");
        if line.contains("worker ready") {
            break;
        }
    }
    // `timeout` hands the signal on to the worker.
    let pid = rustix::process::Pid::from_child(&worker);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    for line in lines {
        said += &format!("{}\n", line.unwrap());
    }
    let code = worker.wait().unwrap().code();
    assert_eq!(code, Some(1), "ended by itself, and says that something was wrong:\n{said}");
    assert!(said.contains("plugin host.test.calling: 3 \"from within\""), "{said}");
    assert!(said.contains("a plugin did not stop; the process ends without it"), "{said}");
    assert!(said.contains("\"calling\"") && said.contains("has not returned after 4 s"), "{said}");
}
