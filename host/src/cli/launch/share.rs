//! The part of this machine's memory that workers take by default.
//!
//! The workers of a machine (pools, host memory for pages, staging) share a quarter of its memory. The rest is for weights and
//! other programs. Amounts that the operator sets are not changed, and the default amounts adapt to them as far as they can.
//!
//! Pools in a GPU's memory share half of that memory, and take none of the machine's. The other half is for weights and
//! activations.

use host_core::transfer::StagingMode;

use super::gpu;
use crate::cli::memory;
use crate::cli::settings::{ExecutorName, RoleName, Settings};

/// Divisor: all workers together take the machine's memory divided by this.
const PARTS: u64 = 4;
/// Divisor: staging takes a worker's share divided by this.
const STAGING_PARTS: u64 = 8;
/// Limit of a worker's staging memory. A link has fewer bytes in flight.
const MOST_STAGING: u64 = 128 << 20;
/// Divisor: a pool gets at least its share divided by this, whatever the operator sets for other parts.
const LEAST_POOL_PARTS: u64 = 8;
/// Bytes of host memory for each byte of the pool.
const HOST_PER_POOL: u64 = 2;
/// Divisor: the pools of all workers on a GPU together take its memory divided by this.
const GPU_PARTS: u64 = 2;
/// Assumed memory of a machine or GPU whose size cannot be read.
const UNKNOWN: u64 = 4 << 30;

fn machine() -> u64 {
    memory::available().unwrap_or(UNKNOWN)
}

/// Default limit of the memory of one worker of this machine, in bytes.
fn of_worker(settings: &Settings, machine: u64) -> u64 {
    machine / PARTS / settings.workers_here() as u64
}

/// Bytes of staging memory of a worker without `--staging-bytes`.
#[must_use]
pub fn staging_bytes(settings: &Settings) -> u64 {
    staging_of(settings, machine())
}

fn staging_of(settings: &Settings, machine: u64) -> u64 {
    let packs = settings.role != Some(RoleName::Aggregated) && settings.staging != Some(StagingMode::Never);
    if packs { (of_worker(settings, machine) / STAGING_PARTS).min(MOST_STAGING) } else { 0 }
}

/// Upper limit of the memory of one worker, in bytes. A quarter of the machine is left to other programs.
fn most_of_worker(settings: &Settings, machine: u64) -> u64 {
    machine / PARTS * (PARTS - 1) / settings.workers_here() as u64
}

/// Size in bytes of a worker's KV pool, if the operator sets neither bytes nor pages.
#[must_use]
pub fn pool_bytes(settings: &Settings) -> u64 {
    match settings.executor() {
        ExecutorName::Cuda => pool_on(settings, gpu::bytes(settings).unwrap_or(UNKNOWN)),
        ExecutorName::Cpu | ExecutorName::Synthetic => pool_of(settings, machine()),
    }
}

fn pool_on(settings: &Settings, gpu: u64) -> u64 {
    gpu / GPU_PARTS / settings.workers_here() as u64
}

/// Bytes of the machine's memory that a pool of `pool` bytes takes.
#[must_use]
pub fn pool_of_machine(settings: &Settings, pool: u64) -> u64 {
    match settings.executor() {
        ExecutorName::Cuda => 0,
        ExecutorName::Cpu | ExecutorName::Synthetic => pool,
    }
}

fn pool_of(settings: &Settings, machine: u64) -> u64 {
    let share = of_worker(settings, machine).saturating_sub(staging_of(settings, machine));
    let staging = settings.staging_bytes.map_or(0, |given| given.0);
    let host = settings.hicache_memory.map(|given| given.0);
    let pool = match host {
        // The rest of the share is for the offload tiers.
        None if settings.hierarchical_cache() => share / (1 + HOST_PER_POOL),
        _ => share,
    };
    let taken = staging.saturating_add(host.unwrap_or(0));
    // If the amounts that the operator set leave too little, the check of the sum refuses them. The pool itself does not become too
    // small before.
    pool.min(most_of_worker(settings, machine).saturating_sub(taken)).max(pool / LEAST_POOL_PARTS)
}

/// Host memory in bytes for pages, for a worker without `--hicache-memory` and with a pool of `pool` bytes.
///
/// It is twice the pool, if the machine has enough memory left.
#[must_use]
pub fn host_bytes(settings: &Settings, pool: u64) -> u64 {
    host_of(settings, pool, machine())
}

fn host_of(settings: &Settings, pool: u64, machine: u64) -> u64 {
    let staging = settings.staging_bytes.map_or_else(|| staging_of(settings, machine), |given| given.0);
    let taken = pool_of_machine(settings, pool).saturating_add(staging);
    let rest = most_of_worker(settings, machine).saturating_sub(taken);
    pool.saturating_mul(HOST_PER_POOL).min(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn workers_take_a_quarter_of_the_machine_by_default() {
        for (role, hierarchical, workers) in [
            (None, false, 2),
            (None, true, 2),
            (Some(RoleName::Decode), true, 1),
            (Some(RoleName::Aggregated), false, 1),
        ] {
            for machine in [GIB / 2, GIB, 24 * GIB, 2048 * GIB] {
                let settings =
                    Settings { role, hierarchical_cache: Some(hierarchical), ..Settings::default() };
                let (pool, staging) = (pool_of(&settings, machine), staging_of(&settings, machine));
                let host = if hierarchical { host_of(&settings, pool, machine) } else { 0 };
                let all = workers * (pool + staging + host);
                assert!(all <= machine / 4 && all > machine / 4 - 16, "{role:?}, {machine}: {all}");
            }
        }
    }

    #[test]
    fn the_pool_makes_room_for_what_the_operator_gives() {
        let with = |hicache: &str, staging: &str| Settings {
            hierarchical_cache: Some(true),
            hicache_memory: Some(hicache.parse().unwrap()),
            staging_bytes: Some(staging.parse().unwrap()),
            ..Settings::default()
        };
        let pool = pool_of(&with("8GiB", "128MiB"), 24 * GIB);
        assert!(pool > GIB / 2 && pool + 8 * GIB + (128 << 20) <= 9 * GIB, "{pool}");
        assert!(pool_of(&with("1GiB", "64KiB"), 24 * GIB) > 2 * GIB);
        let pool = pool_of(&with("10GiB", "0"), 24 * GIB);
        assert!(pool > 0 && 2 * (pool + 10 * GIB) < 24 * GIB, "{pool}");
    }

    #[test]
    fn a_pool_on_a_gpu_takes_a_part_of_that_and_leaves_the_machine_to_host_memory() {
        let settings = Settings { executor: Some(ExecutorName::Cuda), ..Settings::default() };
        let one = Settings { role: Some(RoleName::Aggregated), ..settings.clone() };
        assert_eq!((pool_on(&settings, 80 * GIB), pool_on(&one, 80 * GIB)), (20 * GIB, 40 * GIB));
        let host = host_of(&settings, 20 * GIB, 64 * GIB);
        assert_eq!(host + staging_of(&settings, 64 * GIB), 24 * GIB, "{host}");
    }

    #[test]
    fn host_memory_fits_beside_a_pool_of_the_operators_choice() {
        let settings = Settings { hierarchical_cache: Some(true), ..Settings::default() };
        assert_eq!(host_of(&settings, GIB, 24 * GIB), 2 * GIB);
        let host = host_of(&settings, 6 * GIB, 24 * GIB);
        assert!(
            2 * (6 * GIB + host + staging_of(&settings, 24 * GIB)) <= 18 * GIB && host > 2 * GIB,
            "{host}"
        );
        assert_eq!(host_of(&settings, 10 * GIB, 24 * GIB), 0);
    }
}
