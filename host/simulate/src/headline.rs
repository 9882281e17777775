//! Published tables, predicted.
//!
//! A table has a baseline row and an improved one. What the publication does not say about its machines is calibrated on the
//! baseline row alone: as many free constants as cells that they are fitted to, each named with its cell. All other cells, and the
//! whole improved row, are predictions. Where two constants could explain one cell, both readings are given, because choosing
//! between them by the improved row would be fitting it.

mod calibrate;
mod pull_19746;

use serde::Serialize;

use crate::cluster::Cluster;
use crate::goodput::Goodput;
use crate::report::Report;
use crate::traffic::Workload;
use crate::{Options, simulate};
pub use calibrate::Fitted;
pub use pull_19746::pull_19746;

/// One figure of a row, theirs and ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cell {
    /// What it is.
    pub name: &'static str,
    /// As published, or `None` for an arm that was not.
    pub published: Option<f64>,
    /// As simulated.
    pub simulated: f64,
    /// Whether a constant was fitted to it.
    pub fitted: bool,
}

impl Cell {
    /// How far ours is from theirs, as a share of theirs.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        self.published.map(|published| self.simulated / published - 1.0)
    }
}

/// One configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// What it is.
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
    /// What arms keep within limits under open arrivals.
    pub goodput: Vec<Arm>,
}

/// The goodput of one configuration.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Arm {
    /// What it is.
    pub name: String,
    /// At each pair of limits.
    pub goodput: Vec<Goodput>,
}

/// A figure of a report.
pub(crate) type Figure = (&'static str, fn(&Report) -> f64);

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
