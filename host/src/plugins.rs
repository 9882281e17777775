//! Find, read, check and load plugins.
//!
//! [`Catalog::scan`] reads the manifests of all shared libraries in some directories without running any of their code.
//! [`requirements::check`] compares what a configuration needs with what the chosen plugins declare.
//! [`open_transfer`] then loads one and hands out its backend as the plain trait, so that nothing behind it knows
//! whether a backend was loaded or linked.
//!
//! A loaded library is never unloaded: threads and thread-local destructors of Rust code make that unsafe.

mod catalog;
mod error;
mod load;
mod loaded_transfer;
mod manifest;
mod preflight;
pub mod requirements;

pub use catalog::{Catalog, Entry, Unusable};
pub use error::{NoneFound, PluginError, PreflightError};
pub use load::open_transfer;
pub use loaded_transfer::LoadedTransfer;
pub use manifest::{Build, ConfigKey, Manifest, Role};
pub use preflight::preflight;
