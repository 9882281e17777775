//! `host plugins ..`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::super::launch;
use super::super::settings::Settings;
use super::{check, inspect, install, list, new, rules, test};
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
    Test(test::Test),
    /// Runs one case in this process
    #[command(hide = true)]
    RunCase(test::RunCase),
}

/// Where plugins are.
#[derive(Args, Debug)]
pub struct Directories {
    /// Directories with plugins [default: "plugins" beside the program, and the program's own]
    #[arg(long, value_name = "DIR,...", value_delimiter = ',')]
    plugins_dir: Option<Vec<PathBuf>>,
}

impl Directories {
    /// In the order of the search.
    pub fn list(&self) -> Vec<PathBuf> {
        Settings { plugins_dir: self.plugins_dir.clone(), ..Settings::default() }.plugins_dirs()
    }
}

impl Command {
    /// Does it.
    ///
    /// # Errors
    /// [`Refused`](crate::cli::Refused) for what cannot work, anything else for what failed.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Command::List { directories, json } => list::run(&directories.list(), json),
            Command::Inspect { file, json } => inspect::run(&file, json),
            Command::Check { settings } => {
                let settings = settings.with_file()?;
                // Each of these says everything it finds; a second kind of mistake is worth saying in the same run.
                let plan = launch::plan(&settings).map(drop);
                let found = [plan, check(&settings)];
                let wrong: Vec<String> =
                    found.into_iter().filter_map(|result| Some(result.err()?.to_string())).collect();
                if !wrong.is_empty() {
                    return Err(crate::cli::Refused(wrong.join("\n")).into());
                }
                launch::text_model(&settings)?;
                say!("the configuration works");
                Ok(())
            }
            Command::Rules { json } => rules::run(json),
            Command::Install { file, directories } => install::run(&file, &directories.list()),
            Command::New(new) => new.run(),
            Command::Test(test) => test.run(),
            Command::RunCase(case) => case.run(),
            Command::Lock { directories } => install::lock(&directories.list()),
        }
    }
}
