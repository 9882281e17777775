//! The `openai` package against a running server.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;

use crate::server::Server;
use crate::workspace::{Profile, Workspace};

/// Exactly this version, so that a new release changes nothing here by itself.
const OPENAI: &str = "openai==3.52.0";

/// Exactly this version, because NIXL's C API changes between releases without notice, and this is the one that the
/// plugin was written and measured against. The CUDA in its name is not needed: the wheel brings UCX along, and nothing of
/// its dependencies is used, only its libraries. 66 MiB.
const NIXL: &str = "nixl-cu12==1.5.1";

/// NVIDIA's run-time compiler of CUDA 12 and of CUDA 13, exactly these, so that a new release changes nothing here by
/// itself. Neither needs a GPU. 86 and 56 MiB.
const NVRTC: [&str; 2] = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvrtc==13.5.37"];

/// Runs tests/python/openai_client.py against a split server of the small model. False when a check failed.
pub fn check(workspace: &Workspace, python: &Path) -> anyhow::Result<bool> {
    let model = workspace.tiny_model(false)?;
    let built = workspace.built(Profile::Dev);
    let flag = |path: &Path| path.display().to_string();
    let flags = ["--model", &flag(&model), "--plugins-dir", &flag(&built)].map(str::to_owned);
    let server = Server::start(&built.join("host"), &flags, &workspace.target.join("demo"), "openai")?;
    let status = Command::new(python)
        .arg(workspace.root.join("tests/python/openai_client.py"))
        .arg(&server.url)
        .stdin(Stdio::null())
        .status()
        .context("python cannot be run")?;
    server.stop()?;
    Ok(status.success())
}

/// A python with the `openai` package, in an environment below the target folder.
///
/// # Errors
/// With the reason why there is none.
pub fn environment(workspace: &Workspace) -> Result<PathBuf, String> {
    installed(workspace, OPENAI, &[])
}

/// NIXL's library, installed into the same environment.
///
/// # Errors
/// With the reason why there is none.
pub fn nixl(workspace: &Workspace) -> Result<PathBuf, String> {
    let python = installed(workspace, NIXL, &["--no-deps"])?;
    let ask = "import pathlib, sysconfig\n\
               packages = pathlib.Path(sysconfig.get_paths()['platlib'])\n\
               print(next(packages.glob('.nixl*/libnixl_capi.so'), ''))";
    let output = Command::new(python).args(["-c", ask]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("python cannot be run: {error}"))?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    if path.is_file() { Ok(path) } else { Err(format!("{NIXL} was installed without libnixl_capi.so")) }
}

/// The folders of both compilers for CUDA, as a list of paths.
///
/// # Errors
/// With the reason why one of them is missing.
pub fn nvrtc(workspace: &Workspace) -> Result<OsString, String> {
    let mut folders = Vec::new();
    for (package, inner) in NVRTC.into_iter().zip(["cuda_nvrtc", "cu13"]) {
        let python = installed(workspace, package, &["--no-deps"])?;
        let packages = platform_packages(&python)?;
        let folder = packages.join("nvidia").join(inner).join("lib");
        if !folder.is_dir() {
            return Err(format!("{package} was installed without {}", folder.display()));
        }
        folders.push(folder);
    }
    std::env::join_paths(folders).map_err(|error| format!("the folders of NVRTC make no list: {error}"))
}

/// Where an environment keeps packages with compiled parts.
fn platform_packages(python: &Path) -> Result<PathBuf, String> {
    let ask = "import sysconfig; print(sysconfig.get_paths()['platlib'])";
    let output = Command::new(python).args(["-c", ask]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("python cannot be run: {error}"))?;
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

fn installed(workspace: &Workspace, package: &str, flags: &[&str]) -> Result<PathBuf, String> {
    let folder = workspace.target.join("python");
    let python = folder.join("bin/python");
    let ready = folder.join(format!("{package}.installed"));
    if ready.exists() && python.exists() {
        return Ok(python);
    }
    if !python.exists() {
        let base = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        succeed(Command::new(base).args(["-m", "venv", "--clear"]).arg(&folder), "a virtual environment")?;
    }
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]);
    succeed(pip.args(flags).arg(package), &format!("`pip install {package}`"))?;
    std::fs::write(&ready, "").map_err(|error| format!("{} cannot be written: {error}", ready.display()))?;
    Ok(python)
}

fn succeed(command: &mut Command, what: &str) -> Result<(), String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{what} failed, because python3 cannot be run: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    let last: Vec<&str> = said.lines().rev().take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    Err(format!("{what} failed ({}): {}", output.status, last.join(" | ")))
}
