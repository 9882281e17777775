//! `cargo xtask gpu`: the checks and figures that need an NVIDIA GPU.

use std::fmt::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, bail, ensure};

use crate::workspace::Workspace;

const HELP: &str = "\
Run on an NVIDIA GPU what runs elsewhere on a stand-in for its driver, and measure it.

The programs are built here and put into a folder with a script. With --pack that is all: the folder can be carried to a machine
that has a GPU and no compiler, where `sh run.sh` runs everything. It takes a few minutes. What each program says lies in `results`
then, with one line for each in `results/summary.txt`.

On that machine: NVIDIA's driver (525 or later) and NVRTC (the package nvidia-cuda-nvrtc, or CUDA). The variable NVRTC names NVRTC's
library or a folder with it, such as Python's site-packages. With compute-sanitizer in PATH, the checks of kernels run a second time
under it, all at the same time.

Usage: cargo xtask gpu [OPTIONS]

Options:
  --pack FOLDER  Build and fill the folder, and run nothing
  -h, --help     This text";

/// A program of the folder.
struct Program {
    /// Its name, also that of its results.
    name: &'static str,
    package: &'static str,
    /// Cargo's arguments for its target: `--test` or `--bench`, and the name.
    target: [&'static str; 2],
    /// Its arguments.
    arguments: &'static str,
    /// Seconds that it may take.
    seconds: u32,
    /// Its arguments under compute-sanitizer, if it runs there.
    sanitized: Option<&'static str>,
}

/// Seconds that a program may take under compute-sanitizer.
const SANITIZED_SECONDS: u32 = 240;

const fn bench(name: &'static str, package: &'static str, seconds: u32, sanitized: bool) -> Program {
    let sanitized = if sanitized { Some("--bench check") } else { None };
    Program { name, package, target: ["--bench", name], arguments: "--bench", seconds, sanitized }
}

const PROGRAMS: [Program; 8] = [
    bench("cuda_copy", "host-kernels", 60, true),
    bench("cuda_exact", "host-kernels", 60, true),
    bench("cuda_digest", "host-kernels", 60, true),
    bench("cuda_linear", "host-kernels", 60, true),
    bench("cuda_attention", "host-kernels", 60, true),
    Program {
        name: "cuda_executor",
        package: "host-executor",
        target: ["--test", "cuda"],
        arguments: "--test-threads=1 --nocapture",
        seconds: 90,
        sanitized: None,
    },
    bench("device_handover", "host-plugin-shm", 60, false),
    bench("cuda_speed", "host-executor", 120, false),
];

/// Runs the command.
pub fn run(arguments: &[String]) -> anyhow::Result<ExitCode> {
    let mut pack = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--pack" => pack = Some(PathBuf::from(rest.next().context("--pack needs a folder; see --help")?)),
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            other => bail!("gpu has no option {other:?}; see `cargo xtask gpu --help`"),
        }
    }
    let workspace = Workspace::find()?;
    let folder = pack.clone().unwrap_or_else(|| workspace.target.join("gpu"));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for program in &PROGRAMS {
        let built = build(&workspace, program)?;
        let target = folder.join(program.name);
        std::fs::copy(&built, &target)
            .with_context(|| format!("cannot copy {} to {}", built.display(), target.display()))?;
        // A tenth of the size is left. A failure is ignored: without `strip` the program is larger.
        let _stripped = Command::new("strip").arg(&target).status();
    }
    let commit =
        Command::new("git").args(["rev-parse", "--short=8", "HEAD"]).current_dir(&workspace.root).output();
    let commit = commit.ok().filter(|output| output.status.success());
    let commit =
        commit.map_or_else(String::new, |output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    write_script(&folder, &script(&commit))?;
    if pack.is_some() {
        println!("{}: run `sh run.sh` in it on a machine with a GPU", folder.display());
        return Ok(ExitCode::SUCCESS);
    }
    let status =
        Command::new("sh").arg("run.sh").current_dir(&folder).status().context("sh cannot be run")?;
    println!("results: {}", folder.join("results").display());
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Builds a program for release, and returns its path.
fn build(workspace: &Workspace, program: &Program) -> anyhow::Result<PathBuf> {
    let [kind, name] = program.target;
    let mut command =
        workspace.cargo(&["test", "--release", "--no-run", "--message-format=json-render-diagnostics"]);
    let output =
        command.args(["--package", program.package, kind, name]).output().context("cargo cannot be run")?;
    ensure!(
        output.status.success(),
        "{} cannot be built: {}",
        program.name,
        String::from_utf8_lossy(&output.stderr)
    );
    let messages = String::from_utf8_lossy(&output.stdout);
    let executable = messages.lines().rev().find_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        (message["target"]["name"] == name).then(|| message["executable"].as_str().map(PathBuf::from))?
    });
    executable.with_context(|| format!("cargo does not say where {} is", program.name))
}

fn write_script(folder: &Path, text: &str) -> anyhow::Result<()> {
    let file = folder.join("run.sh");
    std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&file, mode).with_context(|| format!("cannot make {} a program", file.display()))
}

/// The script that runs all programs.
fn script(commit: &str) -> String {
    let mut script = format!(
        "#!/bin/sh\n# Runs every program of this folder. See `cargo xtask gpu --help`.\ncd \"$(dirname \"$0\")\" || exit 1\n\
         mkdir -p results\nexport HOST_CUDA=device\n: > results/summary.txt\nfailed=0\n\
         one() {{\n    name=$1; seconds=$2; shift 2\n    timeout \"$seconds\" \"$@\" > \"results/$name.txt\" 2>&1\n    code=$?\n    \
         [ $code = 0 ] || failed=1\n    echo \"$name: exit status $code\" | tee -a results/summary.txt\n    return $code\n}}\n\
         {{ date -u +%Y-%m-%d; echo 'commit {commit}'; nvidia-smi -L; uname -r; }} > results/machine.txt 2>&1\n",
    );
    for Program { name, arguments, seconds, .. } in &PROGRAMS {
        // Writing to a String cannot fail.
        let _written = writeln!(script, "one {name} {seconds} ./{name} {arguments}");
    }
    script.push_str("if command -v compute-sanitizer > /dev/null; then\n    running=\n");
    for Program { name, sanitized, .. } in &PROGRAMS {
        if let Some(arguments) = sanitized {
            let _written = writeln!(
                script,
                "    one {name}.sanitized {SANITIZED_SECONDS} compute-sanitizer --error-exitcode 9 ./{name} {arguments} &\n    \
                 running=\"$running $!\""
            );
        }
    }
    script.push_str("    for each in $running; do wait \"$each\" || failed=1; done\nfi\n");
    script.push_str("exit $failed\n");
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs the script over stand-ins for the programs, one of which fails.
    #[test]
    fn every_program_is_run_and_one_that_fails_is_told() {
        let folder = tempfile::tempdir().unwrap();
        for (index, program) in PROGRAMS.iter().enumerate() {
            let text =
                format!("#!/bin/sh\necho \"$0 $* $HOST_CUDA\"\nexit {}\n", if index == 2 { 7 } else { 0 });
            crate::executable::write(&folder.path().join(program.name), &text);
        }
        write_script(folder.path(), &script("0123abcd")).unwrap();
        // A PATH without a sanitizer.
        let status =
            Command::new("sh").arg("run.sh").env("PATH", "/usr/bin:/bin").current_dir(folder.path()).status();
        assert_eq!(status.unwrap().code(), Some(1));
        let read = |name: &str| std::fs::read_to_string(folder.path().join("results").join(name)).unwrap();
        let summary = read("summary.txt");
        assert_eq!(summary.lines().count(), PROGRAMS.len(), "{summary}");
        assert!(
            summary.contains("cuda_digest: exit status 7") && summary.contains("cuda_copy: exit status 0"),
            "{summary}"
        );
        assert!(read("cuda_executor.txt").contains("--test-threads=1 --nocapture device"));
        assert!(read("machine.txt").contains("commit 0123abcd"));
    }

    /// With a stand-in for the sanitizer, which finds something in one program.
    #[test]
    fn checks_run_again_under_the_sanitizer_and_what_it_finds_fails_the_run() {
        let folder = tempfile::tempdir().unwrap();
        for program in &PROGRAMS {
            crate::executable::write(&folder.path().join(program.name), "#!/bin/sh\n");
        }
        let sanitizer = "#!/bin/sh\necho \"$*\"\n[ \"$3\" != ./cuda_linear ] || exit 9\n";
        crate::executable::write(&folder.path().join("compute-sanitizer"), sanitizer);
        write_script(folder.path(), &script("0123abcd")).unwrap();
        let path = format!("{}:/usr/bin:/bin", folder.path().display());
        let status = Command::new("sh").arg("run.sh").env("PATH", path).current_dir(folder.path()).status();
        assert_eq!(status.unwrap().code(), Some(1));
        let read = |name: &str| std::fs::read_to_string(folder.path().join("results").join(name)).unwrap();
        let summary = read("summary.txt");
        let sanitized = PROGRAMS.iter().filter(|program| program.sanitized.is_some()).count();
        assert_eq!(summary.lines().count(), PROGRAMS.len() + sanitized, "{summary}");
        assert!(summary.contains("cuda_linear.sanitized: exit status 9"), "{summary}");
        assert!(summary.contains("cuda_attention.sanitized: exit status 0"), "{summary}");
        assert_eq!(read("cuda_copy.sanitized.txt"), "--error-exitcode 9 ./cuda_copy --bench check\n");
    }

    #[test]
    fn wrong_options_are_told() {
        let said = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            run(&arguments).unwrap_err().to_string()
        };
        assert!(said(&["--pack"]).contains("--pack needs a folder"));
        assert!(said(&["--fast"]).contains("gpu has no option \"--fast\""));
    }
}
