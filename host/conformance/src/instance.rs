//! Instances of the plugin that is tested.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use host_memory::SharedMemory;
use host_plugin_api::{
    Address, LayerGroup, LayerKind, Memory, MemoryKind, Opening, PoolAllocator, PoolOpening, StorageTier,
    TransferBackend,
};
use host_plugins::{PluginError, open_allocator, open_tier, open_transfer};

use super::observe::shutdown_ms;
use super::{Stop, Subject, UNCONFIGURED};

/// An instance of any role.
pub(super) enum Instance {
    Transfer(Arc<dyn TransferBackend>),
    Tier(Arc<dyn StorageTier>),
    /// Kept so that it is dropped at the end.
    Allocator(#[allow(dead_code)] Arc<dyn PoolAllocator>),
}

impl Instance {
    /// The role's name in manifests.
    pub fn role(&self) -> &'static str {
        match self {
            Instance::Transfer(_) => "transfer",
            Instance::Tier(_) => "tier",
            Instance::Allocator(_) => "allocator",
        }
    }

    /// Whether shareable host memory can be registered. `None` for a role that registers no memory.
    pub fn registers_dram(&self) -> Option<Result<(), String>> {
        let memory = match SharedMemory::new("manifest", 1 << 16) {
            Ok(memory) => memory,
            Err(error) => return Some(Err(error.to_string())),
        };
        let offered = Memory {
            address: Address::of(memory.address().as_ptr()),
            length: memory.bytes() as u64,
            kind: MemoryKind::DRAM,
            device: 0,
            fd: memory.fd().as_raw_fd(),
            generation: 1,
            fd_offset: 0,
        };
        let taken = match self {
            Instance::Transfer(backend) => backend.register(&offered).and_then(|id| backend.deregister(id)),
            Instance::Tier(tier) => tier.register(&offered).and_then(|id| tier.deregister(id)),
            Instance::Allocator(_) => return None,
        };
        Some(taken.map_err(|error| error.to_string()))
    }

    /// Shuts the instance down. No call may be under way.
    pub fn end(self) -> Result<(), String> {
        let ended = match &self {
            Instance::Transfer(backend) => backend.shutdown(shutdown_ms()),
            Instance::Tier(tier) => tier.shutdown(shutdown_ms()),
            Instance::Allocator(_) => Ok(()),
        };
        ended.map_err(|error| format!("shutdown of an idle instance answered {error}"))
    }
}

impl Subject {
    fn opening(&self, name: &str) -> Opening {
        Opening { name: name.to_owned(), config: self.config.clone() }
    }

    /// Opens the transfer role.
    pub fn transfer(&self, name: &str) -> Result<Arc<dyn TransferBackend>, Stop> {
        open_transfer(&self.entry, &self.opening(name)).map_err(|error| self.closed("transfer", &error))
    }

    /// Opens the tier role.
    pub fn tier(&self, name: &str) -> Result<Arc<dyn StorageTier>, Stop> {
        open_tier(&self.entry, &self.opening(name)).map_err(|error| self.closed("tier", &error))
    }

    /// Opens the allocator role for these pools.
    pub fn allocator(&self, opening: &PoolOpening) -> Result<Arc<dyn PoolAllocator>, Stop> {
        let opening = PoolOpening { config: self.config.clone(), ..opening.clone() };
        open_allocator(&self.entry, &opening).map_err(|error| self.closed("allocator", &error))
    }

    /// The outcome for a role that did not open: it is skipped if only the operator can give the configuration that it needs, else
    /// it fails.
    fn closed(&self, role: &str, error: &PluginError) -> Stop {
        match !self.configured && error.is_about_configuration() {
            true => Stop::Skip(format!("{UNCONFIGURED}: role {role}: {error}")),
            false => Stop::Fail(error.to_string()),
        }
    }

    /// Opens each role that this host knows. Returns the instances, and the reasons of roles that need a configuration.
    pub(super) fn opened(&self, name: &str) -> Result<(Vec<Instance>, Vec<String>), Stop> {
        let (mut all, mut unconfigured) = (Vec::new(), Vec::new());
        for role in &self.manifest().roles {
            let opened = match role.kind.as_str() {
                "transfer" => self.transfer(name).map(Instance::Transfer),
                "tier" => self.tier(name).map(Instance::Tier),
                "allocator" => self.allocator(&full_pool(64)).map(Instance::Allocator),
                _ => continue,
            };
            match opened {
                Ok(instance) => all.push(instance),
                Err(Stop::Skip(why)) => unconfigured.push(why),
                Err(stop) => return Err(stop),
            }
        }
        Ok((all, unconfigured))
    }

    /// Opens each role that this host knows. Skips the case if none opens, for lack of a configuration.
    pub(super) fn instances(&self, name: &str) -> Result<Vec<Instance>, Stop> {
        let (all, unconfigured) = self.opened(name)?;
        match unconfigured.is_empty() || !all.is_empty() {
            true => Ok(all),
            false => Err(Stop::Skip(unconfigured.join("; "))),
        }
    }
}

/// A pool of so many pages of 16 tokens, for a model with these groups of layers.
pub(super) fn pool(pages: u32, groups: &[LayerGroup]) -> PoolOpening {
    PoolOpening {
        name: "conformance".to_owned(),
        config: String::new(),
        page_tokens: 16,
        pages,
        groups: groups.to_vec(),
    }
}

/// The pool of a model whose layers all attend to every token.
pub(super) fn full_pool(pages: u32) -> PoolOpening {
    pool(pages, &[LayerGroup { kind: LayerKind::FULL, layers: 2, window: 0, parts: 1 }])
}
