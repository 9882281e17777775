//! Workers that draft tokens.

use super::offload::with_offload;
use super::scene::Scene;
use super::{SEEDS, run, run_aggregated};

#[test]
fn guesses_change_no_answer_whatever_else_happens() {
    let scene = Scene { drafts: true, ..Scene::default() };
    for (window, cache, pressure, paced) in [
        (false, false, false, false),
        (false, true, true, false),
        (true, true, true, false),
        (true, false, true, true),
        (false, true, false, true),
    ] {
        let scene = Scene { window, cache, pressure, paced, talk: cache, ..scene };
        for (name, total) in
            [("drafts", run("drafts", scene)), ("drafts alone", run_aggregated("drafts alone", scene))]
        {
            assert_eq!((total.failed, total.integrity_failures), (0, 0), "{name}");
            let (drafted, right) = (total.drafted_tokens, total.drafts_right);
            assert!(right > SEEDS && drafted - right > SEEDS, "{name}: {right} of {drafted} guesses right");
            assert!(!pressure || total.retractions > SEEDS / 4, "{name}: pages seldom ran short");
        }
    }
}

#[test]
fn guesses_survive_aborts_loss_flips_deaths_and_disconnects() {
    for (window, cache) in [(false, false), (false, true), (true, true)] {
        let faults = Scene { executor: 0.05, window, cache, alike: cache, ..Scene::of_every_kind() };
        let total = run("drafts and faults", Scene { drafts: true, pressure: true, talk: cache, ..faults });
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.retractions > 0 && total.quarantined > 0 && total.integrity_failures > 0);
        assert!(total.drafts_right > 0 && total.drafted_tokens > total.drafts_right);
    }
}

#[test]
fn what_was_guessed_wrong_enters_no_offload_tier() {
    for window in [false, true] {
        let scene = Scene { drafts: true, window, pressure: true, talk: true, ..with_offload() };
        let total = run("drafts and offload tiers", scene);
        assert_eq!((total.failed, total.integrity_failures), (0, 0));
        assert!(total.loaded > SEEDS / 4 && total.written > SEEDS / 4);
        assert!(total.drafts_right > 0 && total.drafted_tokens > total.drafts_right);
    }
}
