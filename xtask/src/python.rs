//! Python packages that tests need, and the check of the `openai` package against a running server.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;
use host_tests::fetched::Artifact;

use crate::server::Server;
use crate::workspace::{Profile, Workspace};

/// Exactly this version, so that a new release changes nothing here by itself.
const OPENAI: &str = "openai==3.52.0";

/// NIXL. Exactly this version, because its C API changes between releases without notice, and the plugin was written and measured
/// against this one. CUDA is not needed, although the name has it: the wheel brings UCX along, and only its libraries are used,
/// not its dependencies. 66 MiB.
const NIXL: &str = "nixl-cu12==1.5.1";

/// Mooncake. Exactly this version, because its Python API is the project's own and not a standard, and the plugin was written and
/// measured against this one. It needs no GPU and no network adapter, and none of its dependencies is used.
const MOONCAKE: &str = "mooncake-transfer-engine-non-cuda==0.3.13.post1";

/// An S3 server for the tests of NIXL's storage tier in a bucket. Exactly these versions, so that new releases change nothing
/// here by themselves. 30 MiB with dependencies.
const MOTO: [&str; 3] = ["moto[s3]==5.2.1", "flask==3.1.3", "flask-cors==6.0.2"];

/// A clang with all that it needs, for plugins in C and C++ where the machine has none: Debian's needs root to be installed.
/// Exactly this version, so that a new release changes nothing here by itself. 100 MB.
const ZIG: &str = "ziglang==0.17.1";

/// Libraries that Mooncake links to, and that machines without network adapters for RDMA lack: Debian's packages, and the files
/// that are loaded, in this order.
const VERBS: [(&str, &str); 3] = [
    ("libnl-3-200", "libnl-3.so.200"),
    ("libnl-route-3-200", "libnl-route-3.so.200"),
    ("libibverbs1", "libibverbs.so.1"),
];

/// LMDB, in the same form.
const LMDB: [(&str, &str); 2] = [("liblmdb-dev", "lmdb.h"), ("liblmdb0", "liblmdb.so.0")];

/// NVIDIA's run-time compiler of CUDA 12 and of CUDA 13, exactly these, so that a new release changes nothing here by
/// itself. Neither needs a GPU. 86 and 56 MiB.
const NVRTC: [&str; 2] = ["nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvrtc==13.5.37"];

/// An environment of packages in the target folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Environment {
    /// That of most packages.
    Common,
    /// That of the clients that agents are built on, which need other versions of packages.
    Clients,
    /// That of the benchmark clients of SGLang and vLLM.
    Benchmarks,
    /// That of NVIDIA's benchmark client, which names versions of most of its packages.
    Aiperf,
    /// That of the program `llm`.
    Llm,
}

impl Environment {
    fn folder(self, workspace: &Workspace) -> PathBuf {
        workspace.target.join(match self {
            Self::Common => "python",
            Self::Clients => "python-clients",
            Self::Benchmarks => "python-benchmarks",
            Self::Aiperf => "python-aiperf",
            Self::Llm => "python-llm",
        })
    }
}

/// Runs tests/python/openai_client.py against a split server of the small model. False when a check failed.
pub fn check(workspace: &Workspace, python: &Path) -> anyhow::Result<bool> {
    with_small_model(workspace, "openai", |url| {
        let mut command = Command::new(python);
        command.arg(workspace.root.join("tests/python/openai_client.py")).arg(url).stdin(Stdio::null());
        command.status().map(|status| status.success())
    })?
    .context("python cannot be run")
}

/// Starts a split server of the small model, with a template that takes tools, and calls `run` with its address. `name` is that of
/// its log.
pub fn with_small_model<T>(
    workspace: &Workspace,
    name: &str,
    run: impl FnOnce(&str) -> T,
) -> anyhow::Result<T> {
    let model = workspace.tiny_model(false)?;
    let template = workspace.root.join("tests/python/tools.jinja").display().to_string();
    with_model(workspace, &model, &["--chat-template", &template], name, run)
}

/// Starts a split server of SmolLM2-135M-Instruct, which was fetched, and calls `run` with its address. `name` is that of its log.
pub fn with_real_model<T>(
    workspace: &Workspace,
    name: &str,
    run: impl FnOnce(&str) -> T,
) -> anyhow::Result<T> {
    let model = Artifact::SmolLm2.path_in(&workspace.target.join("fetched"));
    with_model(workspace, &model, &[], name, run)
}

/// Starts a split server of a model with further flags, and calls `run` with its address.
fn with_model<T>(
    workspace: &Workspace,
    model: &Path,
    more: &[&str],
    name: &str,
    run: impl FnOnce(&str) -> T,
) -> anyhow::Result<T> {
    let built = workspace.built(Profile::Dev);
    let flag = |path: &Path| path.display().to_string();
    let given = ["--model", &flag(model), "--plugins-dir", &flag(&built)].map(str::to_owned);
    let flags: Vec<String> = given.into_iter().chain(more.iter().map(|flag| (*flag).to_owned())).collect();
    let server = Server::start(&built.join("host"), &flags, &workspace.target.join("demo"), name)?;
    let ran = run(&server.url);
    server.stop()?;
    Ok(ran)
}

/// A python with the `openai` package, in an environment in the target folder.
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

/// The program `zig`, which has a clang inside.
///
/// # Errors
/// With the reason why there is none.
pub fn zig(workspace: &Workspace) -> Result<PathBuf, String> {
    let python = installed(workspace, ZIG, &["--no-deps"])?;
    let path = platform_packages(&python)?.join("ziglang/zig");
    if path.is_file() { Ok(path) } else { Err(format!("{ZIG} was installed without {}", path.display())) }
}

/// An interpreter with Mooncake, and the libraries to load before it, as a list of paths.
///
/// # Errors
/// With the reason why there is none.
pub fn mooncake(workspace: &Workspace) -> Result<(PathBuf, OsString), String> {
    let python = installed(workspace, MOONCAKE, &["--no-deps"])?;
    let preload = if imports(&python, &[]).is_ok() { Vec::new() } else { verbs(workspace)? };
    imports(&python, &preload)?;
    let list = std::env::join_paths(preload).map_err(|error| format!("these make no list: {error}"))?;
    Ok((python, list))
}

/// An interpreter with moto.
///
/// # Errors
/// With the reason why there is none.
pub fn moto(workspace: &Workspace) -> Result<PathBuf, String> {
    let [moto, rest @ ..] = MOTO;
    let python = installed(workspace, moto, &rest)?;
    succeed(Command::new(&python).args(["-c", "import moto.server"]), "`import moto.server`")?;
    Ok(python)
}

/// Whether an interpreter can import Mooncake, after it has loaded some libraries.
fn imports(python: &Path, preload: &[PathBuf]) -> Result<(), String> {
    let ask = "import ctypes, sys\n\
               for path in sys.argv[1:]: ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)\n\
               import mooncake.engine, mooncake.store";
    succeed(Command::new(python).args(["-I", "-c", ask]).args(preload), "`import mooncake.engine`")
}

/// The libraries that Mooncake links to.
fn verbs(workspace: &Workspace) -> Result<Vec<PathBuf>, String> {
    unpacked(workspace, "verbs", &VERBS)
}

/// LMDB's header and its library, of Debian, which the example of a tier in C++ needs.
///
/// # Errors
/// With the reason why they are missing.
pub fn lmdb(workspace: &Workspace) -> Result<[PathBuf; 2], String> {
    let files = unpacked(workspace, "lmdb", &LMDB)?;
    files.try_into().map_err(|files| format!("{files:?} are not two files"))
}

/// Downloads Debian's packages and unpacks them into a folder of the target folder. Neither needs special rights. Returns the paths of
/// the files that are named with them.
fn unpacked(workspace: &Workspace, folder: &str, packages: &[(&str, &str)]) -> Result<Vec<PathBuf>, String> {
    let folder = workspace.target.join(folder);
    let root = folder.join("root");
    let find =
        || -> Option<Vec<PathBuf>> { packages.iter().map(|(_, file)| find_file(&root, file)).collect() };
    if let Some(found) = find() {
        return Ok(found);
    }
    let failed = |error: std::io::Error| format!("{} cannot be made: {error}", folder.display());
    std::fs::create_dir_all(&folder).map_err(failed)?;
    let names: Vec<&str> = packages.iter().map(|(package, _)| *package).collect();
    let mut download = Command::new("apt-get");
    succeed(download.arg("download").args(&names).current_dir(&folder), "`apt-get download`")?;
    for entry in std::fs::read_dir(&folder).map_err(failed)?.filter_map(Result::ok) {
        let path = entry.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            succeed(Command::new("dpkg").arg("-x").arg(&path).arg(&root), "`dpkg -x`")?;
        }
    }
    find().ok_or_else(|| {
        let files: Vec<&str> = packages.iter().map(|(_, file)| *file).collect();
        format!("{} have no {}", names.join(", "), files.join(", "))
    })
}

/// A file of this name in a folder or the folders in it.
fn find_file(folder: &Path, name: &str) -> Option<PathBuf> {
    let path = folder.join(name);
    if path.exists() {
        return Some(path);
    }
    let folders = std::fs::read_dir(folder).ok()?.filter_map(Result::ok).map(|entry| entry.path());
    folders.filter(|path| path.is_dir() && !path.is_symlink()).find_map(|path| find_file(&path, name))
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

/// The folder in which an environment keeps packages with compiled parts.
///
/// # Errors
/// When python cannot be run.
pub fn platform_packages(python: &Path) -> Result<PathBuf, String> {
    let ask = "import sysconfig; print(sysconfig.get_paths()['platlib'])";
    let output = Command::new(python).args(["-c", ask]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("python cannot be run: {error}"))?;
    Ok(PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()))
}

/// The interpreter of the common environment, with pip.
///
/// # Errors
/// With the reason why there is none.
pub fn interpreter(workspace: &Workspace) -> Result<PathBuf, String> {
    interpreter_of(workspace, Environment::Common)
}

fn interpreter_of(workspace: &Workspace, environment: Environment) -> Result<PathBuf, String> {
    let folder = environment.folder(workspace);
    let python = folder.join("bin/python");
    if !python.exists() {
        let base = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        succeed(Command::new(base).args(["-m", "venv", "--clear"]).arg(&folder), "a virtual environment")?;
    }
    Ok(python)
}

/// The interpreter of the common environment, with this package installed.
///
/// # Errors
/// With the reason why it cannot be installed.
pub fn installed(workspace: &Workspace, package: &str, flags: &[&str]) -> Result<PathBuf, String> {
    installed_in(workspace, Environment::Common, package, flags)
}

/// The interpreter of an environment, with this package installed, and with others that `flags` name.
///
/// # Errors
/// With the reason why it cannot be installed.
pub fn installed_in(
    workspace: &Workspace,
    environment: Environment,
    package: &str,
    flags: &[&str],
) -> Result<PathBuf, String> {
    let folder = environment.folder(workspace);
    let python = folder.join("bin/python");
    let others = flags.iter().filter(|flag| !flag.starts_with('-'));
    let names: Vec<&str> = std::iter::once(&package).chain(others).copied().collect();
    let ready = folder.join(format!("{}.installed", names.join(" ")));
    if ready.exists() && python.exists() {
        return Ok(python);
    }
    let python = interpreter_of(workspace, environment)?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]);
    succeed(pip.args(flags).arg(package), &format!("`pip install {package}`"))?;
    std::fs::write(&ready, "").map_err(|error| format!("{} cannot be written: {error}", ready.display()))?;
    Ok(python)
}

/// Runs a program. Its output shows only when it fails.
///
/// # Errors
/// With its last lines.
pub fn succeed(command: &mut Command, what: &str) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| {
        format!("{what} failed, because {} cannot be run: {error}", command.get_program().display())
    })?;
    if output.status.success() {
        return Ok(());
    }
    let said =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    let last: Vec<&str> = said.lines().rev().take(3).collect();
    let last: Vec<&str> = last.into_iter().rev().collect();
    Err(format!("{what} failed ({}): {}", output.status, last.join(" | ")))
}
