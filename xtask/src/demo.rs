//! `cargo xtask demo`: one prefill worker, one decode worker and a router against one aggregated worker.

mod script;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};

use host_tests::fetched::Artifact;

use crate::client::{Answer, Message, restored_pages, transferred_bytes};
use crate::fetch;
use crate::server::Server;
use crate::workspace::{Profile, Workspace};
use script::Prompt;

const HELP: &str = "\
Serve a small model with prefill and decode split, and compare with one aggregated worker.

Builds `host` and three plugins, fetches SmolLM2-135M-Instruct (92 MB, once), and starts a router, a prefill worker and a
decode worker that move KV cache through the shm plugin and keep it in files through hicache-file. Streams some prompts and
a conversation of four turns, restarts the server and asks the last turn again, then sends everything to `host --role
aggregated` and compares every token and its log probability. Exit code 0 only when all are equal, KV moved, and the
restarted server restored the conversation from its files. Without a package registry a model with random weights takes the
place of the real one, so the answers are nonsense.

Usage: cargo xtask demo [OPTIONS]

Options:
  --model PATH   Use this model instead: a GGUF file or a Hugging Face directory (Qwen3, Llama or Gemma-3)
  --random       Use a small model with random weights, which needs no download
  --window       The same, of which most layers see the newest tokens only (Gemma-3)
  --tokens N     Tokens per answer at most [default: 48]
  --keep         Leave the split server running and print its address
  -h, --help     This text";

/// The transfer plugin and the storage tier.
const PLUGINS: &str = "shm,hicache-file";

struct Options {
    model: Option<PathBuf>,
    random: bool,
    window: bool,
    tokens: u32,
    keep: bool,
}

fn options(arguments: &[String]) -> anyhow::Result<Option<Options>> {
    let mut options = Options { model: None, random: false, window: false, tokens: 48, keep: false };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().with_context(|| format!("{argument} needs a value; see --help"));
        match argument.as_str() {
            "--keep" => options.keep = true,
            "--random" => options.random = true,
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

/// The outcome of one prompt on the split server.
struct Row {
    prompt: Prompt,
    answer: Answer,
    moved: u64,
    restored: u64,
}

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let Some(options) = options(arguments)? else {
        println!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    };
    let workspace = Workspace::find()?;
    println!("building host and its plugins (2 to 3 minutes on 2 cores, the first time)");
    let packages = ["host", "host-plugin-shm", "host-plugin-hicache-file", "host-plugin-swa"];
    workspace.build(Profile::Demo, &packages)?;
    let folder = workspace.target.join("demo-files");
    std::fs::create_dir_all(&folder).with_context(|| format!("{} cannot be made", folder.display()))?;
    let model = model(&options, &workspace)?;
    let built = workspace.built(Profile::Demo);
    let pages = folder.join("pages");
    if pages.exists() {
        std::fs::remove_dir_all(&pages).context("the pages of an earlier demo cannot be removed")?;
    }
    let stage = Stage { program: built.join("host"), built, folder, pages, model, tokens: options.tokens };

    let split = stage.split("split")?;
    let mut rows = Vec::new();
    for prompt in script::prompts() {
        rows.push(stage.ask(&split, prompt)?);
    }
    let mut said = Vec::new();
    for (number, turn) in (1..).zip(script::TURNS) {
        said.push(Message { role: "user", content: turn.to_owned() });
        let row = stage.ask(&split, script::turn(number, &said))?;
        said.push(Message { role: "assistant", content: row.answer.text.clone() });
        rows.push(row);
    }

    println!("\nrestarting the server; the last turn once more");
    split.stop()?;
    let split = stage.split("again")?;
    said.pop();
    rows.push(stage.ask(&split, Prompt { name: "again".into(), ..script::turn(4, &said) })?);

    let different = stage.compare(&rows)?;
    let all: usize = rows.iter().map(|row| row.answer.tokens.len()).sum();
    match different {
        0 => println!("\nEQUAL: {all} tokens and their log probabilities are those of the aggregated worker"),
        _ => {
            println!("\nNOT EQUAL: {different} of {} answers differ from the aggregated worker's", rows.len())
        }
    }
    table(&rows);
    let moved = rows.iter().any(|row| row.moved > 0);
    let restored = rows.last().is_some_and(|row| row.restored > 0);
    if !moved {
        println!("\nNO TRANSFER: no KV came from a prefill worker");
    }
    if !restored {
        println!("\nNOT RESTORED: the restarted server read no page of the conversation from its files");
    }
    let shown = stage.program.display();
    println!("\nTry next:");
    if options.keep {
        println!("  {shown} chat {}", split.url);
        println!("  curl {}/metrics", split.url);
        println!("\nstill serving at {} (end it with: kill {})", split.url, split.pid());
        println!("its log: {}", split.log.display());
        split.keep();
    } else {
        println!("  {shown} chat --model {} --plugins {PLUGINS}", stage.model.display());
        println!(
            "  {shown} --model {} --plugins {PLUGINS}    # an OpenAI server on port 8000",
            stage.model.display()
        );
        split.stop()?;
    }
    let good = different == 0 && moved && restored && all > 0;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The model that the options name, else SmolLM2, else one with random weights.
fn model(options: &Options, workspace: &Workspace) -> anyhow::Result<PathBuf> {
    if let Some(model) = &options.model {
        return Ok(model.clone());
    }
    if !options.random && !options.window {
        let problems = fetch::fetch(workspace, std::iter::once(Artifact::SmolLm2));
        if problems.is_empty() {
            return Ok(Artifact::SmolLm2.path_in(&workspace.target.join("fetched")));
        }
        let why = problems.join("; ");
        println!("no real model: {why}; a model with random weights speaks nonsense instead");
    }
    workspace.tiny_model(options.window)
}

/// Settings that all servers of one demo share.
struct Stage {
    program: PathBuf,
    built: PathBuf,
    folder: PathBuf,
    pages: PathBuf,
    model: PathBuf,
    tokens: u32,
}

impl Stage {
    fn flags(&self, more: &[&str]) -> Vec<String> {
        let shown = |path: &Path| path.display().to_string();
        let mut flags = vec!["--model".to_owned(), shown(&self.model)];
        flags.extend(["--plugins-dir".to_owned(), shown(&self.built)]);
        flags.extend(more.iter().map(|flag| (*flag).to_owned()));
        flags
    }

    /// Starts the split server and prints its workers.
    fn split(&self, name: &str) -> anyhow::Result<Server> {
        let place = format!("hicache-file.dir={}", self.pages.display());
        let size = "hicache-file.size_limit_mib=1024";
        // This policy restores even from a slow disk. By default the cost model computes pages again where that is faster.
        let wait = ["--hicache-prefetch-policy", "wait_complete"];
        let flags = [&["--plugins", PLUGINS, "--set", &place, "--set", size], &wait[..]].concat();
        let flags = self.flags(&flags);
        println!("\n$ host {} --port 0", flags.join(" "));
        let server = Server::start(&self.program, &flags, &self.folder, name)?;
        let health = server.health()?;
        println!("serving {} at {}", health["model"].as_str().unwrap_or("?"), server.url);
        for worker in health["workers"].as_array().into_iter().flatten() {
            let text = |field: &str| worker[field].as_str().unwrap_or("?").to_owned();
            println!("  {:<8} at {}, {} KV pages", text("role"), text("address"), worker["pages"]["total"]);
        }
        Ok(server)
    }

    /// Sends a prompt to the split server, and shows the answer as it comes.
    fn ask(&self, server: &Server, prompt: Prompt) -> anyhow::Result<Row> {
        println!("\n[{}] {}", prompt.name, shorten(prompt.ask.newest()));
        let (moved, restored) = (transferred_bytes(&server.url)?, restored_pages(&server.url)?);
        let answer = prompt.ask.stream(&server.url, &served_model(server)?, self.tokens, show)?;
        println!();
        let moved = transferred_bytes(&server.url)?.saturating_sub(moved);
        let restored = restored_pages(&server.url)?.saturating_sub(restored);
        Ok(Row { prompt, answer, moved, restored })
    }

    /// Sends the same prompts to one aggregated worker without caches, and counts the answers that differ.
    fn compare(&self, rows: &[Row]) -> anyhow::Result<usize> {
        let flags = self.flags(&["--role", "aggregated", "--no-prefill-radix-cache"]);
        println!("\nthe reference:\n$ host {} --port 0", flags.join(" "));
        let reference = Server::start(&self.program, &flags, &self.folder, "aggregated")?;
        let model = served_model(&reference)?;
        let mut different = 0;
        for Row { prompt, answer, .. } in rows {
            let expected = prompt.ask.stream(&reference.url, &model, self.tokens, |_piece| {})?;
            let equal = expected.tokens.iter().zip(&answer.tokens).take_while(|(a, b)| a == b).count();
            if equal < expected.tokens.len().max(answer.tokens.len()) || expected.text != answer.text {
                different += 1;
                println!("{}: differs from the reference after {equal} tokens", prompt.name);
            }
        }
        reference.stop()?;
        Ok(different)
    }
}

fn served_model(server: &Server) -> anyhow::Result<String> {
    let health = server.health()?;
    Ok(health["model"].as_str().context("/health names no model")?.to_owned())
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

fn table(rows: &[Row]) {
    println!(
        "\n{:<9} {:>13} {:>7} {:>14} {:>12} {:>13} {:>12} {:>9}",
        "", "prompt tokens", "cached", "from files", "KV moved", "answer tokens", "first token", "tokens/s"
    );
    for Row { prompt, answer, moved, restored } in rows {
        let speed = answer.tokens_per_second().map_or_else(|| "-".to_owned(), |speed| format!("{speed:.0}"));
        println!(
            "{:<9} {:>13} {:>7} {:>8} pages {:>8} KiB {:>13} {:>9.1} ms {:>9}",
            prompt.name,
            answer.prompt_tokens,
            answer.cached_tokens,
            restored,
            moved >> 10,
            answer.tokens.len(),
            answer.first_token.as_secs_f64() * 1000.0,
            speed
        );
    }
}
