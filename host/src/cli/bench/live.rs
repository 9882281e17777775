//! `host bench live`: workloads on real workers, and the simulation of the same requests beside them.
//!
//! ```text
//! Requested ── workloads ──┬──► drive ── HTTP ──► server: router, workers, plugins
//!                          │      └── Seen ─────► Figures ──┐
//!                          └──► host_simulate::simulate ────┴──► Comparison
//!                                      ▲
//!               described: Cluster ────┘
//! ```

mod answer;
mod described;
mod drive;
mod measured;
mod own_server;

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use host_simulate::comparison::Comparison;
use host_simulate::html::{self, Compared};
use host_simulate::recording::Curves;
use host_simulate::{Cluster, Options, Report, Workload, record};
use host_wire::random::random_u64;
use serde::Serialize;

use super::super::Refused;
use super::super::load::{Load, Name, Requested};
use super::super::output::say;
use super::super::server::started::{serving_flags, shown};
use super::super::server::{Address, Client, Stop};
use super::super::settings::Settings;
use super::super::simulate::{lines, page};
use super::{progress, write};
use measured::Server;
use own_server::OwnServer;

/// A server, or flags to start one with, and what is sent to it.
#[derive(Args, Debug)]
pub struct Live {
    /// A server that runs. It is measured, and nothing is simulated [default: one is started with the flags of this command]
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// PEM file with the authorities of an https:// server's certificate [default: those that this machine trusts]
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,

    /// Workloads, one after the other [default: shared, rounds, and the trace if there is one]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    workload: Option<Vec<Name>>,

    #[command(flatten)]
    load: Load,

    /// Writes the results to this file too, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Writes a page with the distributions of the latencies to this file. Any browser opens it, without a network
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    #[command(flatten)]
    settings: Settings,
}

/// The most requests in flight. Each has a connection.
const MOST_AT_ONCE: u16 = 512;

/// The command's own options, each with a value. All others are the server's.
const OWN: [&str; 17] = [
    "--url",
    "--ca",
    "--workload",
    "--trace",
    "--requests",
    "--concurrency",
    "--rate",
    "--burst",
    "--prefixes",
    "--prefix-tokens",
    "--input-tokens",
    "--turns",
    "--output-tokens",
    "--speed",
    "--shorten",
    "--json",
    "--html",
];

/// The results of one workload.
#[derive(Serialize)]
struct Result {
    #[serde(flatten)]
    comparison: Comparison,
    /// The cluster that was simulated.
    cluster: Option<Cluster>,
}

impl Live {
    /// Measures all workloads, one after the other.
    ///
    /// # Errors
    /// [`Refused`] for wrong flags or a wrong trace. Another error when the server cannot be used, or a request failed.
    pub fn run(self) -> anyhow::Result<()> {
        // Runs on one thread, the first of the process: the system ends a started server with the thread that started it.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.context("no runtime for the measurement")?;
        let ended = runtime.block_on(self.measure());
        // Does not wait for a simulation that a signal interrupted.
        runtime.shutdown_background();
        ended
    }

    async fn measure(&self) -> anyhow::Result<()> {
        let mut stop = Stop::listen()?;
        let flags = serving_flags(std::env::args_os().skip(1), &["bench", "live"], &OWN);
        let workloads = self.workloads()?;
        let Some(url) = &self.url else {
            let mut own = OwnServer::start(&self.settings, flags)?;
            let measured = tokio::select! {
                measured = self.on_own_server(&mut own, workloads) => measured,
                () = stop.requested() => Err(anyhow::anyhow!("interrupted")),
            };
            let ended = own.end().await;
            return measured.and(ended);
        };
        if !flags.is_empty() {
            let flags = shown(&flags);
            let message =
                format!("--url {url} and {flags}: give the URL of a server, or flags to start one with");
            return Err(Refused(message).into());
        }
        let client = Client::new(Address::parse(url).map_err(Refused)?, self.ca.as_deref())?;
        let server = Server::find(client).await?;
        tokio::select! {
            measured = self.all(&server, workloads, None) => measured,
            () = stop.requested() => Err(anyhow::anyhow!("interrupted")),
        }
    }

    /// The workloads, in order.
    fn workloads(&self) -> anyhow::Result<Vec<Requested>> {
        if self.load.concurrency() > MOST_AT_ONCE {
            let message = format!("--concurrency {}: at most {MOST_AT_ONCE}", self.load.concurrency());
            return Err(Refused(message).into());
        }
        let standard = || {
            let trace = self.load.trace.as_ref().map(|_file| Name::Trace);
            [Name::Shared, Name::Rounds].into_iter().chain(trace).collect()
        };
        let names: Vec<Name> = self.workload.clone().unwrap_or_else(standard);
        self.load.check(&names, false)?;
        names.into_iter().map(|name| self.load.requested(name)).collect()
    }

    /// The title of the page.
    fn title(&self) -> String {
        match &self.url {
            Some(url) => format!("host bench live: {url}"),
            None => "host bench live: workers of its own".to_owned(),
        }
    }

    async fn on_own_server(&self, own: &mut OwnServer, workloads: Vec<Requested>) -> anyhow::Result<()> {
        let server = Server::find(own.until_ready(self.ca.as_deref()).await?).await?;
        let cluster = own.described(&server).await?;
        self.all(&server, workloads, Some(cluster)).await
    }

    async fn all(
        &self,
        server: &Server,
        workloads: Vec<Requested>,
        cluster: Option<Cluster>,
    ) -> anyhow::Result<()> {
        let (mut results, mut runs) = (Vec::new(), Vec::new());
        let mut failures = 0;
        for Requested { name, workload } in workloads {
            let watch =
                |ended: usize| progress(&format!("{name}: {ended} of {} requests", workload.requests()));
            let run = drive::drive(server, &workload, random_salt()?, watch).await;
            progress("");
            failures += run.figures.requests.failed;
            let recorded = match cluster.clone() {
                Some(cluster) => {
                    progress(&format!("{name}: simulation"));
                    let simulated = simulated(workload, cluster).await?;
                    progress("");
                    Some(simulated)
                }
                None => None,
            };
            let (simulated, simulated_curves) = recorded.unzip();
            let comparison = Comparison { name, live: run.figures, live_found: run.found, simulated };
            say!("");
            lines(&comparison)?;
            if let Some(why) = run.first_failure {
                say!("  the first failure: {why}");
            }
            runs.push(Compared { comparison: comparison.clone(), live_curves: run.curves, simulated_curves });
            results.push(Result { comparison, cluster: cluster.clone() });
        }
        write(self.json.as_deref(), &results)?;
        page(self.html.as_deref(), || html::live(&self.title(), &runs))?;
        if failures > 0 {
            anyhow::bail!("{failures} requests failed");
        }
        Ok(())
    }
}

/// Simulates a workload beside the runtime, which goes on to wait for signals.
async fn simulated(workload: Workload, cluster: Cluster) -> anyhow::Result<(Report, Curves)> {
    let run = move || record(&workload, &cluster, &Options::default(), &mut |_progress| {});
    let (report, recording) = tokio::task::spawn_blocking(run).await.context("the simulation failed")?;
    Ok((report, recording.curves))
}

/// A number that no run has had before. Its lower bits are zero, where the positions of tokens are.
fn random_salt() -> anyhow::Result<u64> {
    Ok(random_u64().context("the system gives no random number")? << 40)
}
