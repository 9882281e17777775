//! The folders of the repository, and calls of cargo.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};

/// The repository and its target folder.
#[derive(Debug)]
pub struct Workspace {
    /// The folder of the workspace's Cargo.toml.
    pub root: PathBuf,
    /// The folder that cargo builds in: `CARGO_TARGET_DIR`, its configuration, or `target`.
    pub target: PathBuf,
}

/// A profile of cargo.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// The profile of tests.
    Dev,
    /// Computes about as fast as a release, and is built in a third of the time.
    Demo,
    /// The profile of releases.
    Release,
}

impl Profile {
    pub fn name(self) -> &'static str {
        match self {
            Profile::Dev => "dev",
            Profile::Demo => "demo",
            Profile::Release => "release",
        }
    }
}

impl Workspace {
    /// Finds the workspace by asking cargo.
    pub fn find() -> anyhow::Result<Self> {
        let mut command = Command::new(cargo());
        command.args(["metadata", "--format-version", "1", "--no-deps", "--manifest-path"]);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
        let output = command.stderr(Stdio::inherit()).output().context("cargo cannot be run")?;
        ensure!(output.status.success(), "cargo metadata failed with {}", output.status);
        let answer: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("cargo metadata gave no JSON")?;
        let path = |field: &str| {
            let text = answer[field].as_str();
            text.map(PathBuf::from).with_context(|| format!("cargo metadata names no {field}"))
        };
        Ok(Self { root: path("workspace_root")?, target: path("target_directory")? })
    }

    /// A cargo command in the repository's root, building where this workspace builds.
    pub fn cargo(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(cargo());
        command.args(arguments).current_dir(&self.root).env("CARGO_TARGET_DIR", &self.target);
        command.stdin(Stdio::null());
        command
    }

    /// Builds these packages.
    pub fn build(&self, profile: Profile, packages: &[&str]) -> anyhow::Result<()> {
        let mut command = self.cargo(&["build", "--profile", profile.name()]);
        packages.iter().for_each(|package| {
            command.args(["--package", package]);
        });
        let status = command.status().context("cargo cannot be run")?;
        ensure!(status.success(), "{} do not build; see above", packages.join(", "));
        Ok(())
    }

    /// The folder of a profile's programs and plugins.
    pub fn built(&self, profile: Profile) -> PathBuf {
        self.target.join(if profile == Profile::Dev { "debug" } else { profile.name() })
    }

    /// One of the demo's small models, with sliding layers or without, made from a fixed seed if it is not there yet.
    pub fn tiny_model(&self, window: bool) -> anyhow::Result<PathBuf> {
        let (name, write): (_, fn(&Path, u64) -> std::io::Result<()>) = match window {
            true => ("tiny-gemma3", host_tests::model::tiny_gemma3),
            false => ("tiny-qwen3", host_tests::model::tiny_qwen3),
        };
        let model = self.target.join("demo").join(name);
        if !model.join("complete").exists() {
            write(&model, 0)
                .and_then(|()| std::fs::write(model.join("complete"), ""))
                .with_context(|| format!("the model cannot be written to {}", model.display()))?;
        }
        Ok(model)
    }
}

/// The cargo that runs this.
fn cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}
