//! Reports and headline tables for the terminal.

use std::fmt::{self, Display, Write as _};

use crate::cluster::Role;
use crate::comparison::Comparison;
use crate::goodput::{Goodput, Limits};
use crate::headline::{Fitted, Table};
use crate::report::{Distribution, Report};

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let requests = self.figures.requests;
        writeln!(
            f,
            "{} requests completed, {} failed, in {:.1} s",
            requests.completed, requests.failed, self.figures.duration_s
        )?;
        let rate = &self.figures.throughput;
        writeln!(
            f,
            "{:.2} requests/s, {:.0} input tokens/s, {:.0} output tokens/s",
            rate.requests_per_s, rate.input_tokens_per_s, rate.output_tokens_per_s
        )?;
        writeln!(f, "\n{:<10}{:>12}{:>12}{:>12}{:>12}{:>12}", "ms", "mean", "p50", "p90", "p99", "most")?;
        let rows = [
            ("TTFT", &self.figures.ttft_ms),
            ("ITL", &self.figures.itl_ms),
            ("TPOT", &self.figures.tpot_ms),
            ("E2E", &self.figures.e2e_ms),
        ];
        rows.iter().try_for_each(|(name, values)| row(f, name, values))?;
        let prompts = &self.prompts;
        let share = |part: u64| 100.0 * part as f64 / (prompts.tokens.max(1)) as f64;
        writeln!(
            f,
            "\nprompts: {} tokens; found in L1 {:.1} %, in L2 {:.1} %, in L3 {:.1} %; computed {:.1} %",
            prompts.tokens,
            share(prompts.found_l1),
            share(prompts.found_l2),
            share(prompts.found_l3),
            share(prompts.computed)
        )?;
        if self.transfers.pages > 0 {
            writeln!(
                f,
                "transfers: {:.1} GB; {:.1} % of the prompts' tokens were on the decode worker",
                self.transfers.gigabytes,
                share(prompts.not_sent)
            )?;
        }
        if self.transfers.shared + self.transfers.renegotiated > 0 {
            let (shared, renegotiated) = (self.transfers.shared, self.transfers.renegotiated);
            writeln!(
                f,
                "{shared} requests waited for the pages of another one, {renegotiated} were renegotiated"
            )?;
        }
        let mut table = String::new();
        writeln!(
            table,
            "\n{:<12}{:>10}{:>10}{:>10}{:>10}{:>10}{:>12}{:>14}{:>13}",
            "worker", "pages", "used", "most", "active", "queued", "steps", "answers/step", "preemptions"
        )?;
        for worker in &self.workers {
            let role = match worker.role {
                Role::Prefill => "prefill",
                Role::Decode => "decode",
                Role::Aggregated => "aggregated",
            };
            writeln!(
                table,
                "{role:<12}{:>10}{:>8.1} %{:>8.1} %{:>10.1}{:>10.1}{:>12}{:>14.1}{:>13}",
                worker.pages,
                worker.used_mean * 100.0,
                worker.used_most * 100.0,
                worker.active_mean,
                worker.queued_mean,
                worker.steps,
                worker.answers_per_step,
                worker.preemptions
            )?;
        }
        f.write_str(&table)
    }
}

fn row(f: &mut fmt::Formatter<'_>, name: &str, values: &Distribution) -> fmt::Result {
    let numbers = [values.mean, values.p50, values.p90, values.p99, values.most];
    write!(f, "{name:<10}")?;
    numbers.iter().try_for_each(|number| write!(f, "{number:>12.1}"))?;
    writeln!(f)
}

impl Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let simulated = if self.simulated.is_some() { "simulated" } else { "" };
        writeln!(f, "{}\n{:<28}{:>12}{simulated:>12}", self.name, "", "live")?;
        for row in self.rows() {
            write!(f, "  {:<26}{:>12.2}", row.name, row.live)?;
            if let Some(simulated) = row.simulated {
                write!(f, "{simulated:>12.2}")?;
            }
            if let Some(error) = row.error() {
                write!(f, "{:>+8.1} %", error * 100.0)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        for fitted in &self.constants {
            let Fitted { name, value, unit, cell } = fitted;
            writeln!(f, "  fitted to the baseline's {cell}: {name} {value:.3} {unit}")?;
        }
        for row in &self.rows {
            writeln!(f, "\n{:<38}{:>12}{:>12}{:>10}", row.name, "published", "simulated", "error")?;
            for cell in &row.cells {
                let published = cell.published.map(|value| format!("{value:.2}")).unwrap_or_default();
                let error = match cell.error() {
                    Some(_) if cell.fitted => "fitted".to_owned(),
                    Some(error) => format!("{:+.0} %", error * 100.0),
                    None => String::new(),
                };
                writeln!(f, "  {:<36}{published:>12}{:>12.2}{error:>10}", cell.name, cell.simulated)?;
            }
        }
        for arm in &self.goodput {
            writeln!(f, "\ngoodput: {}", arm.name)?;
            arm.goodput.iter().try_for_each(|found| writeln!(f, "  {found}"))?;
        }
        Ok(())
    }
}

impl Display for Goodput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Limits { ttft_p99_ms, itl_p99_ms } = self.limits;
        let (ttft, itl) = (self.report.figures.ttft_ms.p99, self.report.figures.itl_ms.p99);
        write!(
            f,
            "{:.2} requests/s within TTFT p99 {ttft_p99_ms} ms, ITL p99 {itl_p99_ms} ms (there: {ttft:.0} ms, {itl:.1} ms)",
            self.requests_per_s
        )
    }
}
