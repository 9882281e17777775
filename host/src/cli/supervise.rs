//! The default: one prefill worker, one decode worker and a router on this machine, each its own process.
//!
//! A child that ends by itself is reported and started again. The listening sockets belong to the supervisor and are
//! handed down, so that a restarted router answers at the same address. Children end with their standard input, so
//! that none outlives a supervisor that was killed.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use rustix::fd::{AsFd, AsRawFd};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

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

    let (stop_router, router_stopped) = watch::channel(false);
    let (stop_workers, workers_stopped) = watch::channel(false);
    let worker = |role: RoleName| {
        let mut arguments = role_arguments(role, &format!("{}-0", role.as_str()));
        arguments.extend(["--router".to_owned(), router_url.clone()]);
        if settings.threads.is_none() {
            arguments.extend(["--threads".to_owned(), threads.clone()]);
        }
        tokio::spawn(keep(role, arguments, workers_stopped.clone()))
    };
    let prefill = worker(RoleName::Prefill);
    let decode = worker(RoleName::Decode);
    let mut arguments = role_arguments(RoleName::Router, "router");
    arguments.extend(["--listen-fds".to_owned(), fds]);
    let router = tokio::spawn(keep(RoleName::Router, arguments, router_stopped));
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
    stop_router.send_replace(true);
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
    stop_workers.send_replace(true);
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

/// Runs one child, again and again until asked to stop.
async fn keep(
    role: RoleName,
    arguments: Vec<String>,
    mut stopped: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let mut restarts: VecDeque<Instant> = VecDeque::new();
    loop {
        let mut child = spawn(&arguments)?;
        // Held open until the child has ended: `wait` would close it, and the child ends with it.
        let _lifeline = child.stdin.take();
        let pid = child.id().unwrap_or_default();
        tracing::info!(role = role.as_str(), pid, "started");
        let status = tokio::select! {
            status = child.wait() => status.context("a child cannot be waited for")?,
            () = asked(&mut stopped) => return end(role, child).await,
        };
        if status.code() == Some(REFUSED) {
            return Err(Refused(format!(
                "the {} process refused its configuration; see above",
                role.as_str()
            ))
            .into());
        }
        let now = Instant::now();
        restarts.push_back(now);
        while restarts.front().is_some_and(|first| now.duration_since(*first) > WINDOW) {
            restarts.pop_front();
        }
        if restarts.len() > RESTARTS {
            anyhow::bail!(
                "the {} process ended {} times within {WINDOW:?}, last with {status}; giving up",
                role.as_str(),
                restarts.len()
            );
        }
        let wait = FIRST_WAIT * (1 << (restarts.len() - 1).min(5));
        tracing::error!(role = role.as_str(), pid, %status, ?wait, "a process ended by itself; starting it again");
        tokio::select! {
            () = sleep(wait) => {}
            () = asked(&mut stopped) => return Ok(()),
        }
    }
}

async fn asked(stopped: &mut watch::Receiver<bool>) {
    // A supervisor that is gone wants no children either.
    drop(stopped.wait_for(|stop| *stop).await);
}

fn spawn(arguments: &[String]) -> anyhow::Result<Child> {
    let program = std::env::current_exe().context("the program cannot find itself")?;
    Command::new(program)
        .args(std::env::args_os().skip(1))
        .args(arguments)
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("a child process cannot be started")
}

/// Asks a child to end, and ends it if it does not.
async fn end(role: RoleName, mut child: Child) -> anyhow::Result<()> {
    if let Some(pid) = child.id().and_then(|id| rustix::process::Pid::from_raw(id.cast_signed())) {
        // A child that is gone already is what we want.
        let _gone = rustix::process::kill_process(pid, rustix::process::Signal::TERM).is_err();
    }
    if timeout(GRACE, child.wait()).await.is_err() {
        tracing::error!(role = role.as_str(), "did not end within {GRACE:?}; killing it");
        child.kill().await.context("a child cannot be killed")?;
    }
    Ok(())
}
