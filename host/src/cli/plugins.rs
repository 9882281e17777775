//! The plugins that the settings request, and the commands about plugins.

mod bench;
mod check;
mod command;
mod features;
mod host_defaults;
mod inspect;
mod install;
mod list;
mod new;
mod open;
mod requested;
mod resolve;
mod rules;
mod trial;

pub use check::{ask, check, check_all};
pub use command::{Command, Directories};
pub use open::{OpenedTransfer, open_allocator, open_tier, open_transfer};
pub use requested::Requested;
pub use resolve::{Resolved, resolve};
pub use trial::try_out;

use std::path::Path;

use anyhow::Context as _;

use super::Refused;
use super::settings::Settings;

/// The boolean setting of a plugin that makes it read-only.
pub const READ_ONLY: &str = "read_only";

/// Reads a file with the plugin's own table. Empty without a file.
fn plugin_config(file: Option<&Path>) -> anyhow::Result<String> {
    let text = file.map(std::fs::read_to_string).transpose();
    Ok(text.context("the plugin's configuration cannot be read")?.unwrap_or_default())
}

/// The plugin's own table in the settings, as text. Empty if there is none.
fn config_of(settings: &Settings, plugin: &str) -> Result<String, Refused> {
    let table = settings.plugin.get(plugin).map(toml::to_string).transpose();
    let text = table.map_err(|error| Refused(format!("[plugin.{plugin}] is not a table: {error}")))?;
    Ok(text.unwrap_or_default())
}
