//! The formats of counters: OpenMetrics, and the older text format of Prometheus.

use std::collections::HashSet;

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// One of the formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics.
    OpenMetrics,
    /// The text format of Prometheus.
    Text,
}

impl Format {
    /// The format that a request accepts. Without `Accept`, or with any type accepted, this is the text format, which every
    /// reader knows.
    #[must_use]
    pub fn accepted(accept: Option<&str>) -> Self {
        let types = accept.unwrap_or_default().split(',');
        let wanted = |range: &str| {
            let mut parts = range.split(';').map(str::trim);
            let is_open = parts.next() == Some("application/openmetrics-text");
            is_open && !parts.any(|part| part.replace(' ', "") == "q=0")
        };
        if types.into_iter().any(wanted) { Self::OpenMetrics } else { Self::Text }
    }

    /// Its media type.
    #[must_use]
    pub fn media_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => OPEN_METRICS,
            Self::Text => TEXT,
        }
    }

    /// Converts series to this format.
    #[must_use]
    pub fn of(self, open_metrics: String) -> String {
        match self {
            Self::OpenMetrics => open_metrics,
            Self::Text => text(&open_metrics),
        }
    }
}

/// Series in the format that a request accepts, and that format's media type.
#[must_use]
pub fn in_format(accept: Option<&str>, open_metrics: String) -> (&'static str, String) {
    let format = Format::accepted(accept);
    (format.media_type(), format.of(open_metrics))
}

/// Converts series to the text format. It names a counter in `# TYPE` and `# HELP` with `_total`, as in its samples. It has no
/// units, and no mark at the end.
fn text(open_metrics: &str) -> String {
    let counters: HashSet<&str> = open_metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut text = String::with_capacity(open_metrics.len());
    for line in open_metrics.lines() {
        let about = ["# TYPE ", "# HELP "].iter().find_map(|kind| Some((kind, line.strip_prefix(kind)?)));
        match about {
            Some((kind, rest)) => {
                let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
                let total = if counters.contains(name) { "_total" } else { "" };
                text.push_str(&format!("{kind}{name}{total} {rest}\n"));
            }
            None if line.starts_with("# UNIT ") || line == "# EOF" => {}
            None => {
                text.push_str(line);
                text.push('\n');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERIES: &str = "# HELP host_requests Requests.\n# TYPE host_requests counter\nhost_requests_total{a=\"b\"} 3\n\
         # HELP host_wait_seconds Time.\n# TYPE host_wait_seconds gauge\n# UNIT host_wait_seconds seconds\nhost_wait_seconds 0.5\n# EOF\n";

    #[test]
    fn the_format_is_the_one_that_is_accepted() {
        for (accept, open) in [
            (None, false),
            (Some("*/*"), false),
            (Some("text/plain"), false),
            (Some("application/json"), false),
            (Some("application/openmetrics-text;version=1.0.0,text/plain;q=0.5"), true),
            (Some("text/plain;version=0.0.4, application/openmetrics-text; version=1.0.0; q=0.5"), true),
            (Some("application/openmetrics-text;q=0"), false),
        ] {
            let (kind, text) = in_format(accept, SERIES.to_owned());
            assert_eq!((kind == OPEN_METRICS, text.contains("# EOF")), (open, open), "{accept:?}");
        }
    }

    #[test]
    fn the_text_format_names_counters_as_their_samples() {
        let expected = "# HELP host_requests_total Requests.\n# TYPE host_requests_total counter\nhost_requests_total{a=\"b\"} 3\n\
             # HELP host_wait_seconds Time.\n# TYPE host_wait_seconds gauge\nhost_wait_seconds 0.5\n";
        assert_eq!(text(SERIES), expected);
    }
}
