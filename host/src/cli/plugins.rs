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

/// The setting of a plugin with which it changes nothing.
pub const READ_ONLY: &str = "read_only";

/// The plugin's own table in a file of its own, as text, which is empty without a file.
fn plugin_config(file: Option<&Path>) -> anyhow::Result<String> {
    let text = file.map(std::fs::read_to_string).transpose();
    Ok(text.context("the plugin's configuration cannot be read")?.unwrap_or_default())
}

/// The plugin's own table, as text, which is empty when there is none.
fn config_of(settings: &Settings, plugin: &str) -> Result<String, Refused> {
    let table = settings.plugin.get(plugin).map(toml::to_string).transpose();
    let text = table.map_err(|error| Refused(format!("[plugin.{plugin}] is not a table: {error}")))?;
    Ok(text.unwrap_or_default())
}
