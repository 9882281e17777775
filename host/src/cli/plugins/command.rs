//! `host plugins ..`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use host_plugins::Policy;
use host_plugins::directory::Options;

use super::super::launch;
use super::super::settings::{RoleName, Settings};
use super::bench;
use super::{ask, check_all, inspect, install, list, new, resolve, rules, try_out};
use crate::cli::output::say;

/// What to do with plugins.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Lists the plugins that are there, without running them
    List {
        /// Where
        #[command(flatten)]
        directories: Directories,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Says what a file is and can do, without running it
    Inspect {
        /// The plugin's file
        file: PathBuf,
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Checks the whole configuration and starts nothing: exit code 0, or 2 with everything that is wrong
    ///
    /// Plugins are opened as a worker opens them, offered a little memory, and compared with the model's sizes. A storage tier
    /// that has a setting read_only is opened with it, unless its directory is still to be made.
    Check {
        /// The configuration
        #[command(flatten)]
        settings: Box<Settings>,
    },
    /// Prints what every feature needs of plugins and of other features, and why
    Rules {
        /// One JSON document
        #[arg(long)]
        json: bool,
    },
    /// Puts a plugin into a plugin directory: checked, whole or not at all, and safe while a host runs the old one
    Install {
        /// The plugin's file
        file: PathBuf,
        /// Replace another plugin, with another id, that has the same name
        #[arg(long)]
        force: bool,
        /// List it in plugins.lock, which is written if there is none and no other plugin
        #[arg(long)]
        lock: bool,
        /// Where
        #[command(flatten)]
        directories: Directories,
    },
    /// Puts the file before back that install replaced. Done again, it undoes that
    Rollback {
        /// The plugin's name
        name: String,
        /// Where
        #[command(flatten)]
        directories: Directories,
    },
    /// Removes a plugin with all that belongs to it. A process that has it loaded keeps it
    Remove {
        /// The plugin's name, or the path of its file
        name: String,
        /// Where
        #[command(flatten)]
        directories: Directories,
    },
    /// Writes plugins.lock into a plugin directory: from then on only the files that are there now are loaded
    Lock {
        /// Where
        #[command(flatten)]
        directories: Directories,
    },
    /// Writes a crate for a new plugin, which builds and passes `host plugins test` as it is
    New(new::New),
    /// Says whether a plugin keeps its contract: named cases, each in a process of its own
    Test(host_plugin_test::command::Test),
    /// Measures what reading, loading and calling a plugin costs
    Bench(bench::Bench),
    /// Loads a plugin in this process and says how long that took
    #[command(hide = true)]
    TimeLoad(bench::TimeLoad),
    /// Runs one case in this process
    #[command(hide = true)]
    RunCase(host_plugin_test::command::RunCase),
}

/// Where plugins are.
#[derive(Args, Debug)]
pub struct Directories {
    /// Directories with plugins [default: "plugins" beside the program, the program's own, and "../lib/host/plugins" from
    /// there]
    #[arg(long, value_name = "DIR,...", value_delimiter = ',')]
    plugins_dir: Option<Vec<PathBuf>>,

    /// File of publishers, one [[publisher]] with name and minisign key for each: only plugins that one of them signed are
    /// accepted
    #[arg(long, value_name = "FILE")]
    plugin_publishers: Option<PathBuf>,

    /// Accept files that users other than root, you, and the owner of this program could change
    #[arg(long)]
    insecure_plugin_permissions: bool,

    /// Accept plugins built with panic = "abort"
    #[arg(long)]
    plugins_may_abort: bool,
}

impl Directories {
    /// The directories, in the order of the search.
    pub fn list(&self) -> Vec<PathBuf> {
        self.settings().plugins_dirs()
    }

    /// The settings that these flags make. A file may add to them.
    pub fn settings(&self) -> Settings {
        Settings {
            plugins_dir: self.plugins_dir.clone(),
            plugin_publishers: self.plugin_publishers.clone(),
            insecure_plugin_permissions: self.insecure_plugin_permissions,
            plugins_may_abort: self.plugins_may_abort,
            ..Settings::default()
        }
    }

    /// Which plugin files are accepted.
    pub fn policy(&self) -> Policy {
        self.settings().plugin_policy()
    }
}

impl Command {
    /// Runs the command.
    ///
    /// # Errors
    /// [`Refused`](crate::cli::Refused) for invalid arguments, another error when a step fails.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Command::List { directories, json } => list::run(directories.policy(), &directories.list(), json),
            Command::Inspect { file, json } => inspect::run(&file, json),
            Command::Check { settings } => {
                let settings = resolve(settings.with_file()?)?.settings;
                check_all(&settings)?;
                // A router opens no plugin, and has no configuration for any.
                if settings.role != Some(RoleName::Router) {
                    ask(&settings)?;
                    try_out(&settings)?;
                }
                launch::text_model(&settings)?;
                say!("the configuration works");
                Ok(())
            }
            Command::Rules { json } => rules::run(json),
            Command::Install { file, force, lock, directories } => {
                install::run(directories.policy(), &file, &directories.list(), Options { force, lock })
            }
            Command::Rollback { name, directories } => {
                install::rollback(directories.policy(), &name, &directories.list())
            }
            Command::Remove { name, directories } => {
                install::remove(directories.policy(), &name, &directories.list())
            }
            Command::New(new) => new.run(),
            Command::Test(test) => test.run(),
            Command::Bench(bench) => bench.run(),
            Command::TimeLoad(load) => load.run(),
            Command::RunCase(case) => case.run(),
            Command::Lock { directories } => install::lock(directories.policy(), &directories.list()),
        }
    }
}
