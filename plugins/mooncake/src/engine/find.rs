//! Which Mooncake is used, and what was tried before.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use host_plugin_api::{Error, ErrorCode, Result};
use object::{Object as _, ObjectSymbol as _};

use super::Driver;
use super::c::{CDriver, SYMBOLS};
use super::python::PythonDriver;
use crate::config::{Backend, Config};
use crate::python::Probe;

/// What the C library is called.
pub const FILE: &str = "libtransfer_engine.so";

/// What was tried and did not work, with the reasons.
#[derive(Default)]
struct Attempts(Vec<(String, String)>);

impl Attempts {
    fn add(&mut self, what: impl ToString, why: impl ToString) {
        self.0.push((what.to_string(), why.to_string()));
    }

    fn error(self) -> Error {
        let mut text = "Mooncake's transfer engine cannot be used; tried".to_owned();
        for (what, why) in self.0 {
            text.push_str(&format!("\n    {what}: {why}"));
        }
        text.push_str(
            "\n  install it with `pip install mooncake-transfer-engine-non-cuda` (mooncake-transfer-engine on machines with \
             CUDA) into the Python environment that is active here, or name an interpreter as python in [plugin.mooncake], \
             or the path of libtransfer_engine.so in MOONCAKE_TE_LIBRARY or as library",
        );
        Error::new(ErrorCode::UNSUPPORTED, text)
    }
}

/// The C library that the user named, which is then the only one that is tried: falling back to another Mooncake would hide
/// the mistake.
fn named(config: &Config) -> Option<PathBuf> {
    let variable =
        || std::env::var_os("MOONCAKE_TE_LIBRARY").filter(|path| !path.is_empty()).map(PathBuf::from);
    let path = config.library.clone().or_else(variable).filter(|_| config.backend != Backend::Python)?;
    Some(if path.is_dir() { path.join(FILE) } else { path })
}

/// Tries one after the other until one works.
fn search<T>(
    config: &Config,
    c: impl Fn(&Path) -> std::result::Result<T, String>,
    python: impl Fn(&Probe) -> std::result::Result<T, String>,
) -> Result<T> {
    config.check_transfer()?;
    let mut attempts = Attempts::default();
    if let Some(path) = named(config) {
        return c(&path).map_err(|why| {
            attempts.add(path.display(), why);
            attempts.error()
        });
    }
    if config.backend != Backend::Python {
        match c(Path::new(FILE)) {
            Ok(found) => return Ok(found),
            Err(why) => attempts.add(FILE, why),
        }
    }
    // Also for the C library: some wheels have it in their folder.
    let probe = match Probe::run(config.python.as_deref(), &config.preloads()) {
        Ok(probe) => probe,
        Err(why) => {
            attempts.add("python", why);
            return Err(attempts.error());
        }
    };
    if config.backend != Backend::Python {
        let path = probe.packages.join("mooncake").join(FILE);
        let tried = if path.is_file() { c(&path) } else { Err("there is no such file".to_owned()) };
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
    Err(attempts.error())
}

/// Loads the Mooncake that is configured, or the first that is there.
///
/// # Errors
/// `UNSUPPORTED` with every attempt and its reason, `CONFIG` when none could work as configured.
pub fn load(config: &Config) -> Result<Box<dyn Driver>> {
    search(
        config,
        |path| Ok(Box::new(CDriver::load(path, config)?) as Box<dyn Driver>),
        |probe| Ok(Box::new(PythonDriver::load(probe, config)?) as Box<dyn Driver>),
    )
}

/// Says whether [`load`] would find one. Nothing of Mooncake is loaded into this process.
///
/// # Errors
/// As [`load`].
pub fn check(config: &Config) -> Result<()> {
    search(config, |path| look_at(path, &config.preloads()), |probe| probe.engine().map(drop))
}

/// Whether a library would load here: the system's loader lists what it would load, in a process that runs nothing of it.
fn look_at(path: &Path, preload: &[PathBuf]) -> std::result::Result<(), String> {
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
        .map_err(|error| format!("the loader cannot be asked: {error}"))?;
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
    let missing: Vec<&str> = SYMBOLS.iter().copied().filter(|name| !there.contains(name)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{} has no {}: it is not Mooncake's, or older than 0.3.6",
        place.display(),
        missing.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attempt_is_in_the_error_with_its_reason() {
        let config = Config { python: Some("/no/such/python".into()), ..Config::default() };
        let error = check(&config).unwrap_err();
        for part in [FILE, "cannot run /no/such/python", "pip install", "MOONCAKE_TE_LIBRARY"] {
            assert!(error.code == ErrorCode::UNSUPPORTED && error.message.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn what_the_user_names_is_all_that_is_tried() {
        let config = Config { library: Some("/no/such.so".into()), ..Config::default() };
        let error = check(&config).unwrap_err();
        assert!(error.message.contains("/no/such.so") && !error.message.contains("    python"), "{error}");
        let other = Config { library: Some("/lib/x86_64-linux-gnu/libc.so.6".into()), ..Config::default() };
        assert!(check(&other).unwrap_err().message.contains("has no createTransferEngine"));
    }
}
