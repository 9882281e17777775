//! `cargo xtask msrv`: builds the crates that plugins depend on with the oldest supported compiler.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail, ensure};

use crate::workspace::{Profile, Workspace};

const HELP: &str = "\
Build and test host-plugin-api, and the crates that `host plugins new` makes, with the oldest compiler that may build them.

That is the `rust-version` of plugin-api/Cargo.toml. The API is packed first, as a registry would hand it out; the crates are made
outside of the checkout, and what they build is put to the conformance kit.

Usage: cargo xtask msrv [OPTIONS]

Options:
  --cargo PROGRAM  The compiler's cargo [default: rustup's of that version; `rustup toolchain install 1.85`]
  -h, --help       This text

Debian 12 has one of that version as `rustc-web` and `cargo-web`: --cargo /usr/bin/cargo, with RUSTC=/usr/bin/rustc.";

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let mut given = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--cargo" => given = Some(rest.next().context("--cargo needs a program; see --help")?),
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            other => bail!("msrv has no option {other:?}; see `cargo xtask msrv --help`"),
        }
    }
    let workspace = Workspace::find()?;
    let wanted = rust_version(&workspace)?;
    let old = match given {
        Some(program) => vec![program.clone()],
        None => ["rustup", "run", &wanted, "cargo"].map(str::to_owned).to_vec(),
    };
    let target = workspace.target.join("msrv");
    let cargo = |at: &Path, arguments: &[&str]| {
        let mut command = Command::new(&old[0]);
        // These variables belong to the compiler that runs this, not to the named one.
        command.env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
        command.args(&old[1..]).args(arguments).current_dir(at).env("CARGO_TARGET_DIR", &target);
        command
    };
    let output = cargo(&workspace.root, &["--version"]).output();
    let version = output.ok().filter(|output| output.status.success());
    let version = version.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    let version = version.with_context(|| {
        format!("`{} --version` fails: install Rust {wanted}, or name another with --cargo", old.join(" "))
    })?;
    ensure!(version.contains(&format!(" {wanted}.")), "{wanted} is wanted, and this is {version}");
    println!("with {version}");

    done(&mut workspace.cargo(&["package", "-p", "host-plugin-api", "--allow-dirty", "--no-verify"]))?;
    let packed = newest(&workspace.target.join("package"))?;
    let made = tempfile::tempdir().context("no folder for crates")?;
    done(Command::new("tar").arg("-xf").arg(&packed).arg("-C").arg(made.path()))?;
    let name = packed.file_stem().context("the packed crate has no name")?;
    done(&mut cargo(&made.path().join(name), &["test"]))?;

    done(&mut workspace.cargo(&["build", "-p", "host"]))?;
    // The program is copied out of the checkout, so that the crates bring the API along.
    let host = made.path().join("host");
    std::fs::copy(workspace.built(Profile::Dev).join("host"), &host).context("host cannot be copied")?;
    for role in ["transfer", "tier", "allocator"] {
        let name = format!("old-{role}");
        let new = ["plugins", "new", &name, "--role", role];
        done(Command::new(&host).current_dir(made.path()).args(new))?;
        let at = made.path().join(&name);
        std::fs::copy(workspace.root.join("Cargo.lock"), at.join("Cargo.lock")).context("no Cargo.lock")?;
        done(&mut cargo(&at, &["test"]))?;
        done(&mut cargo(&at, &["build"]))?;
        let file = target.join("debug").join(format!("libold_{role}.so"));
        done(Command::new(&host).args(["plugins", "test"]).arg(file))?;
    }
    println!("host-plugin-api and its templates build and pass their tests with {version}");
    Ok(ExitCode::SUCCESS)
}

/// The oldest compiler that the API's manifest names.
pub fn rust_version(workspace: &Workspace) -> anyhow::Result<String> {
    let path = workspace.root.join("plugin-api/Cargo.toml");
    let text =
        std::fs::read_to_string(&path).with_context(|| format!("{} cannot be read", path.display()))?;
    let value = text.lines().find_map(|line| line.strip_prefix("rust-version = "));
    let value = value.map(|value| value.trim_matches('"').to_owned());
    value.with_context(|| format!("{} names no rust-version", path.display()))
}

/// The packed crate that was written last.
fn newest(folder: &Path) -> anyhow::Result<PathBuf> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))?;
    let packed = entries.filter_map(Result::ok).filter(|entry| {
        entry.file_name().to_string_lossy().starts_with("host-plugin-api-")
            && entry.path().extension().is_some_and(|extension| extension == "crate")
    });
    let newest = packed.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok());
    newest.map(|entry| entry.path()).context("cargo package wrote no crate")
}

fn done(command: &mut Command) -> anyhow::Result<()> {
    let shown = format!("{command:?}");
    let status = command.status().with_context(|| format!("{shown} cannot be run"))?;
    ensure!(status.success(), "{shown} failed with {status}; see above");
    Ok(())
}
