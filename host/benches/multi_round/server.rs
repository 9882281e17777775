//! A server of a router, a prefill and a decode worker, each with its own flags.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use host_tests::cluster::{Cluster, Start, signal};

/// A worker's own flags and its configuration file.
pub struct Worker {
    /// Flags in addition to those of every worker.
    pub flags: Vec<String>,
    /// The content of the file, as TOML.
    pub config: String,
}

/// A running server.
pub struct Server {
    router: Cluster,
    workers: Vec<Process>,
    _configs: tempfile::TempDir,
}

struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        signal(self.0.id(), "TERM");
        // It ends after its work is done. An error is ignored, because nothing can be done about it.
        let _ended = self.0.wait().is_err();
    }
}

impl Server {
    /// Starts all three processes and waits until they have registered.
    pub fn start(prefill: &Worker, decode: &Worker) -> anyhow::Result<Self> {
        Self::start_with(&[], prefill, decode)
    }

    /// As [`start`](Self::start), with flags that all three processes get.
    pub fn start_with(shared: &[String], prefill: &Worker, decode: &Worker) -> anyhow::Result<Self> {
        let program = Path::new(env!("CARGO_BIN_EXE_host"));
        let plugins = program.parent().unwrap_or(program);
        let flags = ["--role", "router", "--executor", "synthetic", "--control", "127.0.0.1:0"];
        let flags = [&flags.map(str::to_owned), shared].concat();
        let router = Cluster::start(&Start { program, flags, config: String::new(), workers: 0 });
        let control = router.greeting.rsplit(' ').next().unwrap_or_default().to_owned();
        let configs = tempfile::tempdir()?;
        let start = |(role, worker): (&str, &Worker)| -> anyhow::Result<Process> {
            let config = configs.path().join(format!("{role}.toml"));
            std::fs::write(&config, &worker.config)?;
            let mut command = Command::new(program);
            command.args(["--role", role, "--name", role, "--router", &control, "--executor", "synthetic"]);
            command.args(["--log-level", "warn", "--plugins-dir"]).arg(plugins);
            for cache in ["--prefill-radix-cache", "--decode-radix-cache"] {
                if !worker.flags.iter().any(|flag| flag == cache) {
                    command.arg(cache.replace("--", "--no-"));
                }
            }
            command.args(shared).args(&worker.flags).arg("--config").arg(config).stdin(Stdio::null());
            Ok(Process(command.spawn()?))
        };
        let workers: anyhow::Result<Vec<Process>> =
            [("prefill", prefill), ("decode", decode)].into_iter().map(start).collect();
        let server = Self { router, workers: workers?, _configs: configs };
        server.router.wait("both workers", || server.router.workers().len() == server.workers.len());
        Ok(server)
    }

    /// URL of the server.
    pub fn url(&self) -> &str {
        &self.router.url
    }

    /// A worker's series.
    pub fn metrics(&self, role: &str) -> BTreeMap<String, f64> {
        self.router.metrics(&self.router.worker(role))
    }
}
