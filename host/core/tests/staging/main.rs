//! Staged transfers between many workers. Messages get lost, repeated and reordered, writes land late, and workers die.
//!
//! A second set of tests covers each known hazard of such protocols in other systems.

#![allow(clippy::unwrap_used, reason = "a fixture that fails is a test that fails")]

mod edges;
mod fixture;
mod hazards;
mod world;

use world::{Faults, Outcome, World};

fn run(seed: u64, faults: Faults) -> Outcome {
    World::new(seed, faults).run()
}

/// Seeds for each kind of fault. `HOST_STAGING_SEEDS` sets another number.
fn seeds() -> u64 {
    std::env::var("HOST_STAGING_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(400)
}

#[test]
fn everything_arrives_where_it_belongs_when_nothing_goes_wrong() {
    for seed in 0..seeds() {
        let outcome = run(seed, Faults::default());
        assert_eq!(outcome.completed, outcome.rooms, "seed {seed}");
        assert!(outcome.staged > 0, "seed {seed}");
    }
}

#[test]
fn lost_repeated_and_reordered_messages_only_cost_time() {
    for seed in 0..seeds() {
        let outcome = run(seed, Faults { loss: 0.25, repeats: 0.2, ..Faults::default() });
        assert_eq!(outcome.completed, outcome.rooms, "seed {seed}");
    }
}

#[test]
fn rooms_whose_writes_are_slow_leave_the_others_their_pace() {
    for seed in 0..seeds() {
        let outcome = run(seed, Faults { slow: 0.3, loss: 0.05, ..Faults::default() });
        assert_eq!(outcome.completed, outcome.rooms, "seed {seed}");
    }
}

#[test]
fn aborts_failures_and_second_attempts_in_every_state_leave_nothing_behind() {
    let mut completed = 0;
    for seed in 0..seeds() {
        let faults =
            Faults { aborts: 0.4, damage: 0.2, slow: 0.1, loss: 0.1, repeats: 0.1, ..Faults::default() };
        completed += run(seed, faults).completed;
    }
    assert!(completed > 0);
}

#[test]
fn workers_that_die_and_come_back_mix_nothing_up() {
    let mut completed = 0;
    for seed in 0..seeds() {
        let faults = Faults { deaths: 3, slow: 0.2, loss: 0.1, repeats: 0.2, ..Faults::default() };
        completed += run(seed, faults).completed;
    }
    assert!(completed > 0);
}

#[test]
fn everything_at_once_stays_bounded_and_comes_to_an_end() {
    for seed in 0..seeds() {
        let faults = Faults {
            loss: 0.3,
            repeats: 0.3,
            slow: 0.2,
            aborts: 0.2,
            damage: 0.1,
            deaths: 3,
            errors: 0.01,
            invented: 40,
        };
        run(seed, faults);
    }
}
