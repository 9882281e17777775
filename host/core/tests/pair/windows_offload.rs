//! Models of which some layers slide, on workers with offload tiers.

use host_core::hierarchy::{PrefetchPolicy, WritePolicy};

use super::offload::with_offload;
use super::scene::Scene;
use super::{SEEDS, run, run_aggregated};

fn sliding() -> Scene {
    Scene { window: true, ..with_offload() }
}

#[test]
fn an_aggregated_worker_goes_on_behind_windows_that_it_restores() {
    for write in [WritePolicy::WriteThrough, WritePolicy::WriteThroughSelective, WritePolicy::WriteBack] {
        let total = run_aggregated("windows in offload tiers", Scene { flush: 0.01, write, ..sliding() });
        assert_eq!((total.failed, total.restores_failed), (0, 0));
        // Pages that are written after two uses are seldom stored in time: for 275 requests in 4000 worlds.
        let few = write == WritePolicy::WriteThroughSelective;
        assert!(total.promised_windows > if few { SEEDS / 40 } else { SEEDS / 2 }, "{write:?}");
        assert!(total.promised_storage > 0 && total.written > 0 && total.evicted_pages > 0);
    }
}

#[test]
fn windows_that_fail_hang_or_are_lies_cost_an_aggregated_worker_no_answer() {
    let faults = Scene { tier: 0.1, copy: 0.05, abort: 0.2, flush: 0.01, pressure: true, ..sliding() };
    for (write, prefetch) in [
        (WritePolicy::WriteThrough, PrefetchPolicy::WaitComplete),
        (WritePolicy::WriteBack, PrefetchPolicy::Timeout),
    ] {
        let total = run_aggregated("windows in offload tiers, faults", Scene { write, prefetch, ..faults });
        assert!(total.hung > 0 && total.restores_failed > 0 && total.finished > SEEDS);
        assert!(total.promised_windows > SEEDS / 8 && total.retractions > 0);
        assert!(total.restored_offload_tokens > 0, "no preempted request found anything in offload tiers");
    }
}

#[test]
fn prefill_and_decode_find_each_others_windows_in_offload_tiers() {
    let total = run("windows in offload tiers", sliding());
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.promised_windows > SEEDS / 4, "prefill seldom found a window");
    let total = run("windows in offload tiers, faults", Scene { tier: 0.15, copy: 0.05, ..sliding() });
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.hung > 0 && total.restores_failed > 0 && total.promised_windows > 0);
}

#[test]
fn windows_in_offload_tiers_survive_aborts_loss_flips_deaths_and_disconnects() {
    let everything = Scene { pressure: true, alike: true, executor: 0.02, ..Scene::of_every_kind() };
    let faults = Scene {
        tier: 0.1,
        copy: 0.05,
        flush: 0.005,
        cache: true,
        talk: true,
        offload: true,
        window: true,
        ..everything
    };
    let mut resumed = 0;
    for (write, prefetch) in [
        (WritePolicy::WriteThrough, PrefetchPolicy::Timeout),
        (WritePolicy::WriteThroughSelective, PrefetchPolicy::WaitComplete),
        (WritePolicy::WriteBack, PrefetchPolicy::BestEffort),
    ] {
        let total = run("windows in offload tiers and everything", Scene { write, prefetch, ..faults });
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(total.loaded > 0 && total.quarantined > 0 && total.retractions > 0);
        resumed += total.restored_offload_tokens;
    }
    assert!(resumed > 0, "no preempted request found anything in offload tiers");
}
