//! `host simulate --plan`: the fewest devices for a workload.

use std::io::{IsTerminal as _, Write as _};

use anyhow::Context as _;
use host_simulate::goodput::Limits;
use host_simulate::plan::{Wish, plan};
use host_simulate::{Cluster, Workload, html};

use super::super::Refused;
use super::{Simulate, lines};

/// The most devices of a plan.
const MOST_DEVICES: usize = 10_000;

impl Simulate {
    /// Searches, and prints a row for each arrangement.
    pub(super) fn plan(&self, workload: &Workload, cluster: &Cluster, limits: Limits) -> anyhow::Result<()> {
        let wish = Wish {
            limits,
            tp: self.tp.clone(),
            host_memory_gib: self.host_memory_gib.clone(),
            most_devices: self.most_devices,
        };
        let tp = |tp: &usize| (1..=Cluster::MOST_RANKS).contains(tp);
        let gib = |gib: &f64| (0.0..=Cluster::MOST_HOST_GIB).contains(gib);
        if !wish.tp.iter().all(tp) || !wish.host_memory_gib.iter().all(gib) {
            let (ranks, most) = (Cluster::MOST_RANKS, Cluster::MOST_HOST_GIB);
            let message =
                format!("--tp takes numbers from 1 to {ranks}, and --host-memory-gib sizes from 0 to {most}");
            return Err(Refused(message).into());
        }
        if wish.most_devices > MOST_DEVICES {
            let message = format!("--most-devices {}: at most {MOST_DEVICES}", wish.most_devices);
            return Err(Refused(message).into());
        }
        let measured = cluster.workers.iter().find(|workers| workers.step.is_some());
        if let Some(tp) = measured.map(|workers| workers.tp).filter(|tp| wish.tp != [*tp]) {
            let message = format!(
                "the cluster has a worker with `step`, which is the time on {tp} devices: give --tp {tp}, or leave `step` out"
            );
            return Err(Refused(message).into());
        }
        let shown = std::io::stderr().is_terminal();
        let mut watch = |what: &str| {
            if shown {
                // A failure to print progress is ignored: nothing depends on it.
                let _unread = write!(std::io::stderr(), "\r{what:60}");
            }
        };
        let plan = plan(workload, cluster, &wish, &self.options(), &mut watch);
        watch("");
        lines(&plan)?;
        self.page(|title| html::plan(title, &plan))?;
        let Some(path) = &self.json else { return Ok(()) };
        let text = serde_json::to_string_pretty(&plan)? + "\n";
        std::fs::write(path, text)
            .with_context(|| format!("the plan cannot be written to {} (--json)", path.display()))
    }
}
