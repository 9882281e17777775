//! Two workers and their clients: faults of the network and of the workers.

use super::scene::Scene;
use super::world::{aggregated, pair};
use super::{SEEDS, run};

#[test]
fn without_faults_every_answer_is_right() {
    let total = run("no faults", Scene::default());
    assert_eq!((total.failed, total.integrity_failures, total.layer_parts_sent), (0, 0, 0));
    assert!(total.finished > SEEDS);
}

#[test]
fn lost_repeated_and_reordered_messages_change_no_answer() {
    let total = run("network", Scene { loss: 0.3, repeat: 0.2, ..Scene::default() });
    assert_eq!(total.failed, 0);
    assert!(total.messages_repeated > 0 && total.messages_stale > 0, "the faults never struck");
}

#[test]
fn aborts_at_any_time_leave_nothing_behind() {
    let faults = Scene { loss: 0.2, repeat: 0.2, abort: 0.5, ..Scene::default() };
    let total = run("aborts", faults);
    assert!(total.finished > 0 && total.failed > 0);
    assert!(total.quarantined > 0, "no abort ever struck a page in flight");
}

#[test]
fn pages_of_a_room_that_was_given_up_are_not_used_again_while_what_arrived_is_copied_into_them() {
    let faults = Scene {
        loss: 0.1,
        abort: 0.5,
        death: 0.01,
        disconnect: 0.01,
        layers: true,
        cache: true,
        ..Scene::default()
    };
    let total = run("copies", faults);
    assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.copies > SEEDS && total.closed_late > 0, "no room was given up while it was copied");
}

#[test]
fn flipped_bytes_cost_a_second_transfer_and_no_answer() {
    let total = run("flips", Scene { flip: 0.05, ..Scene::default() });
    assert!(total.integrity_failures > 0, "no byte was ever flipped");
    assert!(total.finished > total.failed);
}

#[test]
fn bytes_that_flip_again_and_again_end_in_an_error_and_free_pages() {
    let total = run("many flips", Scene { flip: 0.5, abort: 0.2, ..Scene::default() });
    assert!(total.failed > 0 && total.finished > 0);
}

#[test]
fn a_dying_prefill_worker_loses_no_page() {
    let faults = Scene { loss: 0.1, repeat: 0.1, abort: 0.2, death: 0.01, ..Scene::default() };
    let total = run("deaths", faults);
    assert!(total.deaths > 0 && total.finished > 0);
}

#[test]
fn a_dropped_connection_is_fenced_before_its_pages_are_used_again() {
    let faults = Scene { loss: 0.1, repeat: 0.2, abort: 0.2, disconnect: 0.01, ..Scene::default() };
    let total = run("disconnects", faults);
    assert!(total.disconnects > 0 && total.fences_failed > 0 && total.finished > 0);
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let faults = Scene { flip: 0.02, executor: 0.02, layers: true, cache: true, ..Scene::of_every_kind() };
    for seed in 0..20 {
        let trace = || {
            let mut world = pair(seed, faults);
            world.keep_trace();
            world.run();
            assert!(world.trace().len() > 100, "nothing was written down");
            world.trace().to_vec()
        };
        assert_eq!(trace(), trace(), "seed {seed}");
    }
}

#[test]
fn the_aggregated_worker_gives_the_same_answers() {
    for seed in 0..50 {
        let mut world = aggregated(seed, Scene { cache: seed % 2 == 1, ..Scene::default() });
        world.run();
        assert_eq!(world.outcome().failed, 0, "seed {seed}");
        assert!(world.outcome().finished > 0);
    }
    let kv = Scene::default().kv(0);
    assert_eq!(kv.answer_to(&[1, 2, 3], 4), kv.answer_to(&[1, 2, 3], 4));
}
