//! Makes the parts of a worker from the settings. All checks come first, before anything is started.

pub mod gpu;
mod grammars;
mod model;
mod model_path;
mod needs;
mod numbers;
mod parts;
mod ranks;
pub mod share;
mod worker;

use host_core::layer_groups::LayerGroups;
use host_core::radix::{PageHash, Policy};
use host_core::{KvLayout, Role};
use host_executor::ModelShape;
use host_wire::identity;

use super::settings::{RoleName, Settings};
use super::{Refused, allocator, offload, staging};
pub use model::{beside, text_model};
use needs::Needs;
pub use parts::parts;

/// Sizes of a worker, which are known before it starts.
#[derive(Debug)]
pub struct Plan {
    /// The model's shape, as far as it is known without its weights.
    pub shape: ModelShape,
    /// The layout of each rank's pool.
    pub layouts: Vec<KvLayout>,
    /// Number of tokens of one sequence that fill the pool.
    pub pool_tokens: u64,
    /// Longest prompt and answer together, in tokens.
    pub max_tokens: u32,
    /// The groups of layers in which pages are sent.
    pub layer_groups: LayerGroups,
}

fn refused(message: impl Into<String>) -> Refused {
    Refused(message.into())
}

/// Checks the model and sizes the pool, without loading weights or taking memory.
///
/// Without a role, this is done for all workers of this machine, and the first is returned.
///
/// # Errors
/// When the settings cannot work. The error says what would work.
pub fn plan(settings: &Settings) -> Result<Plan, Refused> {
    offload::check(settings)?;
    served_names(settings)?;
    allocator::check(settings)?;
    let staging = staging::staging(settings)?;
    numbers::check(settings)?;
    model_path::check(settings)?;
    gpu::check(settings)?;
    let shape = model::shape(settings)?;
    let roles = settings.role.map_or(vec![RoleName::Prefill, RoleName::Decode], |role| vec![role]);
    let mut needs = Needs::default();
    let mut plans = Vec::new();
    for (role, ranks) in roles.into_iter().zip(ranks::of_workers(settings)?) {
        let plan = worker::plan(settings, &shape, ranks)?;
        let packs = matches!(role, RoleName::Prefill | RoleName::Decode).then_some(&staging);
        if let Some(staging) = packs {
            staging::check_ranks(staging, &plan.layouts, plan.max_tokens)?;
        }
        let cached =
            radix_cache(settings, if role == RoleName::Decode { Role::Decode } else { Role::Prefill });
        let offload = offload::hierarchy(settings, &plan.layouts, cached.is_some(), None)?;
        needs.add(&plan.layouts, offload.as_ref(), packs);
        plans.push(plan);
    }
    needs.check(settings)?;
    plans.into_iter().next().ok_or_else(|| refused("no worker to plan"))
}

/// Checks settings of workers that a router does not use: a value that is wrong here is also wrong for its workers.
///
/// # Errors
/// When a value is invalid.
pub fn check_router(settings: &Settings) -> Result<(), Refused> {
    offload::check(settings)?;
    served_names(settings)?;
    staging::staging(settings)?;
    ranks::check_bounds(settings)?;
    model_path::check(settings)?;
    numbers::check(settings)
}

/// A digest of all properties that distinguish this model's KV from that of other models.
///
/// # Errors
/// When the settings cannot work.
pub fn kv_identity(settings: &Settings) -> Result<PageHash, Refused> {
    Ok(identity::digest(&parts::identity_of(settings, &plan(settings)?)))
}

/// Longest name of a model that a router accepts, in bytes.
const LONGEST_MODEL_NAME: usize = host_front::registry::MAX_TEXT;

/// Checks the names under which the model is served.
fn served_names(settings: &Settings) -> Result<(), Refused> {
    let Some(names) = &settings.served_model_name else { return Ok(()) };
    if names.is_empty() || names.iter().any(|name| name.trim().is_empty()) {
        return Err(refused(
            "--served-model-name is empty: give a name, or leave it out to use that of the model's directory",
        ));
    }
    if let Some(name) = names.iter().find(|name| name.len() > LONGEST_MODEL_NAME) {
        return Err(refused(format!(
            "--served-model-name has {} bytes: at most {LONGEST_MODEL_NAME} are allowed",
            name.len()
        )));
    }
    Ok(())
}

/// The eviction policy of a worker of this role, if it keeps a radix cache.
fn radix_cache(settings: &Settings, role: Role) -> Option<Policy> {
    let wanted = match role {
        Role::Decode => settings.decode_radix_cache(),
        Role::Prefill | Role::Aggregated => settings.prefill_radix_cache(),
    };
    wanted.then(|| settings.radix_eviction.map(Policy::from).unwrap_or_default())
}
