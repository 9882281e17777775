//! Emptying the cache under running requests.

use host_core::radix::CacheEvent;
use host_core::scheduler::Flushed;
use host_core::{Event, Role, Room};
use host_sim::{Leg, PEER};

use super::leg::{config, tokens};

#[test]
fn an_idle_cache_is_empty_at_once_and_says_so() {
    let mut leg = Leg::with(host_core::Config { cache_events: true, ..config(Role::Aggregated, 16) });
    leg.submit(1, &tokens(0..16), 1);
    leg.compute_all();
    assert_eq!(leg.stats().pool.cached, 4);
    leg.cache_events.clear();
    assert_eq!(leg.scheduler.flush_cache(), Some(Flushed { freed: 4, in_use: 0 }));
    assert_eq!((leg.stats().pool.cached, leg.stats().evicted_pages), (0, 0), "nothing was short");
    leg.wait(std::time::Duration::ZERO);
    assert_eq!(leg.cache_events, [CacheEvent::Cleared]);
    assert_eq!(leg.scheduler.flush_cache(), Some(Flushed::default()));
    leg.at_rest();
}

#[test]
fn pages_in_use_stay_for_their_requests_are_found_by_no_other_and_go_with_the_last() {
    let mut leg = Leg::with(host_core::Config { cache_events: true, ..config(Role::Decode, 64) });
    let prompt = tokens(0..16);
    leg.submit(1, &prompt, 1);
    leg.deliver(1);
    // Two requests hold the same four pages. One of the two adds two pages of its own.
    leg.submit(2, &prompt, 8);
    leg.deliver(2);
    leg.submit(3, &[prompt.clone(), tokens(100..108)].concat(), 1);
    assert_eq!((leg.stats().pool.cached, leg.stats().locked_pages), (4, 4));
    assert_eq!(leg.scheduler.flush_cache(), Some(Flushed { freed: 0, in_use: 4 }));
    leg.scheduler.audit();
    // A new request with the same prompt is sent all of it.
    leg.submit(4, &prompt, 1);
    assert_eq!(leg.reserves[&Room(4)].1.decode_prefix_len, 0);
    // Pages that arrive for a request from before the flush enter no tree.
    leg.deliver(3);
    assert_eq!(leg.finished, [Room(1), Room(3)]);
    assert_eq!(leg.stats().pool.cached, 4);
    leg.compute_all();
    assert!(leg.finished.contains(&Room(2)));
    assert_eq!(leg.stats().pool.cached, 0, "the last of them is gone");
    leg.deliver(4);
    assert_eq!(leg.stats().pool.cached, 4, "the cache fills again");
    leg.submit(5, &prompt, 1);
    assert_eq!(leg.reserves[&Room(5)].1.decode_prefix_len, 16);
    leg.deliver(5);
    // A listener gets one event of the flush, and none of the pages that left later.
    let cleared = leg.cache_events.iter().position(|event| *event == CacheEvent::Cleared).unwrap();
    assert!(matches!(leg.cache_events[cleared + 1..], [CacheEvent::Stored { .. }]), "{:?}", leg.cache_events);
    leg.at_rest();
}

#[test]
fn a_flush_frees_requests_that_wait_for_pages_that_will_not_be_kept() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    for room in 0..3 {
        leg.submit(room, &tokens(0..16), 1);
    }
    assert_eq!(leg.reserves.len(), 1);
    leg.scheduler.flush_cache();
    leg.wait(std::time::Duration::ZERO);
    // The first of the waiting requests leads now: its pages will be kept.
    assert_eq!(leg.reserves.keys().map(|room| room.0).collect::<Vec<_>>(), [0, 1]);
    leg.deliver(0);
    leg.deliver(1);
    assert_eq!(leg.reserves[&Room(2)].1.pages.len(), 0);
    leg.deliver(2);
    leg.at_rest();
}

#[test]
fn a_flushed_request_that_fails_gives_its_pages_back_when_they_are_safe() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.submit(1, &tokens(0..16), 1);
    leg.deliver(1);
    leg.submit(2, &tokens(0..24), 1);
    leg.scheduler.flush_cache();
    leg.event(Event::Cancel(Room(2)));
    assert_eq!((leg.stats().pool.cached, leg.stats().pool.quarantined), (4, 2), "prefill may still write");
    leg.drained(2);
    assert_eq!(leg.stats().pool.cached, 0);
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    leg.at_rest();
}

#[test]
fn a_worker_without_a_cache_has_nothing_to_flush() {
    let mut leg = Leg::with(host_core::Config { radix_cache: None, ..config(Role::Aggregated, 16) });
    leg.submit(1, &tokens(0..16), 1);
    leg.compute_all();
    assert_eq!(leg.scheduler.flush_cache(), None);
}
