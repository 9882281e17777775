//! Repository commands: `cargo xtask demo`, `test`, `fetch`, `compare`, `chaos`, `gpu`, `roll`, `dist`, `msrv` and `nightly`.

#![forbid(unsafe_code)]
#![allow(clippy::disallowed_methods, reason = "waits for real processes and measures them")]

mod chaos;
mod client;
mod compare;
mod demo;
mod dist;
#[cfg(test)]
mod executable;
mod fetch;
mod gpu;
mod msrv;
mod nightly;
mod node;
mod outcome;
mod python;
mod roll;
mod server;
mod test;
mod workspace;

use std::process::ExitCode;

const HELP: &str = "\
Repository commands.

Usage: cargo xtask <COMMAND>

Commands:
  demo     Serve a small model with prefill and decode split, and compare with one aggregated worker
  test     Build everything and run every test
  fetch    Fetch the models, tokenizers and programs that tests compare with
  compare  Measure speed beside llama.cpp
  chaos    Inject faults into real processes under load, and compare every answer
  gpu      Run on a GPU what runs elsewhere on a stand-in for one, and measure it
  roll     Replace the build of one commit by that of another under load, and compare every answer
  dist     Make an archive to install, and try it in an empty root
  msrv     Build and test what plugins are made of with the oldest compiler that may build them
  nightly  Checks that take too long, or need too much, to be made of every change

`cargo xtask <COMMAND> --help` tells more.";

fn main() -> ExitCode {
    let arguments: Vec<String> =
        std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned()).collect();
    let result = match arguments.split_first() {
        Some((command, rest)) if command == "demo" => demo::run(rest),
        Some((command, rest)) if command == "fetch" => fetch::run(rest),
        Some((command, rest)) if command == "test" => test::run(rest),
        Some((command, rest)) if command == "compare" => compare::run(rest),
        Some((command, rest)) if command == "chaos" => chaos::run(rest),
        Some((command, rest)) if command == "gpu" => gpu::run(rest),
        Some((command, rest)) if command == "roll" => roll::run(rest),
        Some((command, rest)) if command == "dist" => dist::run(rest),
        Some((command, rest)) if command == "msrv" => msrv::run(rest),
        Some((command, rest)) if command == "nightly" => nightly::run(rest),
        Some((flag, _)) if ["--help", "-h", "help"].contains(&flag.as_str()) => {
            println!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        Some((other, _)) => Err(anyhow::anyhow!("there is no command {other:?}\n\n{HELP}")),
        None => Err(anyhow::anyhow!("no command given\n\n{HELP}")),
    };
    result.unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
