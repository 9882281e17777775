//! Measures the cost of TLS inside a cluster: requests and hand-overs over connections with a shared secret, compared with plain
//! ones.
//!
//! `cargo build --release --workspace && cargo bench -p host --bench cluster_tls [-- ROUNDS SECONDS]`
//!
//! Two clusters of router, prefill and decode worker run side by side on 127.0.0.1, one of them with `--cluster-secret`. In each
//! round one cluster runs a case while the other waits, then they change places. The executor is synthetic and takes no time for a
//! token. Pages go through `shm`, which TLS does not affect. Notices of arrival and all other messages between router and workers
//! go over the connections that are compared.
//!
//! - `short`: 8 clients that stream answers of 16 tokens to prompts of 64.
//! - `long`: one client sends prompts of 2,048 tokens and gets answers of one token, so that most of the time is the hand-over of
//!   64 MiB.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

#[path = "multi_round/server.rs"]
#[allow(dead_code, reason = "the other benches look at metrics too")]
mod server;

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use host_tests::streaming::{Streamed, generate};
use server::{Server, Worker};

/// K and V of 8 layers, 8 heads and 64 elements of f32: 32 KiB for a token.
const MODEL: &str = "[synthetic]\nlayers = 8\nkv-heads = 8\nhead-dim = 64\n";
const POOL_PAGES: &str = "96";
const PAGE_TOKENS: &str = "64";

struct Case {
    name: &'static str,
    clients: usize,
    prompt: usize,
    answer: usize,
}

const CASES: [Case; 2] = [
    Case { name: "short", clients: 8, prompt: 64, answer: 16 },
    Case { name: "long", clients: 1, prompt: 2048, answer: 1 },
];

/// The figures of a cluster in a case, one for each round.
#[derive(Default)]
struct Figures {
    rate: Vec<f64>,
    first_ms: Vec<f64>,
    late_ms: Vec<f64>,
    mib: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let mut numbers = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let rounds = numbers.next().unwrap_or(5_usize);
    let seconds = numbers.next().unwrap_or(5_usize);
    anyhow::ensure!(rounds > 0 && seconds > 0, "at least one round of one second");
    let folder = tempfile::tempdir()?;
    let secret = folder.path().join("secret").display().to_string();
    let made = Command::new(env!("CARGO_BIN_EXE_host")).args(["certs", "secret", &secret]).output()?;
    anyhow::ensure!(made.status.success(), "no secret was made: {}", String::from_utf8_lossy(&made.stderr));
    let ways = [("plain", vec![]), ("TLS", vec!["--cluster-secret".to_owned(), secret])];
    let worker = || Worker {
        flags: ["--plugins", "shm", "--pool-pages", POOL_PAGES, "--page-size", PAGE_TOKENS]
            .iter()
            .map(|flag| (*flag).to_owned())
            .collect(),
        config: MODEL.to_owned(),
    };
    let clusters = ways
        .iter()
        .map(|(_, shared)| Server::start_with(shared, &worker(), &worker()))
        .collect::<anyhow::Result<Vec<_>>>()?;
    let mut figures: Vec<Figures> = (0..CASES.len() * ways.len()).map(|_| Figures::default()).collect();
    // The first round is not counted: it makes connections and touches memory.
    for round in 0..=rounds {
        for (number, case) in CASES.iter().enumerate() {
            for turn in 0..ways.len() {
                let way = (turn + round) % ways.len();
                let own = if round == 0 {
                    &mut Figures::default()
                } else {
                    &mut figures[number * ways.len() + way]
                };
                measure(clusters[way].url(), case, Duration::from_secs(seconds as u64), own)?;
            }
        }
    }
    println!("| Case | Cluster | Requests/s | First token, median | First token, 99 % | MiB handed over/s |");
    println!("| --- | --- | ---: | ---: | ---: | ---: |");
    for (case, of) in CASES.iter().zip(figures.chunks(ways.len())) {
        for ((way, _), own) in ways.iter().zip(of) {
            // Each ratio compares figures of the same round.
            let ratio = median(own.rate.iter().zip(&of[0].rate).map(|(own, plain)| own / plain).collect());
            println!(
                "| {} | {way} | {:.0} ({ratio:.2} of plain) | {:.2} ms | {:.2} ms | {:.0} |",
                case.name,
                median(own.rate.clone()),
                median(own.first_ms.clone()),
                median(own.late_ms.clone()),
                median(own.mib.clone()),
            );
        }
    }
    Ok(())
}

/// Lets the clients of a case send requests for `time`.
fn measure(url: &str, case: &Case, time: Duration, figures: &mut Figures) -> anyhow::Result<()> {
    let next = AtomicUsize::new(0);
    let begun = Instant::now();
    let client = || -> anyhow::Result<Vec<Streamed>> {
        let mut answers = Vec::new();
        while begun.elapsed() < time {
            // No two prompts share a prefix.
            let number = next.fetch_add(1, Ordering::Relaxed);
            let prompt: Vec<u32> = (0..case.prompt)
                .map(|token| ((token * 7 + number * 13 + token / 100) % 250) as u32)
                .collect();
            answers.push(generate(url, &prompt, case.answer).map_err(anyhow::Error::msg)?);
        }
        Ok(answers)
    };
    let answers = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..case.clients).map(|_| scope.spawn(client)).collect();
        let answers = clients.into_iter().map(|client| match client.join() {
            Ok(answers) => answers,
            Err(_panic) => anyhow::bail!("a client panicked"),
        });
        answers.collect::<anyhow::Result<Vec<_>>>()
    })?;
    let answers: Vec<Streamed> = answers.into_iter().flatten().collect();
    let seconds = begun.elapsed().as_secs_f64();
    let mut first: Vec<f64> = Vec::new();
    for answer in &answers {
        let read = answer.read.first().context("an answer without a token")?;
        first.push((*read - answer.sent).as_secs_f64() * 1e3);
    }
    first.sort_unstable_by(f64::total_cmp);
    let bytes: u64 = answers.iter().map(|answer| answer.transferred_bytes).sum();
    anyhow::ensure!(bytes > 0, "nothing was handed over");
    figures.rate.push(answers.len() as f64 / seconds);
    figures.first_ms.push(first[first.len() / 2]);
    figures.late_ms.push(first[first.len() * 99 / 100]);
    figures.mib.push(bytes as f64 / seconds / f64::from(1 << 20));
    Ok(())
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_unstable_by(f64::total_cmp);
    of[of.len() / 2]
}
