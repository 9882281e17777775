//! What goes wrong, drawn from the seed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::cast::{Cast, Role};

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillPrefill,
    KillDecode,
    KillRouter,
    KillBothRoles,
    FreezeWorker,
    FreezeLongerThanLost,
    FreezeRouter,
    DrainWorker,
    FlushCaches,
    ChangeStoredBytes,
}

/// How often each is drawn.
const FAULTS: &[(Fault, u32, &str)] = &[
    (Fault::KillPrefill, 4, "kill -9 of a prefill worker"),
    (Fault::KillDecode, 6, "kill -9 of a decode worker"),
    (Fault::KillRouter, 2, "kill -9 of a router"),
    (Fault::KillBothRoles, 2, "kill -9 of a prefill and a decode worker at once"),
    (Fault::FreezeWorker, 4, "SIGSTOP of a worker for up to 3 s"),
    (Fault::FreezeLongerThanLost, 1, "SIGSTOP of a worker for 12 s, until it counts as lost"),
    (Fault::FreezeRouter, 1, "SIGSTOP of a router for up to 2 s"),
    (Fault::DrainWorker, 4, "SIGTERM of a worker, which drains"),
    (Fault::FlushCaches, 2, "all radix caches emptied"),
    (Fault::ChangeStoredBytes, 4, "bytes of stored pages changed on disk"),
];

/// Injects so many faults. Returns how many of each kind.
pub fn inject(
    cast: &mut Cast,
    random: &mut fastrand::Rng,
    count: u32,
    every: Duration,
) -> BTreeMap<&'static str, u32> {
    let mut injected = BTreeMap::new();
    let mut shown = Instant::now();
    while injected.values().sum::<u32>() < count {
        let all: u32 = FAULTS.iter().map(|(_, weight, _)| weight).sum();
        let mut lot = random.u32(0..all);
        let (fault, _, name) = FAULTS
            .iter()
            .find(|(_, weight, _)| {
                let found = lot < *weight;
                lot = lot.saturating_sub(*weight);
                found
            })
            .unwrap();
        if strike(cast, random, *fault) {
            *injected.entry(*name).or_default() += 1;
        }
        cast.run_for(every.mul_f64(0.2 + 1.6 * random.f64()));
        if shown.elapsed() > Duration::from_secs(60) {
            shown = Instant::now();
            println!("  {} of {count} faults", injected.values().sum::<u32>());
        }
    }
    injected
}

/// False when nothing could be struck.
fn strike(cast: &mut Cast, random: &mut fastrand::Rng, fault: Fault) -> bool {
    let millis = |random: &mut fastrand::Rng, most| Duration::from_millis(random.u64(100..most));
    match fault {
        Fault::KillPrefill => cast.kill(Role::Prefill, random),
        Fault::KillDecode => cast.kill(Role::Decode, random),
        Fault::KillRouter => cast.kill(Role::Router, random),
        Fault::KillBothRoles => cast.kill(Role::Prefill, random) | cast.kill(Role::Decode, random),
        Fault::FreezeWorker => {
            let role = if random.bool() { Role::Prefill } else { Role::Decode };
            let time = millis(random, 3000);
            cast.freeze(role, time, random)
        }
        Fault::FreezeLongerThanLost => {
            let role = if random.bool() { Role::Prefill } else { Role::Decode };
            cast.freeze(role, Duration::from_secs(12), random)
        }
        Fault::FreezeRouter => {
            let time = millis(random, 2000);
            cast.freeze(Role::Router, time, random)
        }
        Fault::DrainWorker => {
            let role = if random.bool() { Role::Prefill } else { Role::Decode };
            cast.drain(role, random)
        }
        Fault::FlushCaches => cast.flush(random),
        Fault::ChangeStoredBytes => cast.change_stored_bytes(random),
    }
}
