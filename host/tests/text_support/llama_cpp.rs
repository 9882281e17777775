//! llama.cpp's tokenizer.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use host_tests::fetched::Artifact;

/// For each file, each text's ids.
///
/// # Panics
/// When llama.cpp was not fetched, `node` is missing, or a file is refused.
pub fn tokens(files: &[&Path], texts: &[String]) -> Vec<Vec<Vec<u32>>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/node/tokenize.mjs");
    let mut node = Command::new("node")
        .arg(script)
        .arg(Artifact::LlamaCpp.path())
        .args(files)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("node (Node.js 20 or later), which runs llama.cpp's build of npm");
    let input = serde_json::to_vec(texts).unwrap();
    node.stdin.take().unwrap().write_all(&input).unwrap();
    let output = node.wait_with_output().unwrap();
    assert!(output.status.success(), "llama.cpp ended with {}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}
