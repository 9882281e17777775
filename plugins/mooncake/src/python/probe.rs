//! Checks what an installation of Python can do, in a process of its own.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;

/// Complete answers of interpreters, with the libraries that were loaded first. A process uses one or two.
static KNOWN: Mutex<Vec<(PathBuf, Vec<PathBuf>, Probe)>> = Mutex::new(Vec::new());
/// The most answers that are kept.
const MOST_KNOWN: usize = 8;

const SCRIPT: &str = include_str!("probe.py");
/// How long an interpreter may take to answer. On a busy machine it takes half a second.
const PATIENCE: Duration = Duration::from_secs(60);
/// The oldest wheel that has what the transfer role calls, and the first whose TCP tells the sender that a write is in the
/// receiver's memory and not only in a socket's buffer.
const OLDEST: [u32; 3] = [0, 3, 13];

/// An installation of Python, and of Mooncake in it.
#[derive(Clone, Debug, Deserialize)]
pub struct Probe {
    /// Of Python.
    pub version: [u32; 3],
    /// The interpreter's path, as the interpreter says.
    pub executable: String,
    prefix: String,
    libdir: Option<String>,
    soname: Option<String>,
    multiarch: Option<String>,
    /// The folder of packages with compiled parts.
    pub packages: PathBuf,
    /// Libraries to load before Mooncake, in this order.
    pub preloaded: Vec<PathBuf>,
    failed: Vec<String>,
    /// The package that Mooncake was installed from.
    pub wheel: Option<Wheel>,
    engine: Module,
    store: Module,
    /// Whether the operator named the interpreter, rather than that it was found.
    #[serde(skip)]
    pub named: bool,
}

/// A package as `pip` names it.
#[derive(Clone, Debug, Deserialize)]
pub struct Wheel {
    /// The distribution's name.
    pub name: String,
    /// The distribution's version.
    pub version: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Module {
    There { path: PathBuf },
    Missing { error: String },
}

impl Probe {
    /// Probes the interpreter that is configured, or named by `MOONCAKE_PYTHON`, or that of the active virtual
    /// environment, or `python3`. If this process has a complete answer of it already, returns that answer.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it. Whether it has Mooncake is not checked here.
    pub fn run(python: Option<&Path>, preload: &[PathBuf]) -> Result<Self, String> {
        let (python, named) = interpreter(python);
        // The operator trusts an interpreter that the operator names.
        if !named {
            host_ownership::may_run(&python).map_err(|why| {
                format!("{why}; or name it in MOONCAKE_PYTHON, or as python in [plugin.mooncake], to run it all the same")
            })?;
        }
        let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        let same = |(path, before, _): &&(PathBuf, Vec<PathBuf>, Self)| *path == python && before == preload;
        if let Some((.., probe)) = known().iter().find(same) {
            return Ok(Self { named, ..probe.clone() });
        }
        let probe = Self { named, ..Self::ask(&python, preload)? };
        // What an interpreter lacks today may be there tomorrow.
        if probe.engine().is_ok() && probe.store().is_ok() && known().len() < MOST_KNOWN {
            known().push((python, preload.to_vec(), probe.clone()));
        }
        Ok(probe)
    }

    fn ask(python: &Path, preload: &[PathBuf]) -> Result<Self, String> {
        let shown = python.display();
        // `-I` isolates: with `-c` alone Python looks for modules in the current directory first, and would run a file
        // there that has a module's name. Variables and the user's own folder of packages add no places, either.
        let mut child = Command::new(python)
            .args(["-I", "-c", SCRIPT])
            .args(preload)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot run {shown}: {error}"))?;
        // Both are read by threads: a program whose output is not read stops when the pipe is full.
        let output = collect(child.stdout.take());
        let complaints = collect(child.stderr.take());
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Ok(None) => {
                    let _gone = child.kill().and_then(|()| child.wait()).is_err();
                    return Err(format!("{shown} did not answer within {} s", PATIENCE.as_secs()));
                }
                Err(error) => return Err(format!("cannot wait for {shown}: {error}")),
            }
        };
        let output = output.join().unwrap_or_default();
        let answer = output.lines().rev().find(|line| line.starts_with('{'));
        let Some(answer) = answer.filter(|_| status.success()) else {
            let said = complaints.join().unwrap_or_default();
            let last = said.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("it said nothing");
            return Err(format!("{shown} ended with {status}: {last}"));
        };
        serde_json::from_str(answer).map_err(|error| format!("{shown} gave a strange answer: {error}"))
    }

    /// Where Python's library may be, best first.
    pub fn libraries(&self) -> Vec<PathBuf> {
        let Some(soname) = self.soname.as_ref().filter(|name| name.contains(".so")) else {
            return Vec::new();
        };
        let multiarch = self.multiarch.as_deref().unwrap_or_default();
        let folders = [
            self.libdir.as_ref().map(PathBuf::from),
            Some(Path::new(&self.prefix).join("lib")),
            self.libdir.as_ref().map(|folder| Path::new(folder).join(multiarch)),
            Some(Path::new("/usr/lib").join(multiarch)),
        ];
        folders.into_iter().flatten().map(|folder| folder.join(soname)).chain([soname.into()]).collect()
    }

    /// Whether `mooncake.engine` can be used through Python's library in this process.
    ///
    /// # Errors
    /// What is missing, and how to get it.
    pub fn engine(&self) -> Result<&Path, String> {
        self.usable(&self.engine)
    }

    /// Whether `mooncake.store` can be used. As [`engine`](Self::engine).
    ///
    /// # Errors
    /// What is missing, and how to get it.
    pub fn store(&self) -> Result<&Path, String> {
        self.usable(&self.store)
    }

    fn usable<'a>(&self, module: &'a Module) -> Result<&'a Path, String> {
        let python = &self.executable;
        if let Some(failed) = self.failed.first() {
            return Err(format!("{python}: preload: {failed}"));
        }
        let path = match module {
            Module::There { path } => path,
            Module::Missing { error } => return Err(format!("{python}: {error}{}", hint(error))),
        };
        if let Some(Wheel { name, version }) = &self.wheel
            && parse(version) < OLDEST
        {
            let [major, minor, patch] = OLDEST;
            return Err(format!(
                "{python}: {name} is {version}, and this plugin needs {major}.{minor}.{patch} or later: `pip install -U {name}`"
            ));
        }
        let there = |path: &PathBuf| path.components().count() > 1 && path.is_file();
        if !self.libraries().iter().any(there) {
            return Err(self.no_library(""));
        }
        Ok(path)
    }

    /// The error for a missing library of Python's.
    pub(super) fn no_library(&self, tried: &str) -> String {
        let [major, minor, _] = self.version;
        let places: Vec<String> = self.libraries().iter().map(|path| path.display().to_string()).collect();
        format!(
            "{} has no shared library that can be loaded (looked for {}){tried} -- install libpython{major}.{minor} (apt), or \
             use a Python that was built with --enable-shared",
            self.executable,
            if places.is_empty() {
                "nothing: it was built without one".to_owned()
            } else {
                places.join(", ")
            },
        )
    }

    /// Describes a working installation.
    pub fn describe(&self) -> String {
        let wheel = self.wheel.as_ref().map_or_else(
            || "a mooncake of unknown version".to_owned(),
            |Wheel { name, version }| format!("{name} {version}"),
        );
        let [major, minor, patch] = self.version;
        format!("{wheel} in {} (Python {major}.{minor}.{patch})", self.executable)
    }
}

/// The interpreter, and whether the operator named it or it was found.
fn interpreter(configured: Option<&Path>) -> (PathBuf, bool) {
    if let Some(path) = configured {
        return (path.to_owned(), true);
    }
    if let Some(named) = std::env::var_os("MOONCAKE_PYTHON").filter(|path| !path.is_empty()) {
        return (named.into(), true);
    }
    let active = std::env::var_os("VIRTUAL_ENV").map(|root| PathBuf::from(root).join("bin/python"));
    let found = active.filter(|path| path.is_file()).or_else(|| host_ownership::on_the_path("python3"));
    // When none was found, running `python3` gives the error.
    found.map_or_else(|| ("python3".into(), true), |found| (found, false))
}

/// What to do about an import that failed.
fn hint(error: &str) -> &'static str {
    if error.contains("No module named 'mooncake") {
        return " -- `pip install mooncake-transfer-engine` (or mooncake-transfer-engine-non-cuda) into this interpreter";
    }
    if error.contains("libibverbs.so.1") {
        return " -- install libibverbs1 (apt) or libibverbs (dnf), which Mooncake needs for TCP, too, or name it in preload";
    }
    if error.contains("libcuda") {
        return " -- this wheel is for machines with CUDA: `pip install mooncake-transfer-engine-non-cuda` instead";
    }
    ""
}

/// The numbers of a version. A part that is no number ends them.
fn parse(version: &str) -> [u32; 3] {
    let mut numbers = [0; 3];
    for (place, part) in numbers.iter_mut().zip(version.split('.')) {
        match part.parse() {
            Ok(number) => *place = number,
            Err(_) => break,
        }
    }
    numbers
}

fn collect(pipe: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            // After a failure the bytes that were read before it are used.
            let _all = pipe.take(1 << 20).read_to_end(&mut bytes).is_ok();
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert!(parse("0.3.13.post1") >= OLDEST);
        assert!(parse("0.4.0") >= OLDEST);
        assert!(parse("0.3.9") < OLDEST);
        assert_eq!(parse("1.2rc1"), [1, 0, 0]);
    }

    #[test]
    fn an_interpreter_that_is_none_is_an_error_with_its_path() {
        let error = Probe::run(Some(Path::new("/no/such/python")), &[]).unwrap_err();
        assert!(error.contains("cannot run /no/such/python"), "{error}");
        let error = Probe::run(Some(Path::new("/bin/false")), &[]).unwrap_err();
        assert!(error.contains("/bin/false ended with"), "{error}");
        let error = Probe::run(Some(Path::new("/bin/echo")), &[]).unwrap_err();
        assert!(error.contains("/bin/echo"), "{error}");
    }

    #[test]
    fn what_is_missing_comes_with_how_to_get_it() {
        let mut probe: Probe = serde_json::from_str(
            r#"{"version":[3,11,2],"executable":"/py","prefix":"/none","libdir":"/none","soname":"libpython3.11.so.1.0",
                "multiarch":"m","packages":"/p","preloaded":[],"failed":[],"wheel":null,
                "engine":{"error":"ModuleNotFoundError: No module named 'mooncake'"},"store":{"path":"/s.so"}}"#,
        )
        .unwrap();
        assert!(probe.engine().unwrap_err().contains("pip install"));
        assert!(probe.store().unwrap_err().contains("install libpython3.11"));
        probe.wheel = Some(Wheel { name: "w".into(), version: "0.3.12.post1".into() });
        assert!(probe.store().unwrap_err().contains("needs 0.3.13"));
        probe.failed = vec!["libx.so: no such file".into()];
        assert!(probe.store().unwrap_err().contains("preload: libx.so"));
    }
}
