//! `cargo xtask dist`: packs a release into one archive, and tries it in an empty root.

mod bare_root;
pub mod licences;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use crate::workspace::{Profile, Workspace};

const HELP: &str = "\
Make target/dist/host-VERSION-TARGET.tar.gz: programs, plugins, documentation and licences.

Builds `host`, its plugins and the conformance kit, strips them, lists every crate that is in them with its licence and the
licence's text, and packs all of it. Then unpacks the archive in an empty root that holds the C library of this machine and nothing
else, under another name and in another folder, has it serve requests there, prefill and decode split, over its own shm plugin, and
has the kit load that plugin.
docs/install.md says how an archive is installed.

It runs where the C library is at least as new as this machine's. Needs strip (binutils), tar, gzip, ldd and unshare.

Usage: cargo xtask dist [OPTIONS]

Options:
  --dev        Pack what tests use instead of a release build
  --built DIR  Pack the program and the plugins that lie there, and build none
  --no-try     Do not try it, where namespaces cannot be made
  -h, --help   This text";

/// Programs that a release has, by their packages.
const PROGRAMS: [&str; 2] = ["host", KIT];
/// The conformance kit.
const KIT: &str = "host-plugin-test";
/// Plugins that a release has: folders in `plugins/`.
const PLUGINS: [&str; 5] = ["shm", "nixl", "mooncake", "hicache-file", "swa"];

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let (mut profile, mut built, mut tries) = (Profile::Release, None, true);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--built" => {
                built = Some(PathBuf::from(rest.next().context("--built needs a folder; see --help")?));
            }
            "--dev" => profile = Profile::Dev,
            "--no-try" => tries = false,
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            other => bail!("dist has no option {other:?}; see `cargo xtask dist --help`"),
        }
    }
    let workspace = Workspace::find()?;
    let plugins = PLUGINS.map(|name| format!("host-plugin-{name}"));
    let packages: Vec<String> = PROGRAMS.map(str::to_owned).into_iter().chain(plugins).collect();
    let built = match built {
        Some(folder) => folder,
        None => {
            println!("building {}", packages.join(", "));
            let names: Vec<&str> = packages.iter().map(String::as_str).collect();
            workspace.build(profile, &names)?;
            workspace.built(profile)
        }
    };

    let target = target_triple()?;
    let metadata = metadata(&workspace, &target)?;
    let name = format!("host-{}-{target}", licences::version(&metadata, "host")?);
    let folder = workspace.target.join("dist");
    let staged = folder.join(&name);
    match std::fs::remove_dir_all(&staged) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("{} cannot be removed", staged.display()));
        }
        _ => {}
    }
    programs(&built, &staged)?;
    papers(&workspace, &staged.join("share/doc/host"))?;
    let licences = licences::of(&metadata, &packages)?;
    std::fs::write(staged.join("share/doc/host/THIRD-PARTY.md"), licences.text)
        .context("the list of licences cannot be written")?;
    println!("{} crates of others, all with a licence", licences.crates);

    let archive = folder.join(format!("{name}.tar.gz"));
    pack(&workspace, &folder, &name, &archive)?;
    let bytes = std::fs::metadata(&archive).context("the archive is not there")?.len();
    println!("made {} ({:.1} MB)", archive.display(), bytes as f64 / 1e6);
    if tries {
        bare_root::try_out(&archive, &name, &PLUGINS)?;
        println!("it serves in a root that holds {name} and the C library");
    }
    Ok(ExitCode::SUCCESS)
}

/// Cargo's metadata of this workspace and of everything that it depends on, for one target.
pub fn metadata(workspace: &Workspace, target: &str) -> anyhow::Result<Value> {
    let mut command = workspace.cargo(&["metadata", "--format-version", "1", "--filter-platform", target]);
    let output = command.output().context("cargo cannot be run")?;
    ensure!(output.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).context("cargo metadata gave no JSON")
}

/// The target of this machine, for which releases are built.
pub fn target_triple() -> anyhow::Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("-vV").output().context("rustc cannot be run")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned).context("rustc -vV names no host")
}

/// Copies `bin/NAME` and `lib/host/plugins/NAME.so`, without the parts that only debuggers read.
fn programs(built: &Path, staged: &Path) -> anyhow::Result<()> {
    let plugins = staged.join("lib/host/plugins");
    let library = |name: &str| built.join(format!("libhost_plugin_{}.so", name.replace('-', "_")));
    let copies: Vec<(PathBuf, PathBuf)> = PROGRAMS
        .map(|name| (built.join(name), staged.join("bin").join(name)))
        .into_iter()
        .chain(PLUGINS.map(|name| (library(name), plugins.join(format!("{name}.so")))))
        .collect();
    for (from, to) in copies {
        copy(&from, &to)?;
        // A plugin's exported symbol and its manifest stay, because other programs read them.
        done(Command::new("strip").arg("--strip-unneeded").arg(&to))?;
    }
    Ok(())
}

/// Copies README, documentation, chat templates and licences of this repository, laid out so that the README's links hold.
fn papers(workspace: &Workspace, to: &Path) -> anyhow::Result<()> {
    for file in ["README.md", "SECURITY.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        copy(&workspace.root.join(file), &to.join(file))?;
    }
    let mut folders = ["docs", "examples/chat-templates"].map(PathBuf::from).to_vec();
    while let Some(folder) = folders.pop() {
        let entries = std::fs::read_dir(workspace.root.join(&folder))
            .with_context(|| format!("{} cannot be read", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            match entry.file_type()?.is_dir() {
                true => folders.push(path),
                false => copy(&workspace.root.join(&path), &to.join(&path))?,
            }
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let failed = || format!("{} cannot be copied to {}", from.display(), to.display());
    std::fs::create_dir_all(to.parent().with_context(failed)?).with_context(failed)?;
    std::fs::copy(from, to).map(drop).with_context(failed)
}

/// Packs a folder so that the same files give the same bytes: sorted, owned by root, as old as the last commit.
fn pack(workspace: &Workspace, folder: &Path, name: &str, archive: &Path) -> anyhow::Result<()> {
    let mut git = Command::new("git");
    let git = git.current_dir(&workspace.root).args(["log", "-1", "--format=%ct"]).output();
    let seconds = git.ok().filter(|output| output.status.success()).map(|output| output.stdout);
    let seconds = seconds.and_then(|text| String::from_utf8(text).ok()).unwrap_or_default();
    let seconds = if seconds.trim().is_empty() { "0" } else { seconds.trim() };
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mode=u+rwX,go+rX,go-w"]);
    tar.arg(format!("--mtime=@{seconds}")).args(["--use-compress-program", "gzip -n9"]);
    done(tar.arg("-cf").arg(archive).arg("-C").arg(folder).arg(name))
}

/// Runs a command. An error when it does not succeed.
fn done(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("{name} cannot be run: is it installed?"))?;
    ensure!(status.success(), "{name} failed with {status}; see above");
    Ok(())
}
