//! `host plugins test`, and the program `host-plugin-test`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use host_conformance::{
    Limits, OneCase, Report, Status, UNCONFIGURED, cases, limit_this_process, run_case, test_file,
};

use super::output::{OutputClosed, json, line};
use super::say;

/// An error with exit code 2: the plugin does not keep its contract, or the command line is wrong.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// What to test, and how.
#[derive(Args, Debug)]
pub struct Test {
    /// The plugin's file
    #[arg(required_unless_present = "list")]
    file: Option<PathBuf>,
    /// One JSON document
    #[arg(long)]
    json: bool,
    /// Only the cases whose names start so. The flag may be given several times
    #[arg(long = "case", value_name = "NAME")]
    cases: Vec<String>,
    /// TOML file with the plugin's own configuration table
    #[arg(long, value_name = "FILE")]
    plugin_config: Option<PathBuf>,
    /// Seconds that a case may take [default: 30, or ten times --patience]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    time_limit: Option<u64>,
    /// Seconds that a case waits while nothing happens: more for a store that is slow and correct
    #[arg(long, value_name = "SECONDS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=360))]
    patience: u64,
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
    /// The case's name
    #[arg(long)]
    case: String,
    /// TOML file with the plugin's own configuration table
    #[arg(long, value_name = "FILE", conflicts_with = "config_text")]
    plugin_config: Option<PathBuf>,
    /// The same as text
    #[arg(long, default_value = "", hide = true)]
    config_text: String,
    /// Bytes of address space [default: as much as there is]
    #[arg(long, requires = "processor_limit")]
    memory_limit: Option<u64>,
    /// The run that it belongs to
    #[arg(long, default_value_t = 0)]
    run: u64,
    /// Is the second process of the case
    #[arg(long)]
    second: bool,
    /// Milliseconds to wait while nothing happens
    #[arg(long, default_value_t = 3000)]
    patience_ms: u64,
    /// Milliseconds after which calls that have not returned are told
    #[arg(long, default_value_t = 30_000)]
    time_ms: u64,
    /// Seconds of the processors [default: as many as it takes]
    #[arg(long, requires = "memory_limit")]
    processor_limit: Option<u64>,
    /// The plugin's file
    file: PathBuf,
}

impl Test {
    /// Runs the cases and prints their reports. Returns [`Refused`] if a case did not pass.
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
        let config = self.plugin_config.as_deref().map(configuration).transpose()?.unwrap_or_default();
        let program = std::env::current_exe().context("this program cannot be found")?;
        let seconds = self.time_limit.unwrap_or(30.max(self.patience * 10));
        let limits = Limits {
            time: Duration::from_secs(seconds),
            memory: self.memory_limit << 30,
            patience: Duration::from_secs(self.patience),
        };
        let file = self.file.as_deref().unwrap_or(Path::new(""));
        let mut unconfigured = None;
        let each = |report: &Report| -> anyhow::Result<()> {
            if self.json {
                return Ok(());
            }
            let status = format!("{:?}", report.status).to_lowercase();
            // A reason that many cases share is printed only once.
            let told = unconfigured.as_ref() == Some(&report.text);
            if report.text.starts_with(UNCONFIGURED) {
                unconfigured = Some(report.text.clone());
            }
            let text = if told { "the same" } else { report.text.as_str() };
            heard(line(format_args!("{status:<8} {:<26} {text}", report.case)))
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
        if unconfigured > passed {
            let message = format!(
                "of {} cases {unconfigured} were not tested, because {} needs a configuration: --plugin-config FILE",
                reports.len(),
                file.display()
            );
            return Err(Refused(message).into());
        }
        Ok(())
    }
}

/// Reads the file with the plugin's configuration.
fn configuration(file: &Path) -> anyhow::Result<String> {
    std::fs::read_to_string(file)
        .with_context(|| format!("the plugin's configuration {} cannot be read", file.display()))
}

/// Ignores a closed output: the test goes on, and its exit code gives the result.
fn heard(written: anyhow::Result<()>) -> anyhow::Result<()> {
    written.or_else(|error| if error.is::<OutputClosed>() { Ok(()) } else { Err(error) })
}

impl RunCase {
    /// Runs the case here.
    pub fn run(self) -> anyhow::Result<()> {
        if let (Some(memory), Some(seconds)) = (self.memory_limit, self.processor_limit) {
            limit_this_process(memory, seconds).context("the case's process cannot be limited")?;
        }
        let case = OneCase {
            name: &self.case,
            second: self.second,
            run: self.run,
            patience: Duration::from_millis(self.patience_ms),
            time: Duration::from_millis(self.time_ms),
        };
        let config = match self.plugin_config {
            None => self.config_text,
            Some(file) => configuration(&file)?,
        };
        Ok(run_case(&self.file, &config, case)?)
    }
}
