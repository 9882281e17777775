//! Runs test programs, as many at a time as there are cores, those of the external group one at a time.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::programs::Program;

/// Longest time of one program: many times that of the slowest one under any load. A program that takes longer hangs.
const LONGEST: Duration = Duration::from_secs(3600);
/// Time between two looks whether a program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// The result of one program.
#[derive(Debug)]
pub struct Run {
    /// Its name.
    pub name: String,
    /// How long it took.
    pub time: Duration,
    /// What it printed.
    pub output: Vec<u8>,
    /// Its exit status. `None` when it was killed because it took too long.
    pub status: Option<ExitStatus>,
}

impl Run {
    /// Whether all of its tests passed.
    pub fn is_good(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

/// The programs that wait to be run.
#[derive(Debug, Default)]
struct Queue {
    external: VecDeque<Program>,
    others: VecDeque<Program>,
    /// Whether a program of the external group runs.
    external_runs: bool,
}

impl Queue {
    fn new(programs: &[Program]) -> Self {
        let (external, others) = programs.iter().cloned().partition(|program| program.is_external);
        Self { external, others, external_runs: false }
    }

    /// Takes the next program to run. The external group goes first, because it takes long and runs one program at a time.
    fn next(&mut self) -> Option<Program> {
        if !self.external_runs
            && let Some(program) = self.external.pop_front()
        {
            self.external_runs = true;
            return Some(program);
        }
        self.others.pop_front()
    }

    /// Notes that a program has ended.
    fn ended(&mut self, program: &Program) {
        self.external_runs &= !program.is_external;
    }
}

/// Runs all programs, and prints the output of each when it has ended.
///
/// # Errors
/// When one cannot be started, or the output cannot be written.
pub fn run(
    programs: &[Program],
    variables: &[(&'static str, OsString)],
    lanes: usize,
) -> anyhow::Result<Vec<Run>> {
    let queue = Mutex::new(Queue::new(programs));
    let runs = Mutex::new(Vec::new());
    let lane = || -> anyhow::Result<()> {
        loop {
            let Some(program) = locked(&queue).next() else { return Ok(()) };
            let run = run_one(&program, variables);
            locked(&queue).ended(&program);
            let run = run?;
            let mut runs = locked(&runs);
            let mut out = std::io::stdout().lock();
            writeln!(out, "\n{} ({:.1} s)", run.name, run.time.as_secs_f64())
                .and_then(|()| out.write_all(&run.output))
                .and_then(|()| out.flush())
                .context("the output cannot be written")?;
            runs.push(run);
        }
    };
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes.max(1)).map(|_| scope.spawn(lane)).collect();
        // A lane that failed does not end the others.
        let ended: Vec<_> = lanes.into_iter().map(|lane| lane.join()).collect();
        ended.into_iter().try_for_each(|lane| match lane {
            Ok(lane) => lane,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(runs.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn run_one(program: &Program, variables: &[(&'static str, OsString)]) -> anyhow::Result<Run> {
    let output = tempfile::NamedTempFile::new().context("there is no room for a program's output")?;
    let both = || -> std::io::Result<File> { output.as_file().try_clone() };
    let start = Instant::now();
    let mut child = Command::new(&program.path)
        .args(&program.arguments)
        .current_dir(&program.folder)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(both().context("a descriptor cannot be copied")?)
        .stderr(both().context("a descriptor cannot be copied")?)
        .spawn()
        .with_context(|| format!("{} cannot be run", program.path.display()))?;
    let mut said = String::new();
    let status = loop {
        if let Some(status) = child.try_wait().context("a test program cannot be waited for")? {
            if !status.success() {
                said = format!("{} FAILED: {status}\n", program.name);
            }
            break Some(status);
        }
        if start.elapsed() >= LONGEST {
            child.kill().and_then(|()| child.wait()).context("a test program cannot be killed")?;
            said = format!("{} FAILED: it did not end within {LONGEST:?} and was killed\n", program.name);
            break None;
        }
        std::thread::sleep(LOOK);
    };
    let mut bytes = read(output.path())?;
    bytes.extend(said.into_bytes());
    Ok(Run { name: program.name.clone(), time: start.elapsed(), output: bytes, status })
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("{} cannot be read", path.display()))
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str, script: &str, is_external: bool) -> (Program, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let program = Program {
            name: name.to_owned(),
            path: "/bin/sh".into(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            folder: folder.path().to_owned(),
            is_external,
        };
        (program, folder)
    }

    #[test]
    fn the_external_group_has_one_at_a_time_and_goes_first() {
        let make = |name: &str, is_external| Program {
            name: name.to_owned(),
            path: name.into(),
            arguments: Vec::new(),
            folder: ".".into(),
            is_external,
        };
        let programs = [make("a", false), make("b", true), make("c", true), make("d", false)];
        let mut queue = Queue::new(&programs);
        let mut next = || queue.next().map(|program| program.name);
        assert_eq!([next(), next()], [Some("b".to_owned()), Some("a".to_owned())]);
        queue.ended(&programs[0]);
        assert_eq!(queue.next().unwrap().name, "d", "b still runs");
        assert!(queue.next().is_none());
        queue.ended(&programs[1]);
        assert_eq!(queue.next().unwrap().name, "c");
    }

    #[test]
    fn what_a_program_prints_and_how_it_ends_is_kept() {
        let (good, _good) = program("good", "echo $WORD; echo beside >&2; pwd", false);
        let (bad, _bad) = program("bad", "exit 3", true);
        let runs = run(&[good.clone(), bad], &[("WORD", "hello".into())], 2).unwrap();
        let of = |name: &str| runs.iter().find(|run| run.name == name).unwrap();
        let folder = good.folder.display();
        assert!(of("good").is_good());
        assert_eq!(String::from_utf8_lossy(&of("good").output), format!("hello\nbeside\n{folder}\n"));
        assert!(!of("bad").is_good());
        assert!(String::from_utf8_lossy(&of("bad").output).contains("bad FAILED: exit status: 3"));
    }
}
