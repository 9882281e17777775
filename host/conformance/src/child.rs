//! One process per case.

#![allow(clippy::disallowed_methods, reason = "the kit measures other people's code, in real time")]

use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal, getrlimit, pidfd_open, setrlimit};

use super::observe::be_patient;
use super::persistence::{dies, rounds, second};
use super::verdict::{self, Verdict};
use super::wording::ended;
use super::{Case, Outcome, Report, Status, Stop, Subject, cases, subject, transfer_processes};

/// Limit of the output that is kept of a case's process, in bytes.
const OUTPUT: usize = 1 << 20;

/// Prefix of the line that names calls that have not returned when a case's time is nearly over.
const HELD: &str = "@held ";

/// Limits of a case.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time after which its process is killed. Its limit of processor time, over all threads, is twice that.
    pub time: Duration,
    /// Bytes of address space.
    pub memory: u64,
    /// How long to wait without any progress for something that must happen.
    pub patience: Duration,
}

/// A case that this process runs.
#[derive(Clone, Copy, Debug)]
pub struct OneCase<'a> {
    /// Its name.
    pub name: &'a str,
    /// Whether it is the second process of a case that needs two.
    pub second: bool,
    /// Number of the run. Both processes of a case that needs two have the same.
    pub run: u64,
    /// How long to wait without any progress for something that must happen.
    pub patience: Duration,
    /// The limit of the case's time. Calls that are still in progress are named after half and after nine tenths of it.
    pub time: Duration,
}

/// What a process of a case does.
type Run = fn(&Subject) -> Outcome;

/// Descriptors that a case may have open.
const DESCRIPTORS: u64 = 4096;

/// Limits the resources of this process, so that a plugin out of control ends its case and not the machine.
///
/// # Errors
/// The system's error.
pub fn limit_this_process(memory: u64, processor_seconds: u64) -> std::io::Result<()> {
    let at_most = |resource, most: u64, maximum: u64| {
        let now = getrlimit(resource).maximum;
        let least = |most: u64| Some(now.map_or(most, |now| most.min(now)));
        setrlimit(resource, Rlimit { current: least(most), maximum: least(maximum) })
    };
    at_most(Resource::Core, 0, 0)?;
    at_most(Resource::Nofile, DESCRIPTORS, DESCRIPTORS)?;
    at_most(Resource::As, memory, memory)?;
    // If both limits were equal, the system would kill the process without a reason. With a lower first limit it sends SIGXCPU,
    // which names the reason.
    at_most(Resource::Cpu, processor_seconds, processor_seconds.saturating_add(1))?;
    Ok(())
}

/// Runs the chosen cases on a file, each in its own process: this program again, as `plugins run-case`.
///
/// `chosen` is called with each case's name. `each` is called with every report, and an error from it ends the test.
///
/// # Errors
/// When processes cannot be started, or the error of `each`.
pub fn test_file(
    program: &Path,
    file: &Path,
    config: &str,
    limits: Limits,
    chosen: impl Fn(&str) -> bool,
    mut each: impl FnMut(&Report) -> anyhow::Result<()>,
) -> anyhow::Result<Vec<Report>> {
    // Without a manifest only cases for all plugins run, and the case `manifest` says what is wrong.
    let manifest = super::Entry::of_file(file).ok().map(|entry| entry.manifest);
    let fits = |case: &&Case| {
        let Some(kind) = case.role else { return true };
        let role = manifest.as_ref().and_then(|manifest| manifest.role(kind));
        role.is_some_and(|role| {
            case.capability.is_none_or(|name| role.capabilities.iter().any(|c| c == name))
        })
    };
    let mut reports = Vec::new();
    for case in cases().filter(fits).filter(|case| chosen(case.name)) {
        let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let run = clock.as_nanos() as u64 ^ (u64::from(std::process::id()) << 48);
        let mut report = one(program, file, config, limits, case, run, false)?;
        for round in 0..rounds(case.name) {
            let run = run.wrapping_add(round);
            if round > 0 && report.status == Status::Pass {
                report = one(program, file, config, limits, case, run, false)?;
            }
            if report.status == Status::Pass && second(case.name).is_some() {
                report = one(program, file, config, limits, case, run, true)?;
            }
        }
        each(&report)?;
        reports.push(report);
    }
    Ok(reports)
}

fn one(
    program: &Path,
    file: &Path,
    config: &str,
    limits: Limits,
    case: &Case,
    run: u64,
    second: bool,
) -> std::io::Result<Report> {
    let mut child = Command::new(program)
        .args(["plugins", "run-case", "--case", case.name, "--config-text", config])
        .args(["--run", &run.to_string(), "--patience-ms", &limits.patience.as_millis().to_string()])
        .args(["--time-ms", &limits.time.as_millis().to_string()])
        .args(second.then_some("--second"))
        .args(["--memory-limit", &limits.memory.to_string()])
        .args(["--processor-limit", &(limits.time.as_secs() * 2).to_string(), "--"])
        .arg(file)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // Reads the pipes while the process runs, so that a plugin with much output does not block on a full pipe.
    let output = child.stdout.take().map(read_all);
    let errors = child.stderr.take().map(read_all);
    let in_time = ends_within(&child, limits.time)?;
    if !in_time {
        child.kill()?;
    }
    let exit = child.wait()?;
    let text = |pipe: Option<Pipe>, is_all: &dyn Fn(&str) -> bool| {
        pipe.map(|pipe| pipe.text(is_all)).unwrap_or_default()
    };
    let output = text(output, &|said| Verdict::last_in(said).is_some());
    let errors = text(errors, &|_said| exit.success());
    let report = |status, text| Ok(Report { case: case.name, status, text });
    let is_due =
        exit.success() || (dies(case.name) && !second && exit.signal() == Some(Signal::KILL.as_raw()));
    match Verdict::last_in(&output) {
        _ if !in_time => {
            let held = output.lines().rev().find_map(|line| line.split_once(HELD));
            let held = held.map(|(_, calls)| format!(", {calls}")).unwrap_or_default();
            let seconds = limits.time.as_secs();
            report(Status::Timeout, format!("it did not end within {seconds} s{held}; {}", case.about))
        }
        Some(Verdict { status, text }) if is_due => match status.as_str() {
            "pass" => report(Status::Pass, case.about.to_owned()),
            "skip" => report(Status::Skip, text),
            _ => report(Status::Fail, text),
        },
        Some(_) => report(Status::Crash, format!("after the case {}", ended(exit, &errors))),
        None => report(Status::Crash, ended(exit, &errors)),
    }
}

/// The output of a process, which is read while the process runs.
struct Pipe {
    kept: Arc<Mutex<Vec<u8>>>,
    /// Disconnected at the end of the pipe.
    end: Receiver<()>,
}

/// Time to read the rest of the output of an ended process. The pipe ends only when all processes have closed it, and the plugin
/// may have started one that goes on.
const REST: Duration = Duration::from_secs(1);
/// How often to wait for `REST` while the expected output is missing.
const RESTS: u32 = 15;

impl Pipe {
    /// The output of a process that has ended.
    fn text(self, is_all: &dyn Fn(&str) -> bool) -> String {
        let mut text = String::new();
        for _ in 0..RESTS {
            let ended = self.end.recv_timeout(REST) != Err(RecvTimeoutError::Timeout);
            text = String::from_utf8_lossy(&self.kept.lock()).into_owned();
            if ended || is_all(&text) {
                break;
            }
        }
        text
    }
}

fn read_all(mut pipe: impl Read + Send + 'static) -> Pipe {
    let (open, end) = channel();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let filled = kept.clone();
    std::thread::spawn(move || {
        let _open: Sender<()> = open;
        let mut piece = vec![0; 1 << 16];
        // Reads until the pipe ends or fails. Reads also the bytes beyond the limit, so that the child does not block.
        while let Ok(read @ 1..) = pipe.read(&mut piece) {
            let mut filled = filled.lock();
            let room = OUTPUT - filled.len();
            filled.extend_from_slice(&piece[..read.min(room)]);
        }
    });
    Pipe { kept, end }
}

/// Whether the process ends in time.
fn ends_within(child: &Child, time: Duration) -> std::io::Result<bool> {
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| std::io::Error::other("the process has no id"))?;
    let handle = pidfd_open(pid, PidfdFlags::empty())?;
    let deadline = std::time::Instant::now() + time;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&timeout)) {
            Ok(ready) => return Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Runs one case in this process and writes its verdict to standard output.
///
/// # Errors
/// When there is no such case, or its report cannot be written.
pub fn run_case(file: &Path, config: &str, one: OneCase<'_>) -> std::io::Result<()> {
    let name = one.name;
    let unknown = || std::io::Error::other(format!("no case is named {name:?}"));
    let case = cases().find(|case| case.name == name).ok_or_else(unknown)?;
    let sender = || (name == transfer_processes::NAME).then_some(transfer_processes::send as Run);
    let run = if one.second { second(name).or_else(sender).ok_or_else(unknown)? } else { case.run };
    be_patient(one.patience);
    tell_what_is_held(one.time)?;
    let outcome = subject(file, config, one.run).and_then(|subject| run(&subject));
    let (status, text) = match outcome {
        Ok(()) => ("pass", String::new()),
        Err(Stop::Fail(text)) => ("fail", text),
        Err(Stop::Skip(text)) => ("skip", text),
    };
    verdict::tell(status, text)
}

/// Names the calls of plugins that have not returned after half of the time and after nine tenths. On a busy machine the last tenth
/// may leave no time for it.
fn tell_what_is_held(time: Duration) -> std::io::Result<()> {
    let tell = move |after: Duration| {
        std::thread::sleep(after);
        let calls =
            host_plugins::in_progress().into_iter().map(|held| format!("{} of {}", held.call, held.plugin));
        let calls: Vec<String> = calls.collect();
        if !calls.is_empty() {
            // A failure is ignored: the kit ends the process soon.
            let _unread = writeln!(std::io::stdout(), "\n{HELD}in {}", calls.join(" and "));
        }
    };
    let tell_twice = move || [0.5, 0.4].map(|share| tell(time.mul_f64(share)));
    std::thread::Builder::new().name("held".into()).spawn(tell_twice).map(drop)
}
