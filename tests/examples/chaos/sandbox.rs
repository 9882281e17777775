//! Namespaces of the run: its networks, mounts and processes end with it, however it ends.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Set in the runner that runs inside the namespaces, to the process id of the runner that made them.
const INSIDE: &str = "HOST_CHAOS_INSIDE";

const UNSHARE: &[&str] = &["--pdeathsig", "KILL", "unshare", "--net", "--mount", "--pid", "--fork"];
const PROCESSES: &[&str] = &["--kill-child", "--mount-proc"];

/// Runs a command. The error has what the command wrote to stderr.
pub fn run(command: &str) -> Result<(), String> {
    let mut words = command.split_whitespace();
    let program = words.next().unwrap_or_default();
    let output = Command::new(program).args(words).output().map_err(|error| format!("{program}: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() { Ok(()) } else { Err(format!("{command}: {}", said.trim())) }
}

/// Runs this program again in new namespaces, where these can be made, and returns its exit code. `None` when this process itself
/// has to go on.
pub fn again_inside() -> Option<ExitCode> {
    if is_inside() {
        // Sets up a loopback device, and a `/dev/shm` whose files of stepped clocks end with the run.
        for command in ["ip link set lo up", "mount -t tmpfs tmpfs /dev/shm"] {
            run(command).unwrap();
        }
        return None;
    }
    let inside = |program: PathBuf| {
        let mut command = Command::new("setpriv");
        command.args(UNSHARE).args(PROCESSES).arg(program);
        command
    };
    let can = inside("ip".into()).args(["link", "set", "lo", "up"]).output();
    let why = match &can {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
        Err(error) => Some(format!("setpriv: {error}")),
    };
    if let Some(why) = why {
        println!("no namespaces can be made here ({why})");
        return None;
    }
    let program = std::env::current_exe().unwrap();
    let id = std::process::id().to_string();
    let status = inside(program).args(std::env::args_os().skip(1)).env(INSIDE, &id).status();
    for group in crate::memory::groups(&id) {
        // The processes of the group have ended with their namespace.
        let _gone = std::fs::remove_dir(group);
    }
    Some(if status.is_ok_and(|status| status.success()) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Whether this runs in namespaces of its own.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// An id that no other run uses at the same time.
pub fn id() -> String {
    std::env::var(INSIDE).unwrap_or_else(|_| std::process::id().to_string())
}
