//! Tries an archive in an empty root, so that a missing file shows.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};
use host_tests::wait::try_until;

use super::KIT;

/// The folder of the unpacked archive, which no build expects.
const PLACE: &str = "opt/somewhere else";
/// The program's name there: operators may rename it to keep Debian's `host`.
const NAME: &str = "host-llm";

/// Unpacks the archive in a root that holds the C library of this machine and nothing else, and has it list its plugins and
/// answer a request, split over processes.
pub fn try_out(archive: &Path, name: &str, plugins: &[&str]) -> anyhow::Result<()> {
    let root = tempfile::tempdir().context("no folder for a bare root")?;
    let place = root.path().join(PLACE);
    let [proc, tmp, dev] = ["proc", "tmp", "dev"].map(|name| root.path().join(name));
    for folder in [&place, &proc, &tmp, &dev] {
        std::fs::create_dir_all(folder).context("no folder in the bare root")?;
    }
    // The kit's processes read it. An empty file is as good.
    std::fs::write(dev.join("null"), "").context("no /dev/null in the bare root")?;
    super::done(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(&place))?;
    let bin = place.join(name).join("bin");
    std::fs::rename(bin.join("host"), bin.join(NAME)).context("the archive has no bin/host")?;
    let files = plugins.iter().map(|plugin| place.join(name).join(format!("lib/host/plugins/{plugin}.so")));
    for library in libraries([bin.join(NAME), bin.join(KIT)].into_iter().chain(files))? {
        let relative = library.strip_prefix("/").context("a library without a whole path")?;
        super::copy(&library, &root.path().join(relative))?;
    }
    let at = format!("/{PLACE}/{name}");
    let program = format!("{at}/bin/{NAME}");
    let said = succeeds(root.path(), &program, &["plugins", "list"])?;
    for plugin in plugins {
        let listed = said.lines().any(|line| line.split_whitespace().next() == Some(plugin));
        ensure!(listed, "plugin {plugin} is not among those that are found in a bare root:\n{said}");
    }

    let shm = format!("{at}/lib/host/plugins/shm.so");
    succeeds(root.path(), &format!("{at}/bin/{KIT}"), &["--case", "load", &shm])?;

    let flags = ["--executor", "synthetic", "--plugins", "shm", "--port", "0"];
    let mut server = inside(root.path(), &program, &flags);
    let child =
        server.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("unshare cannot be run")?;
    Serving { child }.answers()
}

/// The output of a program in the root that succeeds.
fn succeeds(root: &Path, program: &str, arguments: &[&str]) -> anyhow::Result<String> {
    let output = inside(root, program, arguments).output().context("unshare cannot be run")?;
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(
        output.status.success(),
        "`{program} {}` failed in a bare root (--no-try leaves this out):\n{said}",
        arguments.join(" ")
    );
    Ok(said)
}

/// A server in the root. Everything in its process namespace ends with it.
struct Serving {
    child: Child,
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _gone = self.child.kill().and_then(|()| self.child.wait()).is_err();
    }
}

impl Serving {
    fn answers(mut self) -> anyhow::Result<()> {
        let output = self.child.stdout.take().context("the server's output is missing")?;
        let lines = BufReader::new(output).lines().map_while(Result::ok);
        let address = lines.filter_map(|line| Some(line.split_once("http://")?.1.to_owned())).next();
        let address = address.context("the server ended in a bare root; see above")?;
        let url = format!("http://{}/generate", address.split([' ', ',']).next().unwrap_or_default());
        let body = r#"{"text": "A prompt that fills more than a page of KV.", "sampling_params": {"max_new_tokens": 4}}"#;
        let agent = host_tests::cluster::agent();
        let answer = try_until(|| {
            let sent = agent.post(&url).header("content-type", "application/json").send(body);
            let mut answer = sent.map_err(|error| error.to_string())?;
            let text = answer.body_mut().read_to_string().map_err(|error| error.to_string())?;
            if answer.status().as_u16() == 200 { Ok(text) } else { Err(text) }
        });
        match answer {
            Ok(text) if text.contains(r#""transfer_plugin":"shm""#) => Ok(()),
            Ok(text) => bail!("the answer in a bare root was not sent through shm: {text}"),
            Err(error) => bail!("the server in a bare root answers no request: {error}"),
        }
    }
}

/// The command that runs the program in the root, with `/proc`, an empty `/dev/null` and no other file system, alone in its process namespace.
fn inside(root: &Path, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--root"]).arg(root);
    command.arg("--wd=/").arg("--").arg(program).args(arguments).env_clear();
    if let Some(path) = std::env::var_os("PATH") {
        // The path to unshare itself.
        command.env("PATH", path);
    }
    command
}

/// Shared libraries that these files need, and their loader.
fn libraries(files: impl Iterator<Item = PathBuf>) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for file in files {
        let output = Command::new("ldd").arg(&file).output().context("ldd cannot be run")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.success(), "ldd {} failed: {text}", file.display());
        for line in text.lines() {
            ensure!(!line.contains("not found"), "{} needs what is not here: {line}", file.display());
            found.extend(line.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from));
        }
    }
    let names =
        found.iter().filter_map(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
    let own =
        ["libc.so.", "libm.so.", "libgcc_s.so.", "libdl.so.", "libpthread.so.", "librt.so.", "ld-linux"];
    let more: Vec<_> = names.filter(|name| !own.iter().any(|start| name.starts_with(start))).collect();
    ensure!(more.is_empty(), "a release needs more than the C library: {}", more.join(", "));
    Ok(found)
}
