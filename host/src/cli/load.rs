//! The flags that describe requests, for `host bench live` and `host simulate`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use host_simulate::traffic::{Ask, LATEST_ARRIVAL};
use host_simulate::workloads::{BLOCK, SharedPrefixes, bursts, conversations, unshared};
use host_simulate::{Trace, Workload};

use super::Refused;

/// Tokens that each turn of a conversation adds.
const TURNS: [u32; 6] = [1_000, 300, 300, 300, 300, 300];
/// The most tokens of all prompts and answers together.
const MOST_TOKENS: u64 = 2_000_000_000;
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

impl Name {
    /// The name as a flag has it.
    pub fn shown(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

/// What is sent.
#[derive(Args, Debug)]
pub struct Load {
    /// The requests of the workload `trace`: JSON lines in Mooncake's format
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Requests of a workload, or the first ones of a trace [default: 400 of shared and rounds, 200 of random, all of a trace]
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: Option<u32>,

    /// Requests in flight at once, of workloads whose next request is sent when one has ended [default: 16]
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u16).range(1..))]
    concurrency: Option<u16>,

    /// Requests a second of shared and random, which then arrive independently of each other [default: as answers end]
    #[arg(long, value_name = "REQUESTS", value_parser = pace)]
    rate: Option<f64>,

    /// Requests that arrive together, where they arrive at a rate [default: 1]
    #[arg(long, value_name = "REQUESTS", value_parser = clap::value_parser!(u16).range(1..))]
    burst: Option<u16>,

    /// Different beginnings of the prompts of shared [default: 10]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    prefixes: Option<u64>,

    /// Tokens of such a beginning, a multiple of 100 [default: 2000]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prefix_tokens: Option<u32>,

    /// Tokens of a prompt of random, and those of shared behind the beginning, a multiple of 100 [default: 1024 and 200]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    input_tokens: Option<u32>,

    /// Tokens that each turn of rounds adds to what was said before [default: 1000,300,300,300,300,300]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    turns: Option<Vec<u32>>,

    /// Tokens of an answer [default: 40 of shared, 60 of rounds, 64 of random]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    output_tokens: Option<u32>,

    /// How many times as fast as in the trace its requests arrive [default: 1]
    #[arg(long, value_name = "FACTOR", value_parser = pace)]
    speed: Option<f64>,

    /// Makes prompts and answers of the trace so many times shorter: a divisor of 512 [default: 1]
    #[arg(long, value_name = "DIVISOR")]
    shorten: Option<u32>,
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
    /// The slowest rate at which the last request still arrives in time.
    pub slowest: f64,
    /// The workload with so many requests per second.
    pub workload: Box<dyn Fn(f64) -> Workload>,
}

fn pace(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (0.01..=1e6).contains(&number) {
        Ok(number)
    } else {
        Err("give a number from 0.01 to 1000000".to_owned())
    }
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

/// Checks that so many requests, or conversations, of so many tokens of prompts and answers fit the memory.
fn fits(number: usize, tokens: u64) -> anyhow::Result<()> {
    if number as u64 * tokens > MOST_TOKENS {
        return refused(format!(
            "{number} times {tokens} tokens of prompt and answer: at most {MOST_TOKENS} tokens together, give fewer --requests"
        ));
    }
    Ok(())
}

/// A workload at any rate, from this one on.
fn at_rates(rate: f64, workload: impl Fn(f64) -> Workload + 'static) -> anyhow::Result<AtRates> {
    let last = match in_time(workload(rate))? {
        Workload::Open(asks) => asks.last().map_or(0.0, |ask| ask.at.as_secs_f64()),
        Workload::Closed { .. } | Workload::Conversations { .. } => 0.0,
    };
    let slowest = rate * last / LATEST_ARRIVAL.as_secs_f64();
    Ok(AtRates { rate, slowest, workload: Box::new(workload) })
}

/// Checks that the last request of a workload arrives soon enough.
fn in_time(workload: Workload) -> anyhow::Result<Workload> {
    let Workload::Open(asks) = &workload else { return Ok(workload) };
    let last = asks.last().map_or(0, |ask| ask.at.as_secs());
    let most = LATEST_ARRIVAL.as_secs();
    if last > most {
        return refused(format!(
            "the last request arrives after {last} s: at most {most} s, send them faster"
        ));
    }
    Ok(workload)
}

impl Load {
    /// Checks that each given flag belongs to one of these workloads. With `rated`, requests arrive at rates that a search chooses.
    ///
    /// # Errors
    /// [`Refused`] with a flag that none of them has.
    pub fn check(&self, names: &[Name], rated: bool) -> Result<(), Refused> {
        if self.burst.is_some() && self.rate.is_none() && !rated {
            return Err(Refused("--burst: give the --rate, too".to_owned()));
        }
        const RATED: &[Name] = &[Name::Shared, Name::Random];
        const GENERATED: &[Name] = &[Name::Shared, Name::Rounds, Name::Random];
        let in_flight = if self.rate.is_some() { &[Name::Rounds] } else { GENERATED };
        let flags = [
            ("--trace", self.trace.is_some(), &[Name::Trace][..]),
            ("--concurrency", self.concurrency.is_some(), in_flight),
            ("--rate", self.rate.is_some(), RATED),
            ("--burst", self.burst.is_some(), RATED),
            ("--prefixes", self.prefixes.is_some(), &[Name::Shared]),
            ("--prefix-tokens", self.prefix_tokens.is_some(), &[Name::Shared]),
            ("--input-tokens", self.input_tokens.is_some(), RATED),
            ("--turns", self.turns.is_some(), &[Name::Rounds]),
            ("--output-tokens", self.output_tokens.is_some(), GENERATED),
            ("--speed", self.speed.is_some(), &[Name::Trace]),
            ("--shorten", self.shorten.is_some(), &[Name::Trace]),
        ];
        let unused =
            |(_, given, of): &(&str, bool, &[Name])| *given && !names.iter().any(|name| of.contains(name));
        let Some((flag, _, of)) = flags.into_iter().find(unused) else { return Ok(()) };
        let sent: Vec<String> = names.iter().map(|name| name.shown()).collect();
        let sent = sent.join(",");
        let of: Vec<String> = of.iter().map(|name| name.shown()).collect();
        let (of, rated) = (of.join(", "), if flag == "--concurrency" { " without --rate" } else { "" });
        Err(Refused(format!("{flag}: the workload {sent} has no use for it, only {of}{rated}: leave it out")))
    }

    /// Requests in flight at once, of workloads that limit them.
    pub fn concurrency(&self) -> u16 {
        self.concurrency.unwrap_or(16)
    }

    /// The workload of this name.
    ///
    /// # Errors
    /// [`Refused`] when the trace or a length is wrong or missing. Another error when the trace cannot be read.
    pub fn requested(&self, name: Name) -> anyhow::Result<Requested> {
        let how = match self.rate {
            Some(rate) if self.burst() > 1 => format!("{rate} a second, {} together", self.burst()),
            Some(rate) => format!("{rate} a second"),
            None => format!("{} at once", self.concurrency()),
        };
        let named = match name {
            Name::Shared => {
                let (beginning, own) = (shown(self.prefix_tokens()), shown(self.own_tokens()));
                format!("shared: {} requests of {beginning} + {own} tokens, {how}", self.count(400))
            }
            Name::Rounds => return self.rounds(),
            Name::Random => {
                let (input, output) = (shown(self.random_tokens()), shown(self.answer(64)));
                format!("random: {} requests of {input} tokens, answers of {output}, {how}", self.count(200))
            }
            Name::Trace => {
                let (path, trace) = self.read()?;
                let (requests, speed, shorten) = (trace.len(), self.speed.unwrap_or(1.0), self.shorten());
                let name = format!(
                    "trace: {requests} requests of {path}, {speed} times as fast, {shorten} times shorter"
                );
                return Ok(Requested { name, workload: in_time(trace.into_workload(speed))? });
            }
        };
        let asks = self.asks(name)?;
        let workload = match self.rate {
            Some(rate) => bursts(asks, rate, self.burst(), SEED),
            None => Workload::Closed { asks, concurrency: usize::from(self.concurrency()) },
        };
        Ok(Requested { name: named, workload: in_time(workload)? })
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
                at_rates(rate, workload)
            }
            Name::Shared | Name::Random => {
                let (asks, burst) = (self.asks(name)?, self.burst());
                let workload = move |wanted: f64| bursts(asks.clone(), wanted, burst, SEED);
                at_rates(self.rate.unwrap_or(1.0), workload)
            }
        }
    }

    fn count(&self, standard: u32) -> usize {
        self.requests.unwrap_or(standard) as usize
    }

    fn answer(&self, standard: u32) -> u32 {
        self.output_tokens.unwrap_or(standard)
    }

    fn burst(&self) -> usize {
        self.burst.map_or(1, usize::from)
    }

    fn prefix_tokens(&self) -> u32 {
        self.prefix_tokens.unwrap_or(2_000)
    }

    fn shorten(&self) -> u32 {
        self.shorten.unwrap_or(1)
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
            fits(self.count(200), u64::from(self.random_tokens()) + u64::from(self.answer(64)))?;
            return Ok(unshared(self.count(200), self.random_tokens(), self.answer(64)));
        }
        for (flag, tokens) in
            [("--prefix-tokens", self.prefix_tokens()), ("--input-tokens", self.own_tokens())]
        {
            if !tokens.is_multiple_of(BLOCK) {
                return refused(format!(
                    "{flag} {tokens}: prompts of shared consist of blocks, give a multiple of {BLOCK}"
                ));
            }
        }
        let tokens = [self.prefix_tokens(), self.own_tokens(), self.answer(40)].map(u64::from);
        fits(self.count(400), tokens.iter().sum())?;
        let shape = SharedPrefixes {
            prefixes: self.prefixes.unwrap_or(10),
            prefix_tokens: self.prefix_tokens(),
            suffix_tokens: self.own_tokens(),
            answer: self.answer(40),
            requests: self.count(400),
        };
        Ok(shape.asks(SEED))
    }

    fn rounds(&self) -> anyhow::Result<Requested> {
        let turns = self.turns.as_deref().unwrap_or(&TURNS);
        let concurrency = usize::from(self.concurrency());
        let number = self.count(400).div_ceil(turns.len());
        let name = format!("rounds: {number} conversations of {} turns, {concurrency} at once", turns.len());
        let tokens = turns.iter().map(|turn| u64::from(*turn) + u64::from(self.answer(60)));
        fits(number, tokens.sum())?;
        Ok(Requested { name, workload: conversations(number, turns, self.answer(60), concurrency) })
    }

    /// The trace, and the name of its file.
    fn read(&self) -> anyhow::Result<(String, Trace)> {
        let Some(path) = &self.trace else {
            return refused("--workload trace: give the file with the requests as --trace".to_owned());
        };
        let shorten = self.shorten();
        if shorten == 0 || !Trace::BLOCK.is_multiple_of(shorten) {
            return refused(format!("--shorten {shorten}: give a divisor of {}", Trace::BLOCK));
        }
        let shown = path.display().to_string();
        let text =
            std::fs::read_to_string(path).with_context(|| format!("{shown} cannot be read (--trace)"))?;
        let most = self.requests.map(|requests| requests as usize);
        let trace = Trace::parse(&shown, &text, most).map_err(|wrong| Refused(wrong.to_string()))?;
        Ok((shown, trace.shortened(shorten)))
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
        let most = LATEST_ARRIVAL.as_secs_f64();
        assert!((last(found.slowest) / most - 1.0).abs() < 1e-6, "{}", found.slowest);
        let late = load("--rate 0.01 --requests 400 --burst 400").at_rates(Name::Random);
        assert!(late.is_ok());
        let late = load("--rate 0.01 --requests 1000000 --input-tokens 1").at_rates(Name::Random);
        assert!(late.is_err_and(|error| error.to_string().contains("send them faster")));
    }

    #[test]
    fn a_flag_that_no_workload_uses_is_refused() {
        for (flags, names, said) in [
            (
                "--rate 2",
                &[Name::Rounds][..],
                "--rate: the workload rounds has no use for it, only shared, random",
            ),
            (
                "--rate 2 --concurrency 3",
                &[Name::Shared],
                "--concurrency: the workload shared has no use for it",
            ),
            ("--speed 2", &[Name::Random], "--speed"),
            ("--shorten 2", &[Name::Shared, Name::Rounds], "--shorten: the workload shared,rounds"),
            ("--trace file", &[Name::Shared], "--trace"),
            ("--turns 5", &[Name::Shared], "--turns"),
            ("--burst 5", &[Name::Random], "--burst: give the --rate"),
            ("--burst 5 --rate 2", &[Name::Rounds], "--rate"),
            ("--prefixes 5", &[Name::Random], "--prefixes"),
            ("--prefix-tokens 500", &[Name::Rounds], "--prefix-tokens"),
            ("--input-tokens 500", &[Name::Trace], "--input-tokens"),
            ("--output-tokens 5", &[Name::Trace], "--output-tokens"),
        ] {
            let Refused(error) = load(flags).check(names, false).unwrap_err();
            assert!(error.starts_with(said), "{error}");
        }
        let both = [Name::Shared, Name::Rounds];
        load("--rate 2 --concurrency 3 --turns 5 --prefixes 4").check(&both, false).unwrap();
        load("--burst 2").check(&[Name::Random], true).unwrap();
    }

    #[test]
    fn paces_and_sizes_beyond_their_bounds_are_refused() {
        for flag in ["--rate=1e-20", "--speed=1e-30", "--rate=1e300", "--rate=nan", "--speed=-1"] {
            let said = Flags::try_parse_from(["test", flag]).map(|_| ()).unwrap_err().to_string();
            assert!(said.contains("give a number from 0.01 to 1000000"), "{said}");
        }
        for (flags, name, said) in [
            (
                "--requests 1000000 --prefix-tokens 1000000",
                Name::Shared,
                "at most 2000000000 tokens together",
            ),
            ("--requests 1000000 --input-tokens 1000000", Name::Random, "at most 2000000000 tokens together"),
            ("--requests 1000000 --turns 1000000", Name::Rounds, "at most 2000000000 tokens together"),
            ("--requests 1000000 --output-tokens 100000", Name::Random, "at most 2000000000 tokens together"),
            ("--rate 0.01 --burst 65535", Name::Random, "at most 2592000 s, send them faster"),
        ] {
            let error = load(flags).requested(name).map(|requested| requested.name).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
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
