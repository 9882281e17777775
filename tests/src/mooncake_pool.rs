//! A Mooncake pool on this machine: its master, and processes that lend it memory. Everything on 127.0.0.1.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use crate::mooncake;
use crate::ports::unused;
use crate::program::Program;

/// Seconds without an answer after which a master forgets a client. A living process of a test is never silent for so long.
const FORGETS: u32 = 60;

/// Addresses of a master, which may not run yet.
pub struct Pool {
    /// Address of the master.
    pub address: SocketAddr,
    /// Address of its metrics.
    pub metrics: SocketAddr,
    python: mooncake::Installed,
}

impl Pool {
    /// Chooses addresses for a master. `None` where Mooncake is not installed: then the test is reported as skipped.
    pub fn new() -> Option<Self> {
        Some(Self { python: mooncake::installed()?, address: unused(), metrics: unused() })
    }

    /// The plugin's configuration. Unless `more` sets the timeout, it is long enough for a slow master.
    pub fn config(&self, more: &str) -> String {
        let key = "master_timeout_ms";
        let timeout = if more.contains(key) { String::new() } else { format!("{key} = 20000\n") };
        let address = format!("master_server_address = \"{}\"\n", self.address);
        format!("{}{address}{timeout}{more}", self.python.config())
    }

    /// The environment of Mooncake's own programs.
    pub fn environment(&self) -> Vec<(String, String)> {
        self.python.environment()
    }

    /// The program of the master.
    pub fn program(&self) -> PathBuf {
        self.python.program("mooncake_master")
    }

    /// Arguments of the master, which forgets a client that is silent for so many seconds.
    fn arguments(&self, forgets: u32) -> Vec<String> {
        let (rpc, metrics) = (self.address, self.metrics);
        let arguments = [
            format!("--rpc_address={}", rpc.ip()),
            format!("--rpc_port={}", rpc.port()),
            format!("--metrics_host={}", metrics.ip()),
            format!("--metrics_port={}", metrics.port()),
        ];
        arguments.into_iter().chain([format!("--client_ttl={forgets}")]).collect()
    }

    /// Starts the master and waits until it listens.
    pub fn master(&self) -> Program {
        self.master_that_forgets(FORGETS)
    }

    /// Starts a master that forgets a client after so many seconds without an answer.
    pub fn master_that_forgets(&self, seconds: u32) -> Program {
        let mut command = Command::new(self.program());
        command.args(self.arguments(seconds)).envs(self.environment());
        let mut master = Program::start("mooncake_master", &mut command);
        master.wait_listening(self.address);
        master
    }

    /// Starts a process that lends so many MiB and does nothing else.
    pub fn owner(&self, mebibytes: u32) -> Program {
        let script = format!(
            "from mooncake.store import MooncakeDistributedStore as S\n\
             s = S()\n\
             assert s.setup('127.0.0.1', 'P2PHANDSHAKE', {mebibytes} << 20, 16 << 20, 'tcp', '', '{}') == 0\n\
             print('lent', flush=True)\n\
             import time\n\
             time.sleep(100000)\n",
            self.address
        );
        let mut command = Command::new(self.python.python());
        command.args(["-c", &script]).envs(self.environment());
        let mut owner = Program::start("a process that lends memory", &mut command);
        owner.wait("memory in the pool", |said| said.lines().any(|line| line == "lent"));
        owner
    }
}
