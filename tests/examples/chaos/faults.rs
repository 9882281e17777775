//! Faults, drawn from the seed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::Options;
use crate::cast::{Cast, Part, Role, Ways};
use crate::disk::Orders;
use crate::load::Strikes;
use crate::memory::Bound;

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
    CutWorker,
    CutWorkerLongerThanLost,
    CutRouter,
    CutRouterLongerThanLost,
    LoseFromWorker,
    LoseFromRouter,
    PartWorker,
    PartWorkerLongerThanLost,
    PartOneWay,
    PartOneWayLongerThanLost,
    TransferHangs,
    TransferLies,
    TransferPanics,
    TierHangs,
    TierPanics,
    TierWrongBytes,
    TierFails,
    TierSlow,
    TierStalls,
    DiskFull,
    DiskSlow,
    DiskFails,
    NoMemory,
    ClockStep,
}

/// All faults, each with its weight in the draw and its name in the report.
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
    (Fault::CutWorker, 5, "a worker's link down for up to 5 s"),
    (Fault::CutWorkerLongerThanLost, 3, "a worker's link down for 12 to 15 s, until it counts as lost"),
    (Fault::CutRouter, 2, "a router's link down for up to 5 s"),
    (Fault::CutRouterLongerThanLost, 1, "a router's link down for 12 to 15 s"),
    (Fault::LoseFromWorker, 4, "15 % of a worker's packets lost, each way, for up to 8 s"),
    (Fault::LoseFromRouter, 2, "15 % of a router's packets lost, each way, for up to 8 s"),
    (Fault::PartWorker, 3, "a worker and one other process parted for up to 5 s"),
    (Fault::PartWorkerLongerThanLost, 2, "a worker and one other process parted for 12 to 15 s"),
    (Fault::PartOneWay, 3, "packets from one process to one other lost for up to 5 s"),
    (Fault::PartOneWayLongerThanLost, 2, "packets from one process to one other lost for 12 to 15 s"),
    (Fault::TransferHangs, 2, "a worker's transfer plugin does not return from a call"),
    (Fault::TransferLies, 3, "a worker's transfer plugin sends wrong bytes for up to 3 s"),
    (Fault::TransferPanics, 3, "a worker's transfer plugin panics in a call"),
    (Fault::TierHangs, 2, "a worker's storage tier does not return from a call"),
    (Fault::TierPanics, 3, "a worker's storage tier panics in a call"),
    (Fault::TierWrongBytes, 4, "a worker's storage tier reads wrong bytes for up to 5 s"),
    (Fault::TierFails, 3, "a worker's storage tier fails, forgets and lies for up to 5 s"),
    (Fault::TierSlow, 3, "a worker's storage tier is 0.1 to 2 s late for up to 5 s"),
    (Fault::TierStalls, 2, "a worker's storage tier answers nothing for up to 4 s"),
    (Fault::DiskFull, 3, "the disk of the storage tier full for up to 6 s"),
    (Fault::DiskSlow, 3, "reads, writes and syncs of the tier's file system 50 ms to 2 s late for up to 5 s"),
    (Fault::DiskFails, 3, "reads, writes and syncs of the tier's file system fail for up to 5 s"),
    (Fault::NoMemory, 3, "a worker gets no more memory for up to 8 s"),
    (Fault::ClockStep, 3, "a wall clock steps by up to 60 days"),
];

/// Time that a fault without a visible end counts as lasting: until the process is back.
const DEATH: Duration = Duration::from_secs(2);

/// Injects faults as the options say. Returns the number of each kind.
pub fn inject(
    cast: &mut Cast,
    random: &mut fastrand::Rng,
    strikes: &Strikes,
    options: &Options,
) -> BTreeMap<&'static str, u32> {
    let mut injected = BTreeMap::new();
    let &Options { faults: count, every, lasts, .. } = options;
    if count == 0 {
        cast.run_for(lasts.unwrap_or_default());
        return injected;
    }
    let (start, mut shown) = (Instant::now(), Instant::now());
    let chosen = |name: &str| {
        options.only.is_empty() || options.only.iter().any(|words| name.contains(words.as_str()))
    };
    type Kinds = Vec<&'static (Fault, u32, &'static str)>;
    let (possible, left_out): (Kinds, Kinds) =
        FAULTS.iter().filter(|(.., name)| chosen(name)).partition(|(fault, ..)| is_possible(cast, *fault));
    for (.., name) in left_out {
        println!("left out: {name}");
    }
    assert!(!possible.is_empty(), "no fault is possible whose name has any of {:?}", options.only);
    let all: u32 = possible.iter().map(|(_, weight, _)| weight).sum();
    let goes_on = |injected: &BTreeMap<_, u32>| match lasts {
        Some(lasts) => start.elapsed() < lasts,
        None => injected.values().sum::<u32>() < count,
    };
    while goes_on(&injected) {
        let mut lot = random.u32(0..all);
        let (fault, _, name) = possible
            .iter()
            .find(|(_, weight, _)| {
                let found = lot < *weight;
                lot = lot.saturating_sub(*weight);
                found
            })
            .unwrap();
        let began = Instant::now();
        if let Some(lasts) = strike(cast, random, *fault) {
            *injected.entry(*name).or_default() += 1;
            strikes.lock().unwrap().push((began, began + lasts, name));
        }
        cast.run_for(every.mul_f64(0.2 + 1.6 * random.f64()));
        if shown.elapsed() > Duration::from_secs(60) {
            shown = Instant::now();
            println!("  {} faults in {:.0} s", injected.values().sum::<u32>(), start.elapsed().as_secs_f64());
        }
    }
    injected
}

fn is_possible(cast: &Cast, fault: Fault) -> bool {
    let (cut, lose) = cast.links();
    match fault {
        Fault::CutWorker
        | Fault::CutWorkerLongerThanLost
        | Fault::CutRouter
        | Fault::CutRouterLongerThanLost => cut,
        Fault::LoseFromWorker
        | Fault::LoseFromRouter
        | Fault::PartWorker
        | Fault::PartWorkerLongerThanLost
        | Fault::PartOneWay
        | Fault::PartOneWayLongerThanLost => lose,
        Fault::TransferHangs | Fault::TransferLies | Fault::TransferPanics => cast.switched,
        Fault::DiskFull => cast.disk.small(),
        Fault::DiskSlow | Fault::DiskFails => cast.disk.obeys(),
        Fault::ClockStep => cast.clocks,
        _ => true,
    }
}

/// Injects a fault and returns how long it lasts, or `None` when no target was found.
fn strike(cast: &mut Cast, random: &mut fastrand::Rng, fault: Fault) -> Option<Duration> {
    let up_to = |random: &mut fastrand::Rng, most| Duration::from_millis(random.u64(100..most));
    let worker = |random: &mut fastrand::Rng| if random.bool() { Role::Prefill } else { Role::Decode };
    let long = |random: &mut fastrand::Rng| Duration::from_millis(random.u64(12_000..15_000));
    match fault {
        Fault::KillPrefill => kill(cast, Role::Prefill, random),
        Fault::KillDecode => kill(cast, Role::Decode, random),
        Fault::KillRouter => kill(cast, Role::Router, random),
        Fault::KillBothRoles => {
            let killed = [kill(cast, Role::Prefill, random), kill(cast, Role::Decode, random)];
            killed.into_iter().flatten().next()
        }
        Fault::FreezeWorker => {
            let (role, time) = (worker(random), up_to(random, 3000));
            lasting(cast, role, time, random, |part| part.freeze(time))
        }
        Fault::FreezeLongerThanLost => {
            let (role, time) = (worker(random), Duration::from_secs(12));
            lasting(cast, role, time, random, |part| part.freeze(time))
        }
        Fault::FreezeRouter => {
            let time = up_to(random, 2000);
            lasting(cast, Role::Router, time, random, |part| part.freeze(time))
        }
        Fault::DrainWorker => {
            let role = worker(random);
            cast.victim(role, true, random)?.drain();
            Some(2 * DEATH)
        }
        Fault::FlushCaches => cast.flush(random).then_some(DEATH),
        Fault::ChangeStoredBytes => cast.disk.change_bytes(random).then_some(DEATH),
        Fault::CutWorker | Fault::CutWorkerLongerThanLost => {
            let role = worker(random);
            let time = if fault == Fault::CutWorker { up_to(random, 5000) } else { long(random) };
            cast.victim(role, false, random)?.cut(time).then_some(time)
        }
        Fault::CutRouter | Fault::CutRouterLongerThanLost => {
            let time = if fault == Fault::CutRouter { up_to(random, 5000) } else { long(random) };
            cast.victim(Role::Router, false, random)?.cut(time).then_some(time)
        }
        Fault::LoseFromWorker | Fault::LoseFromRouter => {
            let role = if fault == Fault::LoseFromRouter { Role::Router } else { worker(random) };
            let time = up_to(random, 8000);
            cast.victim(role, false, random)?.lose(time).then_some(time)
        }
        Fault::PartWorker
        | Fault::PartWorkerLongerThanLost
        | Fault::PartOneWay
        | Fault::PartOneWayLongerThanLost => {
            let ways = match fault {
                Fault::PartWorker | Fault::PartWorkerLongerThanLost => Ways::Both,
                _ if random.bool() => Ways::From,
                _ => Ways::To,
            };
            let is_short = matches!(fault, Fault::PartWorker | Fault::PartOneWay);
            let time = if is_short { up_to(random, 5000) } else { long(random) };
            cast.part(ways, time, random).then_some(time)
        }
        Fault::TransferHangs => {
            let time = up_to(random, 3000);
            // Only a prefill worker's plugin sends pages.
            cast.victim(Role::Prefill, true, random)?.hang_transfer(time);
            Some(time + 3 * DEATH)
        }
        Fault::TransferLies => {
            let time = up_to(random, 3000);
            lasting(cast, Role::Prefill, time, random, |part| part.mix_transfer(time))
        }
        Fault::TierHangs => {
            let (role, time) = (worker(random), up_to(random, 3000));
            cast.victim(role, true, random)?.order_tier("faults = \"block-put block-get\"\n", time);
            Some(time + 3 * DEATH)
        }
        Fault::TransferPanics => {
            // A long time, because the panic comes with the next call, and a prefill worker without requests makes none soon.
            let time = up_to(random, 8000);
            // Only a prefill worker's plugin submits transfers.
            let (role, call) =
                if random.bool() { (Role::Prefill, "submit") } else { (worker(random), "poll") };
            cast.victim(role, true, random)?.panic_transfer(call, time);
            Some(time + DEATH)
        }
        Fault::TierPanics => {
            let (role, time) = (worker(random), up_to(random, 5000));
            let call = random.choice(["exists", "get", "put", "poll"])?;
            cast.victim(role, true, random)?.order_tier(&format!("faults = \"panic-{call}\"\n"), time);
            Some(time + DEATH)
        }
        Fault::TierWrongBytes | Fault::TierFails | Fault::TierSlow | Fault::TierStalls => {
            let (role, time) = (worker(random), up_to(random, 5000));
            let orders = orders(fault, random);
            lasting(cast, role, time, random, |part| part.order_tier(&orders, time))
        }
        Fault::DiskFull => {
            let time = up_to(random, 6000);
            cast.disk.fill(Instant::now() + time).then_some(time)
        }
        Fault::DiskSlow | Fault::DiskFails => {
            let time = up_to(random, 5000);
            let orders = match fault {
                Fault::DiskSlow => Orders { late: Some(50..2000), fails: None },
                _ => Orders { late: None, fails: Some(random.u32(1..4)) },
            };
            cast.disk.tell(orders, Instant::now() + time).then_some(time)
        }
        Fault::NoMemory => {
            let (role, time, bound) = (worker(random), up_to(random, 8000), Bound::draw(random));
            cast.victim(role, true, random)?.starve(bound, time).then_some(time)
        }
        Fault::ClockStep => {
            let days = 60 * 86_400;
            let seconds = random.i64(-days..days);
            cast.step_a_clock(seconds, random).then_some(DEATH)
        }
    }
}

fn kill(cast: &mut Cast, role: Role, random: &mut fastrand::Rng) -> Option<Duration> {
    cast.victim(role, true, random)?.kill().then_some(DEATH)
}

/// Applies a fault that ends by itself to a process of a role.
fn lasting(
    cast: &mut Cast,
    role: Role,
    time: Duration,
    random: &mut fastrand::Rng,
    act: impl FnOnce(&mut Part),
) -> Option<Duration> {
    act(cast.victim(role, false, random)?);
    Some(time)
}

/// Orders for the tier, in the syntax of the fixture `faulty-tier`.
fn orders(fault: Fault, random: &mut fastrand::Rng) -> String {
    let (faults, delay) = match fault {
        Fault::TierWrongBytes => ("flip truncate foreign", 0),
        Fault::TierFails => ("fail forget lie refuse", 0),
        Fault::TierStalls => ("hang-exists hang-get hang-put", 0),
        _ => ("", random.u32(100..2000)),
    };
    let (every, seed) = (random.u32(1..4), random.u32(..));
    format!("faults = \"{faults}\"\nevery = {every}\nseed = {seed}\ndelay_ms = {delay}\n")
}
