//! Stops processes of the tests for some seconds, as on a machine that has no processor for them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::process::{Pid, Signal, kill_process};

/// Mean time between two stalls.
const EVERY: Duration = Duration::from_millis(1500);
/// Shortest and longest stall, in milliseconds.
const STALL: std::ops::Range<u64> = 2000..8000;
/// Least time that a process runs after a stall.
const REST: Duration = Duration::from_secs(20);
/// Most processes that stand still at once.
const MOST: usize = 2;
/// Time between two looks at the clock.
const PAUSE: Duration = Duration::from_millis(50);

/// Stops processes below this one, drawn from a seed, until this is dropped.
#[derive(Debug)]
pub struct Stalls {
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Stalls {
    pub fn start(seed: u64) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let own = ends.clone();
        let thread = std::thread::spawn(move || stall(seed, &own));
        Self { ends, thread: Some(thread) }
    }
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        // The thread does not panic, so the result is ignored.
        let _ended = self.thread.take().is_some_and(|thread| thread.join().is_ok());
    }
}

fn stall(seed: u64, ends: &AtomicBool) {
    let mut rng = Rng::with_seed(seed);
    let mut still: Vec<(Pid, Instant)> = Vec::new();
    // The first moment at which a process may be stopped again.
    let mut rested: HashMap<Pid, Instant> = HashMap::new();
    let mut next = Instant::now() + EVERY;
    while !ends.load(Ordering::Relaxed) {
        std::thread::sleep(PAUSE);
        let now = Instant::now();
        still.retain(|(pid, until)| {
            let goes_on = now >= *until;
            if goes_on {
                signal(*pid, Signal::CONT);
            }
            !goes_on
        });
        if now < next || still.len() >= MOST {
            continue;
        }
        next = now + EVERY.mul_f64(rng.f64() * 2.0);
        rested.retain(|_, until| now < *until);
        let mut running = below(std::process::id());
        running.retain(|process| !rested.contains_key(&process.pid));
        let Some(process) = rng.choice(running) else { continue };
        let time = Duration::from_millis(rng.u64(STALL));
        println!("{} ({}) stands still for {:.1} s", process.name, process.pid, time.as_secs_f64());
        signal(process.pid, Signal::STOP);
        still.push((process.pid, now + time));
        rested.insert(process.pid, now + time + REST);
    }
    for (pid, _) in still {
        signal(pid, Signal::CONT);
    }
}

/// Sends a signal. A failure is ignored: a process that has ended needs no signal.
fn signal(pid: Pid, signal: Signal) {
    let _sent = kill_process(pid, signal).is_ok();
}

/// A process that is neither stopped nor has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Process {
    pid: Pid,
    name: String,
}

/// The descendants of a process. Those that a test itself has stopped are left out.
fn below(root: u32) -> Vec<Process> {
    let mut children: HashMap<u32, Vec<(u32, String, char)>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        // The process may have ended meanwhile.
        let text = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some((name, state, parent)) = read(&text) {
            children.entry(parent).or_default().push((id, name, state));
        }
    }
    let (mut found, mut parents) = (Vec::new(), vec![root]);
    while let Some(parent) = parents.pop() {
        for (id, name, state) in children.remove(&parent).unwrap_or_default() {
            parents.push(id);
            let pid = i32::try_from(id).ok().and_then(Pid::from_raw);
            if let (Some(pid), 'R' | 'S' | 'D') = (pid, state) {
                found.push(Process { pid, name });
            }
        }
    }
    found.sort_by_key(|process| process.pid.as_raw_nonzero());
    found
}

/// Name, state and parent of `/proc/PID/stat`.
fn read(stat: &str) -> Option<(String, char, u32)> {
    let (before, after) = stat.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let mut fields = after.split_whitespace();
    Some((name.to_owned(), fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use host_tests::wait::until;

    use super::*;

    #[test]
    fn names_may_have_anything_in_them() {
        assert_eq!(read("7 (a) b(c) S 5 7 7 0"), Some(("a) b(c".to_owned(), 'S', 5)));
        assert_eq!(read(""), None);
    }

    #[test]
    fn processes_below_this_one_are_found_unless_they_stand_still() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let pid = Pid::from_child(&child);
        let is_found = || below(std::process::id()).iter().any(|process| process.pid == pid);
        let becomes = |found: bool| {
            until("the state of a process", || if is_found() == found { Ok(()) } else { Err(!found) })
        };
        becomes(true);
        signal(pid, Signal::STOP);
        becomes(false);
        signal(pid, Signal::CONT);
        becomes(true);
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        assert!(!is_found());
    }
}
