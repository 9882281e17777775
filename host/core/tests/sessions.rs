//! Events of an earlier connection have no effect on the connection in use.

use std::time::Duration;

use host_core::{Action, Config, Event, Role, Room, Time};
use host_sim::{Leg, PEER as PREFILL};

/// A decode worker whose rooms the test closes.
fn decode_worker() -> Leg {
    let mut leg =
        Leg::unconnected(Config { max_tokens: 32, max_running: 4, ..host_sim::config(Role::Decode, 8) });
    leg.closes = false;
    leg
}

/// Handles an event and decides. Returns what is to be done.
fn after(leg: &mut Leg, millis: u64, event: Event) -> Vec<Action> {
    leg.now = Time(Duration::from_millis(millis));
    leg.after(event)
}

fn ask(leg: &mut Leg, millis: u64, room: u64) -> Vec<Action> {
    let request = leg.request(room, &[1; 8], 1);
    after(leg, millis, Event::Submit(request))
}

/// A worker with a first connection that broke and a second one over which pages were promised.
fn reconnected() -> Leg {
    let mut leg = decode_worker();
    ask(&mut leg, 0, 1);
    after(&mut leg, 1, Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
    let broken = Event::PeerLost { peer: PREFILL, session: 1, fenced: false };
    let actions = after(&mut leg, 2, broken);
    assert!(actions.contains(&Action::Fence { peer: PREFILL, session: 1 }), "{actions:?}");
    let actions = ask(&mut leg, 3, 2);
    assert!(actions.iter().any(|action| matches!(action, Action::Connect { .. })), "{actions:?}");
    after(&mut leg, 4, Event::PeerReady { peer: PREFILL, floor: 0, session: 2 });
    // Data that had arrived for the first request is not copied any more.
    after(&mut leg, 4, Event::RoomClosed { room: Room(1) });
    assert_eq!(leg.stats().pool.held, 2, "the second request's pages are promised to prefill");
    leg
}

#[test]
fn a_peer_that_many_ranks_miss_is_cut_off_once() {
    let mut leg = decode_worker();
    ask(&mut leg, 0, 1);
    after(&mut leg, 1, Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
    let fences = |actions: &[Action]| {
        actions.iter().filter(|action| matches!(action, Action::Fence { session: 1, .. })).count()
    };
    let gone = || Event::PeerLost { peer: PREFILL, session: 1, fenced: false };
    let of_each_rank: Vec<usize> = (0..4).map(|_| fences(&after(&mut leg, 2, gone()))).collect();
    assert_eq!(of_each_rank, [1, 0, 0, 0]);
    // The fence is tried again after a delay, however many ranks report the loss meanwhile.
    after(&mut leg, 3, Event::FenceFailed { peer: PREFILL, session: 1 });
    assert_eq!(fences(&after(&mut leg, 4, gone())), 0);
    assert_eq!(fences(&after(&mut leg, 1_100, Event::RoomClosed { room: Room(1) })), 1);
    after(&mut leg, 1_200, Event::PeerLost { peer: PREFILL, session: 1, fenced: true });
    assert_eq!((leg.stats().pool.free, leg.stats().unfenced_peers), (8, 0));
    assert_eq!(fences(&after(&mut leg, 1_300, gone())), 0, "it is cut off already");
    assert_eq!(leg.stats().unfenced_peers, 0);
}

#[test]
fn a_late_report_of_an_earlier_fence_frees_nothing() {
    let mut leg = reconnected();
    after(&mut leg, 5, Event::PeerLost { peer: PREFILL, session: 1, fenced: true });
    assert_eq!(leg.stats().pool.held, 2, "pages that prefill may write were freed");
    assert_eq!(leg.stats().failed, 1, "only the first connection's request failed");
    // The same event for the connection in use does end it.
    after(&mut leg, 6, Event::PeerLost { peer: PREFILL, session: 2, fenced: true });
    after(&mut leg, 6, Event::RoomClosed { room: Room(2) });
    assert_eq!(leg.stats().pool.free, 8);
    assert_eq!(leg.stats().failed, 2);
}

#[test]
fn a_failed_fence_of_an_earlier_connection_does_not_cut_the_next_one() {
    let mut leg = reconnected();
    after(&mut leg, 5, Event::FenceFailed { peer: PREFILL, session: 1 });
    let actions = after(&mut leg, 5_000, Event::FenceFailed { peer: PREFILL, session: 1 });
    assert!(!actions.iter().any(|action| matches!(action, Action::Fence { .. })), "{actions:?}");
    assert_eq!(leg.stats().pool.held, 2);
}

#[test]
fn a_fence_that_failed_is_tried_again_until_it_is_proven() {
    let mut leg = decode_worker();
    ask(&mut leg, 0, 1);
    after(&mut leg, 1, Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
    after(&mut leg, 2, Event::PeerLost { peer: PREFILL, session: 1, fenced: false });
    assert_eq!(leg.stats().pool.quarantined, 2, "pages that prefill may still write");
    after(&mut leg, 3, Event::RoomClosed { room: Room(1) });
    after(&mut leg, 3, Event::FenceFailed { peer: PREFILL, session: 1 });
    let actions = after(&mut leg, 1_100, Event::Cancel(Room(99)));
    assert_eq!(actions, [Action::Fence { peer: PREFILL, session: 1 }]);
    assert_eq!(leg.stats().pool.quarantined, 2, "no time frees them");
    after(&mut leg, 1_200, Event::PeerLost { peer: PREFILL, session: 1, fenced: true });
    assert_eq!(leg.stats().pool.free, 8);
}
