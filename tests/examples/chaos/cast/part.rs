//! One process of the cluster, across its restarts.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use host_tests::cluster::signal;

use crate::memory::{self, Bound};
use crate::network::Node;

/// Time for a process to end after its plugin may have panicked or entered a call that never returns.
const WATCHDOG: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Router,
    Prefill,
    Decode,
}

/// State of a process: running, or under a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Runs,
    Frozen,
    /// It was killed or asked to end.
    Ends,
    /// Its link is down.
    Cut,
    /// Its link loses packets.
    Loses,
    /// No packets go to or from one other process.
    Parted,
    /// Its plugin does not return from calls.
    Hangs,
    /// The fault is over, but a call that began before may still hang.
    MayHang,
    /// Its transfer plugin panics in a call.
    Panics,
    /// The fault is over, but a call that began before may have panicked.
    MayHavePanicked,
    /// It goes on without its storage tier, which has panicked, until it is drained.
    WithoutTier,
    /// A plugin gives wrong answers, or late ones.
    Lies,
    /// It gets no more memory.
    Starves,
}

/// Ways between two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ways {
    Both,
    /// From the process in question to the other.
    From,
    To,
}

/// Files that tell the plugins of one process what to do.
#[derive(Clone, Debug)]
pub struct Switches {
    pub tier: PathBuf,
    pub hang: PathBuf,
    pub mix: PathBuf,
    pub panic: PathBuf,
    /// The offset of its clock, under libfaketime.
    pub clock: Option<PathBuf>,
}

pub struct Part {
    pub role: Role,
    pub name: String,
    /// No fault ends it, so that its memory can be watched.
    pub stays: bool,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub child: Child,
    pub state: State,
    until: Instant,
    pub log: PathBuf,
    /// Odd while the process is killed or its link is cut. Counted up at the beginning and at the end of that time.
    pub killed: Arc<AtomicU64>,
    pub node: Option<Node>,
    /// Ordered pairs of nodes of which the first reaches the second no more.
    parted: Vec<(Node, Node)>,
    pub switches: Switches,
    /// How often the kernel has killed it for its memory.
    pub memory_kills: u64,
    /// Its memory was bounded at some time since it was last started.
    pub was_starved: bool,
}

/// How a part is started.
pub struct Plan {
    pub role: Role,
    pub name: String,
    pub stays: bool,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub node: Option<Node>,
    pub switches: Switches,
}

impl Part {
    pub fn start(host: &Path, plan: Plan, folder: &Path, killed: Arc<AtomicU64>) -> Self {
        let Plan { role, name, stays, arguments, environment, node, switches } = plan;
        let log = folder.join(format!("{name}.log"));
        let child = spawn(host, &arguments, &environment, node.as_ref(), &log);
        let (state, until) = (State::Runs, Instant::now());
        Self {
            role,
            name,
            stays,
            arguments,
            environment,
            child,
            state,
            until,
            log,
            killed,
            node,
            parted: Vec::new(),
            switches,
            memory_kills: 0,
            was_starved: false,
        }
    }

    pub fn again(&mut self, host: &Path) {
        self.restore();
        if self.killed.load(Ordering::SeqCst) % 2 == 1 {
            self.killed.fetch_add(1, Ordering::SeqCst);
        }
        self.child = spawn(host, &self.arguments, &self.environment, self.node.as_ref(), &self.log);
        (self.state, self.was_starved) = (State::Runs, false);
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether a fault explains its end.
    pub fn may_end(&self) -> bool {
        use State::{Ends, Hangs, MayHang, MayHavePanicked, Panics, Starves};
        matches!(self.state, Ends | Hangs | MayHang | Panics | MayHavePanicked | Starves)
    }

    pub fn kill(&mut self) -> bool {
        self.state = State::Ends;
        // Counted before the kill, for clients that connect while the process dies.
        self.killed.fetch_add(1, Ordering::SeqCst);
        self.child.kill().is_ok()
    }

    pub fn drain(&mut self) {
        self.state = State::Ends;
        signal(self.pid(), "TERM");
    }

    /// Enters a state that lasts for `time` from now.
    fn enter(&mut self, state: State, time: Duration) {
        (self.state, self.until) = (state, Instant::now() + time);
    }

    pub fn freeze(&mut self, time: Duration) {
        self.enter(State::Frozen, time);
        signal(self.pid(), "STOP");
    }

    pub fn cut(&mut self, time: Duration) -> bool {
        let Some(node) = &self.node else { return false };
        self.killed.fetch_add(1, Ordering::SeqCst);
        node.cut(true);
        self.enter(State::Cut, time);
        true
    }

    pub fn lose(&mut self, time: Duration) -> bool {
        let Some(node) = &self.node else { return false };
        node.lose(true);
        self.enter(State::Loses, time);
        true
    }

    /// Drops all packets between this process and another that go one of these ways.
    pub fn part(&mut self, other: Node, ways: Ways, time: Duration) -> bool {
        let Some(own) = self.node.clone() else { return false };
        self.parted = match ways {
            Ways::Both => vec![(own.clone(), other.clone()), (other, own)],
            Ways::From => vec![(own, other)],
            Ways::To => vec![(other, own)],
        };
        self.parted.iter().for_each(|(from, to)| from.part(to, true));
        self.enter(State::Parted, time);
        true
    }

    pub fn hang_transfer(&mut self, time: Duration) {
        std::fs::write(&self.switches.hang, "").unwrap();
        self.enter(State::Hangs, time);
    }

    pub fn mix_transfer(&mut self, time: Duration) {
        std::fs::write(&self.switches.mix, "").unwrap();
        self.enter(State::Lies, time);
    }

    /// Has calls of this name panic.
    pub fn panic_transfer(&mut self, call: &str, time: Duration) {
        write_whole(&self.switches.panic, call);
        self.enter(State::Panics, time);
    }

    /// Writes orders for its tier, in the syntax of the fixture `faulty-tier`.
    pub fn order_tier(&mut self, orders: &str, time: Duration) {
        write_whole(&self.switches.tier, orders);
        let state = match () {
            () if orders.contains("block-") => State::Hangs,
            () if orders.contains("panic-") => State::WithoutTier,
            () => State::Lies,
        };
        self.enter(state, time);
    }

    pub fn starve(&mut self, bound: Bound, time: Duration) -> bool {
        let starves = memory::starve(&self.name, self.pid(), bound);
        if starves {
            self.was_starved = true;
            self.enter(State::Starves, time);
        }
        starves
    }

    pub fn step_clock(&self, seconds: i64) -> bool {
        let Some(clock) = &self.switches.clock else { return false };
        std::fs::write(clock, format!("{seconds:+}\n")).is_ok()
    }

    /// Ends its fault now. `MayHang` and `MayHavePanicked` still last their full time.
    pub fn end_early(&mut self) {
        if !matches!(self.state, State::MayHang | State::MayHavePanicked) {
            self.until = self.until.min(Instant::now());
        }
    }

    /// Ends the fault when its time is over.
    pub fn look(&mut self) {
        if matches!(self.state, State::Runs | State::Ends) || Instant::now() < self.until {
            return;
        }
        self.restore();
        match self.state {
            State::Hangs => self.enter(State::MayHang, WATCHDOG),
            State::Panics => self.enter(State::MayHavePanicked, WATCHDOG),
            // The next process has its tier again.
            State::WithoutTier => self.drain(),
            _ => self.state = State::Runs,
        }
    }

    fn restore(&mut self) {
        let pid = self.pid();
        match self.state {
            State::Frozen => signal(pid, "CONT"),
            State::Cut => {
                self.node.iter().for_each(|node| node.cut(false));
                self.killed.fetch_add(1, Ordering::SeqCst);
            }
            State::Parted => self.parted.drain(..).for_each(|(from, to)| from.part(&to, false)),
            State::Loses => self.node.iter().for_each(|node| node.lose(false)),
            State::Hangs | State::Panics | State::WithoutTier | State::Lies => {
                let Switches { tier, hang, mix, panic, .. } = &self.switches;
                for file in [tier, hang, mix, panic] {
                    let _not_there = std::fs::remove_file(file);
                }
            }
            State::Starves => memory::feed(&self.name, pid),
            State::Runs | State::Ends | State::MayHang | State::MayHavePanicked => {}
        }
    }
}

/// Replaces a file by a rename, so that a concurrent reader sees all of the text or none.
fn write_whole(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, path).unwrap();
}

fn spawn(
    host: &Path,
    arguments: &[String],
    environment: &[(String, String)],
    node: Option<&Node>,
    log: &Path,
) -> Child {
    let log = OpenOptions::new().create(true).append(true).open(log).expect("the log can be written");
    let output: File = log.try_clone().expect("another descriptor of the log");
    let mut command = node.map_or_else(|| Command::new(host), |node| node.command(host));
    command.args(arguments).envs(environment.iter().map(|(key, value)| (key, value)));
    command.stdin(Stdio::null()).stdout(output).stderr(log).spawn().expect("the program starts")
}
