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
/// Simulates the trace on the cluster that are written here.
const SIMULATE: [&str; 5] = ["simulate", "--trace", "trace.jsonl", "--cluster", "cluster.toml"];
/// Sends some requests to a worker without a model.
const LIVE: [&str; 7] =
    ["bench", "live", "--role", "aggregated", "--workload", "shared,random", "--prefill-radix-cache"];
/// The pages, by their names: the command of `host`, its further flags, and how many plots the page has.
const PAGES: [(&str, &[&str], &[&str], u32); 4] = [
    ("run", &SIMULATE, &[], 7),
    ("goodput", &SIMULATE, &["--goodput", "2000", "60"], 8),
    (
        "plan",
        &SIMULATE,
        &["--plan", "2000", "60", "--tp", "1,2", "--most-devices", "8", "--requests", "300"],
        3,
    ),
    ("live", &LIVE, &["--requests", "20", "--output-tokens", "8"], 4),
];

/// Opens the pages of simulations.
pub fn check(workspace: &Workspace) -> Outcome {
    let folder = workspace.target.join("browser");
    let node = match Node::find(workspace).and_then(|node| install(workspace, &node, &folder).map(|()| node))
    {
        Ok(node) => node,
        Err(why) => return Outcome::Skipped(why),
    };
    if let Err(error) = inputs(workspace, &folder) {
        return Outcome::Failed(format!("{error:#}"));
    }
    for (name, command, flags, plots) in PAGES {
        let page = match page(workspace, &folder, name, &[command, flags].concat()) {
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
    Outcome::Passed(format!("{} pages of simulations and measurements in Chromium", PAGES.len()))
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

/// Builds `host`, and writes a trace and a cluster.
fn inputs(workspace: &Workspace, folder: &Path) -> anyhow::Result<()> {
    workspace.build(Profile::Dev, &["host"])?;
    let written = |name: &str, text: String| {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("{} cannot be written", path.display()))
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
    written("trace.jsonl", (0..REQUESTS).map(request).collect())?;
    let workers = ["prefill\"\ncount = 2", "decode\""];
    let workers = workers.map(|role| format!("[[workers]]\nrole = \"{role}\nmachine = \"h200\"\n"));
    written("cluster.toml", format!("model = \"qwen3-32b\"\nkv = \"fp8\"\n{}", workers.concat()))
}

/// Has `host` write a page, and returns its path.
fn page(workspace: &Workspace, folder: &Path, name: &str, flags: &[&str]) -> anyhow::Result<String> {
    let page = folder.join(format!("{name}.html")).display().to_string();
    let mut host = Command::new(workspace.built(Profile::Dev).join("host"));
    host.current_dir(folder).args(flags).args(["--html", &page]);
    let output = host.output().context("host cannot be run")?;
    ensure!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(page)
}
