//! Prompts that begin alike and are in progress at the same time.

use std::time::Duration;

use host_core::message::Body;
use host_core::radix::NamespaceKey;
use host_core::request::PeerRef;
use host_core::{Config, Event, Instance, Role, Room};
use host_sim::{Leg, PAGE, PEER};

use super::leg::{config, tokens};

/// A decode worker with this many requests for one prompt, of which only the first is being transferred.
fn waiting(requests: u64, prompt: &[u32]) -> Leg {
    let mut leg = Leg::with(config(Role::Decode, 512));
    for room in 0..requests {
        leg.submit(room, prompt, 2);
    }
    assert_eq!(leg.reserves.len(), 1, "only the first one is sent");
    leg
}

/// Pages that decode requested of prefill in all, and for how many rooms.
fn requested(leg: &Leg) -> (usize, usize) {
    (leg.reserves.values().map(|(_, reserve)| reserve.pages.len()).sum(), leg.reserves.len())
}

fn finish(leg: &mut Leg, rooms: impl IntoIterator<Item = u64>) {
    for room in rooms {
        leg.deliver(room);
    }
    leg.compute_all();
    leg.at_rest();
}

#[test]
fn of_thirty_two_identical_prompts_each_page_moves_once() {
    // Prompts of whole pages, and prompts with a partial page at the end, of which each request needs its own copy.
    for (length, partial) in [(16, 0), (18, 1)] {
        let mut leg = waiting(32, &tokens(0..length));
        leg.deliver(0);
        assert_eq!(requested(&leg), (4 + partial + 31 * partial, 32));
        assert!((1..32).all(|room| leg.reserves[&Room(room)].1.decode_prefix_len == 16));
        finish(&mut leg, 1..32);
        assert_eq!(leg.finished.len(), 32);
        let stats = leg.stats();
        assert_eq!((stats.shared_transfers, stats.shared_pages), (31, 31 * 4));
        assert_eq!(stats.pages_received as usize, 4 + 32 * partial);
    }
}

#[test]
fn without_sharing_each_request_is_sent_all_of_its_prompt() {
    let mut leg = Leg::with(Config { share_transfers: false, ..config(Role::Decode, 512) });
    (0..8).for_each(|room| leg.submit(room, &tokens(0..16), 2));
    assert_eq!(requested(&leg), (8 * 4, 8));
    finish(&mut leg, 0..8);
    assert_eq!((leg.finished.len(), leg.stats().shared_transfers), (8, 0));
}

#[test]
fn a_prompt_that_begins_alike_waits_and_is_sent_the_rest() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.submit(1, &tokens(0..16), 1);
    let other = [tokens(0..12), tokens(500..512)].concat();
    leg.submit(2, &other, 1);
    assert_eq!(requested(&leg), (4, 1));
    leg.deliver(1);
    assert_eq!(leg.reserves[&Room(2)].1.decode_prefix_len, 12);
    assert_eq!(requested(&leg), (4 + 3, 2));
    finish(&mut leg, [2]);
}

#[test]
fn no_request_waits_for_a_small_part_of_what_it_lacks() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.submit(1, &tokens(0..32), 1);
    // One page of 8 in common, and then two.
    leg.submit(2, &[tokens(0..4), tokens(500..528)].concat(), 1);
    assert_eq!(requested(&leg), (8 + 8, 2));
    leg.submit(3, &[tokens(0..8), tokens(600..624)].concat(), 1);
    assert_eq!(requested(&leg), (8 + 8, 2), "a quarter of what it lacks is enough to wait for");
    leg.deliver(2);
    leg.deliver(1);
    finish(&mut leg, [3]);
}

#[test]
fn a_page_alike_behind_another_beginning_is_not_waited_for() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    leg.submit(1, &tokens(0..32), 1);
    leg.submit(2, &[tokens(500..504), tokens(4..32)].concat(), 1);
    assert_eq!(requested(&leg), (16, 2));
    finish(&mut leg, [1, 2]);
}

#[test]
fn pages_far_into_a_long_prompt_are_found_too() {
    let mut leg = Leg::with(config(Role::Decode, 8000));
    let prompt: Vec<u32> = (0..700 * PAGE as u32).map(|token| token * 7 % 997).collect();
    leg.submit(1, &prompt, 1);
    // 660 of 2560 pages in common. A quarter ends at page 639, which lies behind the pages that are indexed one by one.
    let other: Vec<u32> = (0..1900 * PAGE as u32).map(|token| token % 991).collect();
    leg.submit(2, &[&prompt[..660 * PAGE], &other].concat(), 1);
    assert_eq!(leg.reserves.len(), 1);
    // With 638 pages in common, the share is less than a quarter.
    let mut leg = Leg::with(config(Role::Decode, 8000));
    leg.submit(1, &prompt, 1);
    leg.submit(2, &[&prompt[..638 * PAGE], &other[..], &other[..22 * PAGE]].concat(), 1);
    assert_eq!(leg.reserves.len(), 2);
    leg.deliver(1);
    finish(&mut leg, [2]);
}

#[test]
fn a_request_that_cannot_use_the_pages_does_not_wait_for_them() {
    let mut leg = Leg::with(config(Role::Decode, 64));
    let prompt = tokens(0..16);
    leg.submit(1, &prompt, 1);
    let mut other = leg.request(2, &prompt, 1);
    other.namespace = NamespaceKey { salt: "other".into(), ..NamespaceKey::default() };
    leg.send(other);
    let mut uncached = leg.request(3, &prompt, 1);
    uncached.no_cache = true;
    leg.send(uncached);
    assert_eq!(requested(&leg), (12, 3));
    // A request with another prefill worker could begin at once.
    let elsewhere = Instance(PEER.0 + 1);
    leg.event(Event::PeerReady { peer: elsewhere, floor: 0, session: 2 });
    let mut far = leg.request(4, &prompt, 1);
    far.prefill = Some(PeerRef { instance: elsewhere, address: String::new() });
    leg.send(far);
    assert_eq!(requested(&leg), (16, 4));
    // No request waits for a request that leaves no pages in the cache.
    let mut leg = Leg::with(config(Role::Decode, 64));
    let mut uncached = leg.request(1, &prompt, 1);
    uncached.no_cache = true;
    leg.send(uncached);
    leg.submit(2, &prompt, 1);
    assert_eq!(requested(&leg), (8, 2));
    finish(&mut leg, [1, 2]);
}

#[test]
fn a_leader_that_is_cancelled_frees_its_followers_at_once() {
    let mut leg = waiting(4, &tokens(0..16));
    leg.event(Event::Cancel(Room(0)));
    // One of the followers leads from now on, and the others follow it.
    assert_eq!(leg.reserves.keys().map(|room| room.0).collect::<Vec<_>>(), [0, 1]);
    leg.drained(0);
    leg.deliver(1);
    assert_eq!(requested(&leg), (4 + 4, 4));
    finish(&mut leg, [2, 3]);
    assert_eq!((leg.finished.len(), leg.stats().shared_transfers), (3, 2));
}

#[test]
fn a_leader_that_fails_frees_its_followers_at_once() {
    let mut leg = waiting(3, &tokens(0..16));
    leg.message(0, 1, Body::PrefillFailed { message: "broken".into(), retryable: true });
    assert!(leg.failed.contains_key(&Room(0)) && leg.reserves.contains_key(&Room(1)));
    assert!(!leg.reserves.contains_key(&Room(2)));
    leg.drained(0);
    leg.deliver(1);
    finish(&mut leg, [2]);
}

#[test]
fn a_request_that_waits_for_a_transfer_from_a_lost_worker_fails_with_it() {
    let mut leg = waiting(3, &tokens(0..16));
    leg.event(Event::PeerLost { peer: PEER, session: 1, fenced: true });
    assert_eq!(leg.failed.len(), 3, "their prefill worker is gone");
    leg.at_rest();
}

#[test]
fn a_damaged_transfer_is_repeated_for_all_that_wait() {
    let mut leg = waiting(3, &tokens(0..16));
    leg.arrive(0);
    leg.verified(0, false);
    assert_eq!((leg.reserves.len(), leg.reserves[&Room(0)].0), (1, 2), "no other request begins");
    leg.deliver(0);
    assert_eq!(requested(&leg), (4, 3));
    // A leader whose pages are damaged in every attempt frees its followers.
    let mut leg = waiting(2, &tokens(0..16));
    for _ in 0..2 {
        leg.arrive(0);
        leg.verified(0, false);
    }
    assert!(leg.failed.contains_key(&Room(0)));
    leg.drained(0);
    finish(&mut leg, [1]);
}

#[test]
fn a_follower_that_is_cancelled_leaves_nothing_behind() {
    let mut leg = waiting(4, &tokens(0..16));
    leg.event(Event::Cancel(Room(2)));
    leg.deliver(0);
    assert!(!leg.reserves.contains_key(&Room(2)));
    finish(&mut leg, [1, 3]);
    assert_eq!(leg.finished.len(), 3);
}

#[test]
fn a_slow_leader_is_waited_for_no_longer_than_the_other_leg_has_patience() {
    let prompt = tokens(0..16);
    let mut decode = waiting(3, &prompt);
    let mut prefill = Leg::with(config(Role::Prefill, 64));
    for room in 0..3 {
        prefill.submit(room, &prompt, 1);
    }
    let half = config(Role::Decode, 1).bootstrap_timeout / 2;
    decode.answer_messages();
    assert_eq!(decode.scheduler.next_deadline().unwrap().0, half, "nothing else would wake it");
    for leg in [&mut decode, &mut prefill] {
        leg.wait(half - Duration::from_millis(1));
    }
    assert_eq!(requested(&decode), (4, 1));
    decode.wait(Duration::from_millis(1));
    assert_eq!(requested(&decode), (12, 3), "each goes its own way");
    assert!(prefill.failed.is_empty());
    for room in 0..3 {
        prefill.reserve(room, &prompt, 0);
    }
    prefill.compute_all();
    assert!(prefill.failed.is_empty() && prefill.stats().queued == 0, "{:?}", prefill.failed);
    finish(&mut decode, [0, 1, 2]);
}

#[test]
fn one_that_has_lost_patience_and_lacks_pages_asks_for_no_tick_without_end() {
    // The leader takes all pages but two.
    let mut decode = Leg::with(config(Role::Decode, 10));
    decode.submit(0, &tokens(0..32), 1);
    decode.submit(1, &tokens(0..32), 1);
    decode.answer_messages();
    decode.wait(Duration::from_secs(6));
    assert_eq!(requested(&decode), (8, 1), "the second one has no pages");
    assert_eq!(decode.stats().queued, 1);
    let due = decode.scheduler.next_deadline();
    assert!(due.is_none_or(|due| due > decode.now), "{due:?} is past");
}

#[test]
fn a_prompt_that_is_being_computed_is_not_computed_twice() {
    for role in [Role::Aggregated, Role::Prefill] {
        let mut leg = Leg::with(config(role, 64));
        let prompt = tokens(0..18);
        for room in 0..8 {
            leg.submit(room, &prompt, 1);
            if role == Role::Prefill {
                leg.reserve(room, &prompt, 0);
            }
        }
        leg.compute_all();
        // Each request draws its own token, from the last, partial page.
        assert_eq!(leg.stats().prefill_tokens, 18 + 7 * 2, "{role:?}");
        assert_eq!(leg.stats().shared_pages, 7 * 4, "{role:?}");
        if role == Role::Prefill {
            leg.settle();
            for room in 0..8 {
                leg.message(room, 1, Body::Commit);
            }
        }
        assert_eq!(leg.finished.len(), 8);
        leg.at_rest();
    }
}

#[test]
fn followers_do_not_hold_up_the_line() {
    let mut leg = waiting(40, &tokens(0..16));
    for room in 100..140 {
        leg.submit(room, &tokens(room as u32 * 5..room as u32 * 5 + PAGE as u32), 1);
        assert!(leg.reserves.contains_key(&Room(room)), "{room} waits behind those that share");
        leg.deliver(room);
        leg.compute_all();
    }
    leg.deliver(0);
    finish(&mut leg, 1..40);
}

#[test]
fn pages_that_came_twice_are_free_at_once_so_that_the_answer_can_grow_into_them() {
    let mut leg = Leg::with(Config { reserved_decode_tokens: 1, ..config(Role::Decode, 16) });
    let prompt = tokens(0..28);
    leg.submit(1, &prompt, 1);
    leg.submit(2, &prompt, 20);
    leg.answer_messages();
    // Long enough for the second request not to follow any other.
    leg.wait(Duration::from_secs(6));
    assert_eq!(leg.reserves[&Room(2)].1.decode_prefix_len, 0, "both are under way");
    leg.deliver(1);
    leg.deliver(2);
    assert_eq!(
        leg.stats().pool.free,
        16 - 7 - 1,
        "of each page of the prompt there is one, and the answer has begun"
    );
    leg.compute_all();
    assert_eq!(leg.finished, [Room(1), Room(2)], "only its own pages are in the second one's way");
    leg.answer_messages();
    leg.at_rest();
}
