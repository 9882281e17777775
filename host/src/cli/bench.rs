//! `host bench`: this host beside its simulation, and its simulation beside published tables.

mod live;

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Subcommand;
use host_simulate::{headline, html};
use serde::Serialize;

use super::simulate::{lines, page};

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
        /// Writes a page to this file, with the error of each figure and the goodput of each arm. Any browser opens it, without a network
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
    },
    /// Sends workloads to real workers, and puts the simulation of the same requests beside what came
    ///
    /// Starts a server with the given flags of `host`, by default with the synthetic executor, and ends it afterwards. With --url
    /// it measures a server that runs.
    Live(Box<live::Live>),
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// When a file cannot be read or written, or the server that is measured cannot be used.
    pub fn run(self) -> anyhow::Result<()> {
        let (json, html) = match self {
            Command::Headline { json, html } => (json, html),
            Command::Live(live) => return live.run(),
        };
        let tables = headline::all(&mut progress);
        progress("");
        for table in &tables {
            super::output::say!("");
            lines(table)?;
        }
        write(json.as_deref(), &tables)?;
        page(html.as_deref(), || html::tables("Published tables, simulated", &tables))
    }
}

/// Shows one line at a terminal, which the next one overwrites.
fn progress(what: &str) {
    if std::io::stderr().is_terminal() {
        // A failure to print progress is ignored: nothing depends on it.
        let _unread = write!(std::io::stderr(), "\r\x1b[K{what}");
    }
}

/// Writes results to the file of `--json`, if it was given.
fn write(path: Option<&Path>, results: &impl Serialize) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(results)? + "\n";
    std::fs::write(path, &text)
        .with_context(|| format!("the results cannot be written to {} (--json)", path.display()))
}
