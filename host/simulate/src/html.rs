//! A report as one HTML file: drawn by its own script, and nothing of it comes from elsewhere.

use serde::Serialize;

use crate::recording::Recording;
use crate::report::Report;

const PAGE: &str = include_str!("html/page.html");

#[derive(Serialize)]
struct Data<'a> {
    title: &'a str,
    table: String,
    report: &'a Report,
    recording: &'a Recording,
}

/// The page of a run.
#[must_use]
pub fn page(title: &str, report: &Report, recording: &Recording) -> String {
    let data = Data { title, table: report.to_string(), report, recording };
    // Numbers, names and lists: nothing that has no form in JSON. A "<" could end the script that holds it.
    let data = serde_json::to_string(&data).unwrap_or_default().replace('<', "\\u003c");
    PAGE.replace("DATA_OF_THE_RUN", &data)
}
