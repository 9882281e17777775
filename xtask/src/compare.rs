//! `cargo xtask compare`: compares the speed with that of llama.cpp.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use host_tests::fetched::Artifact;
use host_tests::gguf::retyped;
use host_tests::model::Stored;

use crate::node::Node;
use crate::server::Server;
use crate::workspace::{Profile, Workspace};
use crate::{client, fetch};

const HELP: &str = "\
Measure tokens per second of `host` and of llama.cpp on the same models and the same prompts.

Builds `host` as a release, fetches SmolLM2-135M (93 MB) and llama.cpp (20 MB, as the npm package node-llama-cpp builds it for
processors), and writes the model once more with F32 and with BF16 weights. Then the two take turns: prompts of made-up tokens,
prefill alone, then greedy decode, with 1 and with 8 of them at a time. `host` is called over HTTP as one aggregated worker
without a prefix cache; llama.cpp is called in its own process. Both have a thread for each core and their defaults: llama.cpp
keeps KV in f16, `host` in f32 for F32 weights and in bf16 otherwise. Prints a table of medians. Wants a machine that does nothing else.

Usage: cargo xtask compare [OPTIONS]

Options:
  --turns N    Turns of each program and row [default: 5]
  -h, --help   This text";

/// Tokens of a prompt, and of an answer.
const PROMPT: u32 = 512;
const ANSWER: u32 = 128;
/// Prompts at a time.
const STREAMS: [u32; 2] = [1, 8];

/// Seconds that one round takes.
#[derive(Clone, Copy, Debug)]
struct Seconds {
    prefill: f64,
    decode: f64,
}

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let mut turns = 5usize;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--turns" => {
                let number = rest.next().and_then(|turns| turns.parse().ok()).filter(|turns| *turns > 0);
                turns = number.context("--turns needs a number from 1")?;
            }
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            other => bail!("compare has no option {other:?}; see `cargo xtask compare --help`"),
        }
    }
    let workspace = Workspace::find()?;
    workspace.build(Profile::Release, &["host"])?;
    let problems = fetch::fetch(&workspace, [Artifact::SmolLm2, Artifact::LlamaCpp].into_iter());
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    let node = Node::find(&workspace).map_err(anyhow::Error::msg)?;
    let folder = workspace.target.join("compare");
    fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let threads = std::thread::available_parallelism().context("the number of cores")?.get();
    let machine = Machine { workspace, node, folder, threads };

    println!(
        "\n{PROMPT} tokens of a prompt, {ANSWER} of an answer; {threads} threads; medians of {turns} turns\n"
    );
    println!("| Weights | At a time | | `host`, tokens/s | llama.cpp, tokens/s | Ratio |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for (name, model) in machine.models()? {
        for streams in STREAMS {
            machine.row(name, &model, streams, turns)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The programs, folders and threads that both measurements use.
struct Machine {
    workspace: Workspace,
    node: Node,
    folder: PathBuf,
    threads: usize,
}

impl Machine {
    /// The model in each type of weights.
    fn models(&self) -> anyhow::Result<Vec<(&'static str, PathBuf)>> {
        let source = Artifact::SmolLm2.path_in(&self.workspace.target.join("fetched"));
        let mut models = Vec::new();
        for (name, stored) in [("F32", Stored::F32), ("BF16", Stored::Bf16)] {
            let path = self.folder.join(format!("smollm2-{name}.gguf"));
            fs::write(&path, retyped(&source, stored).bytes())
                .with_context(|| format!("{} cannot be written", path.display()))?;
            models.push((name, path));
        }
        models.push(("Q4_1", source));
        Ok(models)
    }

    /// Measures and prints one model with so many prompts at a time.
    fn row(&self, name: &str, model: &Path, streams: u32, turns: usize) -> anyhow::Result<()> {
        let prompts: Vec<Vec<u32>> = (0..streams).map(prompt).collect();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _turn in 0..turns {
            ours.push(self.host(model, &prompts)?);
            theirs.push(self.llama_cpp(model, &prompts)?);
        }
        let tokens = |each: u32, seconds: f64| f64::from(each * streams) / seconds;
        for (part, each, seconds) in [
            ("prefill", PROMPT, (|seconds| seconds.prefill) as fn(&Seconds) -> f64),
            ("decode", ANSWER, |seconds| seconds.decode),
        ] {
            let speed = |all: &[Seconds]| tokens(each, median(all.iter().map(seconds).collect()));
            let (ours, theirs) = (speed(&ours), speed(&theirs));
            println!("| {name} | {streams} | {part} | {ours:.0} | {theirs:.0} | {:.2} |", ours / theirs);
        }
        Ok(())
    }

    /// Measures a round of `host`, after a round that is not counted.
    fn host(&self, model: &Path, prompts: &[Vec<u32>]) -> anyhow::Result<Seconds> {
        let program = self.workspace.built(Profile::Release).join("host");
        let flags = ["--model", &model.display().to_string(), "--role", "aggregated"].map(str::to_owned);
        let more = ["--no-prefill-radix-cache", "--kv-memory", "1GiB"].map(str::to_owned);
        let flags: Vec<String> = flags.into_iter().chain(more).collect();
        let server = Server::start(&program, &flags, &self.folder, "host")?;
        let ask = |count: u32| -> anyhow::Result<f64> {
            let start = Instant::now();
            std::thread::scope(|scope| {
                let clients: Vec<_> = prompts
                    .iter()
                    .map(|prompt| scope.spawn(|| client::generate(&server.url, prompt, count)))
                    .collect();
                clients.into_iter().try_for_each(|client| match client.join() {
                    Ok(answered) => answered,
                    Err(_) => bail!("a client panicked"),
                })
            })?;
            Ok(start.elapsed().as_secs_f64())
        };
        ask(1)?;
        // The prefill gives the first token of an answer.
        let (prefill, whole) = (ask(1)?, ask(ANSWER + 1)?);
        server.stop()?;
        Ok(Seconds { prefill, decode: whole - prefill })
    }

    /// Measures a round of llama.cpp, after a round that is not counted.
    fn llama_cpp(&self, model: &Path, prompts: &[Vec<u32>]) -> anyhow::Result<Seconds> {
        let mut child = Command::new(&self.node.program)
            .arg(self.workspace.root.join("tests/node/speed.mjs"))
            .arg(self.workspace.target.join("fetched").join(Artifact::LlamaCpp.name()))
            .arg(model)
            .args([self.threads.to_string(), ANSWER.to_string(), "2".to_owned()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("Node.js cannot be run")?;
        let mut input = child.stdin.take().context("a piped standard input")?;
        input.write_all(json!(prompts).to_string().as_bytes()).context("Node.js reads no prompts")?;
        drop(input);
        let output = child.wait_with_output().context("Node.js cannot be waited for")?;
        ensure!(output.status.success(), "llama.cpp ended with {}", output.status);
        let rounds: Value = serde_json::from_slice(&output.stdout).context("speed.mjs printed no JSON")?;
        let last = rounds.as_array().and_then(|rounds| rounds.last()).context("no rounds")?;
        let seconds = |part: &str| last[part].as_f64().with_context(|| format!("no seconds of {part}"));
        Ok(Seconds { prefill: seconds("prefill")?, decode: seconds("decode")? })
    }
}

/// Tokens of a prompt. Each prompt has other ones, and none has the special ones at the vocabulary's beginning.
fn prompt(stream: u32) -> Vec<u32> {
    (0..PROMPT).map(|i| 1000 + ((stream * PROMPT + i).wrapping_mul(2_654_435_761) >> 8) % 40_000).collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
