//! Live faults and soaks: `cargo xtask chaos`.

use super::{Outcome, outcome};
use crate::python;
use crate::workspace::Workspace;

/// The runs: the transfer plugin that they need, and their flags.
const RUNS: &[(Option<&str>, &str)] = &[
    (None, "--faults 300"),
    (None, "--faults 150 --executor cpu"),
    (None, "--faults 100 --executor cuda --transfer shm"),
    (None, "--faults 200 --network"),
    (None, "--faults 150 --network --executor cpu"),
    (Some("nixl"), "--faults 100 --transfer nixl"),
    (Some("mooncake"), "--faults 100 --transfer mooncake"),
];

/// Faults between processes of one machine, over links that fail, and with the transfer plugins that can be installed.
pub(super) fn faults(workspace: &Workspace) -> Outcome {
    let mut left_out = Vec::new();
    for (needs, flags) in RUNS {
        let installed = match needs {
            Some("nixl") => python::nixl(workspace).map(drop),
            Some(_) => python::mooncake(workspace).map(drop),
            None => Ok(()),
        };
        if let Err(why) = installed {
            left_out.push(format!("{flags}: {why}"));
            continue;
        }
        let ended = chaos(workspace, flags);
        if !matches!(ended, Outcome::Passed(_)) {
            return ended;
        }
    }
    if left_out.is_empty() {
        return Outcome::Passed(PASSED.to_owned());
    }
    Outcome::Skipped(format!("{PASSED} in the other runs, but not run were {}", left_out.join("; ")))
}

/// Hostile clients beside others, without a fault.
pub(super) fn soak(workspace: &Workspace) -> Outcome {
    let minutes = std::env::var("SOAK_MINUTES").unwrap_or_else(|_| "60".to_owned());
    chaos(workspace, &format!("--for {minutes} --faults 0 --clients 2 --hostile 4"))
}

const PASSED: &str = "nothing was lost, wrong or leaked";

fn chaos(workspace: &Workspace, flags: &str) -> Outcome {
    let mut command = workspace.cargo(&["xtask", "chaos"]);
    outcome(command.args(flags.split(' ')), PASSED)
}
