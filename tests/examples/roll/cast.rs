//! The processes of the cluster. Each is replaced by one of the other build, as an operator would do.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use host_tests::cluster::{Cluster, Start, signal};
use host_tests::ports;
use host_tests::wait::until;

/// A program with its plugin.
pub struct Build {
    pub program: PathBuf,
    plugins: PathBuf,
}

impl Build {
    pub fn in_folder(folder: &Path) -> Self {
        Self { program: folder.join("host"), plugins: folder.to_owned() }
    }
}

pub struct Cast {
    router: Cluster,
    /// URL of the router's control plane.
    control: String,
    /// URL of the control plane of the router's successor. Workers get both.
    next: String,
    workers: BTreeMap<&'static str, Worker>,
    /// Flags that name what computes the answers.
    executor: Vec<String>,
    /// Number of workers so far: each gets a new name.
    lives: u32,
    folder: tempfile::TempDir,
}

struct Worker {
    name: String,
    child: Child,
}

impl Cast {
    pub fn start(build: &Build, executor: Vec<String>) -> Self {
        let folder = tempfile::tempdir().expect("a folder for logs");
        let (control, next) = (address(), address());
        let router = start_router(build, &executor, &control);
        let mut cast = Self { router, control, next, workers: BTreeMap::new(), executor, lives: 0, folder };
        for role in ["prefill", "decode"] {
            let worker = cast.start_worker(role, build);
            cast.workers.insert(role, worker);
        }
        cast.wait_until_live(2);
        cast
    }

    /// The URL for clients.
    pub fn url(&self) -> &str {
        &self.router.url
    }

    fn start_worker(&mut self, role: &str, build: &Build) -> Worker {
        let name = format!("{role}-{}", self.lives);
        self.lives += 1;
        let log = File::create(self.folder.path().join(&name)).expect("the log can be written");
        let mut command = Command::new(&build.program);
        command.args(["--role", role, "--pool-pages", "512", "--name", &name]).args(&self.executor);
        command.args(["--control", "127.0.0.1:0", "--router", &format!("{},{}", self.control, self.next)]);
        command.args(["--plugins", "shm", "--transfer", "shm", "--plugins-dir"]).arg(&build.plugins);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
        Worker { name, child: child.expect("the program starts") }
    }

    fn wait_until_live(&self, count: usize) {
        let live = || self.router.workers().len();
        self.router.wait(&format!("{count} live workers"), || live() == count);
    }

    /// Starts a worker of the other build, and drains the one that it replaces.
    pub fn replace_worker(&mut self, role: &'static str, to: &Build) {
        let new = self.start_worker(role, to);
        self.wait_until_live(3);
        let old = self.workers.insert(role, new).unwrap();
        let (status, said) = self.router.post(&format!("/drain?worker={}", old.name), "").unwrap();
        assert_eq!(status, 202, "{said}");
        old.ends();
        self.wait_until_live(2);
    }

    /// Starts a router of the other build, moves clients to it with `move_to`, and ends the old one.
    pub fn replace_router(&mut self, to: &Build, move_to: impl Fn(&str)) {
        let old = std::mem::replace(&mut self.router, start_router(to, &self.executor, &self.next));
        self.control = std::mem::replace(&mut self.next, address());
        self.wait_until_live(2);
        move_to(&self.router.url);
        ends_well(old);
    }

    /// Keeps the folder with the logs of workers, and returns its path.
    pub fn keep_logs(self) -> PathBuf {
        self.folder.keep()
    }
}

impl Worker {
    fn ends(mut self) {
        let status: ExitStatus = until("a drained worker to end", || {
            self.child.try_wait().unwrap().ok_or_else(|| format!("{} runs", self.name))
        });
        assert!(status.success(), "{} ended with {status}", self.name);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            signal(self.child.id(), "TERM");
            self.child.wait().expect("a worker can be waited for");
        }
    }
}

/// The URL of a control plane at an unused port.
fn address() -> String {
    format!("http://{}", ports::unused())
}

fn start_router(build: &Build, executor: &[String], control: &str) -> Cluster {
    let control = control.trim_start_matches("http://");
    let flags = ["--role", "router", "--control", control].map(str::to_owned);
    let flags = flags.into_iter().chain(executor.iter().cloned()).collect();
    let start = Start { program: &build.program, flags, config: String::new(), workers: 0 };
    Cluster::start_as_given(&start, &[])
}

fn ends_well(mut router: Cluster) {
    let code = router.interrupt();
    assert_eq!(code, Some(0), "the router ends well");
}
