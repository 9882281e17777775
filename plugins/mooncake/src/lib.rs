//! Transfer backend over Mooncake's transfer engine and storage tier over Mooncake Store, through its C library or through its
//! wheel with a Python that is loaded at run time. Building needs nothing of either.
//!
//! - [`engine`] is the transfer engine, behind one interface for both ways to reach it, and the search for it.
//! - [`transfer`] is the transfer role on top of it: connections that can be fenced, messages that arrive once.
//! - [`store`] is the storage role, on Mooncake Store.
//! - [`python`] is CPython inside this process, for both roles.
//!
//! Mooncake is never unloaded. Variables that it reads are set before it is loaded, unless they are set already.

mod config;
mod engine;
mod environment;
#[doc(hidden)]
pub mod fuzzing;
mod loader;
mod python;
mod search;
mod store;
mod transfer;

use host_plugin_api::{Opening, Result};

pub use store::MooncakeTier;
pub use transfer::MooncakeBackend;

/// Opens an instance of the transfer role: finds and loads Mooncake, and starts its threads.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a Mooncake that can be used, `IO` when Mooncake refuses.
pub fn open(opening: &Opening) -> Result<MooncakeBackend> {
    transfer::open(opening)
}

/// Opens an instance of the storage role: finds and loads Mooncake Store, and makes a client.
///
/// # Errors
/// `CONFIG` for a wrong configuration, `UNSUPPORTED` without a Mooncake Store that can be used, `IO` without a master
/// or when Mooncake refuses, `TIMEOUT` when Mooncake does not answer.
pub fn open_storage(opening: &Opening) -> Result<MooncakeTier> {
    store::open(opening)
}

/// Says whether a factory would accept this configuration here. Loads and starts nothing of Mooncake in this process.
///
/// # Errors
/// As [`open`], without `IO`.
pub fn check(role: &str, config: &str) -> Result<()> {
    if role == "tier" {
        return store::check(config);
    }
    engine::find::check(&config::Config::parse(config)?)
}

host_plugin_api::export_plugin! {
    manifest: include_str!("../plugin.toml"),
    transfer: open,
    tier: open_storage,
    check_config: check,
}
