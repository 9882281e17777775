//! A `host` that a command starts, and that ends with the command.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::client;

/// Longest wait for a server to serve.
const START: Duration = Duration::from_secs(120);
/// Longest wait for a server to end. The server gives its own children ten seconds.
const END: Duration = Duration::from_secs(30);
/// Time between two looks at the server.
const LOOK: Duration = Duration::from_millis(20);

/// A running server. Dropping it ends it and waits.
#[derive(Debug)]
pub struct Server {
    child: Option<Child>,
    /// `http://127.0.0.1:…`
    pub url: String,
    /// Its log.
    pub log: PathBuf,
}

impl Server {
    /// Starts `host` with these flags on a free port, and waits until `/health` says ok. What it prints goes to
    /// `folder/name.out`, its log to `folder/name.log`.
    pub fn start(program: &Path, flags: &[String], folder: &Path, name: &str) -> anyhow::Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
        let printed = folder.join(format!("{name}.out"));
        let log = folder.join(format!("{name}.log"));
        // Files rather than pipes: a server that is kept must not lose its output when this process ends.
        let open =
            |path: &Path| File::create(path).with_context(|| format!("{} cannot be written", path.display()));
        let child = Command::new(program)
            .args(flags)
            .args(["--port", "0"])
            .stdin(Stdio::null())
            .stdout(open(&printed)?)
            .stderr(open(&log)?)
            .spawn()
            .with_context(|| format!("{} cannot be started", program.display()))?;
        let mut server = Self { child: Some(child), url: String::new(), log };
        let deadline = Instant::now() + START;
        server.url = server.until(deadline, "said its address", || address(&printed))?;
        let health = format!("{}/health", server.url);
        server
            .until(deadline, "was healthy", || client::get_json(&health).filter(|h| h["status"] == "ok"))?;
        Ok(server)
    }

    /// `/health`, as it is now.
    pub fn health(&self) -> anyhow::Result<Value> {
        client::get_json(&format!("{}/health", self.url)).context("the server does not tell its health")
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Leaves the server running.
    pub fn keep(mut self) {
        self.child = None;
    }

    /// Ends the server. An error when it did not end well.
    pub fn stop(mut self) -> anyhow::Result<()> {
        match self.end()? {
            Some(status) if !status.success() => {
                bail!("the server ended with {status}; its log is {}", self.log.display())
            }
            _ => Ok(()),
        }
    }

    fn until<T>(
        &mut self,
        deadline: Instant,
        what: &str,
        mut look: impl FnMut() -> Option<T>,
    ) -> anyhow::Result<T> {
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            let ended = match &mut self.child {
                Some(child) => child.try_wait().context("the server cannot be waited for")?,
                None => None,
            };
            if let Some(status) = ended {
                self.child = None;
                let log = fs::read_to_string(&self.log).unwrap_or_default();
                bail!("the server ended with {status} before it {what}:\n{log}");
            }
            if Instant::now() > deadline {
                bail!("no server {what} within {START:?}; its log is {}", self.log.display());
            }
            sleep(LOOK);
        }
    }

    /// Sends SIGTERM and waits. Sends SIGKILL when that does not help.
    fn end(&mut self) -> anyhow::Result<Option<std::process::ExitStatus>> {
        let Some(mut child) = self.child.take() else { return Ok(None) };
        if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            // The server may have ended by itself, which the wait below finds.
            let _gone = kill_process(pid, Signal::TERM).is_err();
        }
        let deadline = Instant::now() + END;
        while Instant::now() < deadline {
            if let Some(status) = child.try_wait().context("the server cannot be waited for")? {
                return Ok(Some(status));
            }
            sleep(LOOK);
        }
        // Its own children end with their standard input.
        child.kill().context("the server cannot be killed")?;
        let status = child.wait().context("the server cannot be waited for")?;
        Ok(Some(status))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("xtask: {error:#}");
        }
    }
}

/// The address that the server printed, once its line is complete.
fn address(printed: &Path) -> Option<String> {
    let text = fs::read_to_string(printed).ok()?;
    let complete = text.get(..text.rfind('\n')?)?;
    let rest = complete.split("http://").nth(1)?;
    Some(format!("http://{}", rest.split([' ', ',', '\n']).next()?))
}
