//! Measures conversations of six rounds with the real server, with caches on the decode worker and without. It follows the table
//! that SGLang published for its hierarchical cache on decode (pull request 26227), scaled to this machine.
//!
//! `cargo build --release --workspace && cargo bench -p host --bench multi_round [-- SCALE [CONVERSATIONS [PASSES]] [ARM...]]`
//!
//! There a prompt has 4K tokens, and each round adds 8K of an answer and 4K of a question: 4K, 16K, .. 64K. Here all lengths are
//! divided by `SCALE` (8 by default; 32 takes a quarter of the time). So are the tokens of a prefill step, 8K there, which is
//! SGLang's default on a GPU of 80 GB. As there, the prefill worker has both caches and storage in every arm: the hits in the first
//! column of that table are exactly the prompt of the round before (0.25 of 16K), and with storage on decode also the answers
//! (0.75).
//!
//! - time: a decode step takes 9.8 ms (there 40.3 ms between tokens), a prompt's token 30 us. From rounds 0 and 1 of that table,
//!   the time to the first token is 0.57 ms for each computed token. If eight prompts are computed at once there as here, their
//!   mean wait is 4.5 times that of one, so a token takes 0.127 ms. Both steps and tokens are divided by 4.1, so the ratio of
//!   answers' times to prompts' times is as there, and all times are divided by 4.1 x `SCALE`.
//! - memory: 512 bytes of KV a token, there 256 KiB (Qwen 32B: 64 layers, 8 heads of 128, bf16). The synthetic executor reads all
//!   KV of a sequence in every step, and more KV would make it slower than the modelled steps. KV moves through memory here and not
//!   over a network, at almost no cost compared with computing. So the transfers that decode's own hits save, much of the gain
//!   there, hardly show in times. The bytes are counted.
//! - eight of sixteen conversations run at once. The next round begins when the last one has ended. Decode's pool holds nine whole
//!   sequences (eight and an eighth of that), and host memory one and a half times as many: the working set exceeds the pool from
//!   round 3 on, and host memory in round 5. The prefill worker's are as large. The published table does not give the sizes of the
//!   pools, and it gives the load.
//!
//! The client measures times when it reads. TPOT is the time from the first token to the last, divided by the number of tokens
//! after the first. All arms run one after the other, each on its own servers and storage, and again in each of the `PASSES`. A
//! time is the median of the passes, which one disturbance does not change.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

mod load;
mod report;
mod server;

use std::path::Path;

use load::Load;
use report::{Measured, Round};
use server::{Server, Worker};

/// Rounds of a conversation.
const ROUNDS: usize = 6;
/// Tokens of a question and of an answer, before they are scaled.
const QUESTION: usize = 4096;
const ANSWER: usize = 8192;
/// Tokens of a prefill step: SGLang's default on a GPU of 80 GB.
const CHUNK: usize = 8192;
/// Conversations at once.
const AT_ONCE: usize = 8;
const PAGE_TOKENS: usize = 16;
const PREFILL_TOKEN_US: usize = 30;
const STEP_US: usize = 9_800;
/// 512 bytes a token.
const MODEL: &str = "[synthetic]\nlayers = 2\nkv-heads = 1\nhead-dim = 32\n";
const TOKEN_BYTES: usize = 512;

/// One way to serve: the flags of the decode worker.
pub struct Arm {
    name: &'static str,
    /// Flags of the decode worker.
    flags: &'static [&'static str],
}

const L2: [&str; 2] = ["--decode-radix-cache", "--hierarchical-cache"];
const ARMS: [Arm; 4] = [
    Arm { name: "off", flags: &[] },
    Arm { name: "L1", flags: &["--decode-radix-cache"] },
    Arm { name: "L1+L2", flags: &L2 },
    Arm { name: "L1+L2+L3", flags: &[L2[0], L2[1], "--hicache-storage", "hicache-file"] },
];

/// Sizes of a run.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of a question.
    pub question: usize,
    /// Tokens of an answer.
    pub answer: usize,
    /// Tokens of a prefill step.
    pub chunk: usize,
    /// Number of conversations.
    pub conversations: usize,
}

impl Sizes {
    /// Tokens of a prompt.
    pub fn prompt(&self, round: usize) -> usize {
        self.question + round * (self.question + self.answer)
    }

    /// Pages of a worker's pool.
    fn pool(&self) -> usize {
        let whole = (self.prompt(ROUNDS - 1) + self.answer).div_ceil(PAGE_TOKENS) + 1;
        AT_ONCE * whole * 9 / 8
    }
}

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let mut numbers = words.iter().filter_map(|word| word.parse().ok());
    let scale: usize = numbers.next().unwrap_or(8);
    let conversations: usize = numbers.next().unwrap_or(2 * AT_ONCE);
    let passes: usize = numbers.next().unwrap_or(1);
    anyhow::ensure!((1..=256).contains(&scale), "a scale of 1 to 256, not {scale}");
    anyhow::ensure!((1..=99).contains(&passes), "1 to 99 passes, not {passes}");
    let names: Vec<&String> = words.iter().filter(|word| word.parse::<usize>().is_err()).collect();
    let known = |name: &&&String| ARMS.iter().any(|arm| arm.name == **name);
    anyhow::ensure!(names.iter().all(|name| known(&name)), "arms are off, L1, L1+L2 and L1+L2+L3");
    let [question, answer, chunk] = [QUESTION, ANSWER, CHUNK].map(|tokens| tokens / scale);
    let sizes = Sizes { question, answer, chunk, conversations };
    let wanted = |arm: &&Arm| names.is_empty() || names.iter().any(|name| *name == arm.name);
    let arms: Vec<&Arm> = ARMS.iter().filter(wanted).collect();
    let mut measured: Vec<Measured> =
        arms.iter().map(|arm| Measured { arm: arm.name, passes: Vec::new() }).collect();
    for pass in 0..passes {
        eprintln!("pass {pass} of {passes}");
        for (arm, measured) in arms.iter().zip(&mut measured) {
            measured.passes.push(measure(arm, sizes)?);
        }
    }
    report::print(&measured, sizes);
    Ok(())
}

fn measure(arm: &Arm, sizes: Sizes) -> anyhow::Result<Vec<Round>> {
    let store = tempfile::tempdir()?;
    let server = start(arm, sizes, store.path())?;
    let mut load = Load::new(sizes);
    let mut rounds = Vec::new();
    let mut before = [server.metrics("prefill"), server.metrics("decode")];
    for number in 0..ROUNDS {
        let answers = load.round(server.url(), number)?;
        let after = [server.metrics("prefill"), server.metrics("decode")];
        let round = Round::of(answers, sizes.prompt(number), &before, &after);
        eprintln!("{}, round {number}: {round}", arm.name);
        rounds.push(round);
        before = after;
    }
    Ok(rounds)
}

fn start(arm: &Arm, sizes: Sizes, store: &Path) -> anyhow::Result<Server> {
    let pool = sizes.pool();
    let memory = pool * PAGE_TOKENS * TOKEN_BYTES * 3 / 2;
    let worker = |own: &[&str], step: usize| {
        let mut flags: Vec<String> = own.iter().map(|flag| (*flag).to_owned()).collect();
        if own.contains(&"--hierarchical-cache") {
            flags.extend(["--hicache-memory".to_owned(), memory.to_string()]);
        }
        flags.extend(["--pool-pages".to_owned(), pool.to_string()]);
        flags.extend(["--chunk-tokens".to_owned(), sizes.chunk.to_string()]);
        flags.extend(["--max-batch", "64"].map(str::to_owned));
        let mut config = format!("{MODEL}prefill-token-us = {PREFILL_TOKEN_US}\nstep-us = {step}\n");
        if own.contains(&"hicache-file") {
            config += &format!("[plugin.hicache-file]\ndir = {:?}\n", store.join("pages"));
        }
        Worker { flags, config }
    };
    let prefill = ["--prefill-radix-cache", "--hierarchical-cache", "--hicache-storage", "hicache-file"];
    Server::start(&worker(&prefill, 0), &worker(arm.flags, STEP_US))
}
