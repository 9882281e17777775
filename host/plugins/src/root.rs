//! The root of a loaded file, in whichever language the plugin was written.

use host_plugin_api::abi::{self, AllocatorObject, TierObject, TransferObject};
use host_plugin_api::{Opening, PoolOpening, Result};

use super::c;

/// A checked root.
pub enum Root {
    /// The root of a plugin in Rust. Its types were compared with those of this host.
    Rust(abi::Root),
    /// The root of a plugin in C.
    C(Box<c::Root>),
}

impl Root {
    /// See [`abi::Root::check_config`].
    pub fn check_config(&self, role: &str, config: &str) -> Result<()> {
        match self {
            Self::Rust(root) => root.check_config(role, config),
            Self::C(root) => root.check_config(role, config),
        }
    }

    /// See [`abi::Root::open_transfer`].
    pub fn open_transfer(&self, opening: &Opening) -> Result<TransferObject> {
        match self {
            Self::Rust(root) => root.open_transfer(opening),
            Self::C(root) => root.open_transfer(opening),
        }
    }

    /// See [`abi::Root::open_tier`].
    pub fn open_tier(&self, opening: &Opening) -> Result<TierObject> {
        match self {
            Self::Rust(root) => root.open_tier(opening),
            Self::C(root) => root.open_tier(opening),
        }
    }

    /// See [`abi::Root::open_allocator`].
    pub fn open_allocator(&self, opening: &PoolOpening) -> Result<AllocatorObject> {
        match self {
            Self::Rust(root) => root.open_allocator(opening),
            Self::C(root) => root.open_allocator(opening),
        }
    }

    /// The kinds of role that the plugin plays.
    pub fn roles(&self) -> Vec<&'static str> {
        match self {
            Self::Rust(root) => root.roles(),
            Self::C(root) => root.roles(),
        }
    }
}
