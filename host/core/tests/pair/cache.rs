//! Workers that keep pages for requests with equal beginnings.

use super::scene::Scene;
use super::{SEEDS, run};

#[test]
fn cached_prefixes_change_no_answer_and_are_used() {
    let total = run("cache", Scene { cache: true, ..Scene::default() });
    assert_eq!(total.failed, 0);
    assert!(total.cached_tokens > 0 && total.evicted_pages > 0, "nothing was cached, or nothing evicted");
}

#[test]
fn cached_prefixes_survive_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Scene { abort: 0.4, cache: true, ..Scene::of_every_kind() };
    let total = run("cache and faults", faults);
    assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.cached_tokens > 0 && total.quarantined > 0 && total.integrity_failures > 0);
}

#[test]
fn prompts_alike_in_flight_share_a_transfer_and_change_no_answer() {
    let total = run("alike", Scene { cache: true, alike: true, ..Scene::default() });
    assert_eq!(total.failed, 0);
    assert!(total.shared_transfers > SEEDS, "hardly any request shared a transfer");
}

#[test]
fn prompts_alike_in_flight_survive_every_end_of_those_they_wait_for() {
    let faults =
        Scene { abort: 0.4, flip: 0.1, disconnect: 0.01, cache: true, alike: true, ..Scene::of_every_kind() };
    let total = run("alike and faults", faults);
    assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.shared_transfers > 0 && total.integrity_failures > 0);
}

#[test]
fn thousands_of_conversations_are_answered_as_if_nothing_were_cached() {
    let calm = Scene { cache: true, talk: true, ..Scene::default() };
    let total = run("conversations", calm);
    assert_eq!(total.failed, 0);
    assert!(total.turns > 4 * SEEDS, "hardly any conversation went on");
    assert!(total.cached_tokens > 8 * total.turns, "what was said before was computed again");
    let faults =
        Scene { loss: 0.1, repeat: 0.1, abort: 0.2, flip: 0.05, death: 0.005, disconnect: 0.005, ..calm };
    let total = run("conversations and faults", Scene { flush: 0.005, layers: true, alike: true, ..faults });
    assert!(total.turns > SEEDS / 4 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
    assert!(total.cached_tokens > 0 && total.integrity_failures > 0 && total.flushed_in_use > 0);
}

#[test]
fn caches_that_are_emptied_at_any_time_change_no_answer() {
    let calm = Scene { cache: true, alike: true, flush: 0.02, ..Scene::default() };
    let total = run("flushes", calm);
    assert_eq!(total.failed, 0);
    assert!(total.flushed_in_use > 0 && total.cached_tokens > 0, "no flush met a request");
    let faults = Scene { loss: 0.2, abort: 0.3, flip: 0.05, death: 0.005, disconnect: 0.005, ..calm };
    let total = run("flushes and faults", Scene { pressure: true, ..faults });
    assert!(total.finished > 0 && total.failed > 0 && total.retractions > 0 && total.flushed_in_use > 0);
}
