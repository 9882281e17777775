//! A prefill and a decode scheduler against a hostile world: messages are lost, repeated and reordered, writes land
//! late, bytes flip, clients leave, the prefill process dies. Whatever happens, an answer is right or an error, no
//! write lands on another request's page, and in the end every page is free.

mod cache;
mod drafts;
mod late;
mod layers;
mod network;
mod offload;
mod pressure;
mod scene;
mod windows;
mod windows_offload;
mod world;

use host_sim::{Outcome, World};
use scene::Scene;
use world::{Talkers, aggregated, pair};

const SEEDS: u64 = if cfg!(debug_assertions) { 400 } else { 4000 };

/// Runs `SEEDS` worlds of a prefill and a decode worker, and returns what happened in all of them together.
fn run(name: &str, scene: Scene) -> Outcome {
    run_worlds(name, scene, pair)
}

/// The same with one aggregated worker.
fn run_aggregated(name: &str, scene: Scene) -> Outcome {
    run_worlds(name, scene, aggregated)
}

fn run_worlds(name: &str, scene: Scene, new: fn(u64, Scene) -> World<Talkers>) -> Outcome {
    let mut total = Outcome::default();
    for seed in 0..SEEDS {
        println!("{name}: seed {seed}");
        let mut world = new(seed, scene);
        world.run();
        total += world.outcome();
    }
    println!("{name}: {total:?}");
    total
}
