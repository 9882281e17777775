//! Transfer backend over Mooncake's transfer engine and storage tier over Mooncake Store, through its C library or through its
//! wheel with a Python that is loaded at run time. Building needs nothing of either.
//!
//! - [`engine`] is the transfer engine, whichever way it is reached, and how it is found.
//! - [`transfer`] is the transfer role on top of it: connections that can be fenced, messages that arrive once.
//! - [`python`] is CPython inside this process, for both roles.
//!
//! Mooncake is never unloaded, and what it reads from the environment is set before it is loaded, unless it is set already.

mod config;
mod engine;
mod environment;
mod python;
mod transfer;

use host_plugin_api::{Error, ErrorCode, Opening, Result};

pub use transfer::MooncakeBackend;

/// Opens an instance of the transfer role: finds and loads Mooncake, and starts its threads.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a Mooncake that can be used, `IO` when it refuses.
pub fn open(opening: &Opening) -> Result<MooncakeBackend> {
    MooncakeBackend::open(opening)
}

/// Says whether a factory would accept this configuration here. Loads and starts nothing of Mooncake in this process.
///
/// # Errors
/// As [`open`], without `IO`.
pub fn check(role: &str, config: &str) -> Result<()> {
    if role == "tier" {
        return Err(Error::new(ErrorCode::UNSUPPORTED, "this build has no storage tier yet"));
    }
    engine::find::check(&config::Config::parse(config)?)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
    check_config: check,
}
