//! Workers with offload tiers: host memory and storage.

use host_core::hierarchy::{PrefetchPolicy, WritePolicy};

use super::scene::Scene;
use super::{SEEDS, run, run_aggregated};

/// The scene that all runs with offload tiers start from.
pub fn with_offload() -> Scene {
    Scene { cache: true, talk: true, offload: true, ..Scene::default() }
}

#[test]
fn an_aggregated_worker_restores_from_host_memory_and_storage() {
    let calm = with_offload();
    for faults in [
        Scene { flush: 0.01, ..calm },
        Scene { tier: 0.1, copy: 0.05, abort: 0.2, flush: 0.01, pressure: true, ..calm },
    ] {
        let total = run_aggregated("aggregated, offload tiers", faults);
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
    let total = run("offload tiers", with_offload());
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.loaded > SEEDS && total.promised_storage > SEEDS / 4 && total.written > SEEDS);
}

#[test]
fn a_restore_that_fails_or_hangs_costs_a_transfer_and_no_request() {
    let total = run("offload tiers, faults", Scene { tier: 0.15, copy: 0.05, ..with_offload() });
    assert_eq!((total.failed, total.integrity_failures), (0, 0));
    assert!(total.hung > 0 && total.restores_failed > 0 && total.renegotiated > 0 && total.loaded > 0);
}

#[test]
fn restores_survive_aborts_loss_flips_deaths_and_disconnects() {
    let faults = Scene {
        executor: 0.02,
        tier: 0.1,
        copy: 0.05,
        flush: 0.005,
        cache: true,
        talk: true,
        offload: true,
        ..Scene::of_every_kind()
    };
    let mut resumed = 0;
    for (write, prefetch) in [
        (WritePolicy::WriteThrough, PrefetchPolicy::Timeout),
        (WritePolicy::WriteThroughSelective, PrefetchPolicy::WaitComplete),
        (WritePolicy::WriteBack, PrefetchPolicy::BestEffort),
    ] {
        let faults = Scene { write, prefetch, layers: true, alike: true, pressure: true, ..faults };
        let total = run("offload tiers and everything", faults);
        assert!(total.finished > 0 && total.failed > 0 && total.deaths > 0 && total.disconnects > 0);
        assert!(
            total.loaded > 0 && total.restores_failed > 0 && total.quarantined > 0 && total.retractions > 0
        );
        resumed += total.restored_offload_tokens;
    }
    // Pages that are written after two uses are seldom written before the request is preempted.
    assert!(resumed > 0, "no preempted request found anything in offload tiers");
}
