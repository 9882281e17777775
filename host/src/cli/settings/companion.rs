//! Settings of programs that a plugin wants beside the workers, see [`crate::cli::companion`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;

/// `[companion.NAME]`: what differs from the manifest, or all of it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct CompanionSettings {
    /// The program: a path, or a name that is looked for in the active virtual environment and in `PATH`.
    pub program: Option<PathBuf>,
    /// Its arguments.
    pub arguments: Option<Vec<String>>,
    /// What is set in its environment, beside what the supervisor has in its own.
    pub environment: Option<BTreeMap<String, String>>,
    /// Address at which it takes connections once it is ready.
    pub ready: Option<SocketAddr>,
}
