//! `cargo xtask demo`: one prefill worker, one decode worker and a router against one undivided worker.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};

use crate::client::{Answer, Endpoint, transferred_bytes};
use crate::server::Server;
use crate::workspace::{Profile, Workspace};

const HELP: &str = "\
Serve a small model with prefill and decode split, and compare with one undivided worker.

Builds the workspace, makes a small model with random weights (so the answers are nonsense), starts a router, a
prefill worker and a decode worker that move KV cache through the shm plugin, streams some prompts, sends the same
prompts to `host --role aggregated`, and compares every token and its log probability. Exit code 0 only when all are
equal and KV moved for every prompt.

Usage: cargo xtask demo [OPTIONS]

Options:
  --model DIR    Use this Hugging Face directory (Qwen3, Llama or Gemma-3) instead of the small model
  --window       Use a small model of which most layers see the newest tokens only (Gemma-3)
  --tokens N     Tokens per answer [default: 48]
  --keep         Leave the split server running and print its address
  -h, --help     This text";

/// Streamed to both arrangements: short and long, plain and chat.
const PASSAGE: &str = "A prompt is computed once, on a worker that does nothing else. What the computation leaves \
    behind, keys and values for every token and layer, is written page by page into the memory of another worker, \
    which then adds one token after the other. ";

struct Prompt {
    name: &'static str,
    endpoint: Endpoint,
    text: String,
}

fn prompts() -> Vec<Prompt> {
    let prompt = |name, endpoint, text: String| Prompt { name, endpoint, text };
    vec![
        prompt("greeting", Endpoint::Chat, "Hello! Who are you?".into()),
        prompt("sentence", Endpoint::Completions, "The quick brown fox jumps over".into()),
        prompt("unicode", Endpoint::Completions, "Café, naïve, 漢字 and 🦀:".into()),
        prompt("passage", Endpoint::Chat, format!("Summarize this: {PASSAGE}")),
        prompt("long", Endpoint::Completions, PASSAGE.repeat(8)),
    ]
}

struct Options {
    model: Option<PathBuf>,
    window: bool,
    tokens: u32,
    keep: bool,
}

fn options(arguments: &[String]) -> anyhow::Result<Option<Options>> {
    let mut options = Options { model: None, window: false, tokens: 48, keep: false };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().with_context(|| format!("{argument} needs a value; see --help"));
        match argument.as_str() {
            "--keep" => options.keep = true,
            "--window" => options.window = true,
            "--model" => options.model = Some(std::path::absolute(value()?)?),
            "--tokens" => {
                options.tokens = value()?.parse().context("--tokens needs a number from 1")?;
                ensure!(options.tokens > 0, "--tokens needs a number from 1");
            }
            "--help" | "-h" => return Ok(None),
            other => bail!("demo has no option {other:?}; see `cargo xtask demo --help`"),
        }
    }
    Ok(Some(options))
}

/// What one prompt did on the split server.
struct Row<'a> {
    prompt: &'a Prompt,
    answer: Answer,
    moved: u64,
}

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let Some(options) = options(arguments)? else {
        println!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    };
    let workspace = Workspace::find()?;
    println!("building (release)");
    workspace.build(Profile::Release)?;
    let model = match options.model {
        Some(model) => model,
        None => workspace.tiny_model(options.window)?,
    };
    let built = workspace.built(Profile::Release);
    let program = built.join("host");
    let folder = workspace.target.join("demo");
    let shown = |path: &Path| path.display().to_string();

    let mut flags = vec!["--model".to_owned(), shown(&model)];
    flags.extend(["--plugins".into(), "shm".into(), "--plugins-dir".into(), shown(&built)]);
    println!("starting a split server: host {} --port 0", flags.join(" "));
    let split = Server::start(&program, &flags, &folder, "split")?;
    let name = served_model(&split)?;
    let plugin = show_workers(&split)?;

    let prompts = prompts();
    let mut rows = Vec::new();
    for prompt in &prompts {
        println!("\n{} {}\n> {}", prompt.endpoint.path(), prompt.name, shorten(&prompt.text));
        let before = transferred_bytes(&split.url)?;
        let answer = prompt.endpoint.stream(&split.url, &name, &prompt.text, options.tokens, show)?;
        println!();
        let moved = transferred_bytes(&split.url)?.saturating_sub(before);
        rows.push(Row { prompt, answer, moved });
    }

    let flags = ["--role", "aggregated", "--model", &shown(&model)].map(str::to_owned);
    println!("\nstarting the reference: host {} --port 0", flags.join(" "));
    let reference = Server::start(&program, &flags, &folder, "aggregated")?;
    let mut different = 0;
    for row in &rows {
        let Prompt { name: prompt, endpoint, text } = row.prompt;
        let expected = endpoint.stream(&reference.url, &name, text, options.tokens, |_piece| {})?;
        let equal = expected.tokens.iter().zip(&row.answer.tokens).take_while(|(a, b)| a == b).count();
        if equal < expected.tokens.len().max(row.answer.tokens.len()) || expected.text != row.answer.text {
            different += 1;
            println!("{prompt}: differs from the reference after {equal} tokens");
        }
    }
    reference.stop()?;
    let all: usize = rows.iter().map(|row| row.answer.tokens.len()).sum();
    if different == 0 {
        println!("EQUAL: {all} tokens and their log probabilities are those of the undivided worker");
    } else {
        println!("NOT EQUAL: {different} of {} answers differ from the undivided worker's", rows.len());
    }
    table(&rows, &plugin);
    let unmoved = rows.iter().filter(|row| row.moved == 0).count();
    if unmoved > 0 {
        println!("\nNO TRANSFER: {unmoved} of {} answers came without KV from a prefill worker", rows.len());
    }
    if options.keep {
        println!("\nstill serving at {} (end it with: kill {})", split.url, split.pid());
        println!("its log: {}", split.log.display());
        split.keep();
    } else {
        split.stop()?;
    }
    let good = different == 0 && unmoved == 0 && all > 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn served_model(server: &Server) -> anyhow::Result<String> {
    let health = server.health()?;
    Ok(health["model"].as_str().context("/health names no model")?.to_owned())
}

/// Prints who serves; the names of the plugins between them.
fn show_workers(server: &Server) -> anyhow::Result<String> {
    let health = server.health()?;
    let workers = health["workers"].as_array().context("/health names no workers")?;
    println!("serving at {}", server.url);
    let mut plugins: Vec<&str> = Vec::new();
    for worker in workers {
        let ways: Vec<&str> = worker["transfer_plugins"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(serde_json::Value::as_str)
            .collect();
        let text = |field: &str| worker[field].as_str().unwrap_or("?").to_owned();
        println!(
            "  {:<10} {} at {}, {} KV pages, transfer through {}",
            text("role"),
            text("name"),
            text("address"),
            worker["pages"]["total"],
            ways.join(", ")
        );
        plugins.extend(ways);
    }
    plugins.sort_unstable();
    plugins.dedup();
    Ok(plugins.join(", "))
}

/// Prints a piece of an answer at once, on one line.
fn show(text: &str) {
    let line: String = text.chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    print!("{line}");
    // A closed terminal must not end the demo before its processes are ended.
    let _shown = std::io::stdout().flush().is_ok();
}

fn shorten(text: &str) -> String {
    const LENGTH: usize = 90;
    match text.char_indices().nth(LENGTH) {
        Some((end, _)) => format!("{}… ({} letters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}

fn table(rows: &[Row<'_>], plugin: &str) {
    println!(
        "\n{:<10} {:>13} {:>13} {:>12} {:>10} {:>12}  plugin",
        "prompt", "prompt tokens", "answer tokens", "first token", "tokens/s", "KV moved"
    );
    for Row { prompt, answer, moved } in rows {
        let speed = answer.tokens_per_second().map_or_else(|| "-".to_owned(), |speed| format!("{speed:.0}"));
        println!(
            "{:<10} {:>13} {:>13} {:>9.1} ms {:>10} {:>10} B  {plugin}",
            prompt.name,
            answer.prompt_tokens,
            answer.tokens.len(),
            answer.first_token.as_secs_f64() * 1000.0,
            speed,
            moved
        );
    }
}
