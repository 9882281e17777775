//! Figures of the answers.

use std::collections::BTreeMap;
use std::fmt;

use host_tests::streaming::Streamed;

use super::{PAGE_TOKENS, Sizes};

type Series = BTreeMap<String, f64>;

/// Prompt tokens that a worker found, by the tier that had them.
#[derive(Clone, Copy, Debug, Default)]
struct Hits {
    pool: f64,
    host: f64,
    storage: f64,
}

/// One round of one arm.
pub struct Round {
    /// Milliseconds to the first token.
    first: Vec<f64>,
    /// Milliseconds for each token after it.
    later: Vec<f64>,
    /// Tokens of all prompts.
    prompts: f64,
    /// Tokens of the prompts that prefill computed.
    computed: f64,
    prefill: Hits,
    decode: Hits,
    /// Bytes from prefill to decode.
    bytes: u64,
    /// Pages that offload tiers promised to decode and did not deliver.
    missing: f64,
    /// Pages in offload tiers that were not restored because of the cost model.
    skipped: f64,
}

impl Hits {
    fn of(before: &Series, after: &Series) -> Self {
        let pages = PAGE_TOKENS as f64;
        let offload = |tier: &str| {
            pages * grown(before, after, &format!("host_hicache_promised_pages_total{{tier=\"{tier}\"}}"))
        };
        let pool = grown(before, after, "host_prefix_delivered_tokens_total{tier=\"device\"}");
        Self { pool, host: offload("host"), storage: offload("storage") }
    }

    fn add(self, other: Self) -> Self {
        Self {
            pool: self.pool + other.pool,
            host: self.host + other.host,
            storage: self.storage + other.storage,
        }
    }

    fn shares(self, prompts: f64) -> String {
        let percent = |tokens: f64| 100.0 * tokens / prompts;
        format!("{:.0} / {:.0} / {:.0}", percent(self.pool), percent(self.host), percent(self.storage))
    }
}

fn grown(before: &Series, after: &Series, name: &str) -> f64 {
    let at = |series: &Series| series.get(name).copied().unwrap_or(0.0);
    at(after) - at(before)
}

impl Round {
    /// Figures of a round. `before` and `after` are the workers' series around it, prefill's first.
    pub fn of(answers: Vec<Streamed>, prompt: usize, before: &[Series; 2], after: &[Series; 2]) -> Self {
        let ms = |answer: &Streamed, from: usize, to: usize| {
            1e3 * (answer.read[to] - if from == 0 { answer.sent } else { answer.read[from - 1] })
                .as_secs_f64()
        };
        let last = |answer: &Streamed| answer.read.len() - 1;
        let of = |which: usize, name: &str| grown(&before[which], &after[which], name);
        Self {
            first: answers.iter().map(|answer| ms(answer, 0, 0)).collect(),
            later: answers.iter().map(|answer| ms(answer, 1, last(answer)) / last(answer) as f64).collect(),
            prompts: (prompt * answers.len()) as f64,
            computed: of(0, "host_prefill_tokens_total"),
            prefill: Hits::of(&before[0], &after[0]),
            decode: Hits::of(&before[1], &after[1]),
            bytes: answers.iter().map(|answer| answer.transferred_bytes).sum(),
            missing: of(1, "host_hicache_not_restored_pages_total"),
            skipped: of(0, "host_hicache_skipped_pages_total") + of(1, "host_hicache_skipped_pages_total"),
        }
    }

    /// Combines several rounds into one.
    fn all(rounds: &[&Self]) -> Self {
        let sum = |figure: fn(&Self) -> f64| rounds.iter().map(|round| figure(round)).sum();
        let hits = |figure: fn(&Self) -> Hits| {
            rounds.iter().map(|round| figure(round)).fold(Hits::default(), Hits::add)
        };
        Self {
            first: rounds.iter().flat_map(|round| round.first.iter().copied()).collect(),
            later: rounds.iter().flat_map(|round| round.later.iter().copied()).collect(),
            prompts: sum(|round| round.prompts),
            computed: sum(|round| round.computed),
            prefill: hits(|round| round.prefill),
            decode: hits(|round| round.decode),
            bytes: rounds.iter().map(|round| round.bytes).sum(),
            missing: sum(|round| round.missing),
            skipped: sum(|round| round.skipped),
        }
    }

    /// Share of prompts that prefill did not compute.
    fn hit_rate(&self) -> f64 {
        1.0 - self.computed / self.prompts
    }
}

impl fmt::Display for Round {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "TTFT {:.1} ms, p99 {:.1}; TPOT {:.2} ms; prefill had {} %, all {:.3}; decode had {} %; {:.1} MiB moved; {} pages \
             not restored, {} skipped",
            mean(&self.first),
            quantile(&self.first, 0.99),
            mean(&self.later),
            self.prefill.shares(self.prompts),
            self.hit_rate(),
            self.decode.shares(self.prompts),
            self.bytes as f64 / f64::from(1 << 20),
            self.missing,
            self.skipped,
        )
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

/// One arm: its rounds in each pass.
pub struct Measured {
    /// Its name.
    pub arm: &'static str,
    /// The rounds of each pass.
    pub passes: Vec<Vec<Round>>,
}

/// A row's figures, one for each pass, and all passes together.
struct Row {
    passes: Vec<Round>,
    together: Round,
}

impl Row {
    /// The row of one round, or of all rounds if `round` is none.
    fn of<'a>(measured: &'a Measured, round: usize) -> Self {
        let rounds = |pass: &'a Vec<Round>| pass.get(round..=round).unwrap_or(pass).iter().collect();
        let chosen: Vec<Vec<&Round>> = measured.passes.iter().map(rounds).collect();
        Self {
            passes: chosen.iter().map(|rounds| Round::all(rounds)).collect(),
            together: Round::all(&chosen.concat()),
        }
    }

    /// The median of the passes' figures.
    fn middle(&self, figure: &dyn Fn(&Round) -> f64) -> f64 {
        let mut figures: Vec<f64> = self.passes.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        let last = figures.len() - 1;
        f64::midpoint(figures[last / 2], figures[last.div_ceil(2)])
    }
}

/// Prints a row for each round and arm: for times the median of all passes, for counts the mean of the passes. Changes are relative
/// to the arms "off" and L1.
pub fn print(arms: &[Measured], sizes: Sizes) {
    println!(
        "| round | prompt | arm | TTFT mean | to off | to L1 | p99 | to off | to L1 | TPOT | to off | prefill hits L1 / L2 / L3 | \
         all | decode hits L1 / L2 / L3 | MiB moved | pages not restored | skipped |"
    );
    println!("| --- | ---: | --- |{}", " ---: |".repeat(14));
    let rounds = arms.first().and_then(|arm| arm.passes.first()).map_or(0, Vec::len);
    for round in 0..=rounds {
        let rows: Vec<(&str, Row)> = arms.iter().map(|arm| (arm.arm, Row::of(arm, round))).collect();
        let base = |name: &str| rows.iter().find(|(arm, _)| *arm == name).map(|(_, row)| row);
        for (name, own) in &rows {
            let to = |other: &str, figure: &dyn Fn(&Round) -> f64| {
                base(other).map_or("".to_owned(), |other| {
                    format!("{:+.1} %", 100.0 * (own.middle(figure) / other.middle(figure) - 1.0))
                })
            };
            let first = |round: &Round| mean(&round.first);
            let tail = |round: &Round| quantile(&round.first, 0.99);
            let later = |round: &Round| mean(&round.later);
            let (number, prompt) = match round < rounds {
                true => (round.to_string(), sizes.prompt(round).to_string()),
                false => ("all".to_owned(), String::new()),
            };
            let (all, passes) = (&own.together, own.passes.len() as f64);
            println!(
                "| {number} | {prompt} | {name} | {:.1} ms | {} | {} | {:.1} ms | {} | {} | {:.2} ms | {} | {} | {:.3} | {} | \
                 {:.1} | {:.1} | {:.1} |",
                own.middle(&first),
                to("off", &first),
                to("L1", &first),
                own.middle(&tail),
                to("off", &tail),
                to("L1", &tail),
                own.middle(&later),
                to("off", &later),
                all.prefill.shares(all.prompts),
                all.hit_rate(),
                all.decode.shares(all.prompts),
                all.bytes as f64 / f64::from(1 << 20) / passes,
                all.missing / passes,
                all.skipped / passes,
            );
        }
    }
}
