//! Workers that do not know in time which tokens may follow.

use super::scene::Scene;
use super::{SEEDS, run, run_aggregated};

#[test]
fn draws_that_are_put_off_change_no_answer() {
    let scene = Scene { late_draw: 0.3, pressure: true, ..Scene::default() };
    for (window, cache, drafts, paced) in
        [(false, true, true, false), (true, true, false, false), (true, false, true, true)]
    {
        let scene = Scene { window, cache, drafts, paced, talk: cache, ..scene };
        for (name, total) in
            [("late", run("late", scene)), ("late alone", run_aggregated("late alone", scene))]
        {
            assert_eq!((total.failed, total.integrity_failures), (0, 0), "{name}");
            assert!(total.late_draws > SEEDS && total.retractions > SEEDS / 4, "{name}: {total:?}");
        }
    }
}

#[test]
fn draws_that_are_put_off_survive_aborts_loss_flips_deaths_and_disconnects() {
    for (window, cache, drafts) in [(false, true, false), (true, true, true)] {
        let faults = Scene { executor: 0.05, window, cache, alike: cache, ..Scene::of_every_kind() };
        let scene = Scene { late_draw: 0.3, drafts, pressure: true, talk: cache, layers: true, ..faults };
        let total = run("late and faults", scene);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.retractions > 0 && total.quarantined > 0 && total.integrity_failures > 0);
        assert!(total.late_draws > SEEDS);
    }
}
