//! The flags that describe requests, for `host bench live` and `host simulate`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use host_simulate::traffic::Ask;
use host_simulate::workloads::{SharedPrefixes, bursts, conversations, unshared};
use host_simulate::{Trace, Workload};

use super::Refused;

/// Tokens of a block of a trace. Shorter blocks have a whole number of tokens.
const TRACE_BLOCK: u32 = 512;
/// Generated prompts consist of blocks of so many tokens. Beginnings that prompts share have whole blocks.
const BLOCK: u32 = 100;
/// The seed of prompts and arrivals.
const SEED: u64 = 1;

/// A workload by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Name {
    /// Prompts that begin with one of --prefixes beginnings of --prefix-tokens, and have 200 tokens of their own; answers of 40
    Shared,
    /// Conversations whose turns add --turns tokens; answers of 60
    Rounds,
    /// Prompts of 1,024 tokens that share nothing; answers of 64
    Random,
    /// The requests of --trace, at their times
    Trace,
}

/// What is sent.
#[derive(Args, Debug)]
pub struct Load {
    /// The requests of the workload `trace`: JSON lines in Mooncake's format
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Requests of a workload, or the first ones of a trace [default: 400 of shared and rounds, 200 of random, all of a trace]
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(1..))]
    requests: Option<u32>,

    /// Requests in flight at once, of workloads whose next request is sent when one has ended
    #[arg(long, value_name = "REQUESTS", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub concurrency: u16,

    /// Requests a second of shared and random, which then arrive independently of each other [default: as answers end]
    #[arg(long, value_name = "REQUESTS", value_parser = above_zero)]
    rate: Option<f64>,

    /// Requests that arrive together, with --rate
    #[arg(long, value_name = "REQUESTS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    burst: u16,

    /// Different beginnings of the prompts of shared
    #[arg(long, value_name = "NUMBER", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    prefixes: u64,

    /// Tokens of such a beginning, a multiple of 100
    #[arg(long, value_name = "TOKENS", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prefix_tokens: u32,

    /// Tokens of a prompt of random, and those of shared behind the beginning, a multiple of 100 [default: 1024 and 200]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    input_tokens: Option<u32>,

    /// Tokens that each turn of rounds adds to what was said before
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', default_values_t = [1_000, 300, 300, 300, 300, 300], value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    turns: Vec<u32>,

    /// Tokens of an answer [default: 40 of shared, 60 of rounds, 64 of random]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    output_tokens: Option<u32>,

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

/// The same requests at any rate.
pub struct AtRates {
    /// Requests per second from which a search begins.
    pub rate: f64,
    /// The workload with so many requests per second.
    pub workload: Box<dyn Fn(f64) -> Workload>,
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err("give a number above 0".to_owned()) }
}

fn refused<T>(message: String) -> anyhow::Result<T> {
    Err(Refused(message).into())
}

/// A number with its separators: `2,000`.
fn shown(number: u32) -> String {
    let digits = number.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|group| std::str::from_utf8(group).ok()).collect();
    groups.join(",")
}

impl Load {
    /// The workload of this name.
    ///
    /// # Errors
    /// [`Refused`] when the trace or a length is wrong or missing. Another error when the trace cannot be read.
    pub fn requested(&self, name: Name) -> anyhow::Result<Requested> {
        let how = match self.rate {
            Some(rate) if self.burst > 1 => format!("{rate} a second, {} together", self.burst),
            Some(rate) => format!("{rate} a second"),
            None => format!("{} at once", self.concurrency),
        };
        let named = match name {
            Name::Shared => {
                let (beginning, own) = (shown(self.prefix_tokens), shown(self.own_tokens()));
                format!("shared: {} requests of {beginning} + {own} tokens, {how}", self.count(400))
            }
            Name::Rounds => return Ok(self.rounds()),
            Name::Random => {
                let (input, output) = (shown(self.random_tokens()), shown(self.answer(64)));
                format!("random: {} requests of {input} tokens, answers of {output}, {how}", self.count(200))
            }
            Name::Trace => {
                let (path, trace) = self.read()?;
                let (requests, speed, shorten) = (trace.len(), self.speed, self.shorten);
                let name = format!(
                    "trace: {requests} requests of {path}, {speed} times as fast, {shorten} times shorter"
                );
                return Ok(Requested { name, workload: trace.into_workload(speed) });
            }
        };
        let asks = self.asks(name)?;
        let workload = match self.rate {
            Some(rate) => bursts(asks, rate, usize::from(self.burst), SEED),
            None => Workload::Closed { asks, concurrency: usize::from(self.concurrency) },
        };
        Ok(Requested { name: named, workload })
    }

    /// The workload of this name at any rate.
    ///
    /// # Errors
    /// [`Refused`] when its requests have no rate, too. See [`requested`](Self::requested).
    pub fn at_rates(&self, name: Name) -> anyhow::Result<AtRates> {
        match name {
            Name::Rounds => {
                refused("rounds are sent as answers end: --goodput needs another workload".to_owned())
            }
            Name::Trace => {
                let (_path, trace) = self.read()?;
                let rate = trace.requests_per_s();
                if rate == 0.0 {
                    return refused(
                        "all requests of the trace arrive at once: --goodput needs a rate".to_owned(),
                    );
                }
                let workload = move |wanted: f64| trace.clone().into_workload(wanted / rate);
                Ok(AtRates { rate, workload: Box::new(workload) })
            }
            Name::Shared | Name::Random => {
                let (asks, burst) = (self.asks(name)?, usize::from(self.burst));
                let workload = move |wanted: f64| bursts(asks.clone(), wanted, burst, SEED);
                Ok(AtRates { rate: self.rate.unwrap_or(1.0), workload: Box::new(workload) })
            }
        }
    }

    fn count(&self, standard: u32) -> usize {
        self.requests.unwrap_or(standard) as usize
    }

    fn answer(&self, standard: u32) -> u32 {
        self.output_tokens.unwrap_or(standard)
    }

    fn own_tokens(&self) -> u32 {
        self.input_tokens.unwrap_or(200)
    }

    fn random_tokens(&self) -> u32 {
        self.input_tokens.unwrap_or(1_024)
    }

    /// The requests of shared or random, without times.
    fn asks(&self, name: Name) -> anyhow::Result<Vec<Ask>> {
        if name == Name::Random {
            return Ok(unshared(self.count(200), self.random_tokens(), self.answer(64)));
        }
        for (flag, tokens) in [("--prefix-tokens", self.prefix_tokens), ("--input-tokens", self.own_tokens())]
        {
            if !tokens.is_multiple_of(BLOCK) {
                return refused(format!(
                    "{flag} {tokens}: prompts of shared consist of blocks, give a multiple of {BLOCK}"
                ));
            }
        }
        let shape = SharedPrefixes {
            prefixes: self.prefixes,
            prefix_tokens: self.prefix_tokens,
            suffix_tokens: self.own_tokens(),
            answer: self.answer(40),
            requests: self.count(400),
        };
        Ok(shape.asks(SEED))
    }

    fn rounds(&self) -> Requested {
        let (turns, concurrency) = (self.turns.len(), usize::from(self.concurrency));
        let number = self.count(400).div_ceil(turns);
        let name = format!("rounds: {number} conversations of {turns} turns, {concurrency} at once");
        Requested { name, workload: conversations(number, &self.turns, self.answer(60), concurrency) }
    }

    /// The trace, and the name of its file.
    fn read(&self) -> anyhow::Result<(String, Trace)> {
        let Some(path) = &self.trace else {
            return refused("--workload trace: give the file with the requests as --trace".to_owned());
        };
        if self.shorten == 0 || !TRACE_BLOCK.is_multiple_of(self.shorten) {
            return refused(format!("--shorten {}: give a divisor of {TRACE_BLOCK}", self.shorten));
        }
        let shown = path.display().to_string();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{shown} cannot be read (--trace)"))?;
        let most = self.requests.map(|requests| requests as usize);
        let trace = Trace::parse(&shown, &text, most).map_err(|wrong| Refused(wrong.to_string()))?;
        Ok((shown, trace.shortened(self.shorten)))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        load: Load,
    }

    fn load(flags: &str) -> Load {
        let flags = std::iter::once("test").chain(flags.split_whitespace());
        Flags::try_parse_from(flags).unwrap_or_else(|error| panic!("{error}")).load
    }

    #[test]
    fn workloads_have_the_sizes_of_the_flags() {
        let flags = "--requests 12 --concurrency 3 --prefixes 2 --prefix-tokens 50000 --input-tokens 4500 --output-tokens 7";
        let shared = load(flags).requested(Name::Shared).unwrap();
        assert_eq!(shared.name, "shared: 12 requests of 50,000 + 4,500 tokens, 3 at once");
        let Workload::Closed { asks, concurrency: 3 } = shared.workload else { panic!("not three at once") };
        assert!(asks.len() == 12 && asks.iter().all(|ask| (ask.prompt.tokens, ask.answer) == (54_500, 7)));

        let random = load("--input-tokens 333 --rate 9 --burst 5").requested(Name::Random).unwrap();
        assert_eq!(random.name, "random: 200 requests of 333 tokens, answers of 64, 9 a second, 5 together");
        let Workload::Open(asks) = random.workload else { panic!("no times") };
        assert!(asks[..5].iter().all(|ask| ask.at == asks[0].at) && asks[5].at > asks[4].at);

        let rounds = load("--turns 4000,500 --requests 5").requested(Name::Rounds).unwrap();
        let Workload::Conversations { turns, concurrency: 16 } = rounds.workload else { panic!("no rounds") };
        let tokens: Vec<u32> = turns[2].iter().map(|ask| ask.prompt.tokens).collect();
        assert_eq!((turns.len(), tokens), (3, vec![4_000, 500]));
    }

    #[test]
    fn a_search_has_the_requests_at_its_own_rates() {
        let found = load("--rate 3 --requests 400").at_rates(Name::Random).unwrap();
        let last = |rate| match (found.workload)(rate) {
            Workload::Open(asks) => asks[399].at.as_secs_f64(),
            other => panic!("{} requests without times", other.requests()),
        };
        assert_eq!((found.rate, (last(10.0) / last(20.0)).round()), (3.0, 2.0));
    }

    #[test]
    fn lengths_that_a_workload_cannot_have_are_refused_by_their_flag() {
        for (flags, name, said) in [
            ("--prefix-tokens 150", Name::Shared, "--prefix-tokens 150: prompts of shared consist of blocks"),
            ("--input-tokens 99", Name::Shared, "--input-tokens 99"),
            ("", Name::Trace, "--workload trace: give the file"),
            ("--trace none --shorten 3", Name::Trace, "--shorten 3: give a divisor of 512"),
        ] {
            let error = load(flags).requested(name).map(|requested| requested.name).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let error = load("").at_rates(Name::Rounds).map(|at| at.rate).unwrap_err().to_string();
        assert!(error.contains("--goodput needs another workload"), "{error}");
    }
}
