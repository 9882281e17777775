//! A Mooncake pool on this machine: its master, and processes that lend it memory. Everything on 127.0.0.1.

// Each test uses its part.
#![allow(dead_code, clippy::unwrap_used, clippy::disallowed_methods)]

use std::io::{BufRead, BufReader, Read, Seek};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use host_tests::ports::unused;

use crate::mooncake;

/// Longest wait for one of them.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process of the pool's. Killed with it.
pub struct Process(Child);

impl Process {
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _gone = self.0.kill().and_then(|()| self.0.wait()).is_err();
    }
}

/// Where a master is, or will be.
pub struct Pool {
    pub address: SocketAddr,
    pub metrics: SocketAddr,
    python: mooncake::Installed,
}

impl Pool {
    /// A place for a master; nothing where Mooncake is not installed, which the test then says.
    pub fn new() -> Option<Self> {
        Some(Self { python: mooncake::installed()?, address: unused(), metrics: unused() })
    }

    /// The plugin's configuration.
    pub fn config(&self, more: &str) -> String {
        format!("{}master_server_address = \"{}\"\n{more}", self.python.config(), self.address)
    }

    /// What a command of Mooncake's own needs.
    pub fn environment(&self) -> Vec<(String, String)> {
        self.python.environment()
    }

    /// The program of the master.
    pub fn program(&self) -> PathBuf {
        self.python.program("mooncake_master")
    }

    /// Its arguments. A client that does not answer for 2 s is forgotten.
    pub fn arguments(&self) -> Vec<String> {
        let (rpc, metrics) = (self.address, self.metrics);
        let arguments = [
            format!("--rpc_address={}", rpc.ip()),
            format!("--rpc_port={}", rpc.port()),
            format!("--metrics_host={}", metrics.ip()),
            format!("--metrics_port={}", metrics.port()),
        ];
        arguments.into_iter().chain(["--client_ttl=2".to_owned()]).collect()
    }

    /// Starts the master and waits until it listens.
    pub fn master(&self) -> Process {
        let mut command = Command::new(self.program());
        command.args(self.arguments()).envs(self.environment());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut master = Process(child.unwrap());
        let start = Instant::now();
        while TcpStream::connect(self.address).is_err() {
            if let Some(status) = master.0.try_wait().unwrap() {
                panic!("the master at {} ended: {status}", self.address);
            }
            assert!(start.elapsed() < PATIENCE, "the master does not listen at {}", self.address);
            std::thread::sleep(Duration::from_millis(10));
        }
        master
    }

    /// A process that lends so many MiB and does nothing else.
    pub fn owner(&self, mebibytes: u32) -> Process {
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
        // What it says beside that is kept for the test that fails without it, and in a file, because a pipe must be read.
        let mut log = tempfile::tempfile().unwrap();
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log.try_clone().unwrap()).spawn();
        let mut owner = Process(child.unwrap());
        let mut said = BufReader::new(owner.0.stdout.take().unwrap()).lines().map_while(Result::ok);
        if !said.any(|line| line == "lent") {
            let mut text = String::new();
            log.rewind().and_then(|()| log.read_to_string(&mut text)).unwrap();
            panic!("a process could not lend memory to the pool at {}:\n{text}", self.address);
        }
        owner
    }
}
