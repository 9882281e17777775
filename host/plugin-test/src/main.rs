//! The binary `host-plugin-test`: the conformance kit without the server.

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use host_plugin_test::command::{Refused, RunCase, Test};
use host_plugin_test::output::{OutputClosed, harmless};

/// Says whether a plugin keeps its contract: named cases, each in a process of its own.
#[derive(Debug, Parser)]
#[command(name = "host-plugin-test", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    test: Test,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// As `host plugins`
    #[command(hide = true, subcommand)]
    Plugins(Plugins),
}

#[derive(Debug, Subcommand)]
enum Plugins {
    /// Runs one case in this process
    RunCase(RunCase),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        Some(Command::Plugins(Plugins::RunCase(case))) => case.run(),
        None => cli.test.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<OutputClosed>() => ExitCode::SUCCESS,
        Err(error) => {
            // If standard error is closed too, only the exit code reports the error.
            let text = format!("{error:#}");
            let _unread = writeln!(std::io::stderr(), "host-plugin-test: {}", harmless(&text));
            ExitCode::from(if error.is::<Refused>() { 2 } else { 1 })
        }
    }
}
