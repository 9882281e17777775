//! Measures how many requests a decode pool of fixed bytes holds, and how many end per second, when most layers see only a window:
//! three ways to allocate memory, in one run.
//!
//! `cargo build --release --workspace && cargo bench -p host --bench sliding_window [-- REQUESTS SLIDING...]`
//!
//! Prompts have 8192 tokens, answers 128, the window 128, and pages 64 or 256. Models have six layers, of which three slide (as
//! in gpt-oss) or five (as in Gemma-3), or as many as are named. 64 requests are in flight. The synthetic executor's decode steps
//! take 17.4 ms and 0.417 ms per sequence, as in the bench `shared_prefixes`. The pool holds eight whole requests of the first
//! arm.
//!
//! - `whole`: every layer keeps every token, as if no layer slid. One pool.
//! - `tail`: as in SGLang's pull request 24857 with the default `--swa-full-tokens-ratio` of 0.8. The memory is divided in advance:
//!   a part of N tokens for the layers that see everything, and a part of 0.8 N tokens for the sliding layers. A request takes all
//!   its tokens from the first part and the tail of its window from the second. This is `host` with the same flag.
//! - `shared`: `host` by default: one pool whose pages serve both kinds of layers.
//!
//! Requests held are the mean number of requests that have their first token and not yet their last, over the middle of the run, as
//! clients see it. Requests per second are those that end in the middle. The middle begins when a quarter of the requests has
//! ended, and ends when three quarters have.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

#[path = "../multi_round/server.rs"]
#[allow(dead_code, reason = "the other bench looks at metrics too")]
mod server;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use host_tests::streaming::{Streamed, generate};
use server::{Server, Worker};

const IN_FLIGHT: usize = 64;
const PROMPT: usize = 8192;
const ANSWER: usize = 128;
const WINDOW: usize = 128;
const LAYERS: usize = 6;
/// Bytes of K and V in one layer: one head of four elements, f32.
const TOKEN_BYTES: usize = 2 * 4 * 4;
/// Whole requests that the pool holds when all layers keep all tokens.
const FITTING: usize = 8;
const RATIO: &str = "0.8";
const STEP_US: usize = 17_400;
const SEQUENCE_US: usize = 417;
const PREFILL_TOKEN_US: usize = 2;

/// One way to allocate memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arm {
    Whole,
    Tail,
    Shared,
}

/// A model and a page size.
#[derive(Clone, Copy, Debug)]
struct Setting {
    sliding: usize,
    page_tokens: usize,
}

impl Setting {
    /// Token pages of a whole request.
    fn request(self) -> usize {
        (PROMPT + ANSWER).div_ceil(self.page_tokens)
    }

    /// The pool, in bytes.
    fn bytes(self) -> usize {
        FITTING * self.request() * self.page_tokens * LAYERS * TOKEN_BYTES
    }

    /// Bytes of a page of the pool with this number of layers.
    fn page(self, layers: usize) -> usize {
        layers * self.page_tokens * TOKEN_BYTES
    }

    /// Number of pages in the arm's pool.
    fn pages(self, arm: Arm) -> usize {
        let full = LAYERS - self.sliding;
        match arm {
            Arm::Whole => self.bytes() / self.page(LAYERS),
            Arm::Tail | Arm::Shared => self.bytes() / self.page(full),
        }
    }
}

/// The figures of one run.
struct Row {
    arm: Arm,
    setting: Setting,
    held: f64,
    rate: f64,
    bytes: u64,
}

fn main() -> anyhow::Result<()> {
    let mut numbers = std::env::args().skip(1).filter_map(|argument| argument.parse().ok());
    let requests: usize = numbers.next().unwrap_or(128);
    anyhow::ensure!(requests >= 2 * IN_FLIGHT, "at least {} requests, or there is no middle", 2 * IN_FLIGHT);
    let mut named: Vec<usize> = numbers.collect();
    if named.is_empty() {
        named = vec![3, 5];
    }
    anyhow::ensure!(
        named.iter().all(|sliding| (1..LAYERS).contains(sliding)),
        "1 to {} layers slide",
        LAYERS - 1
    );
    println!("| sliding layers | page | memory | requests held | requests/s | KV moved per request |");
    println!("| ---: | ---: | --- | ---: | ---: | ---: |");
    for (sliding, page_tokens) in named.into_iter().flat_map(|sliding| [(sliding, 64), (sliding, 256)]) {
        let setting = Setting { sliding, page_tokens };
        let mut whole: Option<(f64, f64)> = None;
        for arm in [Arm::Whole, Arm::Tail, Arm::Shared] {
            let row = measure(arm, setting, requests)?;
            let (held, rate) = *whole.get_or_insert((row.held, row.rate));
            println!(
                "| {} of {LAYERS} | {} | {} | {:.1} ({:.2}x) | {:.2} ({:.2}x) | {} KiB |",
                row.setting.sliding,
                row.setting.page_tokens,
                format!("{:?}", row.arm).to_lowercase(),
                row.held,
                row.held / held,
                row.rate,
                row.rate / rate,
                row.bytes / 1024
            );
        }
    }
    Ok(())
}

fn measure(arm: Arm, setting: Setting, requests: usize) -> anyhow::Result<Row> {
    let model = match arm {
        Arm::Whole => String::new(),
        Arm::Tail | Arm::Shared => format!("sliding-layers = {}\nwindow = {WINDOW}\n", setting.sliding),
    };
    let worker = |pages: usize, own: &[&str], cost: &str| Worker {
        flags: [
            ("--pool-pages", pages),
            ("--page-size", setting.page_tokens),
            ("--reserved-decode-tokens", ANSWER),
        ]
        .iter()
        .flat_map(|(flag, value)| [(*flag).to_owned(), value.to_string()])
        .chain(["--chunk-tokens", "2048", "--max-batch", "256"].map(str::to_owned))
        .chain(own.iter().map(|flag| (*flag).to_owned()))
        .collect(),
        config: format!("[synthetic]\nlayers = {LAYERS}\nkv-heads = 1\nhead-dim = 4\n{model}{cost}"),
    };
    let own: &[&str] = if arm == Arm::Tail { &["--swa-full-tokens-ratio", RATIO] } else { &[] };
    // The prefill worker is no bottleneck: it has room for all requests in flight, whatever the arm.
    let prefill =
        worker(2 * IN_FLIGHT * setting.request(), &[], &format!("prefill-token-us = {PREFILL_TOKEN_US}\n"));
    let decode =
        worker(setting.pages(arm), own, &format!("step-us = {STEP_US}\nsequence-us = {SEQUENCE_US}\n"));
    let server = Server::start(&prefill, &decode)?;
    let answers = run(server.url(), requests)?;
    let mut ends: Vec<Instant> = answers.iter().filter_map(|answer| answer.read.last().copied()).collect();
    ends.sort_unstable();
    let (from, to) = (ends[requests / 4], ends[requests * 3 / 4]);
    let time = (to - from).as_secs_f64();
    let overlap = |answer: &Streamed| match (answer.read.first(), answer.read.last()) {
        (Some(first), Some(last)) => {
            (*last).min(to).saturating_duration_since((*first).max(from)).as_secs_f64()
        }
        _ => 0.0,
    };
    Ok(Row {
        arm,
        setting,
        held: answers.iter().map(overlap).sum::<f64>() / time,
        rate: (requests * 3 / 4 - requests / 4) as f64 / time,
        bytes: answers.iter().map(|answer| answer.transferred_bytes).sum::<u64>() / requests as u64,
    })
}

/// Sends all requests, each with another prompt.
fn run(url: &str, requests: usize) -> anyhow::Result<Vec<Streamed>> {
    let next = AtomicUsize::new(0);
    let answers = Mutex::new(Vec::new());
    let client = || -> anyhow::Result<()> {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= requests {
                return Ok(());
            }
            let prompt: Vec<u32> =
                (0..PROMPT).map(|token| ((token * 7 + number * 13 + token / 100) % 250) as u32).collect();
            let answer = generate(url, &prompt, ANSWER).map_err(anyhow::Error::msg)?;
            answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        }
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..IN_FLIGHT).map(|_| scope.spawn(client)).collect();
        clients.into_iter().try_for_each(|client| match client.join() {
            Ok(result) => result,
            Err(_panic) => anyhow::bail!("a client panicked"),
        })
    })?;
    Ok(answers.into_inner().unwrap_or_else(PoisonError::into_inner))
}
