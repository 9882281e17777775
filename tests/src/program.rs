//! External programs that tests run, and the turn that such tests take.

use std::cell::RefCell;
use std::fs::{File, TryLockError};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};

use tempfile::NamedTempFile;

use crate::wait::{PATIENCE, PAUSE, try_until, until};

/// A program that a test started. It is killed when this is dropped. Its output is shown when the test fails.
pub struct Program {
    name: String,
    child: Child,
    said: NamedTempFile,
}

impl Program {
    /// Starts it. Its output goes to a file, because a pipe must be read.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(name: &str, command: &mut Command) -> Self {
        let said = file();
        // Both streams share one open file, so that their output is in one order.
        let child = spawn(name, command, &said, &said);
        Self { name: name.to_owned(), child, said }
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its output so far.
    #[must_use]
    pub fn said(&self) -> String {
        text_in(&self.said)
    }

    /// Waits until `happened` is true of its output.
    ///
    /// # Panics
    /// When it ends before, or when that does not happen in time, with its output.
    pub fn wait(&mut self, what: &str, mut happened: impl FnMut(&str) -> bool) {
        until(&format!("{what} of {}", self.name), || {
            let ended = self.child.try_wait();
            let said = self.said();
            if let Ok(Some(status)) = ended {
                panic!("{} ended with {status} before {what}; it printed:\n{said}", self.name);
            }
            if happened(&said) { Ok(()) } else { Err(said) }
        });
    }

    /// Waits until it takes connections.
    ///
    /// # Panics
    /// When it ends before, or takes none in time, with its output.
    pub fn wait_listening(&mut self, address: SocketAddr) {
        self.wait(&format!("connections at {address}"), |_| TcpStream::connect(address).is_ok());
    }

    /// Asks it to end, and waits. Returns how it ended.
    ///
    /// # Panics
    /// When it does not end, with its output.
    pub fn end(&mut self) -> ExitStatus {
        crate::cluster::signal(self.pid(), "TERM");
        until(&format!("{} to end", self.name), || match self.child.try_wait() {
            Ok(None) => Err(self.said()),
            ended => Ok(ended.ok().flatten().expect("its own child can be waited for")),
        })
    }

    /// Ends it at once.
    ///
    /// # Panics
    /// When it has been waited for already.
    pub fn kill(&mut self) {
        self.child.kill().and_then(|()| self.child.wait()).expect("it can be killed");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _gone = self.child.kill().and_then(|()| self.child.wait()).is_err();
        if std::thread::panicking() {
            eprintln!("{} printed:\n{}", self.name, self.said());
        }
    }
}

/// How a program ended, and all that it printed.
#[derive(Debug)]
pub struct Ended {
    /// How it ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Ended {
    /// Its exit code, if no signal ended it.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Its standard error and its standard output.
    #[must_use]
    pub fn said(&self) -> String {
        format!("{}{}", self.stderr, self.stdout)
    }
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self { status: output.status, stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}; it printed:\n{}{}", self.status, self.stdout, self.stderr)
    }
}

/// Runs a program that has to end by itself, such as a server that refuses to start. One that does not end is killed.
///
/// # Panics
/// When it cannot be started, or does not end in time, with its output.
pub fn run_to_end(name: &str, command: &mut Command) -> Ended {
    // Files, because a process that it left behind may keep a pipe open.
    let (stdout, stderr) = (file(), file());
    let mut child = spawn(name, command, &stdout, &stderr);
    let ended = try_until(|| match child.try_wait() {
        Ok(None) => Err(()),
        ended => Ok(ended.ok().flatten().expect("its own child can be waited for")),
    });
    if ended.is_err() {
        child.kill().and_then(|()| child.wait()).expect("it can be killed");
    }
    let (stdout, stderr) = (text_in(&stdout), text_in(&stderr));
    match ended {
        Ok(status) => Ended { status, stdout, stderr },
        Err(()) => panic!("{name} has not ended after {PATIENCE:?}; it printed:\n{stdout}{stderr}"),
    }
}

fn file() -> NamedTempFile {
    NamedTempFile::new().expect("a file for what a program prints")
}

/// All that a file has.
fn text_in(file: &NamedTempFile) -> String {
    let mut bytes = Vec::new();
    match file.reopen().and_then(|mut file| file.read_to_end(&mut bytes)) {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => format!("what it printed cannot be read: {error}"),
    }
}

/// Starts a program that prints to these files.
fn spawn(name: &str, command: &mut Command, stdout: &NamedTempFile, stderr: &NamedTempFile) -> Child {
    let open = |file: &NamedTempFile| file.as_file().try_clone().expect("another descriptor of the file");
    let child = command.stdin(Stdio::null()).stdout(open(stdout)).stderr(open(stderr)).spawn();
    child.unwrap_or_else(|error| panic!("{name} cannot be started: {error}"))
}

/// Takes the turn: waits until no other test of this user runs external programs or libraries (NIXL, Mooncake, moto), in this
/// process or another. The turn lasts until the calling thread ends, which is the test's.
///
/// Such programs choose ports by themselves and start dozens of threads each. Side by side they would meet at the same ports, and
/// starve each other on a small machine. A process that such a test starts shares its turn.
///
/// # Panics
/// When the file that stands for the turn cannot be locked.
pub fn take_turn() {
    thread_local! {
        static TURN: RefCell<Option<File>> = const { RefCell::new(None) };
    }
    TURN.with_borrow_mut(|turn| {
        if turn.is_none() {
            let user = std::fs::metadata("/proc/self").map_or(0, |own| own.uid());
            let path = std::env::temp_dir().join(format!("host-tests-external-{user}.lock"));
            // This waits without a limit: other tests have their turn before, and their own waits have limits.
            *turn = loop {
                match lock(&path) {
                    Ok(Lock::Held(file)) => break Some(file),
                    Ok(Lock::Parents) => break None,
                    Ok(Lock::Taken) => std::thread::sleep(PAUSE),
                    Err(error) => panic!("{} cannot be locked: {error}", path.display()),
                }
            };
        }
    });
}

/// The state in which an attempt to lock finds the lock.
enum Lock {
    Held(File),
    /// The process that started this one holds it.
    Parents,
    Taken,
}

/// Locks the file unless it is locked, and writes this process's id into it.
fn lock(path: &Path) -> std::io::Result<Lock> {
    let mut file = File::options().create(true).truncate(false).read(true).write(true).open(path)?;
    match file.try_lock() {
        Ok(()) => {
            file.set_len(0)?;
            write!(file, "{}", std::process::id())?;
            Ok(Lock::Held(file))
        }
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            file.read_to_string(&mut holder)?;
            let is_parents = holder == std::os::unix::process::parent_id().to_string();
            Ok(if is_parents { Lock::Parents } else { Lock::Taken })
        }
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_one_threads_and_its_childrens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("turn");
        // The id that an earlier holder left has no meaning.
        std::fs::write(&path, std::os::unix::process::parent_id().to_string()).unwrap();
        let Ok(Lock::Held(_first)) = lock(&path) else { panic!("no process has it") };
        assert_eq!(std::fs::read_to_string(&path).unwrap(), std::process::id().to_string());
        assert!(matches!(lock(&path), Ok(Lock::Taken)), "another waits");
        std::fs::write(&path, std::os::unix::process::parent_id().to_string()).unwrap();
        assert!(matches!(lock(&path), Ok(Lock::Parents)), "a process that its holder started does not");
    }

    #[test]
    fn what_a_program_prints_is_kept_until_it_is_read() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; sleep 60"]);
        let mut program = Program::start("a shell", &mut command);
        program.wait("both lines", |said| said == "one\ntwo\n");
        program.kill();
    }

    #[test]
    fn a_program_that_ends_tells_how_and_what_it_printed_where() {
        let ended = run_to_end("a shell", Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]));
        assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("one\n", "two\n"));
        assert_eq!((ended.code(), ended.said()), (Some(3), "two\none\n".to_owned()));
        assert_eq!(ended.to_string(), "exit status: 3; it printed:\none\ntwo\n");
    }
}
