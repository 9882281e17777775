//! Reports as HTML files. Each file is complete: its own script draws the plots, and a browser loads nothing else.

use serde::Serialize;

use crate::comparison::Comparison;
use crate::goodput::Goodput;
use crate::headline::Table;
use crate::plan::Plan;
use crate::recording::{Curves, Recording};
use crate::report::Report;

const RUN: &str = include_str!("html/page.html");
const PLAN: &str = include_str!("html/plan.html");
const TABLES: &str = include_str!("html/tables.html");
const LIVE: &str = include_str!("html/live.html");
const STYLE: &str = include_str!("html/style.css");
const PLOTS: &str = include_str!("html/plots.js");

#[derive(Serialize)]
struct Run<'a> {
    title: &'a str,
    table: String,
    report: &'a Report,
    recording: &'a Recording,
    goodput: Option<&'a Goodput>,
}

#[derive(Serialize)]
struct Planned<'a> {
    title: &'a str,
    table: String,
    plan: &'a Plan,
}

#[derive(Serialize)]
struct Published<'a> {
    title: &'a str,
    table: String,
    tables: &'a [Table],
}

#[derive(Serialize)]
struct Measured<'a> {
    title: &'a str,
    table: String,
    runs: &'a [Compared],
}

/// A run on real workers beside its simulation, with the distributions of both.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The figures of both.
    #[serde(flatten)]
    pub comparison: Comparison,
    /// The latencies that the clients of the real workers saw.
    pub live_curves: Curves,
    /// Those of the simulation, if there is one.
    pub simulated_curves: Option<Curves>,
}

/// The page of a run. That of a search for goodput is the run at the rate that was found, and has the rates that were tried.
#[must_use]
pub fn page(title: &str, report: &Report, recording: &Recording, goodput: Option<&Goodput>) -> String {
    fill(RUN, &Run { title, table: report.to_string(), report, recording, goodput })
}

/// The page of a plan: the fewest devices of each arrangement, and the latencies of each cluster that was simulated.
#[must_use]
pub fn plan(title: &str, plan: &Plan) -> String {
    fill(PLAN, &Planned { title, table: plan.to_string(), plan })
}

/// The page of published tables beside their simulation: the error of each cell, and the goodput of each arm.
#[must_use]
pub fn tables(title: &str, tables: &[Table]) -> String {
    fill(TABLES, &Published { title, table: joined(tables), tables })
}

/// The page of runs on real workers: the latencies of each, beside those of its simulation.
#[must_use]
pub fn live(title: &str, runs: &[Compared]) -> String {
    let comparisons: Vec<&Comparison> = runs.iter().map(|run| &run.comparison).collect();
    fill(LIVE, &Measured { title, table: joined(&comparisons), runs })
}

/// Tables for the terminal, one after the other.
fn joined(tables: &[impl ToString]) -> String {
    tables.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// A page with its style, its script and its data.
fn fill(page: &str, data: &impl Serialize) -> String {
    // Serialization cannot fail: the data has numbers, strings and lists only. "<" is escaped, because "</script>" in a name would end
    // the script.
    let data = serde_json::to_string(data).unwrap_or_default().replace('<', "\\u003c");
    // The data is inserted last, so that a name in it is never taken for one of these placeholders.
    page.replace("STYLE_OF_PAGES", STYLE).replace("SCRIPT_OF_PLOTS", PLOTS).replace("DATA_OF_THE_RUN", &data)
}
