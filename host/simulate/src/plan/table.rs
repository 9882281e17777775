//! A plan for the terminal.

use std::fmt::{self, Display};

use super::{Plan, Row};

impl Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = self.limits;
        writeln!(
            f,
            "TTFT p99 up to {} ms, ITL p99 up to {} ms; {} runs",
            limits.ttft_p99_ms, limits.itl_p99_ms, self.runs
        )?;
        writeln!(
            f,
            "\n{:>7}  {:<34}{:>12}{:>14}{:>13}{:>12}{:>10}",
            "devices", "workers", "host memory", "TTFT p99, ms", "ITL p99, ms", "requests/s", "found"
        )?;
        self.rows.iter().try_for_each(|row| write!(f, "{row}"))
    }
}

impl Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arrangement = &self.arrangement;
        let (tp, memory) = (arrangement.answers_tp, format!("{} GiB", arrangement.host_memory_gib));
        let fewest = match &self.fewest {
            Ok(fewest) => fewest,
            Err(why) => {
                let workers = match arrangement.prefill_tp {
                    Some(prefill) => format!("prefill of {prefill}, decode of {tp}"),
                    None => format!("aggregated of {tp}"),
                };
                return writeln!(f, "{:>7}  {workers:<34}{memory:>12}  {why}", "-");
            }
        };
        let workers = match arrangement.prefill_tp {
            Some(prefill) => {
                format!("{} prefill of {prefill}, {} decode of {tp}", fewest.prefill, fewest.answers)
            }
            None => format!("{} aggregated of {tp}", fewest.answers),
        };
        let report = &fewest.report;
        let prompts = &report.prompts;
        let found = prompts.tokens.saturating_sub(prompts.computed) as f64 / prompts.tokens.max(1) as f64;
        writeln!(
            f,
            "{:>7}  {workers:<34}{memory:>12}{:>14.0}{:>13.1}{:>12.2}{:>8.0} %",
            fewest.devices,
            report.figures.ttft_ms.p99,
            report.figures.itl_ms.p99,
            report.figures.throughput.requests_per_s,
            found * 100.0
        )
    }
}
