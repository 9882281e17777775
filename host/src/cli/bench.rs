//! `host bench`: published tables compared with predictions for this host.

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Subcommand;
use host_simulate::headline;

use super::output::say;
use super::simulate::lines;

/// What is measured.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Simulates workloads of published tables: what is not published is fitted to a table's baseline row, the rest is predicted
    ///
    /// Takes minutes on one core.
    Headline {
        /// Writes the tables to this file too, as JSON
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
    },
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn run(self) -> anyhow::Result<()> {
        let Command::Headline { json } = self;
        let shown = std::io::stderr().is_terminal();
        let mut watch = |what: &str| {
            if shown {
                // A failure to print progress is ignored: nothing depends on it.
                let _unread = write!(std::io::stderr(), "\r{what:60}");
            }
        };
        let tables = headline::pull_19746(&mut watch);
        watch("");
        for table in &tables {
            say!("");
            lines(table)?;
        }
        if let Some(path) = json {
            let text = serde_json::to_string_pretty(&tables)? + "\n";
            std::fs::write(&path, text)
                .with_context(|| format!("the tables cannot be written to {} (--json)", path.display()))?;
        }
        Ok(())
    }
}
