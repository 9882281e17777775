//! A prefill and a decode scheduler against a hostile world: messages are lost, repeated and reordered, writes land
//! late, bytes flip, clients leave, the prefill process dies. Whatever happens, an answer is right or an error, no
//! write lands on another request's page, and in the end every page is free.

mod pair {
    pub mod memory;
    pub mod sliding;
    pub mod world;
}

use host_core::hierarchy::{PrefetchPolicy, WritePolicy};
use pair::world::{Faults, Outcome, World, answer_to};

const SEEDS: u64 = if cfg!(debug_assertions) { 400 } else { 4000 };

/// Runs `SEEDS` worlds and returns what happened in all of them together.
fn run(name: &str, faults: Faults) -> Outcome {
    let mut total = Outcome::default();
    for seed in 0..SEEDS {
        println!("{name}: seed {seed}");
        let mut world = World::new(seed, faults);
        world.run();
        total.add(world.outcome());
    }
    println!("{name}: {total:?}");
    total
}

#[test]
fn without_faults_every_answer_is_right() {
    let total = run("no faults", Faults::default());
    assert_eq!((total.failed, total.integrity_failures, total.layer_parts_sent), (0, 0, 0));
    assert!(total.finished > SEEDS);
}

#[test]
fn layers_sent_while_others_are_computed_change_no_answer_and_none_is_sent_twice_or_too_early() {
    for cache in [false, true] {
        let total = run("layers", Faults { layers: true, cache, ..Faults::default() });
        assert_eq!((total.failed, total.integrity_failures), (0, 0));
        assert!(total.finished > SEEDS && total.layer_parts_sent > SEEDS);
    }
}

#[test]
fn layers_on_their_way_survive_failing_batches_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Faults {
        loss: 0.2,
        repeat: 0.2,
        abort: 0.3,
        flip: 0.05,
        death: 0.005,
        disconnect: 0.005,
        executor: 0.05,
        layers: true,
        ..Faults::default()
    };
    for cache in [false, true] {
        let total = run("layers and faults", Faults { cache, ..faults });
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.batches_failed > 0 && total.quarantined > 0 && total.integrity_failures > 0);
        assert!(total.layer_parts_sent > SEEDS);
    }
}

#[test]
fn lost_repeated_and_reordered_messages_change_no_answer() {
    let total = run("network", Faults { loss: 0.3, repeat: 0.2, ..Faults::default() });
    assert_eq!(total.failed, 0);
    assert!(total.messages_repeated > 0 && total.messages_stale > 0, "the faults never struck");
}

#[test]
fn aborts_at_any_time_leave_nothing_behind() {
    let faults = Faults { loss: 0.2, repeat: 0.2, abort: 0.5, ..Faults::default() };
    let total = run("aborts", faults);
    assert!(total.finished > 0 && total.failed > 0);
    assert!(total.quarantined > 0, "no abort ever struck a page in flight");
}

#[test]
fn pages_of_a_room_that_was_given_up_are_not_used_again_while_what_arrived_is_copied_into_them() {
    let faults = Faults {
        loss: 0.1,
        abort: 0.5,
        death: 0.01,
        disconnect: 0.01,
        layers: true,
        cache: true,
        ..Faults::default()
    };
    let total = run("copies", faults);
    assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.copies > SEEDS && total.closed_late > 0, "no room was given up while it was copied");
}

#[test]
fn flipped_bytes_cost_a_second_transfer_and_no_answer() {
    let total = run("flips", Faults { flip: 0.05, ..Faults::default() });
    assert!(total.integrity_failures > 0, "no byte was ever flipped");
    assert!(total.finished > total.failed);
}

#[test]
fn bytes_that_flip_again_and_again_end_in_an_error_and_free_pages() {
    let total = run("many flips", Faults { flip: 0.5, abort: 0.2, ..Faults::default() });
    assert!(total.failed > 0 && total.finished > 0);
}

#[test]
fn a_dying_prefill_worker_loses_no_page() {
    let faults = Faults { loss: 0.1, repeat: 0.1, abort: 0.2, death: 0.01, ..Faults::default() };
    let total = run("deaths", faults);
    assert!(total.deaths > 0 && total.finished > 0);
}

#[test]
fn a_dropped_connection_is_fenced_before_its_pages_are_used_again() {
    let faults = Faults { loss: 0.1, repeat: 0.2, abort: 0.2, disconnect: 0.01, ..Faults::default() };
    let total = run("disconnects", faults);
    assert!(total.disconnects > 0 && total.fences_failed > 0 && total.finished > 0);
}

#[test]
fn cached_prefixes_change_no_answer_and_are_used() {
    let total = run("cache", Faults { cache: true, ..Faults::default() });
    assert_eq!(total.failed, 0);
    assert!(total.cached_tokens > 0 && total.evicted_pages > 0, "nothing was cached, or nothing evicted");
}

#[test]
fn cached_prefixes_survive_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Faults {
        loss: 0.2,
        repeat: 0.2,
        abort: 0.4,
        flip: 0.05,
        death: 0.005,
        disconnect: 0.005,
        cache: true,
        ..Faults::default()
    };
    let total = run("cache and faults", faults);
    assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.cached_tokens > 0 && total.quarantined > 0 && total.integrity_failures > 0);
}

#[test]
fn prompts_alike_in_flight_share_a_transfer_and_change_no_answer() {
    let total = run("alike", Faults { cache: true, alike: true, ..Faults::default() });
    assert_eq!(total.failed, 0);
    assert!(total.shared_transfers > SEEDS, "hardly anybody shared a transfer");
}

#[test]
fn prompts_alike_in_flight_survive_every_end_of_those_they_wait_for() {
    let faults = Faults {
        loss: 0.2,
        repeat: 0.2,
        abort: 0.4,
        flip: 0.1,
        death: 0.005,
        disconnect: 0.01,
        cache: true,
        alike: true,
        ..Faults::default()
    };
    let total = run("alike and faults", faults);
    assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.shared_transfers > 0 && total.integrity_failures > 0);
}

#[test]
fn thousands_of_conversations_are_answered_as_if_nothing_were_cached() {
    let calm = Faults { cache: true, talk: true, ..Faults::default() };
    let total = run("conversations", calm);
    assert_eq!(total.failed, 0);
    assert!(total.turns > 4 * SEEDS, "hardly anybody went on");
    assert!(total.cached_tokens > 8 * total.turns, "what was said before was computed again");
    let faults =
        Faults { loss: 0.1, repeat: 0.1, abort: 0.2, flip: 0.05, death: 0.005, disconnect: 0.005, ..calm };
    let total = run("conversations and faults", Faults { flush: 0.005, layers: true, alike: true, ..faults });
    assert!(total.turns > SEEDS / 4 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.cached_tokens > 0 && total.integrity_failures > 0 && total.flushed_in_use > 0);
}

#[test]
fn caches_that_are_emptied_at_any_time_change_no_answer() {
    let calm = Faults { cache: true, alike: true, flush: 0.02, ..Faults::default() };
    let total = run("flushes", calm);
    assert_eq!(total.failed, 0);
    assert!(total.flushed_in_use > 0 && total.cached_tokens > 0, "no flush met a request");
    let faults = Faults { loss: 0.2, abort: 0.3, flip: 0.05, death: 0.005, disconnect: 0.005, ..calm };
    let total = run("flushes and faults", Faults { pressure: true, ..faults });
    assert!(total.finished > 0 && total.failed > 0 && total.retractions > 0 && total.flushed_in_use > 0);
}

#[test]
fn requests_that_lose_their_pages_answer_as_if_they_had_not() {
    let total = run("pressure", Faults { pressure: true, ..Faults::default() });
    assert_eq!(total.failed, 0);
    assert!(total.retractions > SEEDS, "pages seldom ran short");
    assert_eq!(total.restored_tokens, 0, "without a cache nothing is found again");
    assert!(total.recomputed_tokens > total.retractions);
}

#[test]
fn with_a_cache_a_retracted_request_computes_only_what_is_gone() {
    let total = run("pressure and cache", Faults { pressure: true, cache: true, ..Faults::default() });
    assert_eq!(total.failed, 0);
    assert!(total.retractions > SEEDS && total.evicted_pages > 0, "pages seldom ran short");
    assert!(
        total.restored_tokens > 0 && total.recomputed_tokens > 0,
        "nothing was found again, or nothing was gone"
    );
}

#[test]
fn retraction_survives_aborts_loss_flips_deaths_and_disconnects() {
    for (cache, paced) in [(false, false), (true, false), (false, true), (true, true)] {
        let faults = Faults {
            loss: 0.2,
            repeat: 0.2,
            abort: 0.3,
            flip: 0.05,
            death: 0.005,
            disconnect: 0.005,
            pressure: true,
            paced,
            cache,
            alike: cache,
            layers: true,
            ..Faults::default()
        };
        let total = run("pressure and faults", faults);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.retractions > 0 && total.quarantined > 0 && total.integrity_failures > 0);
    }
}

#[test]
fn a_target_for_the_time_between_tokens_changes_no_answer() {
    let total = run("paced", Faults { pressure: true, paced: true, cache: true, ..Faults::default() });
    assert_eq!(total.failed, 0);
    assert!(total.retractions > 0, "nobody lost pages under a target");
    for seed in 0..SEEDS {
        let mut world = World::aggregated(seed, Faults { pressure: true, paced: true, ..Faults::default() });
        world.run();
        assert_eq!(world.outcome().failed, 0, "seed {seed}");
    }
}

#[test]
fn an_aggregated_worker_retracts_without_changing_an_answer() {
    for cache in [false, true] {
        let mut total = Outcome::default();
        for seed in 0..SEEDS {
            let mut world = World::aggregated(seed, Faults { pressure: true, cache, ..Faults::default() });
            world.run();
            total.add(world.outcome());
        }
        println!("cache {cache}: {total:?}");
        assert_eq!(total.failed, 0);
        assert!(total.retractions > SEEDS, "pages seldom ran short");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let faults = Faults {
        loss: 0.2,
        repeat: 0.2,
        abort: 0.3,
        flip: 0.02,
        death: 0.005,
        disconnect: 0.005,
        executor: 0.02,
        layers: true,
        cache: true,
        ..Faults::default()
    };
    for seed in 0..20 {
        let trace = || {
            let mut world = World::new(seed, faults);
            world.run();
            world.trace()
        };
        assert_eq!(trace(), trace(), "seed {seed}");
    }
}

#[test]
fn the_aggregated_worker_gives_the_same_answers() {
    for seed in 0..50 {
        let mut world = World::aggregated(seed, Faults { cache: seed % 2 == 1, ..Faults::default() });
        world.run();
        assert_eq!(world.outcome().failed, 0, "seed {seed}");
        assert!(world.outcome().finished > 0);
    }
    assert_eq!(answer_to(&[1, 2, 3], 4, None), answer_to(&[1, 2, 3], 4, None));
}

/// What every run with host memory and storage below the pools has in common.
fn below() -> Faults {
    Faults { cache: true, talk: true, below: true, ..Faults::default() }
}

#[test]
fn an_aggregated_worker_restores_from_host_memory_and_storage() {
    let calm = below();
    for faults in [
        Faults { flush: 0.01, ..calm },
        Faults { tier: 0.1, copy: 0.05, abort: 0.2, flush: 0.01, pressure: true, ..calm },
    ] {
        let mut total = Outcome::default();
        for seed in 0..SEEDS {
            println!("aggregated, below: seed {seed}");
            let mut world = World::aggregated(seed, faults);
            world.run();
            total.add(world.outcome());
        }
        println!("{faults:?}: {total:?}");
        assert!(
            total.loaded > SEEDS
                && total.promised_storage > 0
                && total.written > 0
                && total.evicted_pages > 0
        );
        match faults.abort > 0.0 {
            true => assert!(total.hung > 0 && total.restores_failed > 0 && total.finished > SEEDS),
            false => assert_eq!(total.failed + total.restores_failed, 0),
        }
    }
}

#[test]
fn what_decode_restores_changes_no_answer() {
    let total = run("below", below());
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.loaded > SEEDS && total.promised_storage > SEEDS / 4 && total.written > SEEDS);
}

#[test]
fn a_restore_that_fails_or_hangs_costs_a_transfer_and_no_request() {
    let total = run("below, faults", Faults { tier: 0.15, copy: 0.05, ..below() });
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.hung > 0 && total.restores_failed > 0 && total.renegotiated > 0 && total.loaded > 0);
}

#[test]
fn restores_survive_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Faults {
        loss: 0.2,
        repeat: 0.2,
        abort: 0.3,
        flip: 0.05,
        death: 0.005,
        disconnect: 0.005,
        executor: 0.02,
        tier: 0.1,
        copy: 0.05,
        flush: 0.005,
        ..below()
    };
    for (write, prefetch) in [
        (WritePolicy::WriteThrough, PrefetchPolicy::Timeout),
        (WritePolicy::WriteThroughSelective, PrefetchPolicy::WaitComplete),
        (WritePolicy::WriteBack, PrefetchPolicy::BestEffort),
    ] {
        let faults = Faults { write, prefetch, layers: true, alike: true, pressure: true, ..faults };
        let total = run("below and everything", faults);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(
            total.loaded > 0 && total.restores_failed > 0 && total.quarantined > 0 && total.retractions > 0
        );
    }
}

#[test]
fn windows_are_there_when_they_are_seen_and_answers_are_right() {
    for cache in [false, true] {
        let total = run("windows", Faults { window: true, cache, ..Faults::default() });
        assert_eq!((total.failed, total.integrity_failures), (0, 0));
        assert!(total.finished > SEEDS && (!cache || total.cached_tokens > SEEDS));
    }
}

#[test]
fn windows_survive_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Faults {
        loss: 0.2,
        repeat: 0.2,
        abort: 0.3,
        flip: 0.05,
        death: 0.005,
        disconnect: 0.005,
        executor: 0.05,
        window: true,
        ..Faults::default()
    };
    for (cache, pressure, paced) in [(false, false, false), (true, false, true), (true, true, false)] {
        let flush = if cache { 0.005 } else { 0.0 };
        let faults = Faults { cache, pressure, paced, flush, alike: cache, talk: cache, ..faults };
        let total = run("windows and faults", faults);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.batches_failed > 0 && total.quarantined > 0 && total.integrity_failures > 0);
        assert!(!pressure || total.retractions > SEEDS / 4, "pages seldom ran short");
    }
}

#[test]
fn requests_that_lose_their_windows_answer_as_if_they_had_not() {
    for cache in [false, true] {
        let faults = Faults { window: true, pressure: true, cache, ..Faults::default() };
        let total = run("windows under pressure", faults);
        assert_eq!(total.failed, 0);
        assert!(total.retractions > SEEDS && total.recomputed_tokens > total.retractions);
        assert!(!cache || total.restored_tokens > 0, "no window was found again");
    }
}

#[test]
fn an_aggregated_worker_goes_on_where_a_window_is_cached() {
    for (talk, pressure) in [(true, false), (true, true)] {
        let faults = Faults { window: true, cache: true, talk, pressure, flush: 0.002, ..Faults::default() };
        let mut total = Outcome::default();
        for seed in 0..SEEDS {
            println!("aggregated, windows: seed {seed}");
            let mut world = World::aggregated(seed, faults);
            world.run();
            total.add(world.outcome());
        }
        println!("{faults:?}: {total:?}");
        assert_eq!(total.failed, 0);
        assert!(total.cached_tokens > SEEDS && total.evicted_pages > SEEDS);
        assert!(!pressure || total.retractions > SEEDS / 4, "pages seldom ran short");
    }
}

#[test]
fn windows_are_computed_again_where_many_part_from_a_prompt_and_answers_are_right() {
    for (talk, pressure) in [(false, false), (true, true)] {
        let faults = Faults { window: true, cache: true, forks: true, talk, pressure, ..Faults::default() };
        for make in [World::new, World::aggregated] {
            let mut total = Outcome::default();
            for seed in 0..SEEDS / 8 {
                println!("forks: seed {seed}");
                let mut world = make(seed, faults);
                world.run();
                total.add(world.outcome());
            }
            println!("{faults:?}: {total:?}");
            assert_eq!((total.failed, total.integrity_failures), (0, 0));
            assert!(total.window_recomputed_tokens > SEEDS / 4, "windows were seldom computed again");
        }
    }
}

#[test]
fn decode_restores_pages_beside_windows_that_are_sent() {
    let total = run("windows and below", Faults { window: true, ..below() });
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.loaded > SEEDS / 4 && total.written > SEEDS / 4);
    let faults = Faults {
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
        ..below()
    };
    for write in [WritePolicy::WriteThrough, WritePolicy::WriteBack] {
        let total = run("windows, below and faults", Faults { write, ..faults });
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.restores_failed > 0 && total.renegotiated > 0 && total.retractions > 0);
    }
}
