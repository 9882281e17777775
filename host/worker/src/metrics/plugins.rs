//! The series of this process's plugins, by plugin id. A label names each number, so that names of two plugins cannot
//! clash.

use std::fmt::Error;

use host_plugins::{Kind, Services, timings};

use super::series::Series;
use crate::watchdog;

/// Writes the numbers of all plugins that were loaded.
pub(super) fn encode(series: &mut Series<'_>) -> Result<(), Error> {
    let plugins = Services::all();
    let of_kind = |kind| {
        let all = plugins
            .iter()
            .flat_map(|(id, services)| services.metrics().into_iter().map(move |metric| (id, metric)));
        all.filter(move |(_, metric)| metric.kind == kind)
            .map(|(id, metric)| ([("plugin", id.clone()), ("name", metric.name.clone())], metric.value()))
    };
    series.counter_by("host_plugin_counter", "Numbers that plugins count", of_kind(Kind::Counter))?;
    series.gauge_by("host_plugin_gauge", "Numbers that plugins keep", of_kind(Kind::Gauge))?;
    series.seconds([(
        "host_plugin_longest_call_seconds",
        "How long the plugin call that is in progress longest has taken so far",
        watchdog::longest(),
    )])?;
    series.buckets_by(
        "host_plugin_call_seconds",
        "Time that calls of plugins take: all that may wait, and one in 61 of the hot ones",
        timings().into_iter().map(|timing| {
            ([("plugin", timing.plugin), ("method", timing.call.to_owned())], timing.buckets, timing.sum)
        }),
    )?;
    series.counter_by(
        "host_plugin_slow_calls",
        "Calls of plugins that took more than a second, or ten if they may wait for others",
        watchdog::slow_calls()
            .into_iter()
            .map(|((plugin, call), count)| ([("plugin", plugin), ("method", call.to_owned())], count)),
    )?;
    series.counter_by(
        "host_plugin_log_lines_left_out",
        "Log lines of a plugin beyond 200 in a second",
        plugins.iter().map(|(id, services)| ([("plugin", id.as_str())], services.lines_left_out())),
    )
}
