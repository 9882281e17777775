//! Models with sliding layers.

use host_core::hierarchy::WritePolicy;
use host_sim::Outcome;

use super::offload::with_offload;
use super::scene::Scene;
use super::world::{aggregated, pair};
use super::{SEEDS, run, run_aggregated};

#[test]
fn windows_are_there_when_they_are_seen_and_answers_are_right() {
    for cache in [false, true] {
        let total = run("windows", Scene { window: true, cache, ..Scene::default() });
        assert_eq!((total.failed, total.integrity_failures), (0, 0));
        assert!(total.finished > SEEDS && (!cache || total.cached_tokens > SEEDS));
    }
}

#[test]
fn windows_survive_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Scene { executor: 0.05, window: true, ..Scene::of_every_kind() };
    for (cache, pressure, paced) in [(false, false, false), (true, false, true), (true, true, false)] {
        let flush = if cache { 0.005 } else { 0.0 };
        let faults = Scene { cache, pressure, paced, flush, alike: cache, talk: cache, ..faults };
        let total = run("windows and faults", faults);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.batches_failed > 0 && total.quarantined > 0 && total.integrity_failures > 0);
        assert!(!pressure || total.retractions > SEEDS / 4, "pages seldom ran short");
    }
}

#[test]
fn requests_that_lose_their_windows_answer_as_if_they_had_not() {
    for cache in [false, true] {
        let faults = Scene { window: true, pressure: true, cache, ..Scene::default() };
        let total = run("windows under pressure", faults);
        assert_eq!(total.failed, 0);
        assert!(total.retractions > SEEDS && total.recomputed_tokens > total.retractions);
        assert!(!cache || total.restored_tokens > 0, "no window was found again");
    }
}

#[test]
fn an_aggregated_worker_goes_on_where_a_window_is_cached() {
    for (talk, pressure) in [(true, false), (true, true)] {
        let faults = Scene { window: true, cache: true, talk, pressure, flush: 0.002, ..Scene::default() };
        let total = run_aggregated("aggregated, windows", faults);
        assert_eq!(total.failed, 0);
        assert!(total.cached_tokens > SEEDS && total.evicted_pages > SEEDS);
        assert!(!pressure || total.retractions > SEEDS / 4, "pages seldom ran short");
    }
}

#[test]
fn windows_are_computed_again_where_many_part_from_a_prompt_and_answers_are_right() {
    for (talk, pressure) in [(false, false), (true, true)] {
        let faults = Scene { window: true, cache: true, forks: true, talk, pressure, ..Scene::default() };
        for make in [pair, aggregated] {
            let mut total = Outcome::default();
            for seed in 0..SEEDS / 8 {
                println!("forks: seed {seed}");
                let mut world = make(seed, faults);
                world.run();
                total += world.outcome();
            }
            println!("{faults:?}: {total:?}");
            assert_eq!((total.failed, total.integrity_failures), (0, 0));
            assert!(total.window_recomputed_tokens > SEEDS / 4, "windows were seldom computed again");
        }
    }
}

#[test]
fn decode_restores_pages_beside_windows_that_are_sent() {
    let total = run("windows and offload tiers", Scene { window: true, ..with_offload() });
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.loaded > SEEDS / 4 && total.written > SEEDS / 4);
    let faults = Scene {
        loss: 0.2,
        abort: 0.3,
        flip: 0.05,
        death: 0.005,
        disconnect: 0.005,
        tier: 0.1,
        copy: 0.05,
        flush: 0.005,
        pressure: true,
        window: true,
        ..with_offload()
    };
    for write in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
        let total = run("windows, offload tiers and faults", Scene { write, ..faults });
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.restores_failed > 0 && total.renegotiated > 0 && total.retractions > 0);
    }
}
