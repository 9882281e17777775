//! Searches for a Mooncake that works, and reports what was tried before. Both roles use it, each with names of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use host_plugin_api::{Error, ErrorCode, Result};
use object::{Object as _, ObjectSymbol as _};

use crate::config::{Backend, Config};
use crate::python::Probe;

/// What was tried and did not work, with the reasons.
#[derive(Default)]
struct Attempts(Vec<(String, String)>);

impl Attempts {
    fn add(&mut self, what: impl ToString, why: impl ToString) {
        self.0.push((what.to_string(), why.to_string()));
    }

    fn error(self, wanted: &Wanted) -> Error {
        let Wanted { title, file, variable, key, .. } = wanted;
        let mut text = format!("{title} cannot be used; tried");
        for (what, why) in self.0 {
            text.push_str(&format!("\n    {what}: {why}"));
        }
        text.push_str(&format!(
            "\n  install it with `pip install mooncake-transfer-engine-non-cuda` (mooncake-transfer-engine on machines with \
             CUDA) into the Python environment that is active here, or name an interpreter as python in [plugin.mooncake], \
             or the path of {file} in {variable} or as {key}"
        ));
        Error::new(ErrorCode::UNSUPPORTED, text)
    }
}

/// The library that is searched for.
pub struct Wanted {
    /// Its name in messages.
    pub title: &'static str,
    /// File name of the C library.
    pub file: &'static str,
    /// The variable that names it.
    pub variable: &'static str,
    /// The key of the configuration that names it.
    pub key: &'static str,
    /// The value of this key.
    pub named: Option<PathBuf>,
    /// The symbols without which a library is not used.
    pub symbols: &'static [&'static str],
}

/// The C library that the user named. It is then the only one that is tried: falling back to another Mooncake would
/// hide the mistake.
fn named(wanted: &Wanted, config: &Config) -> Option<PathBuf> {
    let variable = || std::env::var_os(wanted.variable).filter(|path| !path.is_empty()).map(PathBuf::from);
    let path = wanted.named.clone().or_else(variable).filter(|_| config.backend != Backend::Python)?;
    Some(if path.is_dir() { path.join(wanted.file) } else { path })
}

/// Whether the C library among the packages of an interpreter may be loaded. What the operator names is what the operator
/// trusts, with its packages.
fn may_load(wanted: &Wanted, probe: &Probe, path: &Path) -> std::result::Result<(), String> {
    if probe.named {
        return Ok(());
    }
    let Wanted { variable, key, .. } = wanted;
    host_ownership::may_run(path).map_err(|why| {
        format!("{why}; or name it in {variable}, or as {key} in [plugin.mooncake], to use it all the same")
    })
}

/// Tries one after the other until one works.
///
/// # Errors
/// `UNSUPPORTED` with every attempt and its reason.
pub fn search<T>(
    wanted: &Wanted,
    config: &Config,
    c: impl Fn(&Path) -> std::result::Result<T, String>,
    python: impl Fn(&Probe) -> std::result::Result<T, String>,
) -> Result<T> {
    let mut attempts = Attempts::default();
    if let Some(path) = named(wanted, config) {
        return c(&path).map_err(|why| {
            attempts.add(path.display(), why);
            attempts.error(wanted)
        });
    }
    if config.backend != Backend::Python {
        match c(Path::new(wanted.file)) {
            Ok(found) => return Ok(found),
            Err(why) => attempts.add(wanted.file, why),
        }
    }
    // The probe also finds C libraries: some wheels have one in their folder.
    let probe = match Probe::run(config.python.as_deref(), &config.preloads()) {
        Ok(probe) => probe,
        Err(why) => {
            attempts.add("python", why);
            return Err(attempts.error(wanted));
        }
    };
    if config.backend != Backend::Python {
        let path = probe.packages.join("mooncake").join(wanted.file);
        let tried = match path.is_file() {
            true => may_load(wanted, &probe, &path).and_then(|()| c(&path)),
            false => Err("there is no such file".to_owned()),
        };
        match tried {
            Ok(found) => return Ok(found),
            Err(why) => attempts.add(path.display(), why),
        }
    }
    if config.backend != Backend::C {
        match python(&probe) {
            Ok(found) => return Ok(found),
            Err(why) => attempts.add("python", why),
        }
    }
    Err(attempts.error(wanted))
}

/// Checks whether a library would load here. The system's loader lists what it would load, in a process that runs nothing of it.
///
/// # Errors
/// What is missing.
pub fn look_at(path: &Path, preload: &[PathBuf], symbols: &[&str]) -> std::result::Result<(), String> {
    let listed: Vec<String> =
        preload.iter().map(|p| p.as_path()).chain([path]).map(|p| p.display().to_string()).collect();
    let own = std::env::current_exe().map_err(|error| format!("this program has no path: {error}"))?;
    let output = Command::new(own)
        .env("LD_TRACE_LOADED_OBJECTS", "1")
        .env("LD_WARN", "1")
        .env("LD_BIND_NOW", "1")
        .env("LD_PRELOAD", listed.join(":"))
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("the loader cannot be run: {error}"))?;
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let broken = |line: &&str| {
        line.contains("not found")
            || line.contains("undefined symbol")
            || line.contains("cannot be preloaded")
    };
    if let Some(line) = said.lines().chain(complaints.lines()).find(broken) {
        return Err(line.trim().to_owned());
    }
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    // "libx.so => /path/libx.so (0x..)" or "/path/libx.so (0x..)"
    let place = said.lines().filter(|line| line.contains(&name)).find_map(|line| {
        let words = line.rsplit("=>").next().unwrap_or(line);
        words.split_whitespace().next().map(PathBuf::from)
    });
    let Some(place) = place else { return Err("the loader does not find it".to_owned()) };
    let file = std::fs::read(&place).map_err(|error| format!("{}: {error}", place.display()))?;
    let object = object::File::parse(&*file).map_err(|error| format!("{}: {error}", place.display()))?;
    let there: Vec<&str> =
        object.dynamic_symbols().filter(|s| s.is_definition()).filter_map(|s| s.name().ok()).collect();
    let missing: Vec<&str> = symbols.iter().copied().filter(|name| !there.contains(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} has no {}: it is not Mooncake's, or older than 0.3.6",
        place.display(),
        missing.join(", ")
    ))
}
