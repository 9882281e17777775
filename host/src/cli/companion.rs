//! Companions: programs that a plugin needs beside the workers, such as the server of a shared store.
//!
//! The command line of a companion comes from the plugin's manifest (`[[companion]]`) or from `[companion.NAME]` in the
//! configuration, which takes precedence. The supervisor runs the companions that `--start-companion` names. It starts them before
//! the workers and ends them after the workers.

mod descriptors;
mod template;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use host_plugins::{Catalog, CompanionManifest};

use super::Refused;
use super::settings::{CompanionSettings, Settings};
use template::Values;

/// Longest wait for a companion to answer at its address.
const PATIENCE: Duration = Duration::from_secs(30);
/// The variable that has a companion's environment, as a JSON object, if anything is added to it. All users can read the arguments of a process, but not its
/// variables.
pub const ENVIRONMENT: &str = "HOST_COMPANION_ENVIRONMENT";
/// Pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);

/// A program that the supervisor runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Companion {
    /// Its name in logs.
    pub name: String,
    /// Path of the program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// Variables that are added to the environment of the supervisor.
    pub environment: BTreeMap<String, String>,
    /// Address at which it takes connections once it is ready.
    pub ready: Option<SocketAddr>,
}

/// The companions that the settings name.
///
/// # Errors
/// When a companion is unknown, or its program is not found.
pub fn named(settings: &Settings) -> Result<Vec<Companion>, Refused> {
    let Some(names) = &settings.start_companion else { return Ok(Vec::new()) };
    let catalog = Catalog::scan_with(settings.plugin_policy(), settings.plugins_dirs());
    let plugins = settings.plugins();
    let found = plugins.iter().filter_map(|name| catalog.find(name).ok());
    let variable = |name: &str| std::env::var(name).ok();
    let offered: Vec<Offer> = found
        .flat_map(|entry| {
            let table = settings.plugin.get(&entry.manifest.plugin.name).and_then(toml::Value::as_table);
            let values = Values { table, keys: &entry.manifest.config, variable: &variable };
            entry.manifest.companions.iter().map(move |manifest| Offer { manifest, values })
        })
        .collect();
    names.iter().map(|name| one(name, settings.companion.get(name), &offered, &search_path())).collect()
}

/// A companion from a plugin's manifest, with the values for its template.
#[derive(Clone, Copy)]
struct Offer<'a> {
    manifest: &'a CompanionManifest,
    values: Values<'a>,
}

impl Offer<'_> {
    fn fill(&self, text: &str) -> Result<Option<String>, Refused> {
        self.values.fill(text).map_err(|why| {
            Refused(format!("companion {:?} cannot be started as its plugin says: {why}", self.manifest.name))
        })
    }

    fn arguments(&self) -> Result<Vec<String>, Refused> {
        self.manifest.arguments.iter().filter_map(|text| self.fill(text).transpose()).collect()
    }

    fn environment(&self) -> Result<BTreeMap<String, String>, Refused> {
        let filled = |(name, text): (&String, &String)| Some((name.clone(), self.fill(text).transpose()?));
        let set = self.manifest.environment.iter().filter_map(filled);
        set.map(|(name, value)| Ok((name, value?))).collect()
    }

    fn ready(&self) -> Result<Option<SocketAddr>, Refused> {
        let Some(text) = self.fill(&self.manifest.ready)?.filter(|text| !text.is_empty()) else {
            return Ok(None);
        };
        let name = &self.manifest.name;
        text.parse().map(Some).map_err(|error| {
            Refused(format!(
                "companion {name:?} is ready at {text:?}, which is no address: {error}; give one with numbers, or say ready in \
                 [companion.{name}]"
            ))
        })
    }
}

fn one(
    name: &str,
    configured: Option<&CompanionSettings>,
    offered: &[Offer],
    folders: &[PathBuf],
) -> Result<Companion, Refused> {
    let offer = offered.iter().find(|offer| offer.manifest.name == name);
    let own = configured.cloned().unwrap_or_default();
    let program = own.program.or_else(|| Some(PathBuf::from(&offer?.manifest.program)));
    let Some(program) = program else {
        let known: Vec<&str> = offered.iter().map(|offer| offer.manifest.name.as_str()).collect();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        return Err(Refused(format!(
            "--start-companion {name}: no plugin that is named has such a companion ({known}), and [companion.{name}] names no \
             program: correct the name, or say which program"
        )));
    };
    let found = find(&program, folders).ok_or_else(|| {
        Refused(format!(
            "companion {name:?} is the program {}, which is not there: install it, activate the virtual environment that has \
             it, or name its path as program in [companion.{name}]",
            program.display()
        ))
    })?;
    // A path that the operator named is trusted. A program that was found in a folder is checked.
    if found != program {
        host_ownership::may_run(&found).map_err(|why| {
            Refused(format!(
                "companion {name:?}: {why}; or name its path as program in [companion.{name}] to run it all the same"
            ))
        })?;
    }
    Ok(Companion {
        name: name.to_owned(),
        program: found,
        arguments: match (own.arguments, offer) {
            (Some(own), _) => own,
            (None, offer) => offer.map(Offer::arguments).transpose()?.unwrap_or_default(),
        },
        environment: match (own.environment, offer) {
            (Some(own), _) => own,
            (None, offer) => offer.map(Offer::environment).transpose()?.unwrap_or_default(),
        },
        ready: match (own.ready, offer) {
            (Some(own), _) => Some(own),
            (None, offer) => offer.map(Offer::ready).transpose()?.flatten(),
        },
    })
}

/// Folders in which programs are searched: that of the active virtual environment, and those in `PATH`.
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
    /// Whether a connection to its address succeeds. True without an address.
    pub async fn answers(&self) -> bool {
        match self.ready {
            Some(address) => tokio::net::TcpStream::connect(address).await.is_ok(),
            None => true,
        }
    }

    /// Waits until the companion accepts connections.
    ///
    /// # Errors
    /// When it does not accept connections in time.
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
    /// Becomes the program. Returns on failure, or if the supervisor has ended.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn run(self) -> anyhow::Result<()> {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))
            .context("the system does not tell when the supervisor ends")?;
        let parent = rustix::process::getppid().map(rustix::process::Pid::as_raw_nonzero);
        // The supervisor may have ended before the signal was set up.
        if parent.is_none_or(|parent| parent.get() != self.parent) {
            return Ok(());
        }
        let (program, arguments) = self.command.split_first().context("no program is named")?;
        descriptors::close_on_exec().context("the supervisor's descriptors cannot be kept from it")?;
        // Sets the variables only for the companion: a library in `LD_PRELOAD` must not be loaded into this program.
        let environment = std::env::var(ENVIRONMENT).unwrap_or_else(|_none| "{}".to_owned());
        let environment: BTreeMap<String, String> = serde_json::from_str(&environment)?;
        let mut command = std::process::Command::new(program);
        let error = command.args(arguments).env_remove(ENVIRONMENT).envs(environment).exec();
        Err(anyhow::Error::new(error).context(format!("{} cannot be run", Path::new(program).display())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use host_plugins::ConfigKey;

    fn offer() -> CompanionManifest {
        CompanionManifest {
            name: "master".into(),
            program: "sh".into(),
            arguments: vec!["-c".into(), "exit {port}".into(), "{unset}".into()],
            environment: [
                ("PORT".to_owned(), "{port}".to_owned()),
                ("NONE".to_owned(), "{unset}".to_owned()),
            ]
            .into(),
            ready: "127.0.0.1:{port}".into(),
        }
    }

    fn keys() -> BTreeMap<String, ConfigKey> {
        toml::from_str("port = { type = \"integer\", default = 7 }\nunset = { type = \"string\" }").unwrap()
    }

    #[test]
    fn what_is_configured_wins_over_the_manifest() {
        let (manifest, keys, folders) = (offer(), keys(), search_path());
        let offer =
            |table| Offer { manifest: &manifest, values: Values { table, keys: &keys, variable: &|_| None } };
        let plain = one("master", None, &[offer(None)], &folders).unwrap();
        assert!(plain.program.ends_with("sh") && plain.program.is_absolute(), "{plain:?}");
        assert_eq!((plain.arguments.len(), plain.ready), (2, "127.0.0.1:7".parse().ok()));
        // The plugin's table gives the address of the server. Arguments without a value are left out.
        let table = toml::from_str("port = 9").unwrap();
        let elsewhere = one("master", None, &[offer(Some(&table))], &folders).unwrap();
        assert_eq!(
            (elsewhere.arguments[1].as_str(), elsewhere.ready),
            ("exit 9", "127.0.0.1:9".parse().ok())
        );
        assert_eq!(elsewhere.environment, [("PORT".to_owned(), "9".to_owned())].into());
        let own: CompanionSettings = toml::from_str(
            "program = \"/bin/sh\"\narguments = []\nenvironment = {}\nready = \"127.0.0.1:8\"",
        )
        .unwrap();
        let changed = one("master", Some(&own), &[offer(Some(&table))], &folders).unwrap();
        assert!(changed.environment.is_empty());
        assert_eq!(changed.program, Path::new("/bin/sh"));
        assert_eq!((changed.arguments.len(), changed.ready), (0, "127.0.0.1:8".parse().ok()));
        // A companion that only the configuration describes.
        let other = one("other", Some(&own), &[offer(None)], &folders).unwrap();
        assert_eq!(other.program, Path::new("/bin/sh"));
    }

    #[test]
    fn what_cannot_be_run_is_refused_with_its_name() {
        let (mut offer, keys) = (offer(), keys());
        let refused = |name, manifest: &CompanionManifest, folders: &[PathBuf]| {
            let values = Values { table: None, keys: &keys, variable: &|_| None };
            one(name, None, &[Offer { manifest, values }], folders).unwrap_err().to_string()
        };
        assert!(refused("mistress", &offer, &search_path()).contains("(master)"));
        assert!(refused("master", &offer, &[]).contains("the program sh, which is not there"));
        // A program that another user could replace. Its folder is searched before the system's.
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("sh");
        std::fs::write(&program, "").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o757)).unwrap();
        let why = refused("master", &offer, &[folder.path().to_owned()]);
        assert!(why.contains("every user") && why.contains("[companion.master]"), "{why}");
        offer.ready = "somewhere".into();
        assert!(refused("master", &offer, &search_path()).contains("\"somewhere\""));
    }
}
