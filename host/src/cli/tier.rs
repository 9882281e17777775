//! `host tier ..`: shows and checks what a storage tier holds, through the plugin that stores it.

mod last_warning;
mod list;
mod open;
mod prune;
mod selected;
mod session;
mod stat;
mod verify;

use std::io::IsTerminal;

use clap::Subcommand;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// What to do with a storage tier.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Lists keys (hex) and the bytes of their values ("-" where the plugin does not tell)
    #[command(after_help = open::READS)]
    Ls(list::List),
    /// Says how many values and bytes there are, and how many fit
    #[command(after_help = open::READS)]
    Stat(stat::Stat),
    /// Reads every value, compares it with the host's seal, and counts good, missing and damaged ones. The exit code is 1 when
    /// one was damaged or could not be read
    #[command(after_help = open::READS)]
    Verify(verify::Verify),
    /// Removes all values, or those whose keys start alike
    #[command(after_help = prune::ABOUT)]
    Prune(prune::Prune),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// [`Refused`](crate::cli::Refused) for invalid arguments, another error when a step fails.
    pub fn run(self) -> anyhow::Result<()> {
        // The operator sees the plugin's warnings, because the command's purpose is to inspect the storage.
        let lines = tracing_subscriber::fmt::layer()
            .without_time()
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal())
            .with_writer(std::io::stderr);
        tracing_subscriber::registry()
            .with(EnvFilter::new("warn"))
            .with(lines)
            .with(last_warning::LastWarning)
            .init();
        match self {
            Command::Ls(list) => list.run(),
            Command::Stat(stat) => stat.run(),
            Command::Verify(verify) => verify.run(),
            Command::Prune(prune) => prune.run(),
        }
    }
}
