//! llama.cpp, as the npm package node-llama-cpp builds it.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::fetched::Artifact;

/// The tokens of a prompt and of its greedy answer, as llama.cpp computes them.
#[derive(Debug)]
pub struct Greedy {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// The likeliest token at each step, until one ends the text.
    pub answer: Vec<u32>,
}

/// The token ids of each text, for each file.
///
/// # Panics
/// When llama.cpp was not fetched, Node.js is missing, or a file is refused.
pub fn tokens(files: &[&Path], texts: &[String]) -> Vec<Vec<Vec<u32>>> {
    let lists = |value: &Value| list(value).iter().map(ids).collect();
    list(&run("tokenize.mjs", files, texts)).iter().map(lists).collect()
}

/// The tokens of each text, with at most `count` tokens that follow it. KV is f32.
///
/// # Panics
/// As [`tokens`].
pub fn greedy(file: &Path, count: u32, texts: &[String]) -> Vec<Greedy> {
    let answers = run("greedy.mjs", &[file.as_os_str(), count.to_string().as_ref()], texts);
    let answer = |value: &Value| Greedy { prompt: ids(&value["prompt"]), answer: ids(&value["answer"]) };
    list(&answers).iter().map(answer).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("llama.cpp's script prints lists")
}

fn ids(value: &Value) -> Vec<u32> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).expect("an id");
    list(value).iter().map(id).collect()
}

fn run(script: &str, arguments: &[impl AsRef<OsStr>], texts: &[String]) -> Value {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("node").join(script);
    let program = std::env::var_os("NODE").unwrap_or_else(|| "node".into());
    let mut node = Command::new(&program)
        .arg(script)
        .arg(Artifact::LlamaCpp.path())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!(
                "{} cannot be run ({error}): llama.cpp's build of npm needs Node.js 20 or later, which `cargo xtask test` \
                 installs; the variable NODE names another one",
                program.display()
            )
        });
    let input = serde_json::to_vec(texts).expect("texts as JSON");
    let mut stdin = node.stdin.take().expect("a piped standard input");
    stdin.write_all(&input).expect("Node.js reads its input");
    drop(stdin);
    let output = node.wait_with_output().expect("Node.js ends");
    assert!(output.status.success(), "llama.cpp ended with {}", output.status);
    serde_json::from_slice(&output.stdout).expect("llama.cpp's script prints JSON")
}
