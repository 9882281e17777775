//! `host plugins bench`.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use host_conformance::measure::{self, Measured};
use serde_json::json;

use super::plugin_config;
use crate::cli::Refused;
use crate::cli::output::{self, say};

/// What to measure.
#[derive(Args, Debug)]
pub struct Bench {
    /// The plugin's file
    file: PathBuf,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Exit code 2 when reading takes 1 ms, loading 5 ms, or the boundary 5 % from 64 descriptors up
    #[arg(long)]
    gate: bool,
    /// TOML file with the plugin's own configuration table. Roles that need one are skipped without it
    #[arg(long, value_name = "FILE")]
    plugin_config: Option<PathBuf>,
}

/// One load, in this process.
#[derive(Args, Debug)]
pub struct TimeLoad {
    file: PathBuf,
}

impl Bench {
    /// Measures and prints. With `gate` the command fails if a figure exceeds its limit.
    pub fn run(self) -> anyhow::Result<()> {
        let program = std::env::current_exe().context("this program cannot be found")?;
        let config = plugin_config(self.plugin_config.as_deref())?;
        let measured = measure::file(&program, &self.file, &config).map_err(Refused)?;
        let slow = measured.too_slow();
        if self.json {
            output::json(&json!({"measured": measured, "too_slow": slow}))?;
        } else {
            print(&measured)?;
            for sentence in &slow {
                say!("too slow: {sentence}");
            }
        }
        match slow.is_empty() || !self.gate {
            true => Ok(()),
            false => Err(Refused(slow.join("; ")).into()),
        }
    }
}

fn print(measured: &Measured) -> anyhow::Result<()> {
    say!(
        "inspect    {:>9.3} ms    reading what the file says, best of {}",
        measured.inspect_ms,
        measure::INSPECTIONS
    );
    say!("load       {:>9.3} ms    in a new process, median of {}", measured.load_ms, measure::LOADS);
    say!("");
    if !cfg!(debug_assertions) {
        say!("the boundary, with a built-in backend that adds up its writes, ns per call");
    } else {
        say!(
            "the boundary, with a built-in backend that adds up its writes, ns per call; this is not a release build"
        );
    }
    say!("{:>8} {:>10} {:>10} {:>7}", "writes", "static", "ABI", "ratio");
    for row in &measured.boundary {
        say!("{:>8} {:>10.2} {:>10.2} {:>7.3}", row.writes, row.static_ns, row.abi_ns, row.ratio());
    }
    if !measured.calls.is_empty() {
        say!("");
        say!("this plugin, ns per call");
        for call in &measured.calls {
            say!("{:<10} {:<34} {:>12.1}", call.role, call.name, call.ns);
        }
    }
    for skipped in &measured.skipped {
        say!("");
        say!("NOT MEASURED: the role {}, because {}", skipped.role, skipped.reason);
        say!("    give the plugin its configuration with --plugin-config FILE");
    }
    Ok(())
}

impl TimeLoad {
    /// Loads the plugin in this process and prints the time in nanoseconds.
    pub fn run(self) -> anyhow::Result<()> {
        say!("{}", measure::load_here(&self.file).map_err(Refused)?);
        Ok(())
    }
}
