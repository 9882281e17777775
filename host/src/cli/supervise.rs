//! The default: one prefill worker, one decode worker and a router on this machine, each its own process.
//!
//! A child that ends by itself is reported and started again, from the very file that the supervisor runs, so that
//! replacing the program on disk changes nothing before the next start of everything. The listening sockets belong to
//! the supervisor and are handed down, so that a restarted router answers at the same address.
//!
//! Children end when their standard input does, which is how the supervisor ends them and why none outlives a
//! supervisor that was killed. They ignore signals that ask them to stop: Ctrl-C and many process managers send those to
//! all processes at once, and workers must outlast the requests that the router still carries.

use std::collections::VecDeque;
use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rustix::fd::{AsFd, AsRawFd};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::Refused;
use super::settings::{RoleName, Settings};

/// Restarts of one child within [`WINDOW`] before the supervisor gives up.
const RESTARTS: usize = 5;
/// See [`RESTARTS`].
const WINDOW: Duration = Duration::from_secs(60);
/// First wait before a restart; doubles with each restart in the window.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// How long a child may take to end when asked to.
const GRACE: Duration = Duration::from_secs(10);

/// The exit code with which a child says that its configuration cannot work, so that another try is no use.
const REFUSED: i32 = 2;

/// How far everything is on its way to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Serving,
    /// The router finishes the requests under way, which needs the workers.
    RouterEnds,
    AllEnd,
}

/// The program that children run.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    /// What `path` names, if it names an open file.
    _file: Option<File>,
}

impl Program {
    /// The file that runs here, whatever lies at its path by now.
    fn own() -> anyhow::Result<Self> {
        let file = File::open("/proc/self/exe").context("the program cannot open its own file")?;
        Ok(Self { path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), _file: Some(file) })
    }

    fn spawn(&self, arguments: &[String]) -> std::io::Result<Child> {
        let mut own = std::env::args_os();
        let mut command = Command::new(&self.path);
        if let Some(name) = own.next() {
            command.arg0(name);
        }
        command.args(own).args(arguments).stdin(Stdio::piped()).kill_on_drop(true).spawn()
    }
}

/// Starts everything and keeps it running until Ctrl-C or SIGTERM.
///
/// # Errors
/// When an address is taken, or a child keeps ending.
pub async fn run(settings: &Settings) -> anyhow::Result<()> {
    let set = [
        ("--router", settings.router.is_some()),
        ("--control", settings.control.is_some()),
        ("--name", settings.name.is_some()),
    ];
    for (flag, given) in set {
        if given {
            let message = format!("{flag} needs --role: without a role all parts run on this machine");
            return Err(Refused(message).into());
        }
    }
    let http = listen(settings.http_address())?;
    let control = listen("127.0.0.1:0".parse().context("a constant address")?)?;
    let router_url = format!("http://{}", control.local_addr()?);
    let http_address = http.local_addr()?;
    let fds = format!("{},{}", http.as_raw_fd(), control.as_raw_fd());
    let threads = settings.threads.unwrap_or_else(|| (cores() / 2).max(1)).to_string();

    let program = Arc::new(Program::own()?);
    let (stage, now) = watch::channel(Stage::Serving);
    let worker = |role: RoleName| {
        let mut arguments = role_arguments(role, &format!("{}-0", role.as_str()));
        arguments.extend(["--router".to_owned(), router_url.clone()]);
        if settings.threads.is_none() {
            arguments.extend(["--threads".to_owned(), threads.clone()]);
        }
        tokio::spawn(keep(Arc::clone(&program), role, arguments, Stage::AllEnd, now.clone()))
    };
    let prefill = worker(RoleName::Prefill);
    let decode = worker(RoleName::Decode);
    let mut arguments = role_arguments(RoleName::Router, "router");
    arguments.extend(["--listen-fds".to_owned(), fds]);
    let router =
        tokio::spawn(keep(Arc::clone(&program), RoleName::Router, arguments, Stage::RouterEnds, now.clone()));
    println!("host: serving {} on http://{http_address} (Ctrl-C ends it)", settings.model_name());

    let mut children = [prefill, decode, router];
    let first_to_give_up = async {
        let [prefill, decode, router] = &mut children;
        tokio::select! { end = prefill => end, end = decode => end, end = router => end }
    };
    let ended = tokio::select! {
        signal = super::serve::asked_to_stop() => {
            tracing::info!(signal, "stopping: the router drains first, then the workers end");
            None
        }
        end = first_to_give_up => Some(end),
    };
    // Requests under way finish as long as the router waits for them, so the workers go last.
    stage.send_replace(Stage::RouterEnds);
    let [prefill, decode, router] = children;
    let gave_up = match ended {
        Some(end) => end.context("a supervising task failed")?,
        None => Ok(()),
    };
    let wait_for = |task: tokio::task::JoinHandle<anyhow::Result<()>>| async move {
        if !task.is_finished() {
            // Its own error is not the one to report: this child was asked to end.
            let _ended = task.await;
        }
    };
    wait_for(router).await;
    stage.send_replace(Stage::AllEnd);
    tokio::join!(wait_for(prefill), wait_for(decode));
    gave_up
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// A listening socket that children inherit.
fn listen(address: std::net::SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).map_err(|error| {
        Refused(format!("cannot listen on {address}: {error}; choose another address with --host and --port"))
    })?;
    listener.set_nonblocking(true)?;
    rustix::io::fcntl_setfd(listener.as_fd(), rustix::io::FdFlags::empty())?;
    Ok(listener)
}

fn role_arguments(role: RoleName, name: &str) -> Vec<String> {
    ["--role", role.as_str(), "--name", name, "--supervised"].map(str::to_owned).to_vec()
}

/// Runs one child, again and again, until `stage` reaches the one at which it has to end.
async fn keep(
    program: Arc<Program>,
    role: RoleName,
    arguments: Vec<String>,
    ends_at: Stage,
    mut stage: watch::Receiver<Stage>,
) -> anyhow::Result<()> {
    let mut restarts: VecDeque<Instant> = VecDeque::new();
    loop {
        let (pid, why) = match program.spawn(&arguments) {
            Ok(mut child) => {
                // Held open until the child has to end: `wait` would close it.
                let lifeline = child.stdin.take();
                let pid = child.id().unwrap_or_default();
                tracing::info!(role = role.as_str(), pid, "started");
                let status = tokio::select! {
                    status = child.wait() => status.context("a child cannot be waited for")?,
                    () = reached(&mut stage, ends_at) => {
                        drop(lifeline);
                        return end(role, child).await;
                    }
                };
                if status.code() == Some(REFUSED) {
                    let message =
                        format!("the {} process refused its configuration; see above", role.as_str());
                    return Err(Refused(message).into());
                }
                (pid, format!("ended with {status}"))
            }
            Err(error) => (0, format!("could not be started: {error}")),
        };
        let now = Instant::now();
        restarts.push_back(now);
        while restarts.front().is_some_and(|first| now.duration_since(*first) > WINDOW) {
            restarts.pop_front();
        }
        // A signal to all processes can end a child that is too young to ignore it, a moment before it is noted here.
        if asked_within(FIRST_WAIT, &mut stage).await {
            tracing::warn!(
                role = role.as_str(),
                pid,
                why,
                "a process ended by itself while everything stops"
            );
            return Ok(());
        }
        if restarts.len() > RESTARTS {
            anyhow::bail!(
                "the {} process failed {} times within {WINDOW:?}: it {why}; giving up",
                role.as_str(),
                restarts.len()
            );
        }
        let wait = FIRST_WAIT * (1 << (restarts.len() - 1).min(5));
        tracing::error!(
            role = role.as_str(),
            pid,
            why,
            ?wait,
            "a process ended by itself; starting it again"
        );
        if asked_within(wait - FIRST_WAIT, &mut stage).await {
            return Ok(());
        }
    }
}

async fn reached(stage: &mut watch::Receiver<Stage>, wanted: Stage) {
    // A supervisor that is gone wants no children either.
    drop(stage.wait_for(|now| *now >= wanted).await);
}

/// Waits this long; true at once when everything is asked to end.
async fn asked_within(wait: Duration, stage: &mut watch::Receiver<Stage>) -> bool {
    timeout(wait, reached(stage, Stage::RouterEnds)).await.is_ok()
}

/// Waits for a child whose standard input has ended, and ends it if it does not do so itself.
async fn end(role: RoleName, mut child: Child) -> anyhow::Result<()> {
    if timeout(GRACE, child.wait()).await.is_err() {
        tracing::error!(role = role.as_str(), "did not end within {GRACE:?}; killing it");
        child.kill().await.context("a child cannot be killed")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_does_not_start_is_tried_again_before_everything_is_given_up() {
        let program = Arc::new(Program { path: "/nowhere/host".into(), _file: None });
        let (_stage, now) = watch::channel(Stage::Serving);
        let kept = keep(program, RoleName::Decode, Vec::new(), Stage::AllEnd, now).await;
        let message = kept.unwrap_err().to_string();
        assert!(message.contains("failed 6 times") && message.contains("could not be started"), "{message}");
    }

    #[tokio::test]
    async fn nothing_is_started_again_once_everything_ends() {
        let program = Arc::new(Program { path: "/nowhere/host".into(), _file: None });
        let (_stage, now) = watch::channel(Stage::RouterEnds);
        keep(program, RoleName::Decode, Vec::new(), Stage::AllEnd, now).await.unwrap();
    }
}
