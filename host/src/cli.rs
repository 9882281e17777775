//! Commands and flags.

pub mod addresses;
mod allocator;
mod batch;
mod bench;
mod certs;
pub mod chat;
mod clients;
pub mod companion;
mod drain;
#[cfg(test)]
mod flags;
mod keys;
pub mod launch;
mod lifeline;
mod limits;
mod listeners;
mod load;
pub mod memory;
mod offload;
/// Standard output of the commands.
pub mod output {
    pub use host_plugin_test::output::{OutputClosed, harmless, json, line};
    pub use host_plugin_test::say;
}
pub mod plugins;
mod process_end;
pub mod serve;
mod server;
pub mod settings;
mod simulate;
pub mod staging;
mod summary;
pub mod supervise;
pub mod tier;
mod watchdog;

use std::io::Write as _;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use settings::Settings;

/// An error for a configuration that cannot work. Exit code 2, nothing was started.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// A refusal that this process has told its supervisor. Exit code 2, and this process prints nothing.
#[derive(Debug, thiserror::Error)]
#[error("the supervisor was told why this configuration cannot work")]
struct Told;

/// Whether the same configuration would end the same way each time.
fn is_refusal(error: &anyhow::Error) -> bool {
    error.is::<Refused>()
        || error.is::<host_worker::CannotWork>()
        || error.is::<host_plugin_test::command::Refused>()
}

/// Serves large language models with prefill and decode on separate workers, and a plugin wherever deployments differ.
///
/// Without --role, one prefill worker, one decode worker and a router are started on this machine, each its own
/// process, and served until Ctrl-C.
#[derive(Debug, Parser)]
#[command(name = "host", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    settings: Settings,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Lists, checks, tests and installs plugins
    #[command(subcommand)]
    Plugins(plugins::Command),
    /// Talks to a server in the terminal
    Chat(Box<chat::Chat>),
    /// Sends the requests of a file, and writes their answers to another
    Batch(batch::Batch),
    /// Makes API keys of tenants
    #[command(subcommand)]
    Keys(keys::Command),
    /// Takes a worker out of service: it finishes its requests and ends
    Drain(drain::Drain),
    /// Makes what the processes of a cluster know each other by
    #[command(subcommand)]
    Certs(certs::Command),
    /// Looks at what a storage tier holds, checks it, and removes from it
    #[command(subcommand)]
    Tier(tier::Command),
    /// Simulates what a cluster makes of a trace of requests
    Simulate(simulate::Simulate),
    /// Measures a server beside its simulation, and puts published tables beside what is predicted of this host
    #[command(subcommand)]
    Bench(bench::Command),
    /// Becomes a companion of the supervisor
    #[command(hide = true)]
    Companion(companion::Become),
}

/// Runs the program.
#[must_use]
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.command {
        None => cli.settings.with_file().and_then(serve::run),
        Some(Command::Plugins(command)) => command.run(),
        Some(Command::Chat(chat)) => chat.run(),
        Some(Command::Batch(batch)) => batch.run(),
        Some(Command::Keys(command)) => command.run(),
        Some(Command::Drain(drain)) => drain.run(),
        Some(Command::Certs(command)) => command.run(),
        Some(Command::Tier(command)) => command.run(),
        Some(Command::Simulate(simulate)) => simulate.run(),
        Some(Command::Bench(command)) => command.run(),
        Some(Command::Companion(companion)) => companion.run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<output::OutputClosed>() => ExitCode::SUCCESS,
        Err(error) if error.is::<Told>() => ExitCode::from(2),
        Err(error) => {
            // If standard error is closed too, only the exit code reports the error.
            let _unread = writeln!(std::io::stderr(), "host: {}", output::harmless(&format!("{error:#}")));
            ExitCode::from(if is_refusal(&error) { 2 } else { 1 })
        }
    }
}
