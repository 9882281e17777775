//! Measures the gain and the cost of guesses: decode steps, processor time and wall time of answers, with `--speculate` and
//! without.
//!
//! `cargo xtask fetch smollm2 && cargo bench -p host --bench speculation [-- ROUNDS TOKENS MODEL]`
//!
//! Two clusters of a prefill and a decode worker of SmolLM2-135M-Instruct run side by side, one with `--speculate ngram`. They
//! answer the same requests, one at a time and in turns. The answers must be equal. Steps come from the decode worker's metrics,
//! its processor time from the kernel.
//!
//! - `chat, quotes`: requests to repeat and to change code, text and tables.
//! - `text, quotes`: texts that begin to repeat code, text and tables, to be continued.
//! - `chat, other`: letters and stories, drawn at temperature 0.8 so that they do not repeat themselves.

#![allow(clippy::disallowed_methods, reason = "measures real time")]

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use host_tests::cluster::{Cluster, Start};
use host_tests::fetched::Artifact;
use host_tests::plugin_files;
use serde_json::{Value, json};

const CODE: &str = "def total_price(items, discount):\n    total = 0\n    for item in items:\n        if item.count > 0:\n            \
                    total = total + item.price * item.count\n    if discount > 0:\n        total = total - total * discount\n    return total\n";
const TABLE: &str = "| City | Country | People |\n| --- | --- | --- |\n| Lisbon | Portugal | 545000 |\n| Porto | Portugal | 231000 |\n\
                     | Madrid | Spain | 3300000 |\n| Seville | Spain | 681000 |\n| Lyon | France | 522000 |\n| Nantes | France | 320000 |\n";
const TEXT: &str = "The harbour of the old town was built in three parts. The first part is the stone pier that the fishermen use in the \
                    morning. The second part is the wooden bridge over the river. The third part is the lighthouse, which is closed in winter.";

/// A request: its text, whether it is sent as a chat, and its temperature.
struct Request {
    asked: String,
    chat: bool,
    temperature: f64,
}

fn quotes() -> Vec<Request> {
    let asked = [
        format!("Repeat this Python function and rename the variable total to amount:\n\n{CODE}"),
        format!("Repeat this Python function exactly, without any changes:\n\n{CODE}"),
        format!("Repeat this table and add no text:\n\n{TABLE}"),
        format!("Correct the spelling of this text, and repeat all of it:\n\n{TEXT}"),
        format!("Write this text again, word by word, and then a summary of it:\n\n{TEXT}"),
        format!("Write the rows of this table as a JSON list of objects:\n\n{TABLE}"),
    ];
    asked.map(|asked| Request { asked, chat: true, temperature: 0.0 }).into()
}

fn continued() -> Vec<Request> {
    let code = |asked: &str| {
        format!(
            "Here is a Python function:\n\n```python\n{CODE}```\n\nThe same function{asked}:\n\n```python\n"
        )
    };
    let asked = [
        code(" with the variable total renamed to amount"),
        code(", with a docstring"),
        format!("A table:\n\n{TABLE}\nThe same table, sorted by the name of the city:\n\n"),
        format!("Text: {TEXT}\n\nThe same text with all spelling corrected: "),
        format!("Text: {TEXT}\n\nThe text in three sentences, one for each part:\n1."),
        format!(
            "A table:\n\n{TABLE}\nThe same as JSON:\n\n[\n  {{\"city\": \"Lisbon\", \"country\": \"Portugal\", \"people\": 545000}},\n"
        ),
    ];
    asked.map(|asked| Request { asked, chat: false, temperature: 0.0 }).into()
}

fn other() -> Vec<Request> {
    let asked = [
        "Write a letter to a friend about a walk in the mountains.",
        "Tell a story about a baker who finds a key in a loaf of bread.",
        "Explain why the sea is salty and rivers are not.",
        "Describe a day in the life of a postman in a small town.",
        "What should a traveller know before a journey through a desert?",
        "Write a short speech for the opening of a library.",
    ];
    asked.map(|asked| Request { asked: asked.to_owned(), chat: true, temperature: 0.8 }).into()
}

/// Work of a cluster's decode worker.
#[derive(Clone, Copy, Default)]
struct Done {
    tokens: f64,
    steps: f64,
    guessed: f64,
    right: f64,
    /// Processor time of all threads of its processes.
    cpu_seconds: f64,
    wall_seconds: f64,
}

impl Done {
    fn add(&mut self, from: &Self, to: &Self) {
        self.tokens += to.tokens - from.tokens;
        self.steps += to.steps - from.steps;
        self.guessed += to.guessed - from.guessed;
        self.right += to.right - from.right;
        self.cpu_seconds += to.cpu_seconds - from.cpu_seconds;
        self.wall_seconds += to.wall_seconds - from.wall_seconds;
    }
}

/// Processor time of a process so far, from `/proc/PID/stat` (proc(5): fields 14 and 15, in ticks of 10 ms).
fn cpu_seconds(process: u32) -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("a line of /proc without a name")?;
    let ticks = |field: usize| -> anyhow::Result<f64> {
        Ok(fields.split(' ').nth(field).context("a line of /proc is short")?.parse()?)
    };
    Ok((ticks(11)? + ticks(12)?) / 100.0)
}

fn now(cluster: &Cluster, begun: Instant) -> anyhow::Result<Done> {
    let metrics = cluster.metrics(&cluster.worker("decode"));
    let count = |name: &str| metrics.get(&format!("host_{name}_total")).copied().unwrap_or_default();
    Ok(Done {
        tokens: 0.0,
        steps: count("batches"),
        guessed: count("drafted_tokens"),
        right: count("drafted_tokens_right"),
        cpu_seconds: cpu_seconds(cluster.pid("decode").context("no decode worker")?)?,
        wall_seconds: begun.elapsed().as_secs_f64(),
    })
}

fn start(model: &Path, flags: &[&str]) -> (Cluster, tempfile::TempDir) {
    let plugins = plugin_files::directory(&["shm"]);
    let given =
        ["--model", &model.display().to_string(), "--plugins-dir", &plugins.path().display().to_string()]
            .map(str::to_owned);
    let flags = given.into_iter().chain(flags.iter().map(|flag| (*flag).to_owned())).collect();
    let program = Path::new(env!("CARGO_BIN_EXE_host"));
    (Cluster::start(&Start { program, flags, config: String::new(), workers: 2 }), plugins)
}

/// Sends a request. Returns the answer's text and its number of tokens.
fn ask(cluster: &Cluster, request: &Request, tokens: u64) -> anyhow::Result<(String, f64)> {
    let Request { asked, chat, temperature } = request;
    let (path, mut body) = match chat {
        true => ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": asked}]})),
        false => ("/v1/completions", json!({"prompt": asked})),
    };
    body["max_tokens"] = json!(tokens);
    body["temperature"] = json!(temperature);
    body["seed"] = json!(5);
    let (status, text) = cluster.post(path, &body.to_string()).map_err(anyhow::Error::msg)?;
    anyhow::ensure!(status == 200, "{text}");
    let answer: Value = serde_json::from_str(&text)?;
    let choice = &answer["choices"][0];
    let text =
        choice["message"]["content"].as_str().or_else(|| choice["text"].as_str()).context("no text")?;
    let count = answer["usage"]["completion_tokens"].as_f64().context("no usage")?;
    Ok((text.to_owned(), count))
}

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let number = |place: usize, default| {
        arguments.get(place).and_then(|argument| argument.parse().ok()).unwrap_or(default)
    };
    let (rounds, tokens) = (number(0, 2), number(1, 160));
    let model = arguments.get(2).map_or_else(|| Artifact::SmolLm2.path(), PathBuf::from);
    let clusters = [start(&model, &[]), start(&model, &["--speculate", "ngram"])];
    println!(
        "| Requests | Speculation | Tokens | Steps | Tokens a step | Guesses right | Processor time | Wall time |"
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for (name, requests) in
        [("chat, quotes", quotes()), ("text, quotes", continued()), ("chat, other", other())]
    {
        let mut done = [Done::default(); 2];
        for round in 0..rounds {
            for request in &requests {
                let mut answers = [const { String::new() }; 2];
                for turn in 0..2 {
                    let way = (turn + round as usize) % 2;
                    let cluster = &clusters[way].0;
                    let begun = Instant::now();
                    let before = now(cluster, begun)?;
                    let (text, count) = ask(cluster, request, tokens)?;
                    // Prefill draws the first.
                    let after = Done { tokens: count - 1.0, ..now(cluster, begun)? };
                    done[way].add(&before, &after);
                    answers[way] = text;
                }
                anyhow::ensure!(answers[0] == answers[1], "two answers to {:?}: {answers:#?}", request.asked);
            }
        }
        for (way, of) in ["off", "ngram"].iter().zip(&done) {
            println!(
                "| {name} | {way} | {} | {} | {:.2} | {} of {} | {:.2} s ({:.2} of off) | {:.2} s ({:.2} of off) |",
                of.tokens,
                of.steps,
                of.tokens / of.steps,
                of.right,
                of.guessed,
                of.cpu_seconds,
                of.cpu_seconds / done[0].cpu_seconds,
                of.wall_seconds,
                of.wall_seconds / done[0].wall_seconds
            );
        }
    }
    Ok(())
}
