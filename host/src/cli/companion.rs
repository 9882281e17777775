//! Companions: programs that a plugin wants beside the workers, such as the server that a store's clients meet at. What to
//! run is data, of the plugin's manifest (`[[companion]]`) or of `[companion.NAME]` in the configuration, which wins. The
//! supervisor runs those that `--start-companion` names, before the workers and until after them.

mod descriptors;

use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde::Deserialize;

use super::Refused;
use super::settings::Settings;
use crate::plugins::{Catalog, CompanionManifest};

/// Longest wait for one to answer at its address.
const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(20);

/// `[companion.NAME]`: what differs from the manifest, or all of it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct CompanionSettings {
    /// The program: a path, or a name that is looked for in the active virtual environment and in `PATH`.
    pub program: Option<PathBuf>,
    /// Its arguments.
    pub arguments: Option<Vec<String>>,
    /// Address at which it takes connections once it is ready.
    pub ready: Option<SocketAddr>,
}

/// A program to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Companion {
    /// What logs call it.
    pub name: String,
    /// The file.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Address at which it takes connections once it is ready.
    pub ready: Option<SocketAddr>,
}

/// Those that the settings name.
///
/// # Errors
/// When one is not known, or its program is not there.
pub fn named(settings: &Settings) -> Result<Vec<Companion>, Refused> {
    let Some(names) = &settings.start_companion else { return Ok(Vec::new()) };
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let plugins = settings.plugins();
    let found = plugins.iter().filter_map(|name| catalog.find(name).ok());
    let offered: Vec<&CompanionManifest> = found.flat_map(|entry| &entry.manifest.companions).collect();
    names.iter().map(|name| one(name, settings.companion.get(name), &offered, &search_path())).collect()
}

fn one(
    name: &str,
    configured: Option<&CompanionSettings>,
    offered: &[&CompanionManifest],
    folders: &[PathBuf],
) -> Result<Companion, Refused> {
    let offer = offered.iter().find(|offer| offer.name == name);
    let own = configured.cloned().unwrap_or_default();
    let program = own.program.or_else(|| Some(PathBuf::from(&offer?.program)));
    let Some(program) = program else {
        let known: Vec<&str> = offered.iter().map(|offer| offer.name.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        return Err(Refused(format!(
            "--start-companion {name}: no plugin that is named has such a companion ({known}), and [companion.{name}] names no \
             program: correct the name, or say which program"
        )));
    };
    let ready = match (own.ready, offer.map(|offer| offer.ready.as_str()).filter(|ready| !ready.is_empty())) {
        (Some(address), _) => Some(address),
        (None, Some(text)) => Some(text.parse().map_err(|error| {
            Refused(format!("companion {name:?} is ready at {text:?}, which is no address: {error}"))
        })?),
        (None, None) => None,
    };
    Ok(Companion {
        name: name.to_owned(),
        program: find(&program, folders).ok_or_else(|| {
            Refused(format!(
                "companion {name:?} is the program {}, which is not there: install it, activate the virtual environment that has \
                 it, or name its path as program in [companion.{name}]",
                program.display()
            ))
        })?,
        arguments: own.arguments.or_else(|| Some(offer?.arguments.clone())).unwrap_or_default(),
        ready,
    })
}

/// Folders with programs: of the active virtual environment, and of `PATH`.
fn search_path() -> Vec<PathBuf> {
    let active = std::env::var_os("VIRTUAL_ENV").map(|root| Path::new(&root).join("bin"));
    let path = std::env::var_os("PATH").unwrap_or_default();
    active.into_iter().chain(std::env::split_paths(&path)).collect()
}

fn find(program: &Path, folders: &[PathBuf]) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return program.is_file().then(|| program.to_owned());
    }
    folders.iter().map(|folder| folder.join(program)).find(|path| path.is_file())
}

impl Companion {
    /// Whether something takes connections at its address.
    pub async fn answers(&self) -> bool {
        match self.ready {
            Some(address) => tokio::net::TcpStream::connect(address).await.is_ok(),
            None => true,
        }
    }

    /// Waits until it takes connections.
    ///
    /// # Errors
    /// When it does not in time.
    pub async fn until_ready(&self) -> anyhow::Result<()> {
        let answers = async {
            while !self.answers().await {
                tokio::time::sleep(PAUSE).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, answers).await;
        let address = self.ready.map(|address| address.to_string()).unwrap_or_default();
        waited.with_context(|| {
            format!(
                "companion {:?} does not take connections at {address} after {PATIENCE:?}; see above",
                self.name
            )
        })
    }
}

/// `host companion`, which the supervisor starts: becomes another program that ends with the supervisor. Such a program does
/// not know that its standard input ends when it should.
#[derive(Debug, Args)]
pub struct Become {
    /// The supervisor's process
    #[arg(long)]
    parent: i32,

    /// The program and its arguments
    #[arg(required = true, last = true)]
    command: Vec<std::ffi::OsString>,
}

impl Become {
    /// Does not return when it works.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn run(self) -> anyhow::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
            .context("the system does not tell when the supervisor ends")?;
        let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_nonzero);
        // It may have ended before that was said.
        if parent.is_none_or(|parent| parent.get() != self.parent) {
            return Ok(());
        }
        let (program, arguments) = self.command.split_first().context("no program is named")?;
        descriptors::keep_to_ourselves().context("the supervisor's sockets cannot be kept from it")?;
        let error = std::process::Command::new(program).args(arguments).exec();
        Err(anyhow::Error::new(error).context(format!("{} cannot be run", Path::new(program).display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer() -> CompanionManifest {
        CompanionManifest {
            name: "master".into(),
            program: "sh".into(),
            arguments: vec!["-c".into(), "true".into()],
            ready: "127.0.0.1:7".into(),
        }
    }

    #[test]
    fn what_is_configured_wins_over_the_manifest() {
        let (offer, folders) = (offer(), search_path());
        let plain = one("master", None, &[&offer], &folders).unwrap();
        assert!(plain.program.ends_with("sh") && plain.program.is_absolute(), "{plain:?}");
        assert_eq!((plain.arguments.len(), plain.ready), (2, "127.0.0.1:7".parse().ok()));
        let own: CompanionSettings =
            toml::from_str("program = \"/bin/sh\"\narguments = []\nready = \"127.0.0.1:8\"").unwrap();
        let changed = one("master", Some(&own), &[&offer], &folders).unwrap();
        assert_eq!(changed.program, Path::new("/bin/sh"));
        assert_eq!((changed.arguments.len(), changed.ready), (0, "127.0.0.1:8".parse().ok()));
        // A companion of nobody's.
        let other = one("other", Some(&own), &[&offer], &folders).unwrap();
        assert_eq!(other.program, Path::new("/bin/sh"));
    }

    #[test]
    fn what_cannot_be_run_is_refused_with_its_name() {
        let mut offer = offer();
        let refused = |name, offer: &CompanionManifest, folders: &[PathBuf]| {
            one(name, None, &[offer], folders).unwrap_err().to_string()
        };
        assert!(refused("mistress", &offer, &search_path()).contains("(master)"));
        assert!(refused("master", &offer, &[]).contains("the program sh, which is not there"));
        offer.ready = "somewhere".into();
        assert!(refused("master", &offer, &search_path()).contains("\"somewhere\""));
    }
}
