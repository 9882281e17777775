//! Prefill sends the layers of a chunk while later layers are computed.

use super::scene::Scene;
use super::{SEEDS, run};

#[test]
fn layers_sent_while_others_are_computed_change_no_answer_and_none_is_sent_twice_or_too_early() {
    for cache in [false, true] {
        let total = run("layers", Scene { layers: true, cache, ..Scene::default() });
        assert_eq!((total.failed, total.integrity_failures), (0, 0));
        assert!(total.finished > SEEDS && total.layer_parts_sent > SEEDS);
    }
}

#[test]
fn layers_on_their_way_survive_failing_batches_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Scene { executor: 0.05, layers: true, ..Scene::of_every_kind() };
    for cache in [false, true] {
        let total = run("layers and faults", Scene { cache, ..faults });
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.batches_failed > 0 && total.quarantined > 0 && total.integrity_failures > 0);
        assert!(total.layer_parts_sent > SEEDS);
    }
}
