//! `cargo xtask chaos`: faults on real processes under load.

use std::process::ExitCode;

use anyhow::{Context, ensure};

use crate::workspace::{Profile, Workspace};

const HELP: &str = "\
Injects faults into real processes under a mixed load, and compares every answer with that of one aggregated worker.

Two routers, two prefill and three decode workers share a storage tier. Processes are killed, frozen and drained, plugins made to
hang, to panic and to lie, bytes of stored pages changed. As root, in namespaces of its own, it also cuts links, parts processes, loses
packets, fills the disk, makes it slow and fail, and steps clocks. Ends with a report, which names what was left out; the exit code is 1
if a request was lost, a token was wrong, a process ended unasked, or something leaked.

Usage: cargo xtask chaos [OPTIONS]

Options:
  --faults N       Faults to inject [default: 100]
  --seed N         What is drawn: faults, victims, prompts [default: 1]
  --clients N      Clients at once [default: 8]
  --every-ms N     Mean time between two faults [default: 1000]
  --for MINUTES    Run so long, however many faults that makes; with --faults 0 without any
  --hostile N      Clients beside that read and send slowly, hang up, reset, and send giant JSON [default: 0]
  --executor NAME  What computes the answers [default: synthetic]
                   synthetic: KV that proves itself
                   cpu: a small made-up model; clients also request chats, answers held to grammars, and calls of tools
                   cuda: the same model and requests on the stand-in for a GPU, and with HOST_CUDA=device on a GPU
  --network        Each process has a network of its own (as root), links fail, and pages travel over TCP (remote-wire, nixl, mooncake)
  --transfer NAME  The transfer plugin: corrupting (shm, with faults), shm, remote-wire, nixl or mooncake
                   [default: corrupting; with --network remote-wire]
  --only WORDS     Only faults whose names contain one of these, separated by commas, as the report names them
  -h, --help       This text";

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        println!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let workspace = Workspace::find()?;
    workspace.build(Profile::Dev, &["host"])?;
    let mut command =
        workspace.cargo(&["run", "--quiet", "--package", "host-tests", "--example", "chaos", "--"]);
    let status = command.args(arguments).status().context("cargo cannot be run")?;
    ensure!(status.code().is_some(), "the run ended with {status}");
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
