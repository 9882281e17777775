//! The supervisor, which runs by default: it starts a prefill worker, a decode worker and a router on this machine, each in its own
//! process.
//!
//! If a child ends by itself, the supervisor reports it and starts it again from the file that the supervisor itself runs. So
//! replacing the program on disk changes nothing until everything is started anew. The listening sockets belong to the supervisor.
//! The router inherits them, so that a restarted router answers at the same address. No other child gets them, because it could
//! take connections in the router's place.
//!
//! Children reach each other over Unix sockets in a [private folder](SocketDirectory), which other users of this machine cannot
//! reach. A worker that is started again takes over the name of its socket.
//!
//! [`restarts`] decides when a child is started again and when it is given up. Children report over their [standard
//! input](super::lifeline) when they are ready.
//!
//! A child ends when its standard input closes. That is how the supervisor ends children, and no child outlives a supervisor that
//! was killed. Children ignore SIGINT and SIGTERM: Ctrl-C and many process managers send these to all processes at once, and
//! workers must outlast the requests that the router still serves.
//!
//! [Companions](super::companion) are programs of other projects, which do not watch their standard input. A signal ends them, and
//! the system sends it when the supervisor was killed. They start first and end last. A companion that keeps failing is given up
//! alone.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use host_wire::endpoint::{ListenAt, SocketDirectory, bind_socket};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::io::{FdFlags, fcntl_setfd};
use tokio::process::{Child, Command};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::Refused;
use super::addresses::{self, first_given};
use super::clients::Clients;
use super::companion::{self, Companion};
use super::lifeline::{self, Lifeline};
use super::listeners;
use super::process_end::StopSignals;
use super::settings::{RoleName, Settings};

mod restarts;

use restarts::{End, FIRST_WAIT, Next, Restarts};

/// A companion does not report that it is ready. It counts as ready after running this long.
const COMPANION_READY: Duration = Duration::from_secs(10);
/// Time that a child may take to end, in addition to the time for its requests.
const GRACE: Duration = Duration::from_secs(15);

/// The exit code of a child whose configuration cannot work. A restart would not help.
const REFUSED: i32 = 2;

/// The stages of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Serving,
    /// The router finishes the active requests, for which it needs the workers.
    RouterEnds,
    WorkersEnd,
    CompanionsEnd,
    /// After a second signal: children that still run are killed.
    AtOnce,
}

/// A part of the server, run as a child.
#[derive(Clone, Debug)]
enum ServerPart {
    /// This program. The child inherits `sockets`, on which it listens.
    Own { role: RoleName, arguments: Vec<String>, sockets: Vec<Arc<OwnedFd>> },
    /// A companion.
    Companion(Companion),
}

impl ServerPart {
    fn name(&self) -> &str {
        match self {
            ServerPart::Own { role, .. } => role.as_str(),
            ServerPart::Companion(companion) => &companion.name,
        }
    }

    fn ends_at(&self) -> Stage {
        match self {
            ServerPart::Own { role: RoleName::Router, .. } => Stage::RouterEnds,
            ServerPart::Own { .. } => Stage::WorkersEnd,
            ServerPart::Companion(_) => Stage::CompanionsEnd,
        }
    }
}

/// The program that children run.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    /// The open file, if `path` leads to it by its descriptor.
    _file: Option<File>,
}

impl Program {
    /// The file that this process runs, even if its path now leads to another file.
    fn own() -> anyhow::Result<Self> {
        let file = File::open("/proc/self/exe").context("the program cannot open its own file")?;
        Ok(Self { path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(), _file: Some(file) })
    }

    /// Starts a child. A companion has no lifeline.
    fn spawn(&self, part: &ServerPart) -> std::io::Result<(Child, Option<Lifeline>)> {
        let mut held = None;
        let mut own = std::env::args_os();
        let mut command = Command::new(&self.path);
        if let Some(name) = own.next() {
            command.arg0(name);
        }
        match part {
            ServerPart::Own { arguments, sockets, .. } => {
                let (ours, childs) = lifeline::pair()?;
                held = Some(ours);
                command.args(own).args(arguments).stdin(childs);
                if !sockets.is_empty() {
                    hand_down(&mut command, sockets.clone());
                }
            }
            ServerPart::Companion(companion) => {
                let parent = std::process::id().to_string();
                command.args(["companion", "--parent", &parent]);
                command.env(companion::ENVIRONMENT, serde_json::to_string(&companion.environment)?);
                command.arg("--").arg(&companion.program);
                // It gets a process group of its own, because the supervisor ends companions last. Its standard output is dropped.
                command
                    .args(&companion.arguments)
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .process_group(0);
            }
        }
        Ok((command.kill_on_drop(true).spawn()?, held))
    }
}

/// Starts everything and keeps it running until Ctrl-C or SIGTERM. Workers get the values that the host `supplied` for plugins, in
/// the form of `--set`.
///
/// # Errors
/// When an address is in use, or a child keeps failing.
pub async fn run(settings: &Settings, clients: &Clients, supplied: &[String]) -> anyhow::Result<()> {
    let own = [
        ("--router", settings.router.is_some()),
        ("--metrics", settings.metrics.is_some()),
        ("--name", settings.name.is_some()),
    ];
    if let Some(flag) = first_given(&own).or_else(|| addresses::of_a_cluster(settings)) {
        let message = format!("{flag} needs --role: without a role all parts run on this machine");
        return Err(Refused(message).into());
    }
    let http = listen(settings.http_address())?;
    let http_address = http.local_addr()?;
    let folder = SocketDirectory::new()?;
    let socket = |name: &str| ListenAt::Unix(folder.socket(name)).to_string();
    let control = bind_socket(&folder.socket("router")).context("the router's socket cannot be made")?;
    let (http, control) = (Arc::new(OwnedFd::from(http)), Arc::new(control));
    let mut sockets = vec![Arc::clone(&http), Arc::clone(&control)];
    let mut url_of_operators = None;
    if let Some(at) = &clients.operators {
        let socket = listeners::open(at)?;
        url_of_operators = Some(listeners::url_of_operators(&socket, at, clients)?);
        sockets.push(Arc::new(socket));
    }
    let fds: Vec<String> = sockets.iter().map(|socket| socket.as_raw_fd().to_string()).collect();
    let threads = settings.threads.unwrap_or_else(|| (cores() / 2).max(1)).to_string();

    let mut signals = StopSignals::listen().context("signals cannot be heard")?;
    let program = Arc::new(Program::own()?);
    let (stage, now) = watch::channel(Stage::Serving);
    let grace = settings.drain_timeout() + GRACE;
    let start = |part, first| tokio::spawn(keep(Arc::clone(&program), part, now.clone(), grace, first));
    let companions = start_companions(companion::named(settings)?, start).await?;
    // From here on, starting a part does not wait for it.
    let start = |part| start(part, oneshot::channel().0);
    let worker = |role: RoleName| {
        let name = format!("{}-0", role.as_str());
        let mut arguments = role_arguments(role, &name);
        arguments.extend(["--router".to_owned(), socket("router"), "--control".to_owned(), socket(&name)]);
        if settings.threads.is_none() {
            arguments.extend(["--threads".to_owned(), threads.clone()]);
        }
        arguments.extend(supplied.iter().flat_map(|pair| ["--set".to_owned(), pair.clone()]));
        start(ServerPart::Own { role, arguments, sockets: Vec::new() })
    };
    let prefill = worker(RoleName::Prefill);
    let decode = worker(RoleName::Decode);
    let mut arguments = role_arguments(RoleName::Router, "router");
    arguments.extend(["--listen-fds".to_owned(), fds.join(",")]);
    let router = start(ServerPart::Own { role: RoleName::Router, arguments, sockets });
    if let Some(url) = url_of_operators {
        listeners::say_operators(&url);
    }
    let url = listeners::url(http_address, clients.tls.is_some());
    println!("host: serving {} on {url} (Ctrl-C ends it)", settings.model_name());

    let mut children = [prefill, decode, router];
    let first_to_give_up = async {
        let [prefill, decode, router] = &mut children;
        tokio::select! { end = prefill => end, end = decode => end, end = router => end }
    };
    let ended = tokio::select! {
        signal = signals.next() => {
            tracing::info!(
                signal,
                "stopping: the router drains first, then the workers end; another signal ends everything at once"
            );
            None
        }
        end = first_to_give_up => Some(end),
    };
    // The router waits for active requests, so the workers end after it.
    let stage = Arc::new(stage);
    reach(&stage, Stage::RouterEnds);
    tokio::spawn({
        let stage = Arc::clone(&stage);
        async move {
            let signal = signals.next().await;
            tracing::warn!(signal, "the second signal: everything is ended at once");
            reach(&stage, Stage::AtOnce);
        }
    });
    // The supervisor closes its copies of the sockets. When the router ends, new connections are refused.
    drop((http, control));
    let [prefill, decode, router] = children;
    let gave_up = match ended {
        Some(end) => end.context("a supervising task failed")?,
        None => Ok(()),
    };
    let wait_for = |task: tokio::task::JoinHandle<anyhow::Result<()>>| async move {
        if !task.is_finished() {
            // An error of this task is ignored: its child was told to end.
            let _ended = task.await;
        }
    };
    wait_for(router).await;
    reach(&stage, Stage::WorkersEnd);
    tokio::join!(wait_for(prefill), wait_for(decode));
    reach(&stage, Stage::CompanionsEnd);
    for companion in companions {
        wait_for(companion).await;
    }
    gave_up
}

/// A task that keeps a child running.
type Kept = tokio::task::JoinHandle<anyhow::Result<()>>;

/// Starts companions one after the other, and waits until each is ready.
///
/// # Errors
/// When a companion does not become ready, or its address is in use.
async fn start_companions(
    companions: Vec<Companion>,
    start: impl Fn(ServerPart, oneshot::Sender<()>) -> Kept,
) -> anyhow::Result<Vec<Kept>> {
    let mut all = Vec::new();
    for companion in companions {
        if let Some(address) = companion.ready
            && companion.answers().await
        {
            let name = &companion.name;
            let message = format!(
                "something listens at {address} already, where companion {name:?} would: end it, or leave --start-companion \
                 {name} out to use it"
            );
            return Err(Refused(message).into());
        }
        let (first, started) = oneshot::channel();
        let mut kept = start(ServerPart::Companion(companion.clone()), first);
        let ready = async {
            // An error means that the task has ended, for which the `select!` below waits.
            drop(started.await);
            companion.until_ready().await
        };
        tokio::select! {
            ended = &mut kept => ended.context("a supervising task failed")??,
            ready = ready => ready?,
        }
        all.push(kept);
    }
    Ok(all)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Opens a listening socket. Children do not inherit it unless it is [handed down](hand_down).
fn listen(address: std::net::SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address).map_err(|error| {
        Refused(format!("cannot listen on {address}: {error}; choose another address with --host and --port"))
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Lets the child of this command inherit sockets, under the numbers that they have here.
fn hand_down(command: &mut Command, sockets: Vec<Arc<OwnedFd>>) {
    let keep_open = move || {
        sockets.iter().try_for_each(|socket| fcntl_setfd(socket, FdFlags::empty()).map_err(Into::into))
    };
    // SAFETY: between fork and exec the closure makes only system calls. It takes no lock and allocates nothing, and the system's
    // errors carry only a number.
    unsafe { command.pre_exec(keep_open) };
}

fn role_arguments(role: RoleName, name: &str) -> Vec<String> {
    ["--role", role.as_str(), "--name", name, "--supervised"].map(str::to_owned).to_vec()
}

/// Runs one child, and starts it again until it must end.
///
/// `first` gets a message after the first attempt to start, whether it succeeded or not.
async fn keep(
    program: Arc<Program>,
    part: ServerPart,
    mut stage: watch::Receiver<Stage>,
    grace: Duration,
    first: oneshot::Sender<()>,
) -> anyhow::Result<()> {
    let mut first = Some(first);
    let mut restarts = Restarts::default();
    let (role, own) = (part.name(), matches!(part, ServerPart::Own { .. }));
    loop {
        let (pid, how, why, refusal) = match program.spawn(&part) {
            Ok((mut child, mut lifeline)) => {
                let pid = child.id().unwrap_or_default();
                tracing::info!(role, pid, "started");
                first.take().and_then(|first| first.send(()).ok());
                let status = tokio::select! {
                    status = until_it_ends(role, &mut child, lifeline.as_mut(), &mut restarts) => status?,
                    () = reached(&mut stage, part.ends_at()) => {
                        drop(lifeline);
                        return end(&part, child, grace, &mut stage).await;
                    }
                };
                let how = match status.code() {
                    Some(0) if own => End::Drained,
                    Some(REFUSED) if own => End::Refused,
                    _ => End::Failed,
                };
                let refusal = lifeline.as_mut().and_then(Lifeline::refusal).filter(|_| how == End::Refused);
                (pid, how, format!("ended with {status}"), refusal)
            }
            Err(error) => {
                first.take().and_then(|first| first.send(()).ok());
                (0, End::Failed, format!("could not be started: {error}"), None)
            }
        };
        let next = restarts.ended(how, Instant::now());
        // A signal to all processes may end a child that does not ignore it yet, shortly before the supervisor learns of the
        // signal.
        if next != Next::Refused && ends_within(FIRST_WAIT, &mut stage).await {
            if how == End::Failed {
                tracing::warn!(role, pid, why, "a process ended by itself while everything stops");
            }
            return Ok(());
        }
        let wait = match next {
            Next::Again(wait) => wait,
            Next::GiveUp(times) => {
                let message = format!(
                    "the {role} process failed {times} times in a row before it was ready: it {why}; giving up"
                );
                tracing::error!(role, pid, "{message}");
                anyhow::bail!(message);
            }
            Next::Refused => {
                let message = match refusal {
                    Some(why) => format!("the {role} process cannot work: {why}"),
                    None => format!("the {role} process refused its configuration; see above"),
                };
                return Err(Refused(message).into());
            }
        };
        match how {
            End::Drained => tracing::info!(role, pid, "a process has drained; starting it again"),
            End::Refused => tracing::error!(
                role,
                pid,
                ?wait,
                why = refusal.as_deref().unwrap_or("see above"),
                "a process refuses the configuration that it ran with before; the others go on, and it is started again until it runs"
            ),
            End::Failed => {
                tracing::error!(role, pid, why, ?wait, "a process ended by itself; starting it again");
            }
        }
        if ends_within(wait - FIRST_WAIT, &mut stage).await {
            return Ok(());
        }
    }
}

/// Waits until a child ends. Notes when the child reports that it is ready.
async fn until_it_ends(
    role: &str,
    child: &mut Child,
    mut lifeline: Option<&mut Lifeline>,
    restarts: &mut Restarts,
) -> anyhow::Result<std::process::ExitStatus> {
    let ready = async {
        match &mut lifeline {
            Some(lifeline) => lifeline.ready().await,
            None => sleep(COMPANION_READY).await,
        }
    };
    let ended = tokio::select! {
        status = child.wait() => Some(status),
        () = ready => None,
    };
    if ended.is_none() || lifeline.is_some_and(Lifeline::said_ready) {
        restarts.is_ready(Instant::now());
        tracing::info!(role, "ready");
    }
    let status = match ended {
        Some(status) => status,
        None => child.wait().await,
    };
    status.context("a child cannot be waited for")
}

/// Moves to a later stage. A stage never goes back.
fn reach(stage: &watch::Sender<Stage>, next: Stage) {
    stage.send_if_modified(|now| {
        let later = next > *now;
        *now = next.max(*now);
        later
    });
}

async fn reached(stage: &mut watch::Receiver<Stage>, wanted: Stage) {
    // If the supervisor is gone, the children must end, too.
    drop(stage.wait_for(|now| *now >= wanted).await);
}

/// Waits for `wait`. Returns true at once when everything must end.
async fn ends_within(wait: Duration, stage: &mut watch::Receiver<Stage>) -> bool {
    timeout(wait, reached(stage, Stage::RouterEnds)).await.is_ok()
}

/// Waits for a child to end, and kills it if that takes too long. The caller has closed its standard input; a companion gets a
/// signal here.
async fn end(
    part: &ServerPart,
    mut child: Child,
    grace: Duration,
    stage: &mut watch::Receiver<Stage>,
) -> anyhow::Result<()> {
    let pid = child.id().and_then(|pid| rustix::process::Pid::from_raw(pid.try_into().ok()?));
    if let (ServerPart::Companion(_), Some(pid)) = (part, pid) {
        // A child that has ended but was not waited for keeps its number, so no other process has it.
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)
            .context("a companion cannot be sent SIGTERM")?;
    }
    let why = tokio::select! {
        ended = timeout(grace, child.wait()) => match ended {
            Ok(_status) => return Ok(()),
            Err(_elapsed) => format!("did not end within {grace:?}"),
        },
        () = reached(stage, Stage::AtOnce) => "has to end at once".to_owned(),
    };
    tracing::error!(role = part.name(), "{why}; killing it");
    child.kill().await.context("a child cannot be killed")
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use host_tests::wait::{PAUSE, answered_until};

    use super::*;

    #[tokio::test]
    async fn a_program_that_does_not_start_is_tried_again_before_everything_is_given_up() {
        let program = Arc::new(Program { path: "/nowhere/host".into(), _file: None });
        let (_stage, now) = watch::channel(Stage::Serving);
        let part = ServerPart::Own { role: RoleName::Decode, arguments: Vec::new(), sockets: Vec::new() };
        tokio::time::pause();
        let kept = keep(program, part, now, GRACE, oneshot::channel().0).await;
        let message = kept.unwrap_err().to_string();
        assert!(message.contains("failed 6 times") && message.contains("could not be started"), "{message}");
    }

    /// A program that adds a line to a file in each run and then does `exits`. There `$runs` is the number of the run.
    ///
    /// A shell writes the program. If this process had it open for writing, children of other tests would inherit the descriptor
    /// for a moment, and the system runs no program that is open for writing.
    fn script(folder: &tempfile::TempDir, exits: &str) -> (Arc<Program>, PathBuf) {
        let (path, log) = (folder.path().join("program"), folder.path().join("log"));
        let file = log.display();
        let text = format!("#!/bin/sh\necho >> {file}\nruns=$(wc -l < {file})\n{exits}\n");
        let mut shell = std::process::Command::new("/bin/sh");
        shell.args(["-c", "cat > \"$0\" && chmod 700 \"$0\""]).arg(&path).stdin(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        shell.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let status = shell.wait().unwrap();
        assert!(status.success(), "{} is not written: {status}", path.display());
        (Arc::new(Program { path, _file: None }), log)
    }

    #[tokio::test]
    async fn what_was_taken_once_is_tried_until_it_runs_and_what_never_was_ends_everything() {
        tokio::time::pause();
        let folder = tempfile::tempdir().unwrap();
        let (_stage, now) = watch::channel(Stage::Serving);
        let part = || ServerPart::Own { role: RoleName::Decode, arguments: Vec::new(), sockets: Vec::new() };

        let (program, log) = script(&folder, "exit 2");
        let kept = keep(program, part(), now.clone(), GRACE, oneshot::channel().0).await;
        assert!(kept.unwrap_err().downcast_ref::<Refused>().is_some());
        assert_eq!(std::fs::read_to_string(&log).unwrap().lines().count(), 1);

        // The text that the child wrote to its standard input is the reason.
        let (program, log) = script(&folder, "printf 'xno page fits' >&0\nexit 2");
        let kept = keep(program, part(), now.clone(), GRACE, oneshot::channel().0).await;
        assert_eq!(kept.unwrap_err().to_string(), "the decode process cannot work: no page fits");
        std::fs::remove_file(&log).unwrap();
        // A child that ends with another code is started again, whatever it wrote.
        let (program, log) = script(&folder, "printf 'xno page fits' >&0\nexit 1");
        let kept = keep(program, part(), now.clone(), GRACE, oneshot::channel().0).await;
        assert!(kept.unwrap_err().to_string().contains("failed 6 times"));
        assert_eq!(std::fs::read_to_string(&log).unwrap().lines().count(), 6);

        std::fs::remove_file(&log).unwrap();
        // The child fails once, is refused three times, and fails five times more. Refusals do not count as failures.
        let (program, log) = script(&folder, "[ $runs -ge 2 ] && [ $runs -le 4 ] && exit 2\nexit 1");
        let kept = keep(program, part(), now, GRACE, oneshot::channel().0).await;
        let message = kept.unwrap_err().to_string();
        assert!(message.contains("failed 6 times"), "{message}");
        assert_eq!(std::fs::read_to_string(&log).unwrap().lines().count(), 6 + 3);
    }

    #[tokio::test]
    async fn a_child_that_says_that_it_is_ready_is_not_given_up() {
        tokio::time::pause();
        let folder = tempfile::tempdir().unwrap();
        let (stage, now) = watch::channel(Stage::Serving);
        let part = ServerPart::Own { role: RoleName::Decode, arguments: Vec::new(), sockets: Vec::new() };
        // The child's standard input is a socket, so its text reaches the supervisor. Every sixth life becomes ready.
        let say = "[ $((runs % 6)) -eq 0 ] && printf r >&0";
        let (program, log) = script(&folder, &format!("{say}\nexit 1"));
        let kept = tokio::spawn(keep(program, part, now, GRACE, oneshot::channel().0));
        let lives = || std::fs::read_to_string(&log).unwrap_or_default().lines().count();
        answered_until("more lives than a child has that is never ready", async || {
            tokio::time::sleep(PAUSE).await;
            assert!(!kept.is_finished(), "given up");
            if lives() >= 8 { Ok(()) } else { Err(lives()) }
        })
        .await;
        reach(&stage, Stage::WorkersEnd);
        kept.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn nothing_is_started_again_once_everything_ends() {
        let program = Arc::new(Program { path: "/nowhere/host".into(), _file: None });
        let (_stage, now) = watch::channel(Stage::RouterEnds);
        let part = ServerPart::Own { role: RoleName::Decode, arguments: Vec::new(), sockets: Vec::new() };
        keep(program, part, now, GRACE, oneshot::channel().0).await.unwrap();
    }

    #[tokio::test]
    async fn listening_sockets_are_inherited_by_the_router_alone() {
        let folder = tempfile::tempdir().unwrap();
        let socket = Arc::new(OwnedFd::from(listen("127.0.0.1:0".parse().unwrap()).unwrap()));
        let inode = rustix::fs::fstat(&*socket).unwrap().st_ino;
        let open = folder.path().join("open");
        let (program, _log) = script(&folder, &format!("ls -l /proc/$$/fd > {}", open.display()));
        for role in [RoleName::Prefill, RoleName::Router, RoleName::Decode] {
            let handed = role == RoleName::Router;
            let sockets = if handed { vec![Arc::clone(&socket)] } else { Vec::new() };
            let part = ServerPart::Own { role, arguments: Vec::new(), sockets };
            let (mut child, _lifeline) = program.spawn(&part).unwrap();
            assert!(child.wait().await.unwrap().success());
            let open = std::fs::read_to_string(&open).unwrap();
            assert_eq!(open.contains(&format!("socket:[{inode}]")), handed, "{}: {open}", role.as_str());
        }
    }
}
