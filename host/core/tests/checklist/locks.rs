//! Every request gives back its locks and its pages, whatever it found cached and however it ends.

use std::time::Duration;

use host_core::message::Body;
use host_core::{Config, Event, Role, Room};
use host_sim::{Leg, PAGE, PEER};

use super::leg::{config, tokens};

/// Tokens of a request's 16 that are cached, with a name for the case.
const HITS: [(&str, u32); 3] = [("no hit", 0), ("partial hit", 8), ("full hit", 16)];

/// A decode worker that finds `hit` tokens of request 1's prompt of 16 cached, and has sent its reserve to prefill.
fn reserved(hit: u32, config: Config) -> Leg {
    let mut leg = Leg::with(config);
    if hit > 0 {
        leg.submit(0, &tokens(0..hit), 1);
        leg.deliver(0);
    }
    assert_eq!(leg.stats().pool.cached, hit as usize / PAGE);
    leg.submit(1, &tokens(0..16), 4);
    assert_eq!(leg.reserves[&Room(1)].1.decode_prefix_len, hit);
    assert_eq!(leg.stats().locked_pages, hit as usize / PAGE);
    leg
}

/// Runs one end of the request with every hit. Pages that were cached before must still be cached, without a lock.
fn with_every_hit(case: &str, end: impl Fn(&mut Leg)) {
    for (name, hit) in HITS {
        println!("{case}, {name}");
        let mut leg = reserved(hit, config(Role::Decode, 64));
        end(&mut leg);
        leg.at_rest();
        let stats = leg.stats();
        assert_eq!(stats.prefix_locks, 0, "{case}, {name}");
        let whole = 16 / PAGE;
        let expected = if leg.finished.contains(&Room(1)) { whole..=whole + 1 } else { 0..=whole };
        assert!(expected.contains(&stats.pool.cached), "{case}, {name}: {} cached", stats.pool.cached);
        assert!(stats.pool.cached >= hit as usize / PAGE, "{case}, {name}: freed what was not its own");
        assert_eq!(stats.pool.free + stats.pool.cached, 64, "{case}, {name}");
    }
}

#[test]
fn a_request_that_succeeds_swaps_its_lock_for_the_whole_prompt_and_lets_go_at_the_end() {
    with_every_hit("success", |leg| {
        leg.deliver(1);
        assert_eq!(leg.stats().locked_pages, 16 / PAGE, "the prompt");
        leg.compute_all();
        assert!(leg.finished.contains(&Room(1)));
    });
}

#[test]
fn a_refused_handshake_ends_what_waits_for_it() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    leg.submit(1, &tokens(0..16), 1);
    leg.event(Event::PeerRefused { peer: PEER, message: "another model".into() });
    assert!(leg.failed[&Room(1)].message.contains("another model"));
    leg.at_rest();
}

#[test]
fn a_transfer_that_prefill_refuses_or_gives_up_unlocks_once_drained() {
    with_every_hit("refused", |leg| {
        let refused = Body::Refused { message: "no".into(), retryable: true };
        leg.answer(1, |body| matches!(body, Body::Reserve(_)), refused);
        assert!(leg.failed.contains_key(&Room(1)));
        leg.drained(1);
    });
    with_every_hit("given up", |leg| {
        leg.message(1, 1, Body::PrefillFailed { message: "broken".into(), retryable: true });
        assert!(leg.failed.contains_key(&Room(1)));
        leg.drained(1);
    });
}

#[test]
fn pages_that_prefill_may_still_write_stay_until_it_says_drained_and_no_time_frees_them() {
    with_every_hit("cancelled in transfer", |leg| {
        let held = leg.stats().pool.held;
        leg.answer_messages();
        leg.event(Event::Cancel(Room(1)));
        // Longer than any timeout: prefill keeps answering, but with other messages.
        for _ in 0..300 {
            leg.wait(Duration::from_secs(4));
            // An answer to a question that decode does not ask any more.
            leg.message(99, 0, Body::Committed);
            assert_eq!(leg.stats().pool.quarantined, held);
        }
        leg.drained(1);
    });
}

#[test]
fn a_request_cancelled_in_the_queue_has_locked_nothing() {
    with_every_hit("cancelled in the queue", |leg| {
        // Too few pages are free for this request.
        leg.submit(2, &[tokens(0..16), tokens(500..740)].concat(), 1);
        assert_eq!(leg.stats().queued, 1);
        leg.event(Event::Cancel(Room(2)));
        leg.event(Event::Cancel(Room(1)));
        leg.drained(1);
        assert!(leg.failed.contains_key(&Room(2)));
    });
}

#[test]
fn a_request_cancelled_during_verification_waits_until_its_pages_are_read() {
    with_every_hit("cancelled in verification", |leg| {
        leg.arrive(1);
        leg.event(Event::Cancel(Room(1)));
        leg.drained(1);
        assert_eq!(leg.stats().quarantined_rooms, 1, "its pages are being digested");
        leg.verified(1, true);
    });
}

#[test]
fn a_request_cancelled_while_it_runs_waits_for_its_batch() {
    with_every_hit("cancelled in a batch", |leg| {
        leg.deliver(1);
        assert!(leg.batch.is_some());
        leg.event(Event::Cancel(Room(1)));
        assert_eq!(leg.stats().quarantined_rooms, 1, "its pages are being computed with");
        leg.compute_all();
    });
}

#[test]
fn a_batch_that_fails_unlocks_its_requests() {
    with_every_hit("executor failed", |leg| {
        leg.deliver(1);
        leg.batch = None;
        leg.event(Event::BatchFailed("out of memory".into()));
        assert!(leg.failed[&Room(1)].message.contains("out of memory"));
    });
}

#[test]
fn a_lost_peer_unlocks_when_it_is_fenced_and_not_before() {
    with_every_hit("peer lost", |leg| {
        let held = leg.stats().pool.held;
        leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: false });
        assert!(leg.failed.contains_key(&Room(1)));
        assert_eq!(leg.stats().pool.quarantined, held, "its late writes might land");
        leg.event(Event::FenceFailed { peer: PEER, session: 1 });
        leg.wait(Duration::from_secs(100));
        assert_eq!(leg.stats().pool.quarantined, held);
        leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    });
}

#[test]
fn damage_is_asked_for_again_under_the_same_lock_and_at_last_unlocks() {
    with_every_hit("damaged once", |leg| {
        let (_, first) = leg.reserves[&Room(1)].clone();
        leg.arrive(1);
        leg.verified(1, false);
        assert_eq!(leg.reserves[&Room(1)], (2, first), "the same promise, the same pages");
        leg.deliver(1);
        leg.compute_all();
        assert!(leg.finished.contains(&Room(1)));
    });
    with_every_hit("damaged for good", |leg| {
        for _ in 0..2 {
            leg.arrive(1);
            leg.verified(1, false);
        }
        assert!(leg.failed[&Room(1)].message.contains("damaged"));
        leg.drained(1);
    });
}

#[test]
fn a_preempted_request_lets_its_lock_go_and_takes_another() {
    // Nine pages: two prompts of four, and one for the request that grows first.
    let small = Config { reserved_decode_tokens: 1, ..config(Role::Decode, 9) };
    let mut leg = Leg::with(small);
    for (room, prompt) in [(1, tokens(0..15)), (2, tokens(100..115))] {
        leg.submit(room, &prompt, 8);
        leg.deliver(room);
    }
    leg.compute_all();
    assert!(leg.stats().retractions > 0, "no request was preempted: {:?}", leg.failed);
    assert_eq!(leg.finished.len(), 2);
    assert_eq!(leg.stats().prefix_locks, 0);
    leg.at_rest();
}

#[test]
fn a_request_that_does_not_fit_gives_its_lock_back_each_time() {
    let mut leg = Leg::with(Config { reserved_decode_tokens: 1, ..config(Role::Decode, 6) });
    leg.submit(0, &tokens(0..8), 1);
    leg.deliver(0);
    leg.submit(1, &tokens(100..114), 1);
    // Two of its four pages are cached, and the missing two are not free.
    leg.submit(2, &[tokens(0..8), tokens(200..208)].concat(), 1);
    for _ in 0..5 {
        leg.wait(Duration::from_millis(1));
        assert_eq!((leg.stats().queued, leg.stats().locked_pages), (1, 0));
    }
    leg.deliver(1);
    leg.deliver(2);
    assert_eq!(leg.finished.len(), 3);
    leg.at_rest();
}

#[test]
fn a_prefill_worker_unlocks_on_commit_abort_and_loss() {
    for end in ["commit", "abort", "lost", "cancel"] {
        println!("{end}");
        let mut leg = Leg::with(config(Role::Prefill, 64));
        let prompt = tokens(0..18);
        for room in [0, 1] {
            leg.submit(room, &prompt, 1);
            leg.reserve(room, &prompt, 0);
            leg.compute_all();
            if room == 0 {
                leg.settle();
                leg.message(0, 1, Body::Commit);
            }
        }
        assert_eq!(leg.stats().locked_pages, 4);
        match end {
            "commit" => leg.message(1, 1, Body::Commit),
            "abort" => leg.message(1, 1, Body::Abort),
            "lost" => leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true }),
            _ => leg.event(Event::Cancel(Room(1))),
        }
        assert_eq!(leg.stats().quarantined_rooms, 1, "our own writes read the pages");
        leg.settle();
        leg.at_rest();
        assert_eq!(leg.stats().pool.cached, 4);
    }
}
