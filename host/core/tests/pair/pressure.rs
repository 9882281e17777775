//! Pages run short, and requests are preempted.

use super::scene::Scene;
use super::{SEEDS, run, run_aggregated};

#[test]
fn requests_that_lose_their_pages_answer_as_if_they_had_not() {
    let total = run("pressure", Scene { pressure: true, ..Scene::default() });
    assert_eq!(total.failed, 0);
    assert!(total.retractions > SEEDS, "pages seldom ran short");
    assert_eq!(total.restored_tokens, 0, "without a cache nothing is found again");
    assert!(total.recomputed_tokens > total.retractions);
}

#[test]
fn with_a_cache_a_preempted_request_computes_only_what_is_gone() {
    let total = run("pressure and cache", Scene { pressure: true, cache: true, ..Scene::default() });
    assert_eq!(total.failed, 0);
    assert!(total.retractions > SEEDS && total.evicted_pages > 0, "pages seldom ran short");
    assert!(
        total.restored_tokens > 0 && total.recomputed_tokens > 0,
        "nothing was found again, or nothing was gone"
    );
}

#[test]
fn preemption_survives_aborts_loss_flips_deaths_and_disconnects() {
    for (cache, paced) in [(false, false), (true, false), (false, true), (true, true)] {
        let faults =
            Scene { pressure: true, paced, cache, alike: cache, layers: true, ..Scene::of_every_kind() };
        let total = run("pressure and faults", faults);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.retractions > 0 && total.quarantined > 0 && total.integrity_failures > 0);
    }
}

#[test]
fn a_target_for_the_time_between_tokens_changes_no_answer() {
    let total = run("paced", Scene { pressure: true, paced: true, cache: true, ..Scene::default() });
    assert_eq!(total.failed, 0);
    assert!(total.retractions > 0, "no request lost pages under a target");
    let faults = Scene { pressure: true, paced: true, ..Scene::default() };
    assert_eq!(run_aggregated("paced", faults).failed, 0);
}

#[test]
fn an_aggregated_worker_preempts_without_changing_an_answer() {
    for cache in [false, true] {
        let faults = Scene { pressure: true, cache, ..Scene::default() };
        let total = run_aggregated("aggregated under pressure", faults);
        assert_eq!(total.failed, 0);
        assert!(total.retractions > SEEDS, "pages seldom ran short");
    }
}

#[test]
fn where_nothing_proves_that_writes_have_settled_no_request_is_preempted_and_no_answer_changes() {
    for (window, paced) in [(false, false), (false, true), (true, false)] {
        let scene = Scene { unproven: true, pressure: true, layers: true, window, paced, ..Scene::default() };
        let total = run("unproven", scene);
        assert_eq!((total.failed, total.retractions), (0, 0));
        assert!(total.finished > SEEDS);
    }
}

#[test]
fn without_that_proof_aborts_loss_flips_deaths_and_disconnects_leave_no_page_behind() {
    for window in [false, true] {
        let faults = Scene { unproven: true, pressure: true, layers: true, window, ..Scene::of_every_kind() };
        let total = run("unproven and faults", faults);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.quarantined > 0 && total.fences_failed > 0 && total.integrity_failures > 0);
    }
}
