//! llama.cpp, as the npm package node-llama-cpp builds it.

#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, reason = "each test uses its part")]

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use host_tests::fetched::Artifact;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// What llama.cpp makes of a prompt.
#[derive(Debug, Deserialize)]
pub struct Greedy {
    /// Its tokens.
    pub prompt: Vec<u32>,
    /// The likeliest token, again and again, until one ends the text.
    pub answer: Vec<u32>,
}

/// For each file, each text's ids.
///
/// # Panics
/// When llama.cpp was not fetched, Node.js is missing, or a file is refused.
pub fn tokens(files: &[&Path], texts: &[String]) -> Vec<Vec<Vec<u32>>> {
    run("tokenize.mjs", files, texts)
}

/// For each text, at most so many tokens that follow it. KV is f32.
///
/// # Panics
/// As [`tokens`].
pub fn greedy(file: &Path, count: u32, texts: &[String]) -> Vec<Greedy> {
    run("greedy.mjs", &[file.as_os_str(), count.to_string().as_ref()], texts)
}

fn run<T: DeserializeOwned>(script: &str, arguments: &[impl AsRef<OsStr>], texts: &[String]) -> T {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/node").join(script);
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
    let input = serde_json::to_vec(texts).unwrap();
    node.stdin.take().unwrap().write_all(&input).unwrap();
    let output = node.wait_with_output().unwrap();
    assert!(output.status.success(), "llama.cpp ended with {}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}
