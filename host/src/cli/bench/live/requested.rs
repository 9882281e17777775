//! The workloads that a user asked for.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use host_simulate::workloads::{SharedPrefixes, conversations, poisson, unshared};
use host_simulate::{Trace, Workload};

use crate::cli::Refused;

/// Turns of a conversation: the tokens that each adds to what was said before.
const TURNS: [u32; 6] = [1_000, 300, 300, 300, 300, 300];
/// Beginnings that prompts share, and their tokens.
const PREFIXES: (u64, u32) = (10, 2_000);
/// Tokens of a block of a trace. Shorter blocks have a whole number of tokens.
const TRACE_BLOCK: u32 = 512;
/// The seed of prompts and arrivals.
const SEED: u64 = 1;

/// A workload by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Prompts of 2,200 tokens, 2,000 of which are one of ten beginnings; answers of 40
    Shared,
    /// Conversations of six turns, which add 1,000 and five times 300 tokens; answers of 60
    Rounds,
    /// Prompts that share nothing, of --input-tokens, with answers of --output-tokens
    Random,
    /// The requests of --trace, at their times
    Trace,
}

/// What is sent.
#[derive(Args, Debug)]
pub struct Load {
    /// Workloads, one after the other [default: shared, rounds, and the trace if there is one]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    workload: Option<Vec<Name>>,

    /// The requests of the workload `trace`: JSON lines in Mooncake's format
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Requests of a workload [default: 400 of shared and rounds, 200 of random, all of a trace]
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,

    /// Requests in flight at once, of workloads whose next request is sent when one has ended
    #[arg(long, value_name = "REQUESTS", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=512))]
    concurrency: u16,

    /// Requests a second of shared and random, which then arrive independently of each other [default: as answers end]
    #[arg(long, value_name = "REQUESTS", value_parser = above_zero)]
    rate: Option<f64>,

    /// Tokens of a prompt of the workload `random`
    #[arg(long, value_name = "TOKENS", default_value_t = 1_024, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    input_tokens: u32,

    /// Tokens of an answer of the workload `random`
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    output_tokens: u32,

    /// How many times as fast as in the trace its requests arrive
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = above_zero)]
    speed: f64,

    /// Makes prompts and answers of the trace so many times shorter: a divisor of 512
    #[arg(long, value_name = "DIVISOR", default_value_t = 1)]
    shorten: u32,
}

/// A workload, and a sentence about it.
pub struct Requested {
    /// What is sent, in words.
    pub name: String,
    /// The requests.
    pub workload: Workload,
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err("give a number above 0".to_owned()) }
}

impl Load {
    /// The workloads, in order.
    ///
    /// # Errors
    /// [`Refused`] when the trace is wrong or missing. Another error when it cannot be read.
    pub fn workloads(&self) -> anyhow::Result<Vec<Requested>> {
        let standard = || {
            let trace = self.trace.as_ref().map(|_file| Name::Trace);
            [Name::Shared, Name::Rounds].into_iter().chain(trace).collect()
        };
        let names: Vec<Name> = self.workload.clone().unwrap_or_else(standard);
        names.into_iter().map(|name| self.requested(name)).collect()
    }

    fn requested(&self, name: Name) -> anyhow::Result<Requested> {
        let count = |standard: u32| self.requests.unwrap_or(standard) as usize;
        let sent = |asks| match self.rate {
            Some(rate) => poisson(asks, rate, SEED),
            None => Workload::Closed { asks, concurrency: usize::from(self.concurrency) },
        };
        let how = match self.rate {
            Some(rate) => format!("{rate} a second"),
            None => format!("{} at once", self.concurrency),
        };
        Ok(match name {
            Name::Shared => {
                let (prefixes, prefix_tokens) = PREFIXES;
                let requests = count(400);
                let shape =
                    SharedPrefixes { prefixes, prefix_tokens, suffix_tokens: 200, answer: 40, requests };
                let name = format!("shared: {requests} requests of 2,000 + 200 tokens, {how}");
                Requested { name, workload: sent(shape.asks(SEED)) }
            }
            Name::Rounds => {
                let number = count(400).div_ceil(TURNS.len());
                let name = format!(
                    "rounds: {number} conversations of {} turns, {} at once",
                    TURNS.len(),
                    self.concurrency
                );
                let workload = conversations(number, &TURNS, 60, usize::from(self.concurrency));
                Requested { name, workload }
            }
            Name::Random => {
                let (requests, input, output) = (count(200), self.input_tokens, self.output_tokens);
                let name =
                    format!("random: {requests} requests of {input} tokens, answers of {output}, {how}");
                Requested { name, workload: sent(unshared(requests, input, output)) }
            }
            Name::Trace => self.trace()?,
        })
    }

    fn trace(&self) -> anyhow::Result<Requested> {
        let Some(path) = &self.trace else {
            return Err(
                Refused("--workload trace: give the file with the requests as --trace".to_owned()).into()
            );
        };
        if self.shorten == 0 || !TRACE_BLOCK.is_multiple_of(self.shorten) {
            let message = format!("--shorten {}: give a divisor of {TRACE_BLOCK}", self.shorten);
            return Err(Refused(message).into());
        }
        let shown = path.display().to_string();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{shown} cannot be read (--trace)"))?;
        let most = self.requests.map(|requests| requests as usize);
        let trace = Trace::parse(&shown, &text, most).map_err(|wrong| Refused(wrong.to_string()))?;
        let name = format!(
            "trace: {} requests of {shown}, {} times as fast, {} times shorter",
            trace.len(),
            self.speed,
            self.shorten
        );
        Ok(Requested { name, workload: trace.shortened(self.shorten).into_workload(self.speed) })
    }
}
