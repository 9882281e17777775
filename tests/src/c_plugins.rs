//! Plugins in C and C++: the fixtures of `tests/c`, built by the compilers that are there.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::built::{repository, target};

/// A compiler's family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compiler {
    /// `gcc` and `g++`, which every machine that builds this project has.
    Gcc,
    /// `clang` and `clang++`, or those inside of `zig`, which `cargo xtask test` installs.
    Clang,
}

impl Compiler {
    /// The compilers that are installed.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let clang = Self::Clang.command(false).map(|_command| Self::Clang);
        if clang.is_none() {
            crate::skip::skipped("clang is not installed; `cargo xtask test` installs one");
        }
        [Some(Self::Gcc), clang].into_iter().flatten().collect()
    }

    /// The command that compiles C, or C++, unless there is none.
    #[must_use]
    pub fn command(self, cpp: bool) -> Option<Command> {
        let name = match (self, cpp) {
            (Self::Gcc, false) => "gcc",
            (Self::Gcc, true) => "g++",
            (Self::Clang, false) => "clang",
            (Self::Clang, true) => "clang++",
        };
        if self == Self::Gcc || runs(Command::new(name).arg("--version")) {
            return Some(Command::new(name));
        }
        let zig = zig()?;
        let mut command = Command::new(zig);
        command.arg(if cpp { "c++" } else { "cc" });
        // Zig keeps its compiled libraries here, so it compiles them once.
        command.env("ZIG_GLOBAL_CACHE_DIR", target().join("zig"));
        Some(command)
    }
}

fn runs(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The program of the package `ziglang`.
fn zig() -> Option<PathBuf> {
    let named = std::env::var_os("ZIG").filter(|path| !path.is_empty()).map(PathBuf::from);
    let installed = || {
        let pythons = std::fs::read_dir(target().join("python/lib")).ok()?;
        let folders = pythons.filter_map(|entry| Some(entry.ok()?.path().join("site-packages/ziglang/zig")));
        folders.into_iter().find(|file| file.is_file())
    };
    named.or_else(installed)
}

/// The folder of the headers that plugins include.
#[must_use]
pub fn include() -> PathBuf {
    repository().join("plugin-api/include")
}

/// Builds a fixture of `tests/c`, such as `tier.c`, into this folder, with more flags. Warnings are errors.
///
/// # Panics
/// When it does not compile.
#[must_use]
pub fn build(source: &str, compiler: Compiler, flags: &[&str], folder: &Path) -> PathBuf {
    let path = repository().join("tests/c").join(source);
    let manifest = path.with_file_name(source.replace(".cpp", "-cpp.toml").replace(".c", ".toml"));
    let file = folder.join(format!("{}-{compiler:?}.so", source.replace('.', "-")).to_lowercase());
    let cpp = source.ends_with(".cpp");
    let mut command = compiler.command(cpp).expect("the compiler is there");
    command.arg(if cpp { "-std=c++17" } else { "-std=c11" });
    command.args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", "-g", "-fPIC", "-shared"]);
    command.args(["-fvisibility=hidden", "-pthread"]).args(flags);
    command.arg(format!("-DMANIFEST=\"{}\"", manifest.display()));
    command.arg("-I").arg(include()).arg(&path).arg("-o").arg(&file);
    let output = command.output().expect("a compiler runs");
    assert!(output.status.success(), "{command:?}:\n{}", String::from_utf8_lossy(&output.stderr));
    file
}
