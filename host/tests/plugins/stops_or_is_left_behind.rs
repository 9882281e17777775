//! A plugin that never returns from its shutdown is named in the log, and the process ends nevertheless. The memory that the plugin
//! goes on using stays mapped until then.

use std::process::Command;

use host_tests::plugin_files;
use host_tests::program::Program;

#[test]
fn a_worker_ends_although_its_plugin_does_not_stop() {
    let directory = plugin_files::directory(&["calling"]);
    let config = directory.path().join("host.toml");
    std::fs::write(&config, "[plugin.calling]\nstubborn = true\ntext = \"from within\"\n").unwrap();
    // No router answers at this address. The worker keeps trying, and can stop without one.
    let mut command = Command::new(env!("CARGO_BIN_EXE_host"));
    command.args(["--role", "decode", "--executor", "synthetic", "--router", "http://127.0.0.1:9"]);
    command.args(["--plugins", "calling", "--pool-pages", "64", "--plugins-dir"]);
    command.arg(directory.path()).arg("--config").arg(&config);
    let mut worker = Program::start("a worker", &mut command);
    worker.wait("the beginning", |said| said.contains("worker ready"));
    // The signal goes to this process alone. A program in between would pass it on to its group, and a second signal ends the
    // worker at once.
    let code = worker.end().code();
    let said = worker.said();
    assert_eq!(code, Some(1), "ended by itself, and says that something was wrong:\n{said}");
    assert!(said.contains("plugin host.test.calling: 3 \"from within\""), "{said}");
    assert!(said.contains("a plugin did not stop; the process ends without it"), "{said}");
    assert!(said.contains("\"calling\"") && said.contains("has not returned after 4 s"), "{said}");
}
