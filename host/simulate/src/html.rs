//! Reports as HTML files. Each file is complete: its own script draws the plots, and a browser loads nothing else.

use serde::Serialize;

use crate::goodput::Goodput;
use crate::plan::Plan;
use crate::recording::Recording;
use crate::report::Report;

const RUN: &str = include_str!("html/page.html");
const PLAN: &str = include_str!("html/plan.html");
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

/// A page with its style, its script and its data.
fn fill(page: &str, data: &impl Serialize) -> String {
    // Serialization cannot fail: the data has numbers, strings and lists only. "<" is escaped, because "</script>" in a name would end
    // the script.
    let data = serde_json::to_string(data).unwrap_or_default().replace('<', "\\u003c");
    // The data is inserted last, so that a name in it is never taken for one of these placeholders.
    page.replace("STYLE_OF_PAGES", STYLE).replace("SCRIPT_OF_PLOTS", PLOTS).replace("DATA_OF_THE_RUN", &data)
}
