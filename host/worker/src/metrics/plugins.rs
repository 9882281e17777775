//! What this process's plugins count, under their ids. A label names the number, so that two plugins cannot clash.

use std::fmt::Error;

use host_plugins::{Kind, Services};

use super::series::Series;

/// Writes the numbers of all plugins that were loaded.
pub(super) fn encode(series: &mut Series<'_>) -> Result<(), Error> {
    let plugins = Services::all();
    let words = |kind| {
        let all =
            plugins.iter().flat_map(|(id, services)| services.words().into_iter().map(move |w| (id, w)));
        all.filter(move |(_, word)| word.kind == kind)
            .map(|(id, word)| ([("plugin", id.clone()), ("name", word.name.clone())], word.value()))
    };
    series.counter_by("host_plugin_counter", "Numbers that plugins count", words(Kind::Counter))?;
    series.gauge_by("host_plugin_gauge", "Numbers that plugins keep", words(Kind::Gauge))?;
    series.counter_by(
        "host_plugin_log_lines_left_out",
        "Log lines of a plugin beyond 200 in a second",
        plugins.iter().map(|(id, services)| ([("plugin", id.as_str())], services.lines_left_out())),
    )
}
