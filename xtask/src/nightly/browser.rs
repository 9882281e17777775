//! `cargo xtask nightly browser`: the pages of simulations in headless Chromium, as a reader would use them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, ensure};

use super::outcome;
use crate::node::Node;
use crate::outcome::Outcome;
use crate::workspace::{Profile, Workspace};

/// Where the packages that drive the browser are named, with the script.
const TESTS: &str = "tests/browser";
/// Requests of the simulation: enough for curves, and for lines of time thinner than a pixel.
const REQUESTS: u32 = 2000;
/// The pages, by their names: what makes them, and how many plots they have.
const PAGES: [(&str, &[&str], u32); 3] = [
    ("run", &[], 7),
    ("goodput", &["--goodput", "2000", "60"], 8),
    ("plan", &["--plan", "2000", "60", "--tp", "1,2", "--most-devices", "6", "--requests", "300"], 3),
];

/// Opens the pages of simulations.
pub fn check(workspace: &Workspace) -> Outcome {
    let folder = workspace.target.join("browser");
    let node = match Node::find(workspace).and_then(|node| install(workspace, &node, &folder).map(|()| node))
    {
        Ok(node) => node,
        Err(why) => return Outcome::Skipped(why),
    };
    for (name, flags, plots) in PAGES {
        let page = match page(workspace, &folder, name, flags) {
            Ok(page) => page,
            Err(error) => return Outcome::Failed(format!("{error:#}")),
        };
        let mut command = Command::new(&node.program);
        command.current_dir(&folder).args([
            "open_page.mjs",
            &page,
            &plots.to_string(),
            &format!("{name}.png"),
        ]);
        match outcome(&mut command, "") {
            Outcome::Passed(_) => {}
            failed => return failed,
        }
    }
    Outcome::Passed(format!("{} pages of simulations in Chromium", PAGES.len()))
}

/// The packages from npm (120 MB), Chromium among them, and the script beside them.
fn install(workspace: &Workspace, node: &Node, folder: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{} cannot be made: {error}", folder.display());
    std::fs::create_dir_all(folder).map_err(failed)?;
    for file in ["package.json", "open_page.mjs"] {
        std::fs::copy(workspace.root.join(TESTS).join(file), folder.join(file)).map_err(failed)?;
    }
    let mut install = node.npm();
    install.current_dir(folder).args(["install", "--no-audit", "--no-fund", "--silent"]);
    match install.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`npm install` in {} ended with {status}", folder.display())),
        Err(error) => Err(format!("npm cannot be run: {error}")),
    }
}

/// Simulates a trace that is made up here, and returns the page.
fn page(workspace: &Workspace, folder: &Path, name: &str, flags: &[&str]) -> anyhow::Result<String> {
    workspace.build(Profile::Dev, &["host"])?;
    let written = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))?;
        anyhow::Ok(path.display().to_string())
    };
    let request = |number: u32| {
        let (time, prompt, answer) = (number * 40, 500 + number * 7919 % 6000, 20 + number * 104_729 % 200);
        // Every fourth request begins as the one before it.
        let names = (0..prompt.div_ceil(512)).map(|block| (number / 4 * 16 + block).to_string());
        let names = names.collect::<Vec<_>>().join(", ");
        format!(
            "{{\"timestamp\": {time}, \"input_length\": {prompt}, \"output_length\": {answer}, \"hash_ids\": [{names}]}}\n"
        )
    };
    let trace = written("trace.jsonl", (0..REQUESTS).map(request).collect())?;
    let workers = ["prefill\"\ncount = 2", "decode\""];
    let workers = workers.map(|role| format!("[[workers]]\nrole = \"{role}\nmachine = \"h200\"\n"));
    let cluster =
        written("cluster.toml", format!("model = \"qwen3-32b\"\nkv = \"fp8\"\n{}", workers.concat()))?;
    let page = folder.join(format!("{name}.html")).display().to_string();
    let mut simulate = Command::new(workspace.built(Profile::Dev).join("host"));
    simulate.args(["simulate", "--trace", &trace, "--cluster", &cluster, "--html", &page]).args(flags);
    let output = simulate.output().context("host cannot be run")?;
    ensure!(output.status.success(), "the simulation failed: {}", String::from_utf8_lossy(&output.stderr));
    Ok(page)
}
