//! Find, read, check and load plugins.
//!
//! [`Catalog::scan`] reads the manifests of all shared libraries in some directories without running any of their code.
//! [`requirements::check`] compares what a configuration needs with what the chosen plugins declare.
//! [`open_transfer`], [`open_tier`] and [`open_allocator`] then load a plugin and return the trait object of its role. Their
//! callers cannot tell a loaded backend from a linked one.
//!
//! A loaded library is never unloaded: threads and thread-local destructors of Rust code make that unsafe.

mod bounded;
mod c;
mod calls;
mod catalog;
pub mod directory;
mod dynamic;
mod error;
mod file;
#[doc(hidden)]
pub mod fuzzing;
mod glibc;
mod libraries;
mod library;
pub mod limits;
mod load;
mod loaded_allocator;
mod loaded_tier;
mod loaded_transfer;
pub mod lock;
mod manifest;
mod notes;
mod policy;
mod preflight;
mod publishers;
pub mod requirements;
mod root;
mod services;
mod sidecar;
mod stop;
mod sync;

pub use calls::{CallInProgress, SAMPLE, Timing, in_progress, timings};
pub use catalog::{Catalog, Entry, Unusable};
pub use dynamic::{NeededVersion, needed_libraries, needed_versions};
pub use error::{NoneFound, PluginError, PreflightError};
pub use file::{describe, preflight};
pub use glibc::Glibc;
pub use libraries::LockedLibrary;
pub use library::load_root;
pub use load::{check_config, open_allocator, open_tier, open_transfer};
pub use loaded_allocator::LoadedAllocator;
pub use loaded_tier::LoadedTier;
pub use loaded_transfer::LoadedTransfer;
pub use manifest::{Build, CompanionManifest, ConfigKey, HostDefault, Manifest, Role};
pub use policy::Policy;
pub use publishers::{Publishers, Signed};
pub use services::{Kind, Metric, Services, Waker};
pub use stop::Running;
