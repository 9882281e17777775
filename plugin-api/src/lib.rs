#![doc = include_str!("../README.md")]
//!
//! # What an author writes
//!
//! A plugin is a shared library that plays one or more *roles*. Each role is a plain Rust trait in this crate. The
//! export macro turns an implementation into the checked ABI that the host loads.
//!
//! An author writes three things: a `plugin.toml` beside `Cargo.toml`, a type that implements the role's trait
//! ([`TransferBackend`], [`StorageTier`], [`PoolAllocator`]), and one [`export_plugin!`] line that names the factory. A panic in
//! any of this code reaches the host as [`ErrorCode::PANICKED`]. After it, every call of the instance answers with this code.
//!
//! ```toml
//! manifest_version = 1
//!
//! [plugin]
//! id = "com.example.wire"       # unique
//! name = "wire"                 # what users write
//! version = "0.1.0"             # as in Cargo.toml
//! description = "Moves pages over a wire"
//! min_host = "0.1.0"            # optional: the oldest host it works with
//! threads = "own"               # optional: own or none
//!
//! [[role]]
//! kind = "transfer"              # transfer, tier or allocator
//! memory = ["dram"]
//! capabilities = ["page_writes", "arrival_notification"]   # see the module `capability`
//!
//! [config.depth]                # one table per key the plugin understands. The host refuses others
//! type = "integer"              # string, integer, float, boolean, array or table
//! default = 64
//! doc = "Writes in flight."
//! ```
//!
//! Compatibility: `VERSION` follows semver. Below 1.0 a plugin needs a host with the same minor version. Patch versions
//! only append to the API, and the newer side may be the host or the plugin.

// A plugin may be built with the oldest compiler that Cargo.toml names.
#![deny(clippy::incompatible_msrv)]
// The generated code of `sabi_trait` and prefix types has such names.
#![allow(non_camel_case_types, non_local_definitions)]

pub mod abi;
pub mod allocator;
pub mod c;
pub mod capability;
pub mod error;
mod export;
pub mod note;
pub mod services;
pub mod tier;
pub mod transfer;

pub use allocator::{
    Component, ComponentId, LayerGroup, LayerKind, PoolAllocator, PoolOpening, PoolPage, Retains,
};
pub use error::{Error, ErrorCode, Result};
pub use services::{Counter, Gauge, Host, Level, WAKES, host};
pub use tier::{Key, Scanned, StorageTier, TierCompletion, TierLimits, TierPage, TierUsage};
pub use transfer::{
    Address, Completion, Memory, MemoryKind, NOTIFICATION_BYTES, Notification, NotificationKind, Opening,
    PeerId, RegionId, Submission, Tag, TransferBackend, TransferLimits, Write,
};

/// Version of this crate, and so of the ABI.
///
/// - 0.2.0: the first version that is kept. A plugin of 0.1 has to be built again.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// For the export macro only.
#[doc(hidden)]
pub mod __private {
    pub use abi_stable::library::{LibHeader, RootModuleResult};
}
