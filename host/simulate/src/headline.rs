//! Predictions of published tables.
//!
//! A table has a baseline row and an improved one. Constants that the publication does not give for its machines are
//! calibrated on the baseline row alone. There are as many free constants as cells that they are fitted to, and each is
//! named with its cell. All other cells, and the whole improved row, are predictions. Where two constants could explain
//! one cell, both readings are given. A choice between them by the improved row would be a fit to that row.

mod calibrate;
mod pull_19746;
mod pull_22536;
mod pull_24857;
mod pull_26227;

use serde::Serialize;

use crate::cluster::Cluster;
use crate::goodput::Goodput;
use crate::report::Report;
use crate::traffic::Workload;
use crate::{Options, simulate};
pub use calibrate::Fitted;
pub use pull_19746::pull_19746;
pub use pull_22536::pull_22536;
pub use pull_24857::pull_24857;
pub use pull_26227::pull_26227;

/// One figure of a row, published and simulated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// The name of the figure.
    pub name: &'static str,
    /// The published value, or `None` for an arm that was not published.
    pub published: Option<f64>,
    /// The simulated value.
    pub simulated: f64,
    /// Whether a constant was fitted to it.
    pub fitted: bool,
}

impl Cell {
    /// The difference of the simulated value from the published one, as a share of the published one.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        self.published.map(|published| self.simulated / published - 1.0)
    }
}

/// One configuration and its figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The name of the configuration.
    pub name: String,
    /// Its figures.
    pub cells: Vec<Cell>,
}

/// A published table beside its simulation.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// Where it was published, and which reading of it this is.
    pub title: String,
    /// The constants, and what they were fitted to.
    pub constants: Vec<Fitted>,
    /// The baseline, the improved row, and arms that were not published.
    pub rows: Vec<Row>,
    /// The goodput of each arm under open arrivals.
    pub goodput: Vec<Arm>,
}

/// The goodput of one configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arm {
    /// The name of the configuration.
    pub name: String,
    /// At each pair of limits.
    pub goodput: Vec<Goodput>,
}

/// A figure of a report: its name and its value.
pub(crate) type Figure = (&'static str, fn(&Report) -> f64);

/// The change that an arm makes to the cluster.
type Change = fn(&mut Cluster);

/// All tables, one after the other. `watch` is told what is simulated next.
#[must_use]
pub fn all(watch: &mut dyn FnMut(&str)) -> Vec<Table> {
    let mut tables = pull_19746(watch);
    tables.extend(pull_26227(watch));
    tables.extend(pull_22536(watch));
    tables.extend(pull_24857(watch));
    tables
}

fn run(workload: &Workload, cluster: &Cluster) -> Report {
    simulate(workload, cluster, &Options::default(), &mut |_| {})
}

fn row(name: &str, report: &Report, figures: &[Figure], published: &[f64], fitted: &[&str]) -> Row {
    let cells = figures.iter().enumerate().map(|(place, (name, figure))| Cell {
        name,
        published: published.get(place).copied(),
        simulated: figure(report),
        fitted: fitted.contains(name),
    });
    Row { name: name.to_owned(), cells: cells.collect() }
}
