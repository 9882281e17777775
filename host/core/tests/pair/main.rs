//! A prefill and a decode scheduler against a hostile world: messages are lost, repeated and reordered, writes land
//! late, bytes flip, clients leave, the prefill process dies. Whatever happens, an answer is right or an error, no
//! write lands on another request's page, and in the end every page is free.

mod below;
mod cache;
mod layers;
mod memory;
mod network;
mod pressure;
mod sliding;
mod windows;
mod windows_below;
mod world;

use world::{Faults, Outcome, World};

const SEEDS: u64 = if cfg!(debug_assertions) { 400 } else { 4000 };

/// Runs `SEEDS` worlds of a prefill and a decode worker, and returns what happened in all of them together.
fn run(name: &str, faults: Faults) -> Outcome {
    run_worlds(name, faults, World::new)
}

/// The same with one aggregated worker.
fn run_aggregated(name: &str, faults: Faults) -> Outcome {
    run_worlds(name, faults, World::aggregated)
}

fn run_worlds(name: &str, faults: Faults, new: fn(u64, Faults) -> World) -> Outcome {
    let mut total = Outcome::default();
    for seed in 0..SEEDS {
        println!("{name}: seed {seed}");
        let mut world = new(seed, faults);
        world.run();
        total.add(world.outcome());
    }
    println!("{name}: {total:?}");
    total
}
