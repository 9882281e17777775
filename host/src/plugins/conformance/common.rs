//! Cases for every plugin.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use host_plugin_api::capability;
use host_plugin_api::{
    Component, ComponentPool, Memory, MemoryKind, Opening, PoolAllocator, PoolOpening, StorageTier,
    TransferBackend,
};

use super::observe::{descriptors, threads, wait_for};
use super::{Case, Outcome, Stop, Subject, UNCONFIGURED, ensure};
use crate::executor::memory::SharedMemory;
use crate::plugins::{PluginError, load_root, open_allocator, open_tier, open_transfer};

pub(super) const CASES: &[Case] = &[
    Case {
        name: "manifest",
        role: None,
        capability: None,
        about: "the manifest is readable, its id and its config keys are well-formed",
        run: manifest,
    },
    Case {
        name: "load",
        role: None,
        capability: None,
        about: "the library loads, its types fit, it is what its note says, and loading starts no threads",
        run: load,
    },
    Case {
        name: "lifecycle",
        role: None,
        capability: None,
        about: "instances live side by side, and leave no thread or descriptor behind when they end",
        run: lifecycle,
    },
    Case {
        name: "lifecycle-drop",
        role: None,
        capability: None,
        about: "instances that are dropped without a shutdown leave no thread or descriptor behind",
        run: dropped,
    },
];

/// Instances opened one after the other, in search of what each leaves behind.
const INSTANCES: usize = 20;

/// Time that a shutdown gets, which is what the server gives.
pub(super) const DEADLINE_MS: u64 = 3000;

/// An instance of any role.
pub(super) enum Instance {
    Transfer(Arc<dyn TransferBackend>),
    Tier(Arc<dyn StorageTier>),
    /// Kept for its drop.
    Allocator(#[allow(dead_code)] Arc<dyn PoolAllocator>),
}

impl Instance {
    /// As manifests name it.
    pub fn role(&self) -> &'static str {
        match self {
            Instance::Transfer(_) => "transfer",
            Instance::Tier(_) => "tier",
            Instance::Allocator(_) => "allocator",
        }
    }

    /// Whether shareable host memory can be registered; `None` where nothing is.
    pub fn registers_dram(&self) -> Option<Result<(), String>> {
        let memory = match SharedMemory::new("manifest", 1 << 16) {
            Ok(memory) => memory,
            Err(error) => return Some(Err(error.to_string())),
        };
        let offered = Memory {
            address: memory.address().as_ptr() as u64,
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

    pub fn end(self) -> Result<(), String> {
        let ended = match &self {
            Instance::Transfer(backend) => backend.shutdown(DEADLINE_MS),
            Instance::Tier(tier) => tier.shutdown(DEADLINE_MS),
            Instance::Allocator(_) => Ok(()),
        };
        ended.map_err(|error| format!("shutdown of an idle instance answered {error}"))
    }
}

impl Subject {
    fn opening(&self, name: &str) -> Opening {
        Opening { name: name.to_owned(), config: self.config.clone() }
    }

    pub fn transfer(&self, name: &str) -> Result<Arc<dyn TransferBackend>, Stop> {
        open_transfer(&self.entry, &self.opening(name)).map_err(|error| self.closed("transfer", &error))
    }

    pub fn tier(&self, name: &str) -> Result<Arc<dyn StorageTier>, Stop> {
        open_tier(&self.entry, &self.opening(name)).map_err(|error| self.closed("tier", &error))
    }

    pub fn allocator(&self, opening: &PoolOpening) -> Result<Arc<dyn PoolAllocator>, Stop> {
        let opening = PoolOpening { config: self.config.clone(), ..opening.clone() };
        open_allocator(&self.entry, &opening).map_err(|error| self.closed("allocator", &error))
    }

    /// A role that does not open: for want of a configuration that only whoever runs the test can give, or it should have.
    fn closed(&self, role: &str, error: &PluginError) -> Stop {
        match !self.configured && error.is_about_configuration() {
            true => Stop::Skip(format!("{UNCONFIGURED}: role {role}: {error}")),
            false => Stop::Fail(error.to_string()),
        }
    }

    /// One instance of each role that this host knows, and why others need a configuration.
    pub(super) fn opened(&self, name: &str) -> Result<(Vec<Instance>, Vec<String>), Stop> {
        let (mut all, mut unconfigured) = (Vec::new(), Vec::new());
        for role in &self.manifest().roles {
            let opened = match role.kind.as_str() {
                "transfer" => self.transfer(name).map(Instance::Transfer),
                "tier" => self.tier(name).map(Instance::Tier),
                "allocator" => self.allocator(&pools(64, 64)).map(Instance::Allocator),
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

    /// One instance of each role that this host knows and that opens without a configuration, if none was given.
    pub(super) fn instances(&self, name: &str) -> Result<Vec<Instance>, Stop> {
        let (all, unconfigured) = self.opened(name)?;
        match unconfigured.is_empty() || !all.is_empty() {
            true => Ok(all),
            false => Err(Stop::Skip(unconfigured.join("; "))),
        }
    }
}

/// A full pool and a pool with a window of 40 tokens, pages of 16 tokens.
pub(super) fn pools(full: u32, window: u32) -> PoolOpening {
    let pool = |component, pages, window| ComponentPool { component, pages, window, reserved: 0 };
    PoolOpening {
        name: "conformance".to_owned(),
        config: String::new(),
        page_tokens: 16,
        components: vec![pool(Component::FULL, full, 0), pool(Component::WINDOW, window, 40)],
    }
}

fn manifest(subject: &Subject) -> Outcome {
    let manifest = subject.manifest();
    let id = &manifest.plugin.id;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    ensure!(id.contains('.') && id.chars().all(plain), "the id {id:?} is not of the form com.example.name");
    let name = &manifest.plugin.name;
    ensure!(!name.is_empty() && !name.contains([',', '/', ' ']), "users cannot write the name {name:?}");
    ensure!(!manifest.roles.is_empty(), "the manifest declares no role");
    for role in &manifest.roles {
        let unknown = role.capabilities.iter().find(|c| !capability::ALL.contains(&c.as_str()));
        if let Some(unknown) = unknown {
            ensure!(
                false,
                "role {} declares {unknown:?}, which is no capability of API {}",
                role.kind,
                host_plugin_api::VERSION
            );
        }
    }
    for (key, of) in &manifest.config {
        let kinds = ["string", "integer", "float", "boolean", "array", "table"];
        ensure!(
            kinds.contains(&of.kind.as_str()),
            "config key {key:?} has the type {:?}, not one of {}",
            of.kind,
            kinds.join(", ")
        );
        if let Some(default) = &of.default {
            let found = default.type_str();
            ensure!(found == of.kind, "config key {key:?} is a {}, but its default is a {found}", of.kind);
        }
        ensure!(!of.doc.is_empty(), "config key {key:?} has no doc");
    }
    Ok(())
}

fn load(subject: &Subject) -> Outcome {
    let before = threads();
    let root = load_root(&subject.entry).map_err(|error| error.to_string())?;
    let after = threads();
    ensure!(after <= before, "loading started {} threads; start them when an instance opens", after - before);
    let exported = root.roles();
    for role in &subject.manifest().roles {
        let known = ["transfer", "tier", "allocator"].contains(&role.kind.as_str());
        ensure!(
            !known || exported.contains(&role.kind.as_str()),
            "the manifest declares the role {}, but export_plugin! names no factory for it",
            role.kind
        );
    }
    Ok(())
}

fn lifecycle(subject: &Subject) -> Outcome {
    leaves_nothing(subject, "shut down and dropped", Instance::end)
}

fn dropped(subject: &Subject) -> Outcome {
    leaves_nothing(subject, "dropped without a shutdown", |instance| {
        drop(instance);
        Ok(())
    })
}

/// Opens instances of every role one after the other, and looks at what is left when each was ended. What a library keeps for
/// good and fills up at its first uses, such as a thread for each processor, stops growing; what instances leave does not.
fn leaves_nothing(subject: &Subject, how: &str, end: fn(Instance) -> Result<(), String>) -> Outcome {
    // The first may set up what the library keeps for good.
    let (first, second) = (subject.instances("first")?, subject.instances("second")?);
    first.into_iter().chain(second).try_for_each(end)?;
    let mut left = (0, 0);
    for round in 0..=processors().div_ceil(INSTANCES) {
        let before = (threads(), descriptors());
        for number in 0..INSTANCES {
            subject.instances(&format!("instance-{round}-{number}"))?.into_iter().try_for_each(end)?;
        }
        if wait_for(|| (threads() <= before.0 && descriptors() <= before.1).then_some(())).is_some() {
            return Ok(());
        }
        left = (threads().saturating_sub(before.0), descriptors().saturating_sub(before.1));
    }
    let text = format!(
        "{INSTANCES} instances that were {how} left {} threads and {} descriptors behind, and as many before them did, too",
        left.0, left.1
    );
    Err(Stop::Fail(text))
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}
