//! News of an earlier connection says nothing about the one in use.

use std::time::Duration;

use host_core::radix::NamespaceKey;
use host_core::request::{PeerRef, Request};
use host_core::{Action, Config, Event, Instance, Role, Room, Sampling, Scheduler, Time};

const PREFILL: Instance = Instance(7);

fn decode_worker() -> Scheduler {
    Scheduler::new(Config {
        role: Role::Decode,
        pages: 8,
        page_tokens: 4,
        max_tokens: 32,
        vocabulary: 10,
        chunk_tokens: 4,
        radix_cache: None,
        hierarchy: None,
        cache_events: false,
        identity: host_core::radix::PageHash([0; 32]),
        reserved_decode_tokens: 1_000,
        target_itl: None,
        seed: 0,
        window: None,
        layer_groups: host_core::layer_groups::LayerGroups::off(1),
        max_batch: 4,
        max_running: 4,
        max_queued: 10,
        max_attempts: 3,
        bootstrap_timeout: Duration::from_secs(30),
        request_timeout: Duration::from_secs(600),
        peer_patience: Duration::from_secs(10),
    })
}

fn request(room: u64) -> Event {
    Event::Submit(Request {
        room: Room(room),
        prompt: vec![1; 8],
        max_new_tokens: 1,
        stop_tokens: Vec::new(),
        ignore_stop: true,
        sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0, logprobs: None },
        prefill: Some(PeerRef { instance: PREFILL, address: String::new() }),
        namespace: NamespaceKey::default(),
        no_cache: false,
        names: Vec::new(),
    })
}

/// Handles an event and decides; returns what is to be done.
fn after(scheduler: &mut Scheduler, millis: u64, event: Event) -> Vec<Action> {
    let now = Time(Duration::from_millis(millis));
    let mut actions = Vec::new();
    scheduler.handle(now, event, &mut actions);
    scheduler.tick(now, &mut actions);
    scheduler.audit();
    actions
}

/// A worker with a first connection that broke and a second one over which pages were promised.
fn reconnected() -> Scheduler {
    let mut scheduler = decode_worker();
    after(&mut scheduler, 0, request(1));
    after(&mut scheduler, 1, Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
    let broken = Event::PeerLost { peer: PREFILL, session: 1, fenced: false };
    let actions = after(&mut scheduler, 2, broken);
    assert!(actions.contains(&Action::Fence { peer: PREFILL, session: 1 }), "{actions:?}");
    let actions = after(&mut scheduler, 3, request(2));
    assert!(actions.iter().any(|action| matches!(action, Action::Connect { .. })), "{actions:?}");
    after(&mut scheduler, 4, Event::PeerReady { peer: PREFILL, floor: 0, session: 2 });
    // What had arrived of the first request is copied nowhere any more.
    after(&mut scheduler, 4, Event::RoomClosed { room: Room(1) });
    assert_eq!(scheduler.stats().pool.held, 2, "the second request's pages are promised to prefill");
    scheduler
}

#[test]
fn a_peer_that_many_ranks_miss_is_cut_off_once() {
    let mut scheduler = decode_worker();
    after(&mut scheduler, 0, request(1));
    after(&mut scheduler, 1, Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
    let fences = |actions: &[Action]| {
        actions.iter().filter(|action| matches!(action, Action::Fence { session: 1, .. })).count()
    };
    let gone = || Event::PeerLost { peer: PREFILL, session: 1, fenced: false };
    let of_each_rank: Vec<usize> = (0..4).map(|_| fences(&after(&mut scheduler, 2, gone()))).collect();
    assert_eq!(of_each_rank, [1, 0, 0, 0]);
    // Tried again when it is time, whoever else says so meanwhile.
    after(&mut scheduler, 3, Event::FenceFailed { peer: PREFILL, session: 1 });
    assert_eq!(fences(&after(&mut scheduler, 4, gone())), 0);
    assert_eq!(fences(&after(&mut scheduler, 1_100, Event::RoomClosed { room: Room(1) })), 1);
    after(&mut scheduler, 1_200, Event::PeerLost { peer: PREFILL, session: 1, fenced: true });
    assert_eq!((scheduler.stats().pool.free, scheduler.stats().unfenced_peers), (8, 0));
    assert_eq!(fences(&after(&mut scheduler, 1_300, gone())), 0, "it is cut off already");
    assert_eq!(scheduler.stats().unfenced_peers, 0);
}

#[test]
fn a_late_report_of_an_earlier_fence_frees_nothing() {
    let mut scheduler = reconnected();
    after(&mut scheduler, 5, Event::PeerLost { peer: PREFILL, session: 1, fenced: true });
    assert_eq!(scheduler.stats().pool.held, 2, "pages that prefill may write were freed");
    assert_eq!(scheduler.stats().failed, 1, "only the first connection's request failed");
    // The same news of the connection in use does end it.
    after(&mut scheduler, 6, Event::PeerLost { peer: PREFILL, session: 2, fenced: true });
    after(&mut scheduler, 6, Event::RoomClosed { room: Room(2) });
    assert_eq!(scheduler.stats().pool.free, 8);
    assert_eq!(scheduler.stats().failed, 2);
}

#[test]
fn a_failed_fence_of_an_earlier_connection_does_not_cut_the_next_one() {
    let mut scheduler = reconnected();
    after(&mut scheduler, 5, Event::FenceFailed { peer: PREFILL, session: 1 });
    let actions = after(&mut scheduler, 5_000, Event::FenceFailed { peer: PREFILL, session: 1 });
    assert!(!actions.iter().any(|action| matches!(action, Action::Fence { .. })), "{actions:?}");
    assert_eq!(scheduler.stats().pool.held, 2);
}

#[test]
fn a_fence_that_failed_is_tried_again_until_it_is_proven() {
    let mut scheduler = decode_worker();
    after(&mut scheduler, 0, request(1));
    after(&mut scheduler, 1, Event::PeerReady { peer: PREFILL, floor: 0, session: 1 });
    after(&mut scheduler, 2, Event::PeerLost { peer: PREFILL, session: 1, fenced: false });
    assert_eq!(scheduler.stats().pool.quarantined, 2, "pages that prefill may still write");
    after(&mut scheduler, 3, Event::RoomClosed { room: Room(1) });
    after(&mut scheduler, 3, Event::FenceFailed { peer: PREFILL, session: 1 });
    let actions = after(&mut scheduler, 1_100, Event::Cancel(Room(99)));
    assert_eq!(actions, [Action::Fence { peer: PREFILL, session: 1 }]);
    assert_eq!(scheduler.stats().pool.quarantined, 2, "no time frees them");
    after(&mut scheduler, 1_200, Event::PeerLost { peer: PREFILL, session: 1, fenced: true });
    assert_eq!(scheduler.stats().pool.free, 8);
}
