//! `host plugins test`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use host_conformance::{
    Limits, Report, Status, UNCONFIGURED, cases, limit_this_process, run_case, test_file,
};

use super::plugin_config;
use crate::cli::Refused;
use crate::cli::output::{OutputClosed, json, line, say};

/// What to test, and how.
#[derive(Args, Debug)]
pub struct Test {
    /// The plugin's file
    #[arg(required_unless_present = "list")]
    file: Option<PathBuf>,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Only the cases whose names start so; may be given several times
    #[arg(long = "case", value_name = "NAME")]
    cases: Vec<String>,
    /// TOML file with the plugin's own configuration table
    #[arg(long, value_name = "FILE")]
    plugin_config: Option<PathBuf>,
    /// Seconds that a case may take
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    time_limit: u64,
    /// Address space that a case may take, in GiB
    #[arg(long, value_name = "GIB", default_value_t = 32, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    memory_limit: u64,
    /// Print the cases' names and what they check, and test nothing
    #[arg(long)]
    list: bool,
}

/// One case, in this process.
#[derive(Args, Debug)]
pub struct RunCase {
    #[arg(long)]
    case: String,
    #[arg(long, default_value = "")]
    config_text: String,
    /// Bytes of address space [default: as much as there is]
    #[arg(long, requires = "processor_limit")]
    memory_limit: Option<u64>,
    /// Seconds of the processors [default: as many as it takes]
    #[arg(long, requires = "memory_limit")]
    processor_limit: Option<u64>,
    file: PathBuf,
}

impl Test {
    /// Runs the cases and prints their reports. Refused when one did not pass.
    pub fn run(self) -> anyhow::Result<()> {
        if self.list {
            for case in cases() {
                say!("{:<26} {}", case.name, case.about);
            }
            return Ok(());
        }
        for wanted in &self.cases {
            if !cases().any(|case| case.name.starts_with(wanted.as_str())) {
                return Err(
                    Refused(format!("no case starts with {wanted:?}: see host plugins test --list")).into()
                );
            }
        }
        let chosen =
            |name: &str| self.cases.is_empty() || self.cases.iter().any(|c| name.starts_with(c.as_str()));
        let config = plugin_config(self.plugin_config.as_deref())?;
        let program = std::env::current_exe().context("this program cannot be found")?;
        let limits = Limits { time: Duration::from_secs(self.time_limit), memory: self.memory_limit << 30 };
        let file = self.file.as_deref().unwrap_or(Path::new(""));
        let each = |report: &Report| -> anyhow::Result<()> {
            if !self.json {
                let status = format!("{:?}", report.status).to_lowercase();
                return heard(line(format_args!("{status:<8} {:<26} {}", report.case, report.text)));
            }
            Ok(())
        };
        let reports = test_file(&program, file, &config, limits, chosen, each)?;
        let count = |status| reports.iter().filter(|report| report.status == status).count();
        let (passed, skipped) = (count(Status::Pass), count(Status::Skip));
        let broken = reports.len() - passed - skipped;
        heard(if self.json {
            json(&reports)
        } else {
            line(format_args!("{passed} passed, {broken} did not, {skipped} skipped"))
        })?;
        let unconfigured = reports.iter().filter(|report| report.text.starts_with(UNCONFIGURED)).count();
        if unconfigured > 0 && !self.json {
            heard(line(format_args!(
                "NOT TESTED: {unconfigured} cases need a configuration; give the plugin one with --plugin-config FILE"
            )))?;
        }
        if broken > 0 {
            return Err(Refused(format!("{} does not keep its contract", file.display())).into());
        }
        Ok(())
    }
}

/// A test goes on when its output is closed: the exit code still says how it ended.
fn heard(written: anyhow::Result<()>) -> anyhow::Result<()> {
    written.or_else(|error| if error.is::<OutputClosed>() { Ok(()) } else { Err(error) })
}

impl RunCase {
    /// Runs the case here.
    pub fn run(self) -> anyhow::Result<()> {
        if let (Some(memory), Some(seconds)) = (self.memory_limit, self.processor_limit) {
            limit_this_process(memory, seconds).context("the case's process cannot be limited")?;
        }
        Ok(run_case(&self.file, &self.config_text, &self.case)?)
    }
}
