//! `host simulate`: what requests get from a cluster, without the cluster.

mod faults;
mod plan;

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use host_simulate::goodput::{self, Limits, Search};
use host_simulate::{Cluster, Options, Progress, Report, Workload, html, record};
use host_wire::clock;

use super::Refused;
use super::load::{AtRates, Load, Name};
use super::output::say;

/// Requests, a cluster, and where the report goes, or seeds in which everything goes wrong.
#[derive(Args, Debug)]
pub struct Simulate {
    /// The requests: a trace, or a generated workload [default: trace]
    #[arg(long, value_name = "NAME")]
    workload: Option<Name>,

    #[command(flatten)]
    load: Load,

    /// The machines and what runs on them: a TOML file
    #[arg(long, value_name = "FILE", required_unless_present_any = ["faults", "replay"])]
    cluster: Option<PathBuf>,

    /// Searches the highest rate of requests at which 99 % of the times to the first token and of the times between tokens stay
    /// under these, instead of taking --speed, or --rate, from which the search begins
    #[arg(long, value_names = ["TTFT_MS", "ITL_MS"], num_args = 2, conflicts_with_all = ["speed", "concurrency"])]
    goodput: Option<Vec<f64>>,

    /// Searches the fewest devices on which 99 % of the times to the first token and of the times between tokens stay under these.
    /// Workers are like those of --cluster, in other numbers and with other --tp and --host-memory-gib
    #[arg(long, value_names = ["TTFT_MS", "ITL_MS"], num_args = 2, conflicts_with = "goodput")]
    plan: Option<Vec<f64>>,

    /// Devices that a worker of a plan may have
    #[arg(long, value_name = "DEVICES", value_delimiter = ',', default_values_t = [1, 2, 4], requires = "plan", conflicts_with = "goodput")]
    tp: Vec<usize>,

    /// Host memory that each worker of a plan may have
    #[arg(long, value_name = "GIB", value_delimiter = ',', default_values_t = [0.0], requires = "plan", conflicts_with = "goodput")]
    host_memory_gib: Vec<f64>,

    /// Devices of a plan in all, at most
    #[arg(long, value_name = "DEVICES", default_value_t = 16, requires = "plan", conflicts_with = "goodput")]
    most_devices: usize,

    /// Requests at the beginning, while caches are empty, that count in no latency and no throughput
    #[arg(long, value_name = "REQUESTS", default_value_t = 0)]
    warm_up: usize,

    /// Writes the report to this file too, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Writes a page with curves, and a line of time for each request, to this file: opened by any browser, without a network. With
    /// --goodput it shows the rate that was found, and all that were tried; with --plan the devices and latencies of each arrangement
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Equal seeds give equal reports
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,

    /// Instead of a workload: small clusters, drawn from --seed and the seeds after it, in which messages are lost, workers die, clocks
    /// jump and storage fails. Each answer and each page is checked. A seed that fails is made shorter and told
    #[arg(long, conflicts_with_all = REQUESTS)]
    faults: bool,

    /// How many seeds --faults runs
    #[arg(long, value_name = "NUMBER", default_value_t = 1_000, requires = "faults")]
    seeds: u64,

    /// Runs one case that --faults told, and says what goes wrong in it: a seed, and what is left of it
    #[arg(long, value_name = "CASE", conflicts_with_all = REQUESTS, conflicts_with_all = ["faults", "seed", "seeds"])]
    replay: Option<String>,
}

/// What belongs to the simulation of requests, and not to drawn faults.
const REQUESTS: [&str; 22] = [
    "workload",
    "trace",
    "requests",
    "concurrency",
    "rate",
    "burst",
    "prefixes",
    "prefix_tokens",
    "input_tokens",
    "turns",
    "output_tokens",
    "speed",
    "shorten",
    "cluster",
    "goodput",
    "plan",
    "tp",
    "host_memory_gib",
    "most_devices",
    "warm_up",
    "json",
    "html",
];

impl Simulate {
    /// Runs the command.
    ///
    /// # Errors
    /// [`Refused`] when the workload, the cluster or the case cannot be simulated. Another error when a file cannot be read or
    /// written, or a seed fails.
    pub fn run(&self) -> anyhow::Result<()> {
        if let Some(case) = &self.replay {
            return faults::replay(case);
        }
        let Some(cluster_file) = &self.cluster else {
            return faults::seeds(self.seed, self.seeds);
        };
        let sent = self.sent()?;
        self.load.check(&[sent], self.goodput.is_some())?;
        let refused = |wrong: host_simulate::Wrong| Refused(wrong.to_string());
        let cluster =
            Cluster::parse(&name(cluster_file), &read(cluster_file, "--cluster")?).map_err(refused)?;
        if let Some([ttft_p99_ms, itl_p99_ms]) = self.goodput.as_deref() {
            let limits = limits(*ttft_p99_ms, *itl_p99_ms)?;
            let at_rates = self.load.at_rates(sent)?;
            self.warms_up(&(at_rates.workload)(at_rates.rate))?;
            return self.search(&at_rates, &cluster, limits);
        }
        if let Some([ttft_p99_ms, itl_p99_ms]) = self.plan.as_deref() {
            let limits = limits(*ttft_p99_ms, *itl_p99_ms)?;
            let workload = self.arriving(sent)?;
            self.warms_up(&workload)?;
            return self.plan(&workload, &cluster, limits);
        }
        let workload = self.load.requested(sent)?.workload;
        self.warms_up(&workload)?;
        let begun = clock::now();
        let mut virtual_time = 0.0;
        let shown = std::io::stderr().is_terminal();
        let mut watch = |progress: Progress| {
            virtual_time = progress.now.as_secs_f64();
            if shown && progress.now.as_secs().is_multiple_of(60) {
                show(&progress);
            }
        };
        let (report, recording) = record(&workload, &cluster, &self.options(), &mut watch);
        let took = begun.elapsed().as_secs_f64();
        if shown {
            // Pads with spaces, because the progress line may have been longer.
            let _unread = write!(std::io::stderr(), "\r{:80}\r", "");
        }
        lines(&report)?;
        say!("");
        say!("simulated in {took:.1} s, {:.0} times as fast as the clock", virtual_time / took.max(1e-9));
        self.page(|title| html::page(title, &report, &recording, None))?;
        self.write(&report)
    }

    /// The workload that is asked for.
    fn sent(&self) -> Result<Name, Refused> {
        let trace = self.load.trace.as_ref().map(|_file| Name::Trace);
        self.workload.or(trace).ok_or_else(|| {
            Refused("nothing is sent: give a file of requests as --trace, or a --workload".to_owned())
        })
    }

    /// Requests that arrive at times of their own. If the next one waited for an answer, fewer devices would get fewer requests.
    fn arriving(&self, sent: Name) -> anyhow::Result<Workload> {
        let workload = self.load.requested(sent)?.workload;
        if matches!(workload, Workload::Open(_)) {
            return Ok(workload);
        }
        let sent = sent.shown();
        let message = format!(
            "the requests of {sent} are sent as answers end: --plan needs a --rate, with --workload shared or random, or a --trace"
        );
        Err(Refused(message).into())
    }

    /// Checks that requests are left to be measured.
    fn warms_up(&self, workload: &Workload) -> Result<(), Refused> {
        let (warm_up, all) = (self.warm_up, workload.requests());
        if warm_up < all {
            return Ok(());
        }
        Err(Refused(format!(
            "--warm-up {warm_up}: the workload has {all} requests, so none would be measured"
        )))
    }

    fn options(&self) -> Options {
        Options { seed: self.seed, warm_up: self.warm_up }
    }

    /// Sends the requests at other rates.
    fn search(
        &self,
        AtRates { rate, slowest, workload }: &AtRates,
        cluster: &Cluster,
        limits: Limits,
    ) -> anyhow::Result<()> {
        let shown = std::io::stderr().is_terminal();
        let watched = |rate: f64| {
            if shown {
                // A failure to print progress is ignored: nothing depends on it.
                let _unread = write!(std::io::stderr(), "\r{:60}\r{rate:.2} requests/s", "");
            }
            workload(rate)
        };
        let from = Search { from: *rate, slowest: *slowest, ..Search::default() };
        let found = goodput::search(&watched, cluster, limits, from, &self.options());
        if shown {
            let _unread = write!(std::io::stderr(), "\r{:60}\r", "");
        }
        lines(&found.report)?;
        say!("");
        say!("goodput: {found}; the search began at {rate:.2} requests/s");
        if self.html.is_some() {
            // The rate that was found is simulated once more, to record the run for the page.
            let slowest = found.tried.first().map_or(*rate, |tried| tried.requests_per_s);
            let shown = if found.requests_per_s > 0.0 { found.requests_per_s } else { slowest };
            let (report, recording) = record(&workload(shown), cluster, &self.options(), &mut |_| {});
            self.page(|title| html::page(title, &report, &recording, Some(&found)))?;
        }
        self.write(&found.report)
    }

    /// Writes the page to the file of --html, if the flag was given. `made` gets the title.
    fn page(&self, made: impl FnOnce(&str) -> String) -> anyhow::Result<()> {
        if self.html.is_none() {
            return Ok(());
        }
        let sent = match &self.load.trace {
            Some(file) if self.sent()? == Name::Trace => name(file),
            _ => self.sent()?.shown(),
        };
        let cluster = self.cluster.as_deref().map(name).unwrap_or_default();
        page(self.html.as_deref(), || made(&format!("{sent} on {cluster}")))
    }

    fn write(&self, report: &Report) -> anyhow::Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        std::fs::write(path, report.json())
            .with_context(|| format!("the report cannot be written to {} (--json)", path.display()))
    }
}

/// Writes a page to the file of `--html`, if it was given.
pub(super) fn page(path: Option<&Path>, made: impl FnOnce() -> String) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, made())
        .with_context(|| format!("the page cannot be written to {} (--html)", path.display()))
}

/// Limits of latencies, in milliseconds.
fn limits(ttft_p99_ms: f64, itl_p99_ms: f64) -> Result<Limits, Refused> {
    if [ttft_p99_ms, itl_p99_ms].iter().any(|limit| !(0.001..=1e9).contains(limit)) {
        let given = format!("{ttft_p99_ms} {itl_p99_ms}");
        return Err(Refused(format!("limits {given}: give milliseconds from 0.001 to 1000000000")));
    }
    Ok(Limits { ttft_p99_ms, itl_p99_ms })
}

/// A table, line by line: a line break within a line would be shown as one that is not to be trusted.
pub(super) fn lines(table: &dyn std::fmt::Display) -> anyhow::Result<()> {
    for line in table.to_string().lines() {
        say!("{line}");
    }
    Ok(())
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

fn read(path: &Path, flag: &str) -> anyhow::Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("{} cannot be read ({flag})", path.display()))
}

/// One line that the next one overwrites.
fn show(progress: &Progress) {
    let Progress { now, ended, in_flight, all } = *progress;
    let line = format!("{:.0} s: {ended} of {all} requests ended, {in_flight} in flight", now.as_secs_f64());
    // A failure to print progress is ignored: nothing depends on it.
    let _unread = write!(std::io::stderr(), "\r{line:80}");
}
